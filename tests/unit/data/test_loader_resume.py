"""Position and randomness of data over interrupts: B24 (c), B27, B28, each life in a new process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.rigs.loader_lives import Life, Setting, in_new_process, live, make
from unbroken.data.foreign import IndexedLoader

EPOCH = 100
VALIDATE_AT = tuple(epoch * EPOCH + item for epoch in range(3) for item in (50, 100))
INTERRUPTS = (0, 30, 40, 41, 99, 100, 101, 299, 300)
"""Lives of 30 steps, then 10, then 1; the last item of an epoch, its end, the first of the next; the last of all."""

SETTINGS = [
    Setting("batches"),
    Setting("batches", num_workers=2),
    Setting("sampler"),
    Setting("sampler", num_workers=2, persistent=True),
    Setting("distributed"),
    Setting("distributed", num_workers=2, persistent=True),
    Setting("stateful"),
    Setting("torchdata"),
    Setting("torchdata", num_workers=2, extra={"snapshot_every_n_steps": 7}),
    Setting("torchdata", num_workers=2, persistent=True),
    Setting("torchdata-unseeded"),
    Setting("torchdata-striped", num_workers=2),
    Setting("torchdata-striped"),
    Setting("torchdata-stream", num_workers=2, extra={"snapshot_every_n_steps": 3}),
    Setting("torchdata-stream"),
]


def name_of(setting: Setting) -> str:
    return f"{setting.kind}-{setting.num_workers}{'-persistent' if setting.persistent else ''}"


def lives(setting: Setting, interrupts: tuple[int, ...], validate_at: tuple[int, ...] = ()) -> tuple[list[Any], list[int]]:
    """Everything that came out of one life after the other, and what their validations saw."""
    came_out: list[Any] = []
    validated: list[int] = []
    state = None
    for start, stop in pairwise(interrupts):
        part, state, seen = in_new_process(live, Life(setting, start, stop, state, validate_at))
        came_out += part
        validated += seen
    return came_out, validated


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_B28_interrupts_at_every_awkward_place_join_to_the_uninterrupted_run(setting: Setting) -> None:
    uninterrupted, _, _ = in_new_process(live, Life(setting, 0, 300))
    joined, validated = lives(setting, INTERRUPTS, VALIDATE_AT)
    if setting.kind.startswith("torchdata"):  # seeds no item; a Run continues the process's own streams besides
        joined, uninterrupted = ([[*unit[:3], unit[3][:1]] for unit in units] for units in (joined, uninterrupted))
    assert joined == uninterrupted
    assert validated == [5] * 6
    assert [step for step, _, _, _ in joined] == list(range(1, 301))
    unknown = setting.kind == "stateful" or setting.kind.startswith("torchdata")
    samples = [int(np.ravel(unit[3][0])[0]) if unknown else unit[2][0] for unit in joined]
    epochs = [samples[i : i + EPOCH] for i in range(0, 300, EPOCH)]
    assert all(sorted(epoch) == list(range(EPOCH)) for epoch in epochs)
    assert (epochs[0] != epochs[1] != epochs[2] != epochs[0]) is (setting.kind != "torchdata-stream")


def test_B28_workers_and_kinds_change_nothing() -> None:
    plain, _, _ = in_new_process(live, Life(Setting("batches"), 0, 300))
    for setting in (Setting("batches", num_workers=2), Setting("sampler"), Setting("sampler", num_workers=2, persistent=True)):
        assert in_new_process(live, Life(setting, 0, 300))[0] == plain


def test_B28_a_run_that_was_over_gives_nothing_more() -> None:
    _, state, _ = in_new_process(live, Life(Setting("batches"), 0, 300))
    assert in_new_process(live, Life(Setting("batches"), 300, 400, state))[0] == []


def draws_by_worker(num_workers: int) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """NumPy draws of two epochs, by (epoch, worker) and in order."""
    source = make(Setting("batches", num_workers=num_workers, global_batch=4, units=4, epochs=2, num_samples=40))
    by_worker: dict[tuple[int, int], list[int]] = {}
    in_order: list[int] = []
    for number, unit in enumerate(source.units()):
        draw, worker = int(unit.data[2]), int(unit.data[4])
        by_worker.setdefault((number // 40, worker), []).append(draw)
        in_order.append(draw)
    source.close()
    return by_worker, in_order


def resumed_draws(step: int) -> list[int]:
    source = make(Setting("batches", num_workers=4, global_batch=4, units=4, epochs=2, num_samples=40))
    source.load_state({}, step)
    draws = [int(unit.data[2]) for unit in source.units()]
    source.close()
    return draws


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_B24c_forked_workers_draw_differently_and_continue_where_they_were() -> None:
    by_worker, in_order = in_new_process(draws_by_worker, 4)
    assert len(by_worker) == 8
    assert len({tuple(draws) for draws in by_worker.values()}) == 8
    assert len(set(in_order)) == 80, "an epoch repeated the augmentation of another"
    assert in_new_process(resumed_draws, 15) == in_order[15 * 4 :]
    assert in_new_process(draws_by_worker, 0)[1] == in_order


def test_B27_optimizer_steps_are_no_batch_counts() -> None:
    source = make(Setting("distributed", num_samples=100, global_batch=4, units=4, epochs=None))
    assert isinstance(source, IndexedLoader)
    assert source.position(501) == (20, 0)
    source.load_state({}, 500)
    first = next(iter(source.units()))
    assert (first.step, first.unit) == (501, 0)
    beginning = make(Setting("distributed", num_samples=100, global_batch=4, units=4, epochs=None))
    epoch_20 = [int(unit.ids[0]) for unit, _ in zip(beginning.units(), range(20 * 100 + 1), strict=False)][-1]
    assert first.ids.tolist() == [epoch_20]


@pytest.mark.parametrize("kind", ["batches", "sampler", "distributed", "stateful"])
def test_B27_an_accumulation_window_crosses_the_epoch(kind: str) -> None:
    setting = Setting(kind, num_samples=10, global_batch=4, units=4, epochs=2)
    whole, _, _ = live(Life(setting, 0, 5))
    assert [(step, unit) for step, unit, _, _ in whole] == [(step, unit) for step in range(1, 6) for unit in range(4)]
    for interrupt in range(1, 5):
        first, state, _ = live(Life(setting, 0, interrupt))
        assert first + live(Life(setting, interrupt, 5, state))[0] == whole
