"""What a run keeps: its snapshots at step boundaries, its journal, and the daemon that makes both durable."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

from unbroken.capture.tree import Item
from unbroken.cluster.preempt import EVALUATION_S
from unbroken.config import Interval
from unbroken.core.errors import SaveFailed, SaveWarning, StepLost, UnbrokenError
from unbroken.core.limits import COPY_WAIT_S, DRAIN_TIMEOUT_S, MAX_ATTEMPTS, SLOT_WAIT_S
from unbroken.core.messages import Plan, Refuse
from unbroken.core.ports import Clock, position
from unbroken.opening import Opening
from unbroken.recover.copied import wait_for_copy
from unbroken.recover.journal_client import JournalClient
from unbroken.recover.snapshots import Snapshots
from unbroken.recover.start import Counters
from unbroken.replaying import Again
from unbroken.reporting import Reporting
from unbroken.step.exchange import ExchangeFailed
from unbroken.step.reduce import Flags
from unbroken.step.update import Applied


class Pace:
    """When the next snapshot is due; `due`: take one at the coming boundary."""

    def __init__(self, interval: Interval, clock: Clock, step: int) -> None:
        self._interval = interval
        self._clock = clock
        self._saved_s = self._done_s = clock.monotonic()
        self._step_s = 0.0
        self.due = interval.due(step + 1, 0.0, 0.0)

    def step_done(self) -> None:
        """A step has been applied; the length of the longest recent one is kept."""
        now = self._clock.monotonic()
        self._step_s = max(now - self._done_s, 0.9 * self._step_s)
        self._done_s = now

    def saved(self) -> None:
        """A snapshot has been taken."""
        self._saved_s = self._clock.monotonic()

    def due_after(self, step: int) -> bool:
        """Will a snapshot be due at the boundary of `step`, two steps after the one applied last?"""
        now_s = self._clock.monotonic()
        saved_s = now_s + self._step_s if self.due else self._saved_s  # the coming boundary's snapshot has not been taken yet
        return self._interval.due(step, now_s + 2 * self._step_s - saved_s, self._step_s)


class LongEvaluations:
    """When the next is to be expected. A request to stop may end the process inside it: a snapshot before it makes that one lost step."""

    def __init__(self) -> None:
        self._before: list[int] = []

    def took(self, seconds: float, boundary: int) -> None:
        """One is over; `boundary` is the step whose boundary came last before it. Short ones are never cut."""
        if seconds >= EVALUATION_S and boundary not in self._before:
            self._before = [*self._before[-1:], boundary]

    def expected_after(self, boundary: int) -> bool:
        """Will one come right after this boundary, if the distance between the last two is a habit?"""
        return len(self._before) == 2 and boundary == 2 * self._before[1] - self._before[0]


class Keeping:
    """The saving half of a Run; all ranks call the same things at the same boundaries.

    In the step path: `flags` and `stepped` cost some 50 us on the host; `boundary` costs a look at the socket, and on snapshot steps
    one walk over the state and one copy of it.
    """

    def __init__(self, opening: Opening, plan: Plan, counters: Counters, clock: Clock) -> None:
        self._opening = opening
        self._plan = plan
        self._counters = counters
        self._clock = clock
        self._was_asked = False
        self._rank, world_size = opening.exchange.rank, opening.exchange.world_size
        self._pace = Pace(opening.config.interval, clock, counters.step)
        self._journal = JournalClient(opening.link, plan, self._rank, world_size)
        self._snapshots = Snapshots(opening.link, clock, self._rank, world_size, plan.generation)
        self.reporting = Reporting(opening, plan, self._rank)
        self.evaluations = LongEvaluations()
        self._again = None if opening.config.replay is None else Again(opening, opening.config.replay, plan.step)
        self._wanted: tuple[bool, bool] | None = None
        self._saved_step = -1 if plan.source == "fresh" else plan.step
        self._unconfirmed = (plan.step, False) if plan.source == "memory" else None  # the newest snapshot: (step, milestone)

    @property
    def generation(self) -> int:
        """The generation in progress."""
        return self._plan.generation

    @property
    def num_unsaved(self) -> int:
        """Steps applied since the newest snapshot."""
        return self._counters.step - max(0, self._saved_step)

    def start(self) -> int:
        """Have memory for the snapshots to come, and journal how the start went; bytes of one slot."""
        self._snapshots.reserve(self._opening.expected_slot_bytes(self._counters))
        self._journal.start(self._opening.latest_moments())
        origin = self._plan.options.get("started_from")
        if self._plan.source == "fresh" and origin:
            told = {"source": origin["source"], "format": origin["format"], "source_step": str(origin["step"]), "root": origin["root"]}
            self.note("started_from", step=0, taken=", ".join(origin["taken"]), **told)
        return self._snapshots.slot_bytes

    def flags(self, stop: bool) -> Flags:
        """What this rank says with the coming step. Rank 0 decides about snapshots one step ahead, so that it travels along."""
        boundary, link = self._counters.step + 2, self._opening.link
        due = self._pace.due_after(boundary) or self.evaluations.expected_after(boundary)
        return Flags(stop, self._rank == 0 and self._snapshots.has_room() and due, link.lost is not None, link.poisoned_step)

    def stepped(self, attempt: int, applied: Applied, now_s: float) -> None:
        """A step has been applied by all. Refused where it is one that is made again, and not what it was."""
        if self._again is not None:
            self._again.stepped(self._counters.step, applied, self._opening.exchange.world_size)
        self._journal.step(self._counters.step, attempt, applied, now_s)
        self._pace.step_done()

    def retry(self, step: int, attempt: int, why: Exception) -> int:
        """The number of the next attempt at a step that every member has refused; StepLost where it may not be tried in place."""
        if attempt + 1 >= MAX_ATTEMPTS:
            raise StepLost(f"step {step} was refused {attempt + 1} times in place: {why}") from why
        refuse = Refuse(generation=self.generation, step=step, attempt=attempt, rank=self._rank, reason=str(why)[:1000])
        return self._opening.link.retry(refuse, why)

    def boundary(self, told: list[Flags], *, last: bool, put_off: bool = False) -> bool:
        """The boundary of the step just applied; `told` came with it. True when a rank was asked to stop and all is committed.

        put_off: no snapshot that merely is due is taken now; it is at the next boundary. Refused as by `stepped`.
        """
        if self._again is not None:
            self._again.boundary(self._counters)
            put_off = put_off or not self._again.keeps(self._counters.step)
        self._opening.link.poll()
        self.reporting.send(self._journal, self._counters.step, wait=False)
        self.reporting.committed(self._opening.link.committed)
        first, stop = self._counters.step == 0, any(rank.stop for rank in told)
        milestone = self._opening.config.is_milestone(self._counters.step)
        urgent = stop or last or milestone or self._wanted is not None
        is_lost = any(rank.daemon_lost for rank in told)
        if (urgent or self._pace.due) and is_lost:
            self._reattach()
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self.save(wanted[0] or milestone, wanted[1])
        elif first or urgent or (self._pace.due and not put_off):
            self._snapshot(milestone=milestone, wait_s=DRAIN_TIMEOUT_S if urgent else SLOT_WAIT_S)
        if (stop or last) and not is_lost:
            self._look_again(milestone, wait=not stop)
        if not first:
            self._pace.due = told[0].snapshot_next or (self._pace.due and put_off)
        self._was_asked = stop
        return stop

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Metrics of the step just completed. RuntimeError when it has been saved without them."""
        if self._saved_step == self._counters.step:
            raise RuntimeError(f"step {self._counters.step} has been saved already: call run.log() before run.save()")
        self.reporting.add(self._counters.step, metrics)

    @property
    def must_wait(self) -> bool:
        """Will the coming boundary wait until its snapshot is durable?"""
        return self._wanted is not None and self._wanted[1]

    def want(self, milestone: bool, wait: bool) -> None:
        """Save at the coming boundary."""
        before = self._wanted or (False, False)
        self._wanted = (milestone or before[0], wait or before[1])

    def save(self, milestone: bool, wait: bool) -> None:
        """Save now; with `wait`, return when it is durable or raise SaveFailed."""
        if self._again is not None and not self._again.keeps(self._counters.step):
            return
        taken = self._snapshot(milestone=milestone, wait_s=DRAIN_TIMEOUT_S, explicit=True)
        if wait and not taken:
            raise SaveFailed(f"no snapshot of step {self._counters.step} could be taken, see the warning; older checkpoints are untouched")
        if wait and self._unconfirmed is not None:
            step, is_milestone = self._unconfirmed
            self._opening.link.wait_for_step(step, DRAIN_TIMEOUT_S, milestone=is_milestone)

    def hand_over(self) -> None:
        """Have this step in memory, and the daemon know all that was said so far: a Run to come goes on from it. Best effort."""
        try:
            if self._snapshot(milestone=False, wait_s=SLOT_WAIT_S):
                self._opening.phase()
        except (UnbrokenError, OSError) as error:  # safe to go on: an older snapshot is there
            warnings.warn(f"step {self._counters.step} was not kept: {error}", SaveWarning, stacklevel=4)

    def note(self, name: str, *, step: int, **facts: str) -> None:
        """Journal an event."""
        self._journal.event(name, step, **facts)

    def leave(self) -> None:
        """Another generation goes on, in this process: let this one's memory and its sinks go."""
        self._snapshots.close()
        self.reporting.end(complete=False)

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S, *, whole: bool = True) -> None:
        """Save what is not saved yet, if the state is `whole`; wait until it is durable, say what was not.

        For a copy it waits a while, too, but not where a rank was asked to stop: then every second counts.
        """
        try:
            if whole:
                self._snapshot(milestone=False, wait_s=timeout_s)
            self._opening.link.settle(self._unconfirmed, timeout_s, aloud=self._rank == 0)
            if whole and self._rank == 0 and self._opening.config.copies_to and not self._was_asked:
                wait_for_copy(self._opening.link, self._clock, min(timeout_s, COPY_WAIT_S))
        finally:
            self._snapshots.close()
            self.reporting.end()

    def _snapshot(self, *, milestone: bool, wait_s: float, explicit: bool = False) -> bool:
        """True if this step is in memory, or durable, now."""
        if self._saved_step == self._counters.step and not milestone:
            return True
        if self._again is not None and not self._again.keeps(self._counters.step):
            return False
        self.reporting.send(self._journal, self._counters.step, wait=True)
        try:
            pieces = self._pieces()
        except TypeError as error:  # something unstorable has come into the state since the start; save() lets it pass
            if explicit:
                raise
            warnings.warn(f"no snapshot at step {self._counters.step}, training goes on: {error}", SaveWarning, stacklevel=4)
            self._journal.event("save_failed", self._counters.step, reason=str(error))
            return False
        taken = self._snapshots.take(pieces, self._counters.step, milestone=milestone, wait_s=wait_s)
        if taken is None:
            self._journal.event("snapshot_skipped", self._counters.step)
            return False
        self._saved_step, self._unconfirmed = taken.step, (taken.step, milestone)
        self._pace.saved()
        self._journal.captured(taken)
        return True

    def _look_again(self, milestone: bool, *, wait: bool) -> None:
        """No step tells of a daemon that goes at the last boundary, or while it writes that snapshot: wait for it, then ask all ranks once.

        wait: not where a stop is still to be journalled. Cost: one small gather; closing would wait for the same.
        """
        link = self._opening.link
        link.poll()
        if wait and self._unconfirmed is not None:
            with contextlib.suppress(SaveFailed):  # safe: closing tells it
                link.wait_for_step(self._unconfirmed[0], DRAIN_TIMEOUT_S, milestone=self._unconfirmed[1])
        with contextlib.suppress(ExchangeFailed):  # safe: a rank that ended early is the launcher's matter; the snapshot has been taken
            if any(self._opening.exchange.share(link.lost is not None, bool)):
                self._reattach()
                self._saved_step = -1
                self._snapshot(milestone=milestone, wait_s=DRAIN_TIMEOUT_S)

    def _reattach(self) -> None:
        """Some rank has lost the daemon: go on with another one in a new generation; if that fails, go on without for now."""
        try:
            self._plan = self._opening.reattach()
        except (UnbrokenError, OSError) as error:
            warnings.warn(f"no daemon could be started, nothing is saved for now: {error}", SaveWarning, stacklevel=4)
            return
        self._journal = self._journal.continued(self._opening.link, self._plan)
        self._snapshots.move(self._opening.link, self._plan.generation)
        position[1] = self._plan.generation

    def _pieces(self) -> list[Item]:
        return [*self._opening.pieces(self._counters), *self._opening.facts()]
