"""What a run keeps: its snapshots at step boundaries, its journal, and the daemon that makes both durable."""

from __future__ import annotations

import warnings

from unbroken.capture.tree import Item
from unbroken.config import Interval
from unbroken.core.errors import SaveFailed, SaveWarning, StepLost, UnbrokenError
from unbroken.core.limits import DRAIN_TIMEOUT_S, MAX_ATTEMPTS, SLOT_WAIT_S
from unbroken.core.messages import Plan, Refuse, Status, StatusReply
from unbroken.core.ports import Clock, position
from unbroken.opening import Opening
from unbroken.recover.journal_client import JournalClient
from unbroken.recover.snapshots import Snapshots, expected_bytes
from unbroken.recover.start import Counters
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


class Keeping:
    """The saving half of a Run; all ranks call the same things at the same boundaries.

    In the step path: `flags` and `stepped` cost some 50 us on the host; `boundary` costs a look at the socket, and on snapshot steps
    one walk over the state and one copy of it.
    """

    def __init__(self, opening: Opening, plan: Plan, counters: Counters, clock: Clock) -> None:
        self._opening = opening
        self._plan = plan
        self._counters = counters
        self._rank, world_size = opening.exchange.rank, opening.exchange.world_size
        self._pace = Pace(opening.config.interval, clock, counters.step)
        self._journal = JournalClient(opening.link, plan, self._rank, world_size)
        self._snapshots = Snapshots(opening.link, clock, self._rank, world_size, plan.generation)
        self._wanted: tuple[bool, bool] | None = None
        self._saved_step = -1 if plan.source == "fresh" else plan.step
        self._unconfirmed = (plan.step, False) if plan.source == "memory" else None  # the newest snapshot: (step, milestone)

    @property
    def generation(self) -> int:
        """The generation in progress."""
        return self._plan.generation

    def start(self) -> int:
        """Have memory for the snapshots to come, and journal how the start went; bytes of one slot."""
        self._snapshots.reserve(expected_bytes(self._opening.stack, self._pieces()))
        self._journal.start(self._opening.latest_moments())
        return self._snapshots.slot_bytes

    def phase(self) -> str:
        """What the daemon does: "idle" or "draining"."""
        return self._opening.link.ask(Status(), StatusReply)[0].phase

    def flags(self, stop: bool) -> Flags:
        """What this rank says with the coming step. Rank 0 decides about snapshots one step ahead, so that it travels along."""
        due = self._rank == 0 and self._snapshots.has_room() and self._pace.due_after(self._counters.step + 2)
        return Flags(stop, due, self._opening.link.lost is not None)

    def stepped(self, attempt: int, applied: Applied, now_s: float) -> None:
        """A step has been applied by all."""
        self._journal.step(self._counters.step, attempt, applied, now_s)
        self._pace.step_done()

    def retry(self, step: int, attempt: int, why: Exception) -> int:
        """The number of the next attempt at a step that every member has refused; StepLost where it may not be tried in place.

        The attempts at the n-th reduction of a step count from n * MAX_ATTEMPTS, so that members at different ones do not agree.
        """
        if attempt % MAX_ATTEMPTS + 1 >= MAX_ATTEMPTS:
            raise StepLost(f"step {step} was refused {attempt % MAX_ATTEMPTS + 1} times in place: {why}") from why
        refuse = Refuse(generation=self.generation, step=step, attempt=attempt, rank=self._rank, reason=str(why)[:1000])
        return self._opening.link.retry(refuse, why)

    def boundary(self, told: list[Flags], *, last: bool) -> bool:
        """The boundary of the step just applied; `told` came with it. True when a rank was asked to stop and all is committed."""
        self._opening.link.poll()
        first, stop = self._counters.step == 0, any(rank.stop for rank in told)
        urgent = stop or last or self._wanted is not None
        if (urgent or self._pace.due) and any(rank.daemon_lost for rank in told):
            self._reattach()
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self.save(*wanted)
        elif first or urgent or self._pace.due:
            self._snapshot(milestone=False, wait_s=DRAIN_TIMEOUT_S if urgent else SLOT_WAIT_S)
        if not first:
            self._pace.due = told[0].snapshot_next
        return stop

    def want(self, milestone: bool, wait: bool) -> None:
        """Save at the coming boundary."""
        before = self._wanted or (False, False)
        self._wanted = (milestone or before[0], wait or before[1])

    def save(self, milestone: bool, wait: bool) -> None:
        """Save now; with `wait`, return when it is durable or raise SaveFailed."""
        taken = self._snapshot(milestone=milestone, wait_s=DRAIN_TIMEOUT_S, explicit=True)
        if wait and not taken:
            raise SaveFailed(f"no snapshot of step {self._counters.step} could be taken, see the warning; older checkpoints are untouched")
        if wait and self._unconfirmed is not None:
            step, is_milestone = self._unconfirmed
            self._opening.link.wait_for_step(step, DRAIN_TIMEOUT_S, milestone=is_milestone)

    def stopped(self, signal_name: str) -> None:
        """Note who asked the run to stop."""
        self._journal.event("stopped", self._counters.step, signal=signal_name)

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S, *, whole: bool = True) -> None:
        """Save what is not saved yet, if the state is `whole`; wait until it is durable, say what was not."""
        try:
            if whole:
                self._snapshot(milestone=False, wait_s=timeout_s)
            self._opening.link.settle(self._unconfirmed, timeout_s, aloud=self._rank == 0)
        finally:
            self._snapshots.close()

    def _snapshot(self, *, milestone: bool, wait_s: float, explicit: bool = False) -> bool:
        """True if this step is in memory, or durable, now."""
        if self._saved_step == self._counters.step and not milestone:
            return True
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
