"""The table of slots: what is kept over restarts, consistent cuts, and memory that cannot be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unbroken.core.errors import UnbrokenError
from unbroken.core.messages import SlotSource
from unbroken.core.records import SlotIndex
from unbroken.daemon.memory import SlotTable
from unbroken.shm.slots import Slot

SIZE = 1 << 16


@pytest.fixture
def table() -> Iterator[SlotTable]:
    made = SlotTable()
    yield made
    made.close()


def fill(slot: Slot, step: int, rank: int, world_size: int = 2, generation: int = 0) -> None:
    slot.begin(SlotIndex(generation=generation, step=step, rank=rank, world_size=world_size, milestone=False, pieces=())).release()
    slot.finish()


def test_a_rank_gets_its_slots_again(table: SlotTable) -> None:
    first = table.need(0, SIZE, 2)
    assert table.need(0, SIZE, 2) == first
    assert table.need(0, SIZE // 2, 2) == first
    assert table.total_bytes == 2 * SIZE


def test_I5_a_cut_needs_every_rank_of_one_generation_and_step(table: SlotTable) -> None:
    a, b = table.need(0, SIZE, 2), table.need(1, SIZE, 2)
    fill(a[0], 10, 0)
    assert table.cuts() == []
    fill(b[0], 11, 1)
    fill(b[1], 10, 1, generation=1)
    assert table.cuts() == []
    assert table.missing(0, 10, 2) == [1]
    b[1].free()
    fill(b[1], 10, 1)
    assert [(c.step, c.generation, c.world_size) for c in table.cuts()] == [(10, 0, 2)]
    assert table.find(table.cuts()[0].slots) == [a[0], b[1]]


def test_I5_a_slot_that_names_another_rank_is_no_part_of_a_cut(table: SlotTable) -> None:
    fill(table.need(0, SIZE, 1)[0], 10, 1)
    fill(table.need(1, SIZE, 1)[0], 10, 0)
    assert table.cuts() == []


def test_I4_larger_slots_leave_the_newest_cut_until_a_newer_one_is_there(table: SlotTable) -> None:
    old = table.need(0, SIZE, 2)
    fill(old[0], 10, 0, world_size=1)
    cut = table.cuts()[0]
    new = table.need(0, 2 * SIZE, 2)
    assert not set(new) & set(old)
    table.sweep([cut], 1)
    assert table.cuts() == [cut]
    assert old[1].fd == -1
    fill(new[0], 20, 0, world_size=1)
    table.sweep(table.cuts()[:1], 1)
    assert [c.step for c in table.cuts()] == [20]
    assert table.total_bytes == 4 * SIZE
    with pytest.raises(UnbrokenError, match="does not exist"):
        table.find(cut.slots)


def test_I4_a_smaller_world_leaves_the_cut_of_the_larger_one(table: SlotTable) -> None:
    for rank in range(3):
        fill(table.need(rank, SIZE, 2)[0], 10, rank, world_size=3)
    cut = table.cuts()[0]
    table.sweep([cut], 2)
    assert table.cuts() == [cut]
    table.sweep([], 2)
    assert table.cuts() == []
    assert table.total_bytes == 4 * SIZE


def test_a_new_generation_discards_what_is_newer_than_its_base(table: SlotTable) -> None:
    a, b = table.need(0, SIZE, 2), table.need(1, SIZE, 2)
    fill(a[0], 10, 0)
    fill(b[0], 10, 1)
    fill(a[1], 20, 0)
    table.discard_after(10)
    assert a[1].state == "free"
    assert [c.step for c in table.cuts()] == [10]


def test_a_held_cut_is_held_on_all_ranks_or_none(table: SlotTable) -> None:
    a, b = table.need(0, SIZE, 2), table.need(1, SIZE, 2)
    fill(a[0], 10, 0)
    fill(b[0], 10, 1)
    cut = table.cuts()[0]
    assert table.hold(cut)
    assert a[0].held
    table.release(cut)
    assert b[0].claim()
    assert not table.hold(cut)
    assert not a[0].held


def test_memory_that_cannot_be_had_is_an_error_with_bytes_and_remedy(table: SlotTable) -> None:
    with pytest.raises(UnbrokenError, match=r"2 memory slots of 1152921504606846976 bytes.*fewer ranks"):
        table.need(0, 1 << 60, 2)
    assert table.total_bytes == 0


@pytest.mark.parametrize(("size", "num"), [(SIZE, 0), (SIZE, 1000), (10, 2), (-1, 2)])
def test_a_senseless_wish_is_refused(table: SlotTable, size: int, num: int) -> None:
    with pytest.raises(ValueError, match="ask for"):
        table.need(0, size, num)


def test_a_slot_is_found_only_by_its_rank_and_number(table: SlotTable) -> None:
    table.need(0, SIZE, 1)
    with pytest.raises(UnbrokenError):
        table.find([SlotSource(rank=1, slot=0)])
