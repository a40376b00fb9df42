"""The guarding half of a run: what may be applied, and when the run goes back to before its state had become non-finite.

A bad loss is seen before anything is applied, alike on all ranks, and its step is skipped. What slips through (a finite loss with a bad
gradient, an update that overflows) is seen at the next loss, or by the daemon before a snapshot becomes a checkpoint. Then all ranks go
back to a checkpoint before it and replay *carefully*: gradients are looked at before they are applied, the state after each step, until
past the place where the poison was seen. So the step that makes it is found exactly and skipped, as if it had been seen at once.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import NamedTuple

from unbroken.capture.finite import first_poison
from unbroken.core.errors import AnomalyWarning, GaveUp, NoCheckpoint, StepLost
from unbroken.core.messages import Plan
from unbroken.core.ports import failpoint
from unbroken.keeping import Keeping
from unbroken.opening import Opening
from unbroken.recover.start import Counters
from unbroken.recover.together import together
from unbroken.step.anomalies import Action, Anomalies, Window, judge, window_of
from unbroken.step.exchange import ExchangeFailed
from unbroken.step.reduce import Reduced, UnitFacts, from_bits
from unbroken.step.update import Applied


class Back(NamedTuple):
    """Go back to `at_most` or before, because of what was seen at `seen`; `window`: what is passed over in the replay."""

    seen: int
    at_most: int
    reason: str
    window: Window | None = None


class Guard:
    """Outlives the generations that a process opens. All ranks ask the same things in the same order and decide alike.

    Cost in the step path: 10 us; 30 us more with a spike rule. A loss that is not finite, and each step of a careful replay, cost a
    look at the whole state and a small gather.
    """

    def __init__(self, rules: Anomalies) -> None:
        self.rules = rules
        self.gave_up = False
        self._back: Back | None = None
        self._doubt = False
        self._careful_until = 0
        self._planned: list[Window] = []
        self._num_back = 0
        self._best = -1
        self._warned: set[str] = set()

    def enter(self, opening: Opening, counters: Counters, keeping: Keeping) -> None:
        """A generation begins, the first or one that the run has gone back to."""
        self._opening, self._counters, self._keeping = opening, counters, keeping

    @property
    def must_go_back(self) -> bool:
        """True until `go_back` has done it."""
        return self._back is not None

    @property
    def checks_norm(self) -> bool:
        """Is a step with a non-finite clip norm skipped?"""
        return self.rules.nan != "ignore"

    def is_careful(self) -> bool:
        """Is the coming step part of a careful replay?"""
        return self._counters.step < self._careful_until

    def passes_over(self, step: int) -> str:
        """Why this step is to be skipped without being computed; "" if it is not."""
        for window in self._planned:
            if window.first <= step <= window.last:
                return window.reason
        known = any(first <= step <= last for first, last in self._counters.watch.windows)
        return "part of a window that is passed over" if known else ""

    def judge(self, reduced: Reduced) -> tuple[Action, str]:
        """What becomes of the coming step, and why. GaveUp where the rules say so; ExchangeFailed where the ranks could not agree."""
        step, rules, watch = self._counters.step + 1, self.rules, self._counters.watch
        if self._is_told(reduced):
            return "rollback", ""
        loss = reduced.loss
        action, reason = judge(loss, watch.losses, rules)
        if loss is not None and action == "skip" and not math.isfinite(loss):  # the batch's fault, or that of the state?
            found = self._poison_anywhere(self._counters)
            if found:
                self._plan_back(Back(step, step - 2, f"the loss is {loss}, because {found}"))
                return "rollback", ""
        if action in ("skip", "stop") and loss is not None:
            reason += _whose(reduced)
        if action == "stop":
            self._give_up(f"step {step}: {reason}")
        if action == "rollback" and rules.spike is not None:
            window = window_of(step, rules.spike, watch.windows, f"step {step}: {reason}")
            self._plan_back(Back(step, window.first - 1, window.reason, window))
        elif action == "warn":
            self._keeping.note("spike", step=step, reason=reason)
            self._say(f"step {step}: {reason}; it is applied", "spike")
        return action, reason

    def reduced(self, reduced: Reduced) -> None:
        """One pass of an update that the loop applies by itself, so that nothing can be skipped. GaveUp where the rules say so.

        A loss that is not finite is a reason to look at the state when the update is done; poison that is told, to go back then.
        """
        loss = reduced.loss
        if self._is_told(reduced) or self.rules.nan == "ignore" or loss is None or math.isfinite(loss):
            return
        if self.rules.nan == "stop":
            self._give_up(f"step {self._counters.step + 1}: the loss is {loss}{_whose(reduced)}")
        self._doubt = True

    def _is_told(self, reduced: Reduced) -> bool:
        """Has a rank learned that an earlier state was poisoned? Then all plan to go back."""
        step = self._counters.step + 1
        told = [f.poisoned or (step - 1 if f.bad_norm else 0) for f in (rank.flags for rank in reduced.facts)]
        if self.rules.nan == "ignore" or not any(told):
            return False
        first = min(poisoned for poisoned in told if poisoned)
        reason = self._opening.link.poison or f"the gradient or the state of step {first} was not finite"
        self._plan_back(Back(step, first - 1, reason))
        return True

    def committed(self, applied: Applied, action: Action) -> None:
        """The step has been committed, after `judge` had said `action`. GaveUp after too many in a row that were not applied."""
        step, watch = self._counters.step, self._counters.watch
        if applied.status == "applied":
            watch.applied(applied.loss, self.rules.spike)
        if not applied.reason:
            return
        if self.rules.nan == "stop" and action != "skip":  # its gradient turned out to be bad; else it was a spike
            self._give_up(f"step {step}: {applied.reason}")
        watch.streak += 1
        if watch.streak > self.rules.max_skipped:
            self._give_up(f"{watch.streak} steps in a row could not be applied, the last is step {step}: {applied.reason}")
        if self._opening.stack.parts.scaler is not None and not math.isfinite(applied.loss):
            return  # who trains with a scaler has overflows now and then
        most = f"at most {self.rules.max_skipped} in a row"
        self._say(f"step {step} is not applied: {applied.reason}. Weights stay, its data count as used ({most})", "skipped")

    def passed_over(self) -> None:
        """The step just committed was not computed."""
        step, watch = self._counters.step, self._counters.watch
        for window in self._planned:
            if window.first <= step <= window.last:
                watch.entered(window)

    def finds_poison(self, *, asked: bool, bad_norm: bool) -> bool:
        """At the boundary of the step just applied, on all ranks: look at the state where that is due, and plan to go back.

        Due after each step of a careful replay, before a window is passed over, and where an update of the loop's own had a bad loss;
        `asked`: after the last step of all, which no later loss would tell of, and where the loop waits for a checkpoint.
        """
        if self._back is not None:  # told within an update of the loop's own
            return True
        step, asked, self._doubt = self._counters.step, asked or self._doubt, False
        is_careful = 0 < step <= self._careful_until
        is_before_window = bool(self.passes_over(step + 1)) and not self.passes_over(step)
        if self.rules.nan == "ignore" or not step or not (is_careful or is_before_window or asked):
            return False
        try:
            found = self._poison_anywhere(self._counters, "the norm of the gradient was not finite" if bad_norm else "")
        except ExchangeFailed as error:
            raise StepLost(f"the state after step {step} could not be compared: {error}") from error
        if found:
            reason = f"after step {step} {found}"
            window = Window(step, step, f"the update of this step makes the state non-finite: {found}") if is_careful else None
            self._plan_back(Back(step, step - 1, reason, window))
        return bool(found)

    def go_back(self) -> tuple[Plan, Counters]:
        """Put the newest state before the poison back, on all ranks, in a new generation. GaveUp where that has not helped before."""
        back, opening = self._back, self._opening
        assert back is not None
        failpoint("rollback.begin")
        try:
            known = opening.link.committed
            committed = opening.exchange.share(-1 if known is None else known.step, int)[0]  # rank 0's word, so that all count alike
            if committed > self._best:
                self._best, self._num_back = committed, 0
            self._num_back += 1
            if self.rules.nan == "stop" and (self.rules.spike is None or back.window is None):
                self._give_up(back.reason)
            if self._num_back > self.rules.max_rollbacks:
                self._give_up(f"going back {self.rules.max_rollbacks} times brought no new checkpoint; step {back.seen}: {back.reason}")
            self._keeping.note("rollback", step=back.seen, reason=back.reason, at_most=str(back.at_most))
            plan, counters = opening.go_back(max(back.at_most, 0))
            while self.rules.nan != "ignore" and self._poison_anywhere(counters):  # a checkpoint from before anybody looked
                plan, counters = opening.go_back(plan.step - 1)
        except ExchangeFailed as error:
            raise StepLost(f"the run could not go back from step {back.seen}: {error}") from error
        except NoCheckpoint as error:
            self._give_up(f"step {back.seen}: {back.reason}; {error}. A larger keep= or a shorter lose_at_most= leaves older ones")
        failpoint("rollback.opened")
        self._careful_until = max(self._careful_until, back.seen)
        windows = [*self._planned, back.window] if back.window is not None else self._planned
        self._planned = [window for window in windows if window.last > plan.step]
        self._back = None
        if opening.exchange.rank == 0:
            print(f"unbroken: step {back.seen}: {back.reason}: back to step {plan.step}", file=sys.stderr)
        return plan, counters

    def _plan_back(self, back: Back) -> None:
        known = {(window.first, window.last) for window in self._planned}
        self._planned += [Window(*w, "part of a window that is passed over") for w in self._counters.watch.windows if w not in known]
        self._back = back

    def _poison_anywhere(self, counters: Counters, found: str = "") -> str:
        """What is not finite in the state, as the first rank that sees any says it; one look and two small gathers."""
        opening = self._opening
        mine = together(opening.exchange, lambda: found or first_poison(opening.pieces(counters)))  # a state_dict of the user's may raise
        told = opening.exchange.share(mine, str)
        return next((f"{text} on rank {rank}" if not all(told) else text for rank, text in enumerate(told) if text), "")

    def _give_up(self, why: str) -> None:
        self.gave_up = True
        raise GaveUp(f"{why}. The newest checkpoint is from before it; unbroken.Anomalies says what is done")

    def _say(self, text: str, kind: str) -> None:
        """Once per kind: a hundred bad batches are no hundred news, and all of them stand in the journal."""
        if self._opening.exchange.rank == 0 and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{text}; further ones are journalled without a warning", AnomalyWarning, stacklevel=5)


def _whose(reduced: Reduced) -> str:
    """Which unit's loss is not finite, and which rank computed it."""
    found = [(rank, unit) for rank, facts in enumerate(reduced.facts) for unit in facts.units if _is_bad(unit)]
    if not found:
        return ""
    rank, unit = min(found, key=lambda pair: pair[1].unit)
    more = f" and of {len(found) - 1} more" if len(found) > 1 else ""
    return f" (that of unit {unit.unit} on rank {rank} is {from_bits(unit.loss)}{more})"


def _is_bad(unit: UnitFacts) -> bool:
    return bool(unit.weight and unit.loss) and not math.isfinite(from_bits(unit.loss))
