"""The stepping half of a run: units in, one update out, applied by all ranks or by none; and back to the last boundary when it is given up.

Everything between two boundaries lives here, everything at a boundary in `keeping`. A step is `whole` again once it has been applied or
undone; while the optimizers run it is neither, and nothing of it may be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from unbroken.core.errors import StepLost
from unbroken.core.limits import MAX_ATTEMPTS
from unbroken.core.ports import failpoint, position
from unbroken.data.cursor import Cursor
from unbroken.data.source import Unit
from unbroken.keeping import Keeping
from unbroken.opening import Opening
from unbroken.order.ledger import unit_digest
from unbroken.order.units import blocks
from unbroken.recover.start import Counters
from unbroken.step.exchange import ExchangeFailed
from unbroken.step.micro import Batch, Micro
from unbroken.step.reduce import Flags, Reduced
from unbroken.step.ring import RingUpdate
from unbroken.step.undo import Undo
from unbroken.step.update import Applied, Update, check_clip


class Stepping:
    """One step at a time, on this rank. All ranks call the same things in the same order."""

    def __init__(self, opening: Opening, counters: Counters, keeping: Keeping) -> None:
        self._counters = counters
        self._keeping = keeping
        self._stack, self._streams = opening.stack, opening.stack.streams
        self._exchange = opening.exchange
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

    def has_data(self) -> bool:
        """False when the data have ended."""
        return self._cursor.has_step()

    def begin(self) -> Batch:
        """The next step's units, or once more those of a step that was refused."""
        if self._outcome is not False:
            self._undo.mark()
            self._update.begin()
        self._outcome = None
        self.is_inside = True
        self._start_over()
        return self._batch

    def _start_over(self) -> None:
        self.is_own, self._turn, self._reduced = False, 0, None
        self._held.clear()
        self._batch = Batch(self._counters.step + 1, self._micros)

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
            reduced = self._update.reduce(self._keeping.flags(stop))
        except ExchangeFailed as error:
            self._outcome = False
            self._refuse(error)
            return None
        self.is_whole = False
        return self._applied(self._update.apply(reduced, clip_grad_norm), reduced, now_s)

    def open_update(self) -> None:
        """The loop will reduce and apply by itself. RuntimeError outside a batch, or twice for one."""
        self._streams.leave()
        if not self.is_inside or self._outcome is not None or self.is_own:
            raise RuntimeError("run.update() belongs into the loop over the run, once per batch, in place of run.step()")
        self.is_own = True
        self._update.own("with a closure")

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """An error that leaves this block ends the loop's own update half-way."""
        try:
            yield
        except BaseException:  # raised again: only ends what it has interrupted
            self.is_own = False
            raise

    @property
    def has_begun(self) -> bool:
        """Has the batch been iterated since the last reduction? The same on ranks that hold no unit."""
        return self._batch.begun

    def reduce(self, stop: bool) -> float:
        """Reduce one pass over the batch into `.grad`; the mean loss. StepLost where a collective has failed for good.

        What a refused collective was to add is still there, so all ranks try again with it, as long as all are at this very one.
        """
        self._streams.leave()
        if not self.is_own:
            raise RuntimeError("update.reduce() belongs into its block: with run.update() as update")
        self._require_all_units("update.reduce()")
        failpoint("step.reduce")
        step, attempt, reduced = self._counters.step + 1, self._turn * MAX_ATTEMPTS, None
        while reduced is None:
            try:
                reduced = self._update.reduce(self._keeping.flags(stop))
            except ExchangeFailed as error:
                self._exchange.abandon()
                attempt = self._keeping.retry(step, attempt, error)
                self._exchange.connect(f"{self._keeping.generation}/{step}/{attempt}")
                self._attempt += 1
        self.is_whole = False
        self._update.deliver(reduced)
        self._update.begin_pass()
        self._update.own("yes")
        self._reduced = reduced
        self._turn += 1
        self._batch.begun = False
        failpoint("step.optimizer")
        loss = self._update.loss_of(reduced)
        return float("nan") if loss is None else loss

    def close_update(self, now_s: Callable[[], float]) -> Applied:
        """The loop has applied its update. RuntimeError where gradients were never reduced."""
        self._streams.leave()
        if self._reduced is None or self._batch.begun:
            raise RuntimeError("run.update() ended without update.reduce() after the last pass over the batch: its gradients are lost")
        return self._applied(self._update.finish(self._reduced), self._reduced, now_s)

    def _require_all_units(self, what: str) -> None:
        done, due = len(self._update.collected), len(self._cursor.block)
        if done != due or (self.is_own and not self._batch.begun):
            raise RuntimeError(f"{what} after {done} of {due} units: iterate over the whole batch")

    def _applied(self, applied: Applied, reduced: Reduced, now_s: Callable[[], float]) -> Applied:
        self._outcome, self.is_inside, self.is_own = True, False, False
        self.told = [rank.flags for rank in reduced.facts]
        self._count(applied)
        self._keeping.stepped(self._attempt, applied, now_s())
        self._attempt = 0
        self.is_whole = True
        failpoint("step.applied")
        return applied

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
            unit = self._take(step, number)
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
            self._update.backward(loss, micro.weight, samples)
        elif micro.weight:
            self._update.take_over(micro.weight, samples)
        self._update.finish_unit(micro.unit, self._digest, micro.weight, loss, samples)

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
