"""Snapshots into real memory slots: the newest whole one is never given up, and nothing that goes wrong ends training (I4, I9)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.rigs.daemon_end import DaemonEnd, HandClock
from tests.rigs.step_rank import stack_of
from unbroken.capture.freeze import needed_bytes, plan_slot
from unbroken.capture.tree import Item, flatten
from unbroken.core.errors import SaveWarning
from unbroken.core.limits import MILESTONE_WAIT_S
from unbroken.core.messages import Committed, Error, Failed, NeedSlots, Ready
from unbroken.core.ports import SystemClock
from unbroken.recover.snapshots import Snapshots, Taken, expected_bytes
from unbroken.shm.slots import Slot


@pytest.fixture
def daemon() -> Iterator[DaemonEnd]:
    made = DaemonEnd()
    yield made
    made.close()


@pytest.fixture
def snapshots(daemon: DaemonEnd) -> Iterator[Snapshots]:
    made = Snapshots(daemon.link, HandClock(), 0, 1, 2)
    yield made
    made.close()


def state(value: float, numel: int = 100) -> list[Item]:
    return flatten({"w": torch.full((numel,), value)}, "/s")


def slot_of(daemon: DaemonEnd, number: int) -> Slot:
    """The daemon's view of the slot that was announced."""
    return daemon.table.need(0, 4096, 2)[number]


def value_in(slot: Slot) -> float:
    (placed,) = [p for p in slot.index().pieces if p.piece.pointer == "/s/w"]
    data = slot.data()
    try:
        return float(torch.frombuffer(bytearray(data[placed.offset : placed.offset + placed.size_bytes]), dtype=torch.float32)[-1])
    finally:
        data.release()


