"""Snapshots as the trainer takes them: pick a slot, copy, tell the daemon."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from unbroken.capture.freeze import freeze, needed_bytes, plan_slot
from unbroken.capture.stack import Stack
from unbroken.capture.tree import Item
from unbroken.core.errors import SaveWarning, UnbrokenError
from unbroken.core.limits import MILESTONE_WAIT_S, NUM_SLOTS, SMALL_PIECE_BYTES
from unbroken.core.messages import NeedSlots, Ready, Slots
from unbroken.core.ports import Clock, failpoint
from unbroken.recover.link import Link
from unbroken.shm.slots import Slot, pick


@dataclass(frozen=True)
class Taken:
    """One snapshot: seconds of copying, and seconds that training waited in all."""

    step: int
    capture_s: float
    stall_s: float
    size_bytes: int


class Snapshots:
    """This rank's slots. `take` is in the step path on snapshot steps: one copy of the rank's share, no collective."""

    def __init__(self, link: Link, clock: Clock, rank: int, world_size: int, generation: int) -> None:
        self._link = link
        self._clock = clock
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._slots: list[Slot] = []
        self._milestone = (-1, 0.0)  # the last one's step, and until when it is waited for
        self.slot_bytes = 0

    def move(self, link: Link, generation: int) -> None:
        """Go on with another daemon, which gives slots of its own at the next `take`."""
        self.close()
        self._link, self._generation = link, generation

    def reserve(self, size_bytes: int) -> None:
        """Have slots of at least this size; makes new ones only when those at hand are too small."""
        if self._slots and self.slot_bytes >= size_bytes:
            return
        answer, fds = self._link.ask(NeedSlots(size_bytes=size_bytes, num=NUM_SLOTS), Slots)
        for slot in self._slots:
            slot.close()
        self._slots = [Slot(fd, size) for fd, size in zip(fds, answer.sizes, strict=True)]
        self.slot_bytes = min(answer.sizes)

    def has_room(self) -> bool:
        """Could a snapshot start now? Looks only; `pick` would claim a slot."""
        ready = sum(slot.is_ready for slot in self._slots)
        free = (slot for slot in self._slots if not slot.held and not (slot.is_ready and (ready == 1 or self._is_awaited(slot))))
        return not self._slots or next(free, None) is not None

    def take(self, stack_items: list[Item], step: int, *, milestone: bool, wait_s: float) -> Taken | None:
        """Freeze the items; None, with one warning, when no slot gets free within `wait_s` or the daemon has gone."""
        began = self._clock.monotonic()
        failpoint("capture.begin")
        index = plan_slot(
            stack_items, generation=self._generation, step=step, rank=self._rank, world_size=self._world_size, milestone=milestone
        )
        try:
            size = needed_bytes(index)
            self.reserve(size if not self._slots else max(size, size + size // 16 if size > self.slot_bytes else size))
            slot = self._wait_for_slot(wait_s)
            if slot is None:
                warnings.warn(f"no snapshot at step {step}: the one before is still being written", SaveWarning, stacklevel=3)
                return None
            copying = self._clock.monotonic()
            freeze(slot, index, stack_items)
            copied = self._clock.monotonic()
            self._milestone = (step, copied + MILESTONE_WAIT_S) if milestone else self._milestone
            self._link.send(
                Ready(generation=self._generation, step=step, rank=self._rank, slot=self._slots.index(slot), milestone=milestone)
            )
        except (UnbrokenError, OSError) as error:
            # the daemon has gone, does not answer, or has no memory for a state that has grown: a save never ends training (I9)
            warnings.warn(f"no snapshot at step {step}, training goes on: {error}", SaveWarning, stacklevel=3)
            return None
        failpoint("capture.ready")
        return Taken(step, copied - copying, self._clock.monotonic() - began, size)

    def close(self) -> None:
        """Unmap the slots; their content stays with the daemon."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _is_awaited(self, slot: Slot) -> bool:
        """A milestone stays until it is known what became of it: the daemon may be too busy to hold it yet.

        Not for ever: where another rank has none of it nothing is told, and there is no newer one while this slot is not given up.
        """
        step, until_s = self._milestone
        is_recent = slot.milestone and slot.step == step and self._clock.monotonic() < until_s
        return is_recent and not self._link.knows_milestone(step)

    def _wait_for_slot(self, wait_s: float) -> Slot | None:
        end = self._clock.monotonic() + wait_s
        while (slot := pick(self._slots, self._is_awaited)) is None:
            if self._clock.monotonic() >= end or self._link.lost is not None:
                return None
            self._link.poll()
            self._clock.sleep(0.002)
        return slot


def expected_bytes(stack: Stack, items: list[Item]) -> int:
    """Size to reserve before the first step: what is there now, and two moments per parameter where an optimizer has none yet."""
    size = sum(_placed_bytes(i.nbytes) for i in items) + (1 << 20)
    for optimizer in stack.parts.optimizers.values():
        if not optimizer.state:
            size += 2 * sum(_placed_bytes(p.numel() * p.element_size()) + 512 for g in optimizer.param_groups for p in g["params"])
    return size


def _placed_bytes(size_bytes: int) -> int:
    """At most what a piece of this size takes up in a slot with its place in the index, the gap before it included."""
    return size_bytes + 512 + (4096 if size_bytes > SMALL_PIECE_BYTES else 0)
