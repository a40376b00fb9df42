"""The tree over units: the same bits whoever computed them, nothing left over from the step before, and facts that always fit (I14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.thread_exchange import all_ranks, bits_of
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange, ExchangeFailed
from unbroken.step.flat import FlatLayout, sum_type
from unbroken.step.reduce import Flags, OrderedReduction, RankFacts, Reduced, UnitFacts

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (7,), (3, 5), (65,), (2, 1, 40))
SPECIAL = (-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-30, 6e4)

Values = list[torch.Tensor | None]


@dataclass(frozen=True)
class Step:
    """All units of a step: their weights, and a value or None per tensor of each."""

    weights: Sequence[int]
    values: Sequence[Values]

    def present(self, unit: int) -> list[bool]:
        return [value is not None for value in self.values[unit]]


def draw_step(like: Sequence[torch.Tensor], num_units: int, seed: int) -> Step:
    """Random values over many decades, special ones among them, some missing; one unit in five has no weight."""
    g = torch.Generator().manual_seed(seed)

    def one(tensor: torch.Tensor) -> torch.Tensor | None:
        if torch.rand((), generator=g) < 0.3:
            return None
        exponent = torch.randint(-20, 4, tensor.shape, generator=g)
        value = torch.randn(tensor.shape, generator=g, dtype=torch.float64) * 10.0**exponent
        special = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(len(SPECIAL), tensor.shape, generator=g)]
        return torch.where(torch.rand(tensor.shape, generator=g) < 0.05, special, value).to(tensor.dtype)

    weights = [int(w) if w < 5 else 0 for w in torch.randint(1, 6, (num_units,), generator=g)]
    return Step(weights, [[one(tensor) for tensor in like] for _ in range(num_units)])


def reference(like: Sequence[torch.Tensor], step: Step) -> list[torch.Tensor]:
    """The definition, written down again: neighbours are added, level by level."""
    found = []
    for index, tensor in enumerate(like):
        zero = torch.zeros(tensor.shape, dtype=sum_type(tensor.dtype))
        column = [values[index] for values in step.values]
        row = [zero if v is None else v.to(zero.dtype) for v in column]
        while len(row) > 1:
            row = [row[i] + row[i + 1] if i + 1 < len(row) else row[i] for i in range(0, len(row), 2)]
        found.append(row[0])
    return found


def facts_of(step: Step, block: range) -> tuple[UnitFacts, ...]:
    return tuple(UnitFacts(u, f"{u:032x}", step.weights[u], "0" * 16, "") for u in block)


def copies(values: Values) -> Values:
    """What a reduction may write into."""
    return [None if value is None else value.clone() for value in values]


def reduce_step(reduction: OrderedReduction, step: Step, block: range) -> Reduced:
    """This rank's part of a step, then the collective phase."""
    reduction.reset()
    for unit in block:
        reduction.add(unit, copies(step.values[unit]))
    return reduction.reduce(RankFacts(units=facts_of(step, block), present=reduction.present))


def results(reduction: OrderedReduction, reduced: Reduced) -> list[torch.Tensor]:
    """Each tensor's own result, copied out of memory that is used again; zeros where there is none."""
    like = reduction.tensors
    return [torch.zeros(t.shape, dtype=sum_type(t.dtype)) if s is None else s.clone() for t, s in zip(like, reduced.sums, strict=True)]


