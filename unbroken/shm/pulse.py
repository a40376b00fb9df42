"""A rank's pulse: a page of shared memory in which it says where it is, and the room behind it for its stacks.

The node daemon makes the page and looks at it; the rank writes a few numbers and never waits. So the daemon knows where a rank is that
was stopped, sits in C code or holds the interpreter's lock for ever, and no thread beside the loop can keep a stuck loop looking alive.
Behind the numbers a signal handler of the rank leaves its stacks; the offset of the descriptor, which both ends share, says how many.

The page is an array of float64: marks so far, phase, step, unit, steps done since this start, 1 while a tracer (debugger) is set, the
number of step times ever noted, then from place 16 on the last 64 of them in seconds.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

from unbroken.core.limits import PULSE_BYTES
from unbroken.core.os import memory_file

HEAD_BYTES = 4096
NUM_TIMES = 64

_MARKS, _PHASE, _STEP, _UNIT, _STEPS, _TRACED, _NOTED = range(7)
_TIMES = 16


class Phase(IntEnum):
    """Where a rank is in its run."""

    OUTSIDE = 0
    DATA = 1
    UNIT = 2
    COLLECTIVE = 3
    UPDATE = 4
    BODY = 5
    EVAL = 6
    SAVE = 7
    VERDICT = 8


class Reading(NamedTuple):
    """What a page says. `times` are seconds of the last steps, newest anywhere."""

    marks: int
    phase: Phase
    step: int
    unit: int
    steps: int
    traced: bool
    times: tuple[float, ...]


class Pulse:
    """The rank's end. Without a page (no daemon, or nobody watches) it writes into memory of its own.

    Cost in the step path: a mark is a few stores, 0.2 us; a step of two units and its boundary, clocks included, 5.5 us.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._map: mmap.mmap | None = None
        self._page = memoryview(bytearray(HEAD_BYTES)).cast("d")
        self._began_s = self._paused_s = 0.0
        self._is_timed = False

    def attach(self, fd: int) -> None:
        """Write into this page from now on; the position goes along, the descriptor stays the caller's."""
        before, old = self._page, self._map
        self._map = mmap.mmap(fd, HEAD_BYTES)
        self._page = memoryview(self._map).cast("d")
        self._page[:_NOTED] = before[:_NOTED]
        before.release()
        if old is not None:
            old.close()

    def detach(self) -> None:
        """Leave the page."""
        if self._map is not None:
            self._page[_PHASE] = Phase.OUTSIDE
            self._page.release()
            self._map.close()
            self._map, self._page = None, memoryview(bytearray(HEAD_BYTES)).cast("d")

    def mark(self, phase: Phase, unit: int = 0) -> None:
        """This rank has come to `phase`: it lives."""
        page = self._page
        page[_PHASE] = phase
        page[_UNIT] = unit
        page[_MARKS] += 1

    def begin(self, step: int) -> None:
        """An attempt at `step` begins."""
        self._page[_STEP] = step
        self._page[_TRACED] = sys.gettrace() is not None
        self._began_s, self._paused_s, self._is_timed = self._now_s(), 0.0, True

    def done(self) -> None:
        """The step has been applied: note how long it took, without the evaluations and saves in it."""
        page = self._page
        if self._is_timed:
            page[_TIMES + int(page[_NOTED]) % NUM_TIMES] = self._now_s() - self._began_s - self._paused_s
            page[_NOTED] += 1
        self._is_timed = False
        page[_STEPS] += 1
        self.mark(Phase.BODY)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """In `phase` for a while, then where it was before. Its time is not the step's."""
        page, began_s = self._page, self._now_s()
        before, unit = Phase(int(page[_PHASE])), int(page[_UNIT])
        self.mark(phase)
        try:
            yield
        finally:
            self._paused_s += self._now_s() - began_s
            self.mark(before, unit)


class PulsePage:
    """The daemon's end of one rank's page. `times` are put into a new one: what an earlier life of the run has learned."""

    def __init__(self, rank: int, times: tuple[float, ...] = ()) -> None:
        self.fd = memory_file(f"unbroken-pulse-{rank}", PULSE_BYTES)
        self._map = mmap.mmap(self.fd, HEAD_BYTES)
        page = memoryview(self._map).cast("d")
        page[_NOTED] = len(times)
        for i, seconds in enumerate(times):
            page[_TIMES + i] = seconds
        page.release()

    def read(self) -> Reading:
        """What it says now. A look while the rank writes may see half of a mark; the next look sees it whole."""
        page = memoryview(self._map[:HEAD_BYTES]).cast("d")
        phase = int(page[_PHASE]) if 0 <= page[_PHASE] < len(Phase) else Phase.OUTSIDE
        noted = _count(page[_NOTED])
        times = tuple(t for t in page[_TIMES : _TIMES + min(noted, NUM_TIMES)] if 0 <= t < float("inf"))
        marks, step, unit, steps = (_count(page[place]) for place in (_MARKS, _STEP, _UNIT, _STEPS))
        return Reading(marks, Phase(phase), step, unit, steps, page[_TRACED] == 1, times)

    def ask(self) -> None:
        """Make room for stacks: what was there counts no more."""
        os.lseek(self.fd, HEAD_BYTES, os.SEEK_SET)

    def stacks(self) -> str:
        """What was left there since `ask`."""
        end = min(max(os.lseek(self.fd, 0, os.SEEK_CUR), HEAD_BYTES), PULSE_BYTES)
        return os.pread(self.fd, end - HEAD_BYTES, HEAD_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Give the memory back; a rank that has it mapped keeps it."""
        self._map.close()
        os.close(self.fd)


def _count(value: float) -> int:
    """A number that a confused rank cannot make ours fail with."""
    return int(value) if 0 <= value < 1 << 53 else 0
