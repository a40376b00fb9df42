"""The stepping half of a run: units in, one update out, applied by all ranks or by none; and back to the last boundary when it is given up.

Everything between two boundaries lives here, everything at a boundary in `keeping`. A step is `whole` again once it has been applied or
undone; while the optimizers run it is neither, and nothing of it may be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from unbroken.core.errors import StepLost
from unbroken.core.ports import failpoint, position
from unbroken.data.cursor import Cursor
from unbroken.data.source import Unit
from unbroken.guarding import Guard
from unbroken.keeping import Keeping
from unbroken.opening import Opening
from unbroken.order.ledger import unit_digest
from unbroken.order.units import blocks
from unbroken.recover.start import Counters
from unbroken.shm.pulse import Phase
from unbroken.step.anomalies import Action
from unbroken.step.exchange import ExchangeFailed
from unbroken.step.micro import Batch, Micro
from unbroken.step.reduce import Flags, RankFacts, Reduced, UnitFacts
from unbroken.step.ring import RingUpdate
from unbroken.step.undo import Undo
from unbroken.step.update import Applied, Update, check_clip, passed_over


class Stepping:
    """One step at a time, on this rank. All ranks call the same things in the same order."""

    def __init__(self, opening: Opening, counters: Counters, keeping: Keeping, guard: Guard) -> None:
        self._counters = counters
        self._keeping = keeping
        self._guard = guard
        self._stack, self._streams = opening.stack, opening.stack.streams
        self._exchange, self._pulse = opening.exchange, opening.watching.pulse
        self._is_ring = opening.config.reduce == "ring"
        kind = RingUpdate if self._is_ring else Update
        self._update = kind(self._stack, opening.num_units, self._exchange, full_weight(opening.source.facts(), opening.num_units))
        self._undo = Undo(self._stack.parts.extras)
        rank, world_size = self._exchange.rank, self._exchange.world_size
        block = blocks(opening.num_units, world_size)[rank]
        opening.source.bind(units=opening.num_units, block=block, rank=rank, world_size=world_size)
        self._cursor = Cursor(opening.source, block)
        self._cursor.start(counters.step + 1, opening.start.loader_state)
        self._attempt = 0
        self._was_skipped = False
        self._digest = ""
        self._outcome: bool | None = None
        self._batch = Batch(0, self._micros)
        self._turn = 0
        self._reduced: Reduced | None = None
        self._holds_units = False
        self._held: list[Unit] = []
        self.is_inside = False
        self.is_whole = True
        self.is_own = False
        self.told = [Flags()]

    @property
    def gradient_bytes(self) -> int:
        """Memory for gradients set aside."""
        return self._update.reduction.buffers_bytes

    @property
    def was_applied(self) -> bool:
        """Has the step begun last been applied?"""
        return bool(self._outcome)

    @property
    def was_refused(self) -> bool:
        """Has the step begun last been refused, so that its units come again?"""
        return self._outcome is False

    def has_data(self) -> bool:
        """False when the data have ended."""
        self._pulse.begin(self._counters.step + 1)
        self._pulse.mark(Phase.DATA, self._cursor.block.start)
        return self._cursor.has_step()

    def begin(self) -> Batch:
        """The next step's units, or once more those of a step that was refused."""
        self._enter()
        self._pulse.mark(Phase.UNIT, self._cursor.block.start)
        return self._batch

    def end(self) -> None:
        """The loop asks for the next batch. RuntimeError when it has not called run.step()."""
        if self.is_inside and self._outcome is None:
            raise RuntimeError("the loop asked for the next batch without run.step() or run.update(); one of them belongs to each batch")

    def give_up(self) -> None:
        """Return to the last boundary: buffers, gradients, extras, the rank's own streams, the place in the data."""
        self._streams.leave()
        if self.is_inside:
            self.is_inside, self._outcome = False, None
            self.is_whole = self.is_whole and not self._undo.changed()
            self._start_over()
            self._put_back()
            self._cursor.repeat(self._counters.step + 1)
        elif self._cursor.is_broken:
            self._cursor.repeat(self._counters.step + 1)

    def step(self, stop: bool, clip_grad_norm: float | None, now_s: Callable[[], float]) -> Applied | None:
        """Reduce and apply; None when a collective failed and all is as at the step's beginning. `now_s` is asked when it is done."""
        self._streams.leave()
        if self._outcome is not None:
            raise RuntimeError("run.step() was called twice for one batch")
        if self.is_own:
            raise RuntimeError("run.step() inside run.update(): call update.reduce() and your optimizers' step() there")
        check_clip(clip_grad_norm)
        self._require_all_units("run.step()")
        failpoint("step.reduce")
        try:
            reduced = self._update.reduce(self._keeping.flags(stop), lambda: self._pulse.mark(Phase.COLLECTIVE))
            action, reason = self._guard.judge(reduced)
        except ExchangeFailed as error:
            self._outcome = False
            with self._pulse.within(Phase.VERDICT):
                self._refuse(error)
            self._pulse.mark(Phase.BODY)
            return None
        if action == "rollback":
            self._outcome = False
            self._put_back()
            self._pulse.mark(Phase.BODY)
            return None
        self._pulse.mark(Phase.UPDATE)
        self.is_whole = False
        checks = {"check_norm": self._guard.checks_norm, "careful": self._guard.is_careful()}
        applied = self._update.apply(reduced, clip_grad_norm, skip=reason if action == "skip" else "", **checks)
        return self._done(applied, reduced, action, now_s)

    def pass_over(self, stop: bool, now_s: Callable[[], float]) -> bool:
        """Commit the coming step as skipped, without computing it, where a rule says so; its data are read, so that they are proven.

        Cost where it does: loading this rank's units, and one small gather.
        """
        step = self._counters.step + 1
        reason = self._guard.passes_over(step)
        if not reason:
            return False
        self._enter()
        position[0] = step
        units = []
        for number in self._cursor.block:
            unit = self._cursor.take(step, number)
            units.append(UnitFacts(unit.unit, unit_digest(unit.ids), unit.weight, "", "", samples=unit.weight))
        told = RankFacts(units=tuple(units), flags=self._keeping.flags(stop))
        try:
            facts = self._exchange.share(told, RankFacts)
        except ExchangeFailed as error:
            self._outcome = False
            self._refuse(error)
            return True
        self._outcome, self.is_inside = True, False
        self._commit(passed_over(facts, reason), Reduced(facts=facts, total_weight=0), now_s())
        self._guard.passed_over()
        failpoint("step.applied")
        return True

    def has_bad_norm(self) -> bool:
        """Was the clip norm of the step applied last, which nobody has looked at yet, not finite?"""
        return self._update.has_bad_norm()

    @property
    def was_skipped(self) -> bool:
        """Was the step committed last not applied, because of an anomaly?"""
        return self._was_skipped

    def mark(self) -> None:
        """A boundary: the loop's own random numbers are those of the next step from here on."""
        self._streams.mark()

    def close(self) -> None:
        """Leave the user's objects as they were found."""
        self._update.close()

    def _micros(self) -> Iterator[Micro]:
        step, turn = self._counters.step + 1, self._turn
        if turn:
            self._update.own("with a closure")
        for number in self._cursor.block:
            self._pulse.mark(Phase.DATA, number)
            unit = self._take(step, number)
            self._pulse.mark(Phase.UNIT, number)
            self._digest = digest = unit_digest(unit.ids)
            if unit.weight == 0:
                self._update.finish_unit(number, digest, 0, None)
                continue
            self._update.start_unit()
            self._streams.enter(step, number, turn)
            position[0] = step
            failpoint("step.forward")
            micro = Micro(unit, self._backward)
            yield micro
            self._streams.leave()
            if not micro.done and (self._is_ring or not micro.weight):
                self._update.finish_unit(number, digest, micro.weight, None, unit.weight)
            elif not micro.done:
                raise RuntimeError(
                    f"unit {number} of step {step} ended without micro.backward(loss): call it, not loss.backward(), once for each micro, "
                    "before the next one is taken"
                )

    def _take(self, step: int, number: int) -> Unit:
        """A unit of the step. From the second pass of a step on they are held for the next; the first time they are loaded again."""
        block = self._cursor.block
        if self._turn and number == block.start and len(self._held) != len(block):
            self._holds_units = True
            self._held.clear()
            self._cursor.repeat(step)
        if len(self._held) == len(block):
            return self._held[number - block.start]
        unit = self._cursor.take(step, number)
        if self._holds_units:
            self._held.append(unit)
        return unit

    def _backward(self, micro: Micro, loss: torch.Tensor | None) -> None:
        failpoint("step.backward")
        samples = len(micro.ids)
        if micro.weight and loss is not None:
            last_unit = micro.unit if micro.unit == self._cursor.block[-1] else None
            self._update.backward(loss, micro.weight, samples, last_unit=last_unit)
        elif micro.weight:
            self._update.take_over(micro.weight, samples)
        self._update.finish_unit(micro.unit, self._digest, micro.weight, loss, samples)

    def _enter(self) -> None:
        if self._outcome is not False:
            self._undo.mark()
            self._update.begin()
        self._outcome = None
        self.is_inside = True
        self._start_over()

    def _start_over(self) -> None:
        self.is_own, self._turn, self._reduced = False, 0, None
        self._held.clear()
        self._batch = Batch(self._counters.step + 1, self._micros)

    def _require_all_units(self, what: str) -> None:
        done, due = len(self._update.collected), len(self._cursor.block)
        if done != due or (self.is_own and not self._batch.begun):
            raise RuntimeError(f"{what} after {done} of {due} units: iterate over the whole batch")

    def _done(self, applied: Applied, reduced: Reduced, action: Action, now_s: Callable[[], float]) -> Applied:
        self._outcome, self.is_inside, self.is_own = True, False, False
        self._commit(applied, reduced, now_s())
        self.is_whole = True
        self._pulse.done()
        failpoint("step.applied")
        self._guard.committed(applied, action)
        return applied

    def _commit(self, applied: Applied, reduced: Reduced, now_s: float) -> None:
        self.told = [rank.flags for rank in reduced.facts]
        self._was_skipped = bool(applied.reason)
        self._count(applied)
        self._keeping.stepped(self._attempt, applied, now_s)
        self._attempt = 0

    def _count(self, applied: Applied) -> None:
        counters = self._counters
        counters.step += 1
        counters.samples += applied.num_samples
        counters.applied += applied.status == "applied"
        counters.skipped += applied.status == "skipped"

    def _refuse(self, error: ExchangeFailed) -> None:
        """A retry in place needs every member's word that it has applied nothing: a failed collective proves nothing about others."""
        step = self._counters.step + 1
        self._exchange.abandon()
        changed = self._undo.changed()
        if changed:
            raise StepLost(f"step {step} was refused ({error}) and extras {changed} have changed within it: only a snapshot has them whole")
        self._attempt = self._keeping.retry(step, self._attempt, error)
        self._put_back()
        self._exchange.connect(f"{self._keeping.generation}/{step}/{self._attempt}")
        self._cursor.repeat(step)

    def _put_back(self) -> None:
        self._update.undo()
        self._undo.back()
        self._streams.back()


def full_weight(data: Mapping[str, Any], num_units: int) -> int:
    """Samples of a full step, from the birth facts of the data; where only the loader knows, one per unit."""
    return int(data.get("global_batch") or num_units * int(data.get("batch_size") or 1))