def test_I4_a_snapshot_is_announced_when_it_is_whole(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    taken = snapshots.take(state(3.0), 7, milestone=True, wait_s=0.0)
    assert taken == Taken(7, 0.0, 0.0, needed_bytes(plan_slot(state(3.0), generation=2, step=7, rank=0, world_size=1, milestone=True)))
    (ready,) = daemon.wait_for(Ready)
    assert (ready.generation, ready.step, ready.rank, ready.milestone) == (2, 7, 0, True)
    slot = slot_of(daemon, ready.slot)
    assert (slot.state, slot.stamp, slot.milestone, value_in(slot)) == ("ready", (2, 7, 0, 1), True, 3.0)


def test_I4_two_slots_take_turns_and_the_older_one_is_overwritten(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    for step in range(1, 6):
        assert snapshots.has_room()
        assert snapshots.take(state(float(step)), step, milestone=False, wait_s=0.0)
    ready = daemon.wait_for(Ready, 5)
    assert len({(r.slot, r.step % 2) for r in ready}) == 2
    assert sorted(value_in(slot_of(daemon, n)) for n in range(2)) == [4.0, 5.0]
    assert len(daemon.wait_for(NeedSlots)) == 1, "slots are asked for once"


def test_I4_I9_a_slot_that_is_being_written_to_disk_is_waited_for_then_passed_over(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    clock = HandClock()
    snapshots._clock = clock
    for step in (1, 2):
        snapshots.take(state(float(step)), step, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready, 2)
    first, second = slot_of(daemon, 0), slot_of(daemon, 1)
    assert first.hold(2, 1) and second.hold(2, 2)
    assert not snapshots.has_room()
    began = clock.now
    with pytest.warns(SaveWarning, match="no snapshot at step 3: the one before is still being written") as caught:
        assert snapshots.take(state(3.0), 3, milestone=False, wait_s=1.5) is None
    assert len(caught) == 1
    assert 1.5 <= clock.now - began < 1.6, "as long as was said, no longer"
    assert (value_in(first), value_in(second)) == (1.0, 2.0)
    first.release()
    assert snapshots.has_room()
    assert snapshots.take(state(4.0), 4, milestone=False, wait_s=0.0)
    assert (value_in(first), value_in(second)) == (4.0, 2.0)


@pytest.mark.parametrize("fate", ["committed", "failed", "overtaken"])
def test_I9_a_milestone_is_not_overwritten_before_it_is_known_what_became_of_it(daemon: DaemonEnd, snapshots: Snapshots, fate: str) -> None:
    """The daemon is busy and has not held it yet: newer snapshots take the other slot until it is told."""
    snapshots.take(state(1.0), 1, milestone=True, wait_s=0.0)
    for step in (2, 3, 4):
        assert snapshots.has_room()
        assert snapshots.take(state(float(step)), step, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready, 4)
    assert sorted(value_in(slot_of(daemon, n)) for n in range(2)) == [1.0, 4.0]
    if fate == "committed":
        daemon.tell(Committed(step=1, generation=2, milestone=True, state_root="", seconds=0.0))
    else:
        daemon.tell(Failed(step=1, generation=2, milestone=True, text="no", superseded=fate == "overtaken"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        snapshots._link.poll()
    assert snapshots.take(state(5.0), 5, milestone=False, wait_s=0.0)
    assert sorted(value_in(slot_of(daemon, n)) for n in range(2)) == [4.0, 5.0]


def test_I11_a_milestone_of_which_nothing_is_told_is_given_up_at_last(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    """Another rank has none of it, so there is nothing to be told: this rank must not stand in the way of the next snapshot."""
    clock = HandClock()
    snapshots._clock = clock
    snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0)
    snapshots.take(state(2.0), 2, milestone=True, wait_s=0.0)
    (first, _) = daemon.wait_for(Ready, 2)
    assert slot_of(daemon, first.slot).hold(2, 1)
    assert not snapshots.has_room()
    with pytest.warns(SaveWarning, match="no snapshot at step 3"):
        assert snapshots.take(state(3.0), 3, milestone=False, wait_s=1.0) is None
    clock.sleep(MILESTONE_WAIT_S)
    assert snapshots.has_room()
    assert snapshots.take(state(4.0), 4, milestone=False, wait_s=0.0)


def test_I4_the_only_whole_snapshot_is_not_given_up_while_the_other_slot_is_unusable(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready)
    other = next(slot for slot in (slot_of(daemon, 0), slot_of(daemon, 1)) if not slot.is_ready)
    other._words[6] = 1  # held
    assert not snapshots.has_room()
    with pytest.warns(SaveWarning, match="step 2"):
        assert snapshots.take(state(2.0), 2, milestone=False, wait_s=0.0) is None


def test_a_state_that_has_grown_gets_larger_slots_with_room_to_spare(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0)
    old = slot_of(daemon, 0).size_bytes
    assert snapshots.take(state(2.0, 100_000), 2, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready, 2)
    asked = [message.size_bytes for message in daemon.wait_for(NeedSlots, 2)]
    assert asked[0] == old and asked[1] > 400_000 * 1.06
    assert snapshots.take(state(3.0, 100_500), 3, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready, 3)
    assert len(daemon.wait_for(NeedSlots, 2)) == 2, "a little more needs no new ones"


@pytest.mark.parametrize("when", ["before", "when it is told"])
def test_I9_a_daemon_that_has_gone_costs_the_snapshot_and_one_warning(daemon: DaemonEnd, snapshots: Snapshots, when: str) -> None:
    if when != "before":
        snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0)
        daemon.wait_for(Ready)
    daemon.hang_up()
    with pytest.warns(SaveWarning, match="no snapshot at step 2, training goes on: .*gone") as caught:
        assert snapshots.take(state(2.0), 2, milestone=False, wait_s=0.0) is None
    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["UnbrokenError", "OSError", "Fenced"])
def test_I9_memory_that_cannot_be_had_costs_the_snapshot_and_one_warning(kind: str) -> None:
    refusing = DaemonEnd()
    refusing._slots = lambda message: [Error(kind=kind, text="needs 3 bytes, 2 are available", code=1)]  # type: ignore[method-assign]
    snapshots = Snapshots(refusing.link, SystemClock(), 0, 1, 0)
    with pytest.warns(SaveWarning, match="no snapshot at step 1.*needs 3 bytes"):
        assert snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0) is None
    refusing.close()


def test_I9_another_daemon_gives_slots_of_its_own(daemon: DaemonEnd, snapshots: Snapshots) -> None:
    snapshots.take(state(1.0), 1, milestone=False, wait_s=0.0)
    daemon.hang_up()
    second = DaemonEnd()
    snapshots.move(second.link, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert snapshots.take(state(2.0), 2, milestone=False, wait_s=0.0)
    (ready,) = second.wait_for(Ready)
    assert (ready.generation, value_in(slot_of(second, ready.slot))) == (3, 2.0)
    second.close()


def test_no_descriptor_is_left_behind(daemon: DaemonEnd) -> None:
    before = len(os.listdir("/proc/self/fd"))
    snapshots = Snapshots(daemon.link, HandClock(), 0, 1, 0)
    for step, numel in enumerate((10, 100_000, 300_000)):
        assert snapshots.take(state(1.0, numel), step, milestone=False, wait_s=0.0)
    daemon.wait_for(Ready, 3)
    snapshots.close()
    daemon.table.sweep([], 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_what_is_reserved_at_the_start_is_enough_once_the_optimizer_has_its_moments(make: object) -> None:
    model = nn.Sequential(nn.Linear(30, 20_000), nn.Linear(20_000, 30))
    optimizer = make(model.parameters())  # type: ignore[operator]
    stack = stack_of(model, optimizer)
    reserved = expected_bytes(stack, stack.collect({}, {}, {}))
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    items = stack.collect({"step": 10**9}, {"step": 10**9}, {})
    needed = needed_bytes(plan_slot(items, generation=10**6, step=10**9, rank=0, world_size=1, milestone=False))
    assert needed <= reserved
    assert expected_bytes(stack, items) < reserved + (1 << 20), "what is there already is not reserved twice"