def present_of(reduced: Reduced) -> list[int]:
    return [max(flags) for flags in zip(*(rank.present for rank in reduced.facts), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    num_units=st.integers(1, 9),
    world_size=st.integers(1, 6),
    forms=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_I14_any_partition_gives_the_bits_of_the_tree(
    num_units: int, world_size: int, forms: list[tuple[torch.dtype, tuple[int, ...]]], seed: int
) -> None:
    """Two steps with the same buffers: what is missing in the second must not come from the first."""
    like = [torch.empty(shape, dtype=dtype) for dtype, shape in forms]
    steps = [draw_step(like, num_units, seed + i) for i in range(2)]

    def rank(exchange: Exchange) -> list[tuple[list[bytes], list[int], int, list[UnitFacts]]]:
        reduction = OrderedReduction(like, num_units, exchange)
        found = []
        for step in steps:
            reduced = reduce_step(reduction, step, blocks(num_units, world_size)[exchange.rank])
            found.append((bits_of(results(reduction, reduced)), present_of(reduced), reduced.total_weight, reduced.units()))
        return found

    expected = []
    for step in steps:
        present = [int(any(values[i] is not None for values in step.values)) for i in range(len(like))]
        expected.append((bits_of(reference(like, step)), present, sum(step.weights), list(facts_of(step, range(num_units)))))
    for rank_index, found in enumerate(all_ranks(world_size, rank)):
        assert found == expected, f"rank {rank_index}"


def shifted_reference(like: Sequence[torch.Tensor], step: Step, shifts: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
    """The definition with shifts: of two neighbours the one of the smaller is scaled down before they are added."""
    found = []
    for index, tensor in enumerate(like):
        zero = torch.zeros(tensor.shape, dtype=sum_type(tensor.dtype))
        row = [
            (shift, zero if values[index] is None else values[index].to(zero.dtype))  # type: ignore[union-attr]
            for shift, values in zip(shifts, step.values, strict=True)
        ]
        while len(row) > 1:
            row = [_shifted_sum(*row[i : i + 2]) for i in range(0, len(row), 2)]
        found.append(row[0][1])
    return row[0][0], found


def _shifted_sum(left: tuple[int, torch.Tensor], right: tuple[int, torch.Tensor] | None = None) -> tuple[int, torch.Tensor]:
    if right is None:
        return left
    shift = max(left[0], right[0])
    scaled = [value if own == shift else value * 2.0 ** max(own - shift, -1074) for own, value in (left, right)]
    return shift, scaled[0] + scaled[1]


@settings(max_examples=40, deadline=None)
@given(
    num_units=st.integers(1, 9),
    world_size=st.integers(1, 6),
    bucket_bytes=st.sampled_from([1, 200, 1 << 20]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_I14_sums_that_lack_a_power_of_two_are_added_exactly_in_buckets_of_any_size(
    num_units: int, world_size: int, bucket_bytes: int, seed: int, data: st.DataObject
) -> None:
    """Every bucket tells the shifts of its sums; two steps, so that none may be left from the first."""
    like = [torch.empty(shape, dtype=dtype) for dtype, shape in ((torch.float32, (65,)), (torch.float64, (3,)), (torch.bfloat16, (40,)))]
    steps = [draw_step(like, num_units, seed + i) for i in range(2)]
    shifts = [data.draw(st.lists(st.integers(-40, 40), min_size=num_units, max_size=num_units)) for _ in steps]

    def rank(exchange: Exchange) -> list[tuple[int, list[bytes]]]:
        reduction = OrderedReduction(like, num_units, exchange, bucket_bytes=bucket_bytes)
        found = []
        for step, by_unit in zip(steps, shifts, strict=True):
            reduction.reset()
            block = blocks(num_units, world_size)[exchange.rank]
            for unit in block:
                reduction.add(unit, copies(step.values[unit]), by_unit[unit])
            reduced = reduction.reduce(RankFacts(units=facts_of(step, block), present=reduction.present))
            found.append((reduced.shift, bits_of(results(reduction, reduced))))
        return found

    expected = []
    for step, by_unit in zip(steps, shifts, strict=True):
        shift, sums = shifted_reference(like, step, by_unit)
        expected.append((shift, bits_of(sums)))
    assert all(found == expected for found in all_ranks(world_size, rank))


def test_I14_an_attempt_that_was_given_up_leaves_nothing_behind() -> None:
    like = [torch.empty(70), torch.empty(3, dtype=torch.float64)]
    wanted = draw_step(like, 5, 1)
    other = Step([3] * 5, [[torch.full((70,), float("nan")), torch.full((3,), float("inf"), dtype=torch.float64)]] * 5)

    def rank(exchange: Exchange) -> list[bytes]:
        reduction = OrderedReduction(like, 5, exchange)
        block = blocks(5, 2)[exchange.rank]
        for unit in block[: 1 + exchange.rank]:
            reduction.add(unit, copies(other.values[unit]))
        reduced = reduce_step(reduction, wanted, block)
        assert present_of(reduced) == [1, 1]
        return bits_of(results(reduction, reduced))

    assert all_ranks(2, rank) == [bits_of(reference(like, wanted))] * 2


def test_I8_after_a_failed_collective_the_same_units_can_be_sent_again() -> None:
    like = [torch.empty(9)]
    step = draw_step(like, 4, 3)

    def rank(exchange: Exchange) -> list[bytes]:
        reduction = OrderedReduction(like, 4, exchange)
        block = blocks(4, 3)[exchange.rank]
        if exchange.rank == 1:
            exchange.abandon()
        with pytest.raises(ExchangeFailed):
            reduce_step(reduction, step, block)
        exchange.connect("second")
        return bits_of(results(reduction, reduce_step(reduction, step, block)))

    assert all_ranks(3, rank) == [bits_of(reference(like, step))] * 3


def test_the_padding_behind_the_last_tensor_is_zero_whatever_lay_beside_it() -> None:
    like = [torch.empty(5)]

    def rank(exchange: Exchange) -> None:
        reduction = OrderedReduction(like, 4, exchange)
        for fill in (float("inf"), float("nan"), 1.0):
            step = Step([2] * 4, [[torch.full((5,), fill)] for _ in range(4)])
            reduce_step(reduction, step, blocks(4, 2)[exchange.rank])
            assert bits_of([reduction.buckets[0]._wire["sums 0"].view(torch.float32)[5:]]) == bits_of([torch.zeros(123)])

    all_ranks(2, rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_facts_of_the_largest_step_fit_their_frame(world_size: int) -> None:
    """Every field as long as it can be: the frame's size is computed, not measured."""
    num_units, num_tensors, integer_bytes = 67, 700, 70_000
    like = [torch.empty(0)] * num_tensors

    def facts(rank: int) -> RankFacts:
        units = tuple(UnitFacts(u, "f" * 32, 2**40 + u, "7ff8000000000000", "e" * 32) for u in blocks(num_units, world_size)[rank])
        return RankFacts(units=units, flags=Flags(True, True, True), present=b"\1" * num_tensors, integers=bytes([rank]) * integer_bytes)

    def rank(exchange: Exchange) -> list[RankFacts]:
        reduction = OrderedReduction(like, num_units, exchange, integer_bytes)
        for unit in blocks(num_units, world_size)[exchange.rank]:
            reduction.add(unit, [None] * num_tensors)
        return reduction.reduce(facts(exchange.rank)).facts

    expected = [facts(r) for r in range(world_size)]
    assert all(found == expected for found in all_ranks(world_size, rank))


def test_ranks_without_units_say_their_word_and_get_the_result() -> None:
    like = [torch.empty(3)]
    step = Step([1, 1], [[torch.ones(3)], [torch.ones(3) * 2]])

    def rank(exchange: Exchange) -> tuple[list[bool], list[float]]:
        reduction = OrderedReduction(like, 2, exchange)
        block = blocks(2, 4)[exchange.rank]
        for unit in block:
            reduction.add(unit, copies(step.values[unit]))
        facts = RankFacts(units=facts_of(step, block), flags=Flags(stop=exchange.rank == 3), present=reduction.present)
        reduced = reduction.reduce(facts)
        return [told.flags.stop for told in reduced.facts], results(reduction, reduced)[0].tolist()

    assert all_ranks(4, rank) == [([False, False, False, True], [3.0] * 3)] * 4


@pytest.mark.parametrize("num_units", [1, 2, 7, 8, 64, 100])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_rank_holds_only_logarithmically_many_sums(num_units: int, world_size: int) -> None:
    like = [torch.empty(100), torch.empty(10, dtype=torch.float64)]
    exchange = Exchange(CPU)
    exchange.world_size = world_size
    for rank, block in enumerate(blocks(num_units, world_size)):
        exchange.rank = rank
        reduction = OrderedReduction(like, num_units, exchange)
        for unit in block:
            reduction.add(unit, [torch.ones(100), torch.ones(10, dtype=torch.float64)])
            nodes = reduction.buckets[0].nodes
            held = sum(value.nbytes for node in nodes.values() for value in node.sums if value is not None)
            assert held <= reduction.buffers_bytes
            assert len(nodes) <= 2 * num_units.bit_length() + 1


def test_tensors_keep_their_place_at_every_world_size() -> None:
    forms = (((3,), torch.float32), ((2,), torch.bfloat16), ((4,), torch.float64), ((2, 2), torch.float16))
    layout = FlatLayout([torch.empty(shape, dtype=dtype) for shape, dtype in forms])
    assert layout.types == [torch.float32, torch.float64]
    assert layout.places == [(0, 0), (0, 3), (1, 0), (0, 5)]
    assert layout.padded(1) == [64, 64] and layout.padded(3) == [192, 192]
    flats = [torch.arange(64.0), torch.arange(64.0, dtype=torch.float64)]
    assert layout.view(flats, 3).tolist() == [[5.0, 6.0], [7.0, 8.0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.uint8])
def test_what_has_no_ordered_sum_is_refused_by_its_type(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=str(dtype)):
        FlatLayout([torch.empty(2, dtype=dtype)])
