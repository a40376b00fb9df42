"""What the daemon knows of the snapshots in memory: which cut is safe to start from, which is drained next, and what became of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unbroken.core.errors import StoreError, describe
from unbroken.core.limits import DRAIN_TIMEOUT_S
from unbroken.core.messages import Committed, Failed, Message, Ready
from unbroken.core.records import EventRecord, Record
from unbroken.daemon.drain import Cargo, Drainer, Outcome
from unbroken.daemon.folder import LiveJournal, RunFolder
from unbroken.daemon.memory import SlotTable
from unbroken.daemon.plan import MemoryCut

Stamp = tuple[int, int, bool]
"""(step, generation, milestone): a snapshot may be taken once more in order to be kept."""

MAX_FATES = 64
SYNC_LINES = 256
"""The journal is made durable after so many lines even without a checkpoint."""


def _stamp(cut: MemoryCut) -> Stamp:
    return cut.step, cut.generation, cut.milestone


class Board:
    """Slots, journals and the drain of one run. `tell` sends to all workers. Used by the event loop alone."""

    def __init__(self, folder: RunFolder, drained: Callable[[Outcome], None], tell: Callable[[Message], None]) -> None:
        self.table = SlotTable()
        self.witnessed = False
        self._tell = tell
        self._folder = folder
        self.drainer = Drainer(folder, drained)
        self._journals: dict[int, LiveJournal] = {}
        self._current: LiveJournal | None = None
        self._held: dict[Stamp, MemoryCut] = {}
        self._announced: set[Stamp] = set()
        self._fates: dict[Stamp, str] = {}
        self._draining: MemoryCut | None = None
        self._forgotten: MemoryCut | None = None
        self._last_committed: int | None = None
        self._last_milestone: int | None = None
        self._unsynced = 0

    @property
    def generation(self) -> int:
        """Number of the generation in progress, -1 before the first."""
        return self._current.generation.number if self._current is not None else -1

    @property
    def world_size(self) -> int:
        """Ranks of the generation in progress."""
        return self._current.generation.world_size if self._current is not None else 0

    @property
    def last_applied(self) -> int | None:
        """Newest step that the journal of the generation in progress says was applied."""
        return self._current.last_applied if self._current is not None else None

    @property
    def _base_step(self) -> int:
        return self._current.generation.base_step if self._current is not None else 0

    @property
    def phase(self) -> str:
        """ "draining" while a snapshot is on its way to disk or waits for that, else "idle"."""
        return "draining" if self._draining is not None or self._next() is not None else "idle"

    def stop(self) -> bool:
        """Make journals durable and end the drain; False if it did not end in time."""
        if self._current is not None:
            self.drainer.sync(self._current)
        stopped = self.drainer.stop(0.0 if self._draining is not None else DRAIN_TIMEOUT_S)
        if stopped:
            self.table.close()
        return stopped

    def cuts(self) -> list[MemoryCut]:
        """Cuts that a start may use, newest first: whole, and with every step up to theirs in the journal."""
        return [cut for cut in self.table.cuts() if self._covered(cut)]

    def open(self, journal: LiveJournal) -> None:
        """A generation has been opened: what is newer than its base is gone."""
        self.table.discard_after(journal.generation.base_step)
        if self._current is not None:
            self.drainer.sync(self._current)
        self._current = journal
        self._journals[journal.generation.number] = journal
        if self._last_committed is not None and self._last_committed > self._base_step:
            self._last_committed = self._last_milestone = None  # given up by this start
        self._announced.clear()
        for stamp in [stamp for stamp, fate in self._fates.items() if fate == "failed" and stamp[0] == self._base_step]:
            del self._fates[stamp]  # what the run goes on from deserves another try
        self.drainer.sync(journal)
        self.settle()

    def forget(self) -> None:
        """The run is gone: nothing in memory belongs to what is in the folder now."""
        self.table.discard_after(-1)
        self.witnessed = False
        self._current, self._journals = None, {}
        self._announced.clear()
        self._fates.clear()
        self._last_committed = self._last_milestone = None
        self._forgotten = self._draining
        self.settle()

    def drop(self, cut: MemoryCut) -> None:
        """A cut turned out to be bad."""
        self.table.drop(cut)
        self.settle()

    def announce(self, ready: Ready) -> None:
        """A rank says that its slot is READY: the fate of this snapshot has to be told."""
        self._announced.add((ready.step, ready.generation, ready.milestone))
        if len(self._announced) > MAX_FATES:
            self._announced.discard(min(self._announced))

    def journal(self, records: Sequence[Record]) -> None:
        """Append to the journal of the generation in progress."""
        assert self._current is not None
        try:
            self._current.add(records)
        except StoreError as error:
            self._tell(Failed(step=self._current.last_applied, generation=self.generation, text=f"journal: {describe(error)}"))
        self._unsynced += len(records)
        if self._unsynced >= SYNC_LINES:
            self._unsynced = 0
            self.drainer.sync(self._current)

    def write_events(self, events: Iterable[EventRecord]) -> None:
        """Append events, if there is a journal."""
        if self._current is not None:
            with contextlib.suppress(StoreError):  # a journal that takes no more lines has said so when it lost the first
                self._current.add(events)

    def settle(self, gone: tuple[int, str] | None = None) -> None:
        """Bring holds, waiting drains and told fates up to date with what lies in the slots. `gone`: a rank that has left, and why."""
        if gone is not None:
            self._tell_gone(*gone)
        cuts = self.cuts()
        self._hold(cuts)
        self._tell_overtaken()
        waiting = self._next()
        if self._draining is None and waiting is not None:
            self._draining = waiting
            slots, journal = tuple(self.table.find(waiting.slots)), self._journals[waiting.generation]
            self.drainer.submit(Cargo(waiting, self._folder.repository, slots, journal))

    def drained(self, outcome: Outcome) -> None:
        """The drain has finished with a cut."""
        step, generation, milestone = _stamp(outcome.cut)
        left_behind = outcome.cut is self._forgotten or (generation < self.generation and step > self._base_step)
        self._draining = self._forgotten = None
        if not outcome.error:
            self._set_fate(_stamp(outcome.cut), "committed")
            self._last_committed = step
            self._last_milestone = step if milestone else self._last_milestone
            root, seconds = outcome.state_root, outcome.seconds
            self._tell(Committed(step=step, generation=generation, milestone=milestone, state_root=root, seconds=seconds))
        elif not left_behind:  # else nobody waits for it any more
            self._set_fate(_stamp(outcome.cut), "failed")
            if outcome.is_poisoned:
                self.table.drop(outcome.cut)
            poisoned = outcome.is_poisoned
            self._tell(Failed(step=step, generation=generation, milestone=milestone, text=outcome.error, poisoned=poisoned))
        self.settle()

    def facts(self) -> dict[str, Any]:
        """For people, launchers and tests."""
        newest = max(self._held, default=None)
        return {
            "generation": self.generation if self._current is not None else None,
            "last_applied": self.last_applied,
            "last_ready": newest[0] if newest is not None else None,
            "last_committed": self._last_committed,
            "last_milestone": self._last_milestone,
            "draining": self._draining.step if self._draining is not None else None,
            "slots_bytes": self.table.total_bytes,
        }

    def _covered(self, cut: MemoryCut) -> bool:
        journal = self._journals.get(cut.generation)
        return journal is not None and cut.step <= journal.last_applied

    def _hold(self, cuts: Sequence[MemoryCut]) -> None:
        """Held are the newest cut, for the next start; the one being drained; and milestones that wait for that."""
        wanted = {_stamp(self._draining): self._draining} if self._draining is not None else {}
        newest_found = False
        for cut in cuts:
            stamp = _stamp(cut)
            if newest_found and (stamp in self._fates or not cut.milestone):
                continue
            if stamp in self._held or self.table.hold(cut):
                wanted[stamp] = cut
                newest_found = True
        for stamp, cut in self._held.items():
            if stamp not in wanted:
                self.table.release(cut)
        self._held = wanted
        self.table.sweep(wanted.values(), self.world_size)
        needed = {cut.generation for cut in wanted.values()} | {self.generation}
        self._journals = {number: journal for number, journal in self._journals.items() if number in needed}

    def _next(self) -> MemoryCut | None:
        waiting = [cut for stamp, cut in self._held.items() if stamp not in self._fates and cut is not self._draining]
        milestones = [cut for cut in waiting if cut.milestone]
        if milestones:
            return min(milestones, key=_stamp)
        return max(waiting, key=_stamp, default=None)

    def _tell_overtaken(self) -> None:
        """A snapshot that a newer one has overtaken before it was drained stays memory-only, and that is reported."""
        newest = max(self._held, default=(-1, -1, False))
        for stamp in sorted(self._announced):
            step, generation, milestone = stamp
            if stamp in self._fates:
                self._announced.discard(stamp)
            elif stamp < newest and stamp not in self._held:
                missing = self.table.missing(generation, step, self.world_size)
                why = f"ranks {missing} have none of it" if missing else "draining is slower than the interval"
                text = f"superseded by step {newest[0]} before it was durable: {why}"
                self.write_events([EventRecord(name="memory_only", step=step, facts={"reason": text})])
                self._set_fate(stamp, "superseded")
                self._announced.discard(stamp)
                self._tell(Failed(step=step, generation=generation, milestone=milestone, text=text, superseded=True))

    def _tell_gone(self, rank: int, why: str) -> None:
        """A rank has gone: snapshots of the generation in progress that others have announced and it has not never become whole."""
        for stamp in sorted(self._announced):
            step, generation, milestone = stamp
            if generation == self.generation and stamp not in self._fates and rank in self.table.missing(generation, step, self.world_size):
                self._set_fate(stamp, "failed")
                self._announced.discard(stamp)
                text = f"rank {rank} is gone before its part was whole" + (f": {why}" if why else "")
                self._tell(Failed(step=step, generation=generation, milestone=milestone, text=text))

    def _set_fate(self, stamp: Stamp, fate: str) -> None:
        self._fates[stamp] = fate
        while len(self._fates) > MAX_FATES:
            del self._fates[min(self._fates)]
