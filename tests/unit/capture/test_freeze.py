"""Items into a memory slot: whole or not there at all (I4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unbroken.capture.freeze import freeze, needed_bytes, places, plan_slot
from unbroken.capture.tree import Item, flatten, rebuild
from unbroken.core.limits import SMALL_PIECE_BYTES
from unbroken.core.os import memory_file
from unbroken.core.ports import arm
from unbroken.core.records import SlotIndex
from unbroken.shm.slots import Slot

STATE: dict[str, Any] = {
    "w": torch.arange(7, dtype=torch.float32).view(7, 1).expand(7, 3),
    "t": torch.arange(6, dtype=torch.int8).view(2, 3).t(),
    "half": torch.ones(33, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "text": "x" * 65,
    "list": [True, None, 2**70],
}


def planned(state: Any, step: int = 5) -> tuple[list[Item], SlotIndex]:
    items = flatten(state, "/s")
    return items, plan_slot(items, generation=2, step=step, rank=1, world_size=3, milestone=True)


@pytest.fixture
def slot() -> Iterator[Slot]:
    size = needed_bytes(planned(STATE)[1])
    made = Slot(memory_file("test", size), size)
    yield made
    made.close()


def test_I4_a_frozen_slot_is_ready_and_holds_what_was_frozen(slot: Slot) -> None:
    """A slot of exactly the size that was asked for."""
    items, index = planned(STATE)
    freeze(slot, index, items)
    assert slot.state == "ready"
    assert slot.index() == index
    assert (slot.stamp, slot.milestone) == ((2, 5, 1, 3), True)
    data = slot.data()
    found = rebuild({p.piece.pointer: (p.piece, data[p.offset : p.offset + p.size_bytes]) for p in index.pieces}, "/s")
    data.release()
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], STATE[key]) for key in ("w", "t", "half", "none"))
    assert (found["text"], found["list"]) == (STATE["text"], STATE["list"])


def test_large_pieces_start_a_page() -> None:
    assert places([10, 64, SMALL_PIECE_BYTES, SMALL_PIECE_BYTES + 1, 0, 5]) == [0, 64, 128, 69_632, 135_232, 135_232, 135_237]


def test_pieces_lie_apart_at_multiples_of_64(slot: Slot) -> None:
    _, index = planned(STATE)
    ends = 0
    for piece in index.pieces:
        assert piece.offset % 64 == 0 and piece.offset >= ends
        ends = piece.offset + piece.size_bytes
    assert len({p.offset for p in index.pieces if p.size_bytes}) == sum(bool(p.size_bytes) for p in index.pieces)


def test_I4_what_changes_after_the_copy_is_not_in_the_snapshot(slot: Slot) -> None:
    state = {"w": torch.ones(4)}
    items, index = planned(state)
    freeze(slot, index, items)
    state["w"].fill_(9.0)
    (placed,) = [p for p in index.pieces if p.piece.pointer == "/s/w"]
    assert slot.data()[placed.offset : placed.offset + 16].tobytes() == torch.ones(4).numpy().tobytes()


def test_I4_an_interrupted_copy_is_never_ready(slot: Slot) -> None:
    """Interrupted within the copy, and after it before the last store."""
    items, index = planned(STATE)
    broken = [*items[:-1], Item(items[-1].piece, b"longer than was planned")]
    with pytest.raises(ValueError):
        freeze(slot, index, broken)
    assert slot.state == "writing"

    def strike() -> None:
        assert slot.state == "writing", "READY comes last"
        raise KeyboardInterrupt

    arm("capture.copied", strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            freeze(slot, index, items)
    finally:
        arm("capture.copied", None)
    assert slot.state == "writing"
    freeze(slot, index, items)
    assert slot.is_ready, "and the slot can be written again"


def test_a_slot_made_for_one_step_holds_the_same_state_at_any_later_one(slot: Slot) -> None:
    items, index = planned(STATE, step=10**15)
    assert needed_bytes(index) == slot.size_bytes
    freeze(slot, index, items)
    assert slot.index().step == 10**15


def test_a_slot_that_is_too_small_says_by_how_much(slot: Slot) -> None:
    items, index = planned({"w": torch.zeros(1 << 14)})
    with pytest.raises(ValueError, match=f"slot of {slot.size_bytes} bytes is too small"):
        freeze(slot, index, items)
    assert slot.state == "free"
