"""Slots: layout, states, the rule for the next slot, and hostile contents."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.core.errors import Damaged
from unbroken.core.os import memory_file
from unbroken.core.records import Piece, Placed, SlotIndex
from unbroken.shm.slots import ALIGN_BYTES, HEADER_BYTES, Slot, pick, slot_bytes

PIECES = (
    Placed(piece=Piece(pointer="/model/w", dtype="float32", shape=(250,)), offset=0, size_bytes=1000),
    Placed(piece=Piece(pointer="/rng/torch", dtype="uint8", shape=(100,), scope="rank"), offset=1024, size_bytes=100),
)


def index_at(step: int, generation: int = 0, rank: int = 0, milestone: bool = False) -> SlotIndex:
    return SlotIndex(generation=generation, step=step, rank=rank, world_size=2, milestone=milestone, pieces=PIECES)


def make_slot(size_bytes: int | None = None) -> Slot:
    size_bytes = size_bytes or slot_bytes(index_at(0))
    return Slot(memory_file("test", size_bytes), size_bytes)


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [make_slot(), make_slot()]
    yield made
    for slot in made:
        slot.close()


def fill(slot: Slot, step: int, generation: int = 0) -> None:
    view = slot.begin(index_at(step, generation))
    view[:] = bytes([step % 256]) * len(view)
    view.release()
    slot.finish()


def test_a_snapshot_comes_back_as_it_was_written(slots: list[Slot]) -> None:
    slot = slots[0]
    states: list[str] = [slot.state]
    view = slot.begin(index_at(7, generation=3, milestone=True))
    states.append(slot.state)
    assert states == ["free", "writing"]
    assert len(view) == 1124
    view[:4] = b"abcd"
    slot.finish()
    other = Slot(os.dup(slot.fd), slot.size_bytes)
    assert (other.state, other.stamp, other.milestone) == ("ready", (3, 7, 0, 2), True)
    assert other.index() == index_at(7, generation=3, milestone=True)
    assert bytes(other.data()[:4]) == b"abcd"
    assert other.data().readonly
    other.close()


def test_data_starts_on_a_page_and_the_size_fits_later_steps() -> None:
    size = slot_bytes(index_at(0))
    assert size % ALIGN_BYTES == 0
    slot = make_slot(size)
    slot.begin(index_at(10**15, generation=10**9)).release()
    slot.close()


def test_a_slot_that_is_too_small_is_refused_with_the_remedy() -> None:
    slot = make_slot(HEADER_BYTES + ALIGN_BYTES)
    with pytest.raises(ValueError, match="slot_bytes"):
        slot.begin(index_at(1))
    assert slot.state == "free"
    slot.close()


def test_a_file_shorter_than_said_is_refused_before_it_is_mapped() -> None:
    fd = memory_file("test", HEADER_BYTES)
    with pytest.raises(Damaged, match="4096 bytes long"):
        Slot(fd, 1 << 20)
    os.close(fd)


def test_a_memory_file_cannot_be_cut_short_under_its_readers() -> None:
    slot = make_slot()
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, 0)
    slot.close()


def test_I4_the_newest_ready_slot_is_never_picked_while_it_is_the_only_one(slots: list[Slot]) -> None:
    first = pick(slots)
    assert first is slots[0]
    fill(first, 10)
    second = pick(slots)
    assert second is slots[1]
    assert slots[0].state == "ready"
    fill(second, 20)
    assert pick(slots) is slots[0]
    assert slots[1].state == "ready"
    assert pick([slots[1]]) is None


def test_I4_begin_on_a_ready_slot_is_an_assertion(slots: list[Slot]) -> None:
    fill(slots[0], 10)
    with pytest.raises(AssertionError, match="READY"):
        slots[0].begin(index_at(20))
    assert slots[0].index().step == 10


def test_I4_a_held_slot_is_neither_picked_nor_begun(slots: list[Slot]) -> None:
    fill(slots[0], 10)
    fill(slots[1], 20)
    assert slots[0].hold(0, 10)
    assert slots[1].hold(0, 20)
    assert slots[0].state == "draining"
    assert pick(slots) is None
    assert slots[0].index().step == 10
    slots[0].release()
    assert pick(slots) is slots[0]


def test_I4_a_snapshot_that_only_this_rank_has_does_not_block_it_for_ever(slots: list[Slot]) -> None:
    """Step 20 is the newest cut and held; step 30 never became one, because another rank could not write it."""
    fill(slots[0], 20)
    fill(slots[1], 30)
    assert slots[0].hold(0, 20)
    assert pick(slots) is slots[1]
    assert slots[0].index().step == 20


def test_an_interrupted_slot_is_written_before_a_ready_one(slots: list[Slot]) -> None:
    fill(slots[0], 10)
    slots[1].begin(index_at(20)).release()
    assert pick(slots) is slots[1]


def test_hold_fails_when_the_contents_are_not_those_any_more(slots: list[Slot]) -> None:
    fill(slots[0], 10)
    assert not slots[0].hold(0, 9)
    assert not slots[0].hold(1, 10)
    assert not slots[1].hold(0, 0)
    assert [slot.held for slot in slots] == [False, False]


def test_claim_draws_back_from_a_slot_that_was_held_meanwhile(slots: list[Slot]) -> None:
    fill(slots[0], 10)
    assert slots[0].hold(0, 10)
    assert not slots[0].claim()
    assert slots[0].index().step == 10


def test_an_unfinished_slot_is_damaged_for_its_reader(slots: list[Slot]) -> None:
    slots[0].begin(index_at(5)).release()
    with pytest.raises(Damaged, match="interrupted"):
        slots[0].index()


def test_close_leaves_handed_out_views_alive() -> None:
    slot = make_slot()
    fill(slot, 9)
    data = slot.data()
    slot.close()
    slot.close()
    assert data[0] == 9


@pytest.mark.parametrize(
    ("offset", "raw"),
    [
        (0, b"XX"),
        (16, struct.pack("<I", 99)),
        (20, struct.pack("<I", 77)),
        (32, struct.pack("<Q", 1)),
        (40, struct.pack("<Q", 11)),
        (48, struct.pack("<Q", 1)),
        (64, struct.pack("<Q", 1 << 62)),
        (64, struct.pack("<Q", 17)),
        (72, struct.pack("<Q", 1 << 63)),
        (80, struct.pack("<Q", 1 << 60)),
        (80, struct.pack("<Q", 4)),
        (88, b"\0" * 8),
        (HEADER_BYTES + 3, b"\xff"),
    ],
)
def test_I3_a_scribbled_header_is_damage(offset: int, raw: bytes) -> None:
    slot = make_slot()
    fill(slot, 10)
    os.pwrite(slot.fd, raw, offset)
    with pytest.raises(Damaged):
        slot.index()
    slot.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(min_size=1, max_size=200), offset=st.integers(0, HEADER_BYTES + 400))
def test_I3_any_scribble_over_header_or_index_is_damage_or_harmless(junk: bytes, offset: int) -> None:
    slot = make_slot()
    fill(slot, 10)
    os.pwrite(slot.fd, junk, offset)
    try:
        index = slot.index()
    except Damaged:
        pass
    else:
        assert index == index_at(10)
        assert len(slot.data()) == 1124
    slot.close()
