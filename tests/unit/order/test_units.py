"""Which samples make which unit: any world size, any counter, short last batches, batches across epochs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.order.epochs import Span
from unbroken.order.units import SampleOrder, blocks, default_units


@given(num_units=st.integers(1, 200), world_size=st.integers(1, 200))
def test_B31_blocks_are_contiguous_and_differ_by_at_most_one(num_units: int, world_size: int) -> None:
    found = blocks(num_units, world_size)
    assert [unit for block in found for unit in block] == list(range(num_units))
    sizes = [len(block) for block in found]
    assert len(sizes) == world_size and max(sizes) - min(sizes) <= 1
    assert sum(size == 0 for size in sizes) == max(0, world_size - num_units)


@pytest.mark.parametrize(
    ("world_size", "global_batch", "units"), [(1, 7, 1), (2, 8, 2), (3, 8, 4), (4, 4, 4), (5, 64, 8), (8, 64, 8), (9, 64, 16)]
)
def test_default_units(world_size: int, global_batch: int, units: int) -> None:
    assert default_units(world_size, global_batch) == units


def test_default_units_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"global_batch=6 .* 4 equal units for 3 ranks.*multiple of 4 \(the next is 8\).*units="):
        default_units(3, 6)


def stream(order: SampleOrder, steps: range) -> list[int]:
    return [i for step in steps for unit in range(order.units) for i in order.unit_ids(step, unit).tolist()]


@pytest.mark.parametrize("units", [1, 3, 4, 8])
def test_B31_the_stream_does_not_depend_on_the_units(units: int) -> None:
    one = SampleOrder(24, 8, 1, seed=7)
    assert stream(SampleOrder(24, 8, units, seed=7), range(1, 20)) == stream(one, range(1, 20))


def test_B28_batches_straddle_epochs_and_each_epoch_is_whole() -> None:
    order = SampleOrder(10, 4, 4, seed=1)
    ids = stream(order, range(1, 11))
    epochs = [ids[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [(span.epoch, span.stop - span.start) for unit in range(4) for span in order.walks[0].spans(order.positions(3, unit))] == [
        (0, 1),
        (0, 1),
        (1, 1),
        (1, 1),
    ]


def test_a_batch_larger_than_the_data_set_reads_it_several_times() -> None:
    order = SampleOrder(3, 8, 2, seed=1, epochs=4)
    assert order.num_steps == 2
    ids = stream(order, range(1, 3))
    assert [sorted(ids[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4


def test_B31_a_short_last_batch_makes_uneven_and_empty_units() -> None:
    order = SampleOrder(10, 4, 4, seed=1, epochs=1)
    assert order.num_steps == 3
    assert [len(order.unit_ids(3, unit)) for unit in range(4)] == [1, 1, 0, 0]
    assert [len(order.unit_ids(4, unit)) for unit in range(4)] == [0, 0, 0, 0]
    assert sorted(stream(order, range(1, 4))) == list(range(10))


@pytest.mark.parametrize(
    ("consumed", "num_samples", "position"),
    [
        (2**31 - 1, 1_000_003, (2**31 - 1) % 1_000_003),
        (2**31, 1_000_003, 2**31 % 1_000_003),
        (2_150_400_000, 1_000_003, 393550),
        (2**32 + 5, 1_000_003, (2**32 + 5) % 1_000_003),
        (2**53 + 1, 1_000_003, 224294),
        (2500, 1000, 500),
        (2**80 + 1, 1_000_003, (2**80 + 1) % 1_000_003),
    ],
)
def test_B32_counters_are_exact_at_any_width(consumed: int, num_samples: int, position: int) -> None:
    order = SampleOrder(num_samples, 1, 1, shuffle=False)
    epoch, place = order.walks[0].locate(consumed)
    assert (place, epoch * num_samples + place) == (position, consumed)
    step = consumed + 1  # one sample a step: state `consumed` has consumed that many
    assert order.walks[0].spans(order.positions(step, 0)) == [Span(epoch, position, position + 1)]
    assert order.unit_ids(step, 0).tolist() == [position]
    shuffled = SampleOrder(num_samples, 1, 1, seed=3).unit_ids(step, 0)
    assert shuffled.dtype == np.int64 and 0 <= shuffled[0] < num_samples


def test_B32_steps_of_many_samples_are_exact_too() -> None:
    order = SampleOrder(1_000_003, 3072, 8, shuffle=False)
    assert order.walks[0].locate(700_000 * 3072) == (2150, 393550)
    assert order.unit_ids(700_001, 0)[0] == 393550


@given(steps=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=20))
def test_I7_looking_ahead_never_changes_a_unit(steps: list[tuple[int, int]]) -> None:
    used = SampleOrder(37, 8, 4, seed=5)
    for step, unit in steps:
        assert used.unit_ids(step, unit).tolist() == SampleOrder(37, 8, 4, seed=5).unit_ids(step, unit).tolist()


def test_what_is_handed_out_is_the_callers_own() -> None:
    order = SampleOrder(37, 8, 4, seed=5)
    before = order.unit_ids(1, 0).tolist()
    order.unit_ids(1, 0)[:] = -1
    assert order.unit_ids(1, 0).tolist() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 0}, "num_samples"),
        ({"samples": 2**63}, "num_samples"),
        ({"samples": 5.0}, "num_samples"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 2**40}, "global_batch"),
        ({"units": 0}, "units"),
        ({"units": 2**40}, "units"),
        ({"epochs": 0}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"samples": 1, "global_batch": 10_000}, "more than 1024 times"),
    ],
)
def test_senseless_orders_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SampleOrder(**({"samples": 100, "global_batch": 8, "units": 4} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "unit"), [(0, 0), (1, 4), (1, -1)])
def test_there_is_no_such_unit(step: int, unit: int) -> None:
    with pytest.raises(ValueError, match="there is no unit"):
        SampleOrder(100, 8, 4).unit_ids(step, unit)
