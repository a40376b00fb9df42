"""Entry point in the training process: the run, its loop, its steps and its snapshots.

    run = unbroken.Run("runs/gpt", model=model, optimizer=optimizer, data=unbroken.Batches(dataset, global_batch=64))
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()

The flow of a step: `__iter__` yields this rank's units -> `micro.backward` sets each unit's gradient aside -> `step` reduces and
applies, or undoes -> asking for the next batch is the boundary, where a snapshot may be frozen into memory for the daemon to store.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Unpack
from weakref import WeakValueDictionary

import torch

from unbroken.capture.cursor import Cursor
from unbroken.capture.exchange import ExchangeFailed
from unbroken.capture.loader import Source, as_source
from unbroken.capture.micro import Batch, Micro
from unbroken.capture.reduce import Word
from unbroken.capture.ring import RingUpdate
from unbroken.capture.stack import Parts, Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.capture.update import Applied, Update, scaled
from unbroken.chaos import arm_from_environment
from unbroken.cluster.exitcode import use_exit_codes
from unbroken.cluster.preempt import StopRequest
from unbroken.config import Options, RunConfig, resolve
from unbroken.core.errors import EnvironmentChanged, SaveWarning, StepLost
from unbroken.core.limits import DRAIN_TIMEOUT_S, EXIT_TIMEOUT_S
from unbroken.core.ports import Clock, SystemClock, failpoint, position
from unbroken.keeping import Keeping
from unbroken.opening import Opening, device_of, refuse_metric_schedulers, refuse_sync_batch_norm
from unbroken.order.ledger import unit_digest
from unbroken.order.units import blocks
from unbroken.store.tiers.disk import local_path

__all__ = ["EnvironmentChanged", "Run", "SaveWarning", "StepLost"]


_open_runs: WeakValueDictionary[str, Run] = WeakValueDictionary()


class Run:
    """A training run that continues where it was, whoever is killed. The same script under python, torchrun and `unbroken run`.

    directory: folder of the run, created if missing. model, optimizer, scheduler: one, a list or a dict of them; you wrap, move and
    compile them, Run never does. data: `Batches`, or a DataLoader. extras: anything else with state (EMA, generators, dicts).
    lose_at_most: how much work a failure may cost, "30s" or "100 steps". resume: "auto" starts fresh only where nothing is, "must"
    never does, "never" refuses a folder that holds a run. options: see `unbroken.config.Options`.

    Raises NoCheckpoint (exit 3), Refused and its kinds (exit 4), ValueError and TypeError with the remedy in the text.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: Any,
        optimizer: Any,
        data: Any,
        scheduler: Any = None,
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        lose_at_most: str = "60s",
        resume: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        self._clock: Clock = SystemClock()
        moments = {"process": self._clock.monotonic()}
        use_exit_codes()
        self._config: RunConfig = resolve(lose_at_most, resume, options)
        self._directory = os.path.abspath(local_path(directory))
        self.model = model
        parts = Parts(
            models=keyed_parts(model, "model"),
            optimizers=keyed_parts(optimizer, "optimizer"),
            schedulers=keyed_parts(scheduler, "scheduler"),
            scaler=scaler,
            extras=dict(extras or {}),
        )
        device = device_of(parts.models)
        refuse_sync_batch_norm(parts.models)
        refuse_metric_schedulers(parts.schedulers)
        self._source: Source = as_source(data, units=self._config.units)
        seed = self._config.seed if self._config.seed is not None else int(self._source.facts().get("seed") or 0)
        self._stop = StopRequest()
        self._streams = Streams(seed, device)
        self._stack = Stack(parts, self._streams)
        self._scaler, self._closed, self.loss = scaler, False, float("nan")
        self._opening = Opening(self._directory, self._config, self._stack, self._source, device, self._clock, moments)
        try:
            self._begin()
        except BaseException:  # raised again: whatever it was, the daemon and the other ranks must not wait for us
            self._let_go()
            raise

    # -- life ---------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        opening = self._opening
        plan, self._counters, facts = opening.open()
        self._exchange = opening.exchange
        self._keeping = Keeping(opening, plan, self._counters, facts, self._clock)
        self._stop.install()
        kind = RingUpdate if self._config.reduce == "ring" else Update
        self._update = kind(self._stack, opening.num_units, self._exchange)
        rank, world_size = self._exchange.rank, self._exchange.world_size
        block = blocks(opening.num_units, world_size)[rank]
        self._source.bind(units=opening.num_units, block=block, rank=rank, world_size=world_size)
        self._cursor = Cursor(self._source, block)
        self._cursor.start(self._counters.step + 1, opening.start.loader_state)
        arm_from_environment(rank, plan.generation, self._keeping.phase)
        position[:] = [self._counters.step + 1, plan.generation]
        self._attempt = 0
        self._outcome: bool | None = None
        self._inside = self._looping = self._torn = False
        self._words = [Word()]
        self._boundary_open = plan.source == "fresh"
        self._streams_at_start: dict[str, Any] | None = self._streams.read()
        opening.moments["align"] = self._clock.monotonic()
        opening.announce(plan, self._update.reduction.buffers_bytes, self._keeping.start())
        atexit.register(self._at_exit)
        earlier = _open_runs.get(self._directory)
        if earlier is not None:
            earlier._overtaken()
        _open_runs[self._directory] = self

    def close(self) -> None:
        """Commit the last boundary, wait until it is durable, let the daemon go. Warns where an automatic save had failed. Idempotent.

        Called while an error leaves the loop, it saves nothing of a step whose boundary was not reached: that state is not whole.
        """
        if self._boundary_open and sys.exc_info()[0] is not None:
            self._torn = True
        self._close(DRAIN_TIMEOUT_S)

    def _close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._streams.leave()
        try:
            if self._torn:
                text = f"step {self._counters.step + (not self._boundary_open)} was left half-way by an error: what it did is not saved"
                warnings.warn(text, SaveWarning, stacklevel=3)
            else:
                self._give_up_step()
            self._keeping.close(timeout_s, whole=not self._torn)
        finally:
            self._let_go()

    def _overtaken(self) -> None:
        """The same process has opened this folder again (a notebook's cell run twice): this object must not write any more."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            self._let_go()

    def _let_go(self) -> None:
        """Give back what a failed start or an ended run holds."""
        self._source.close()
        if hasattr(self, "_update"):
            self._update.close()
        self._opening.close()
        self._stop.remove()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _at_exit(self) -> None:
        """The script ended inside or after its loop without close(). With several ranks, who knows whether all did: wait, but not long."""
        if getattr(sys, "last_value", None) is None:
            self._exchange.abandon()
            self._close(DRAIN_TIMEOUT_S if self._exchange.world_size == 1 else EXIT_TIMEOUT_S)

    # -- the loop -----------------------------------------------------------------------------------------------------------

    @property
    def completed(self) -> int:
        """Steps applied so far, those before this start included."""
        return self._counters.step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batch of the next step until the data or `total_steps` end; asking for the next one is the step's boundary."""
        self._require_open()
        if self._streams_at_start is not None:
            # whatever the script drew or seeded since Run() was made (warm-up, sanity check) must not move the run
            self._streams.write(self._streams_at_start)
            self._streams_at_start = None
        self._give_up_step()  # the loop may have been left inside one
        self._looping = True
        try:
            self._boundary()
            while not self._at_end() and self._cursor.has_step():
                self._begin_attempt()
                yield Batch(self._counters.step + 1, self._micros)
                if self._inside and self._outcome is None:
                    raise RuntimeError("the loop asked for the next batch without run.step(); call it once per batch")
                if self._outcome:
                    self._boundary()
        finally:
            self._looping = False
        self.close()

    def _require_open(self) -> None:
        if self._closed:  # also true after the loop has ended by itself
            raise RuntimeError("this run is closed; make a new Run to go on")
        if self._torn:
            raise RuntimeError("an error left the optimizer step half done, so this state is not whole; make a new Run, which goes back")

    def _give_up_step(self) -> None:
        """Be again as at the last boundary: buffers, gradients, the rank's own streams, the place in the data."""
        if self._inside:
            self._inside, self._outcome = False, None
            self._update.undo()
            self._streams.back()
            self._cursor.repeat(self._counters.step + 1)

    def _begin_attempt(self) -> None:
        if self._outcome is not False:
            self._update.begin()
        self._outcome = None
        self._inside = True

    def _at_end(self) -> bool:
        ends = [n for n in (self._config.total_steps, self._source.num_steps()) if n is not None]
        return bool(ends) and self._counters.step >= min(ends)

    def _micros(self) -> Iterator[Micro]:
        step = self._counters.step + 1
        for number in self._cursor.block:
            unit = self._cursor.take(step, number)
            self._digest = digest = unit_digest(unit.ids)
            if unit.weight == 0:
                self._update.finish_unit(number, digest, 0, None)
                continue
            self._update.start_unit()
            self._streams.enter(step, number)
            position[0] = step
            failpoint("step.forward")
            micro = Micro(unit, self._backward)
            yield micro
            self._streams.leave()
            if not micro.done and self._config.reduce == "ring":
                self._update.finish_unit(number, digest, unit.weight, None)
            elif not micro.done:
                raise RuntimeError(f"unit {number} of step {step} ended without micro.backward(loss)")

    def _backward(self, micro: Micro, loss: torch.Tensor) -> None:
        failpoint("step.backward")
        scaled(self._scaler, loss).backward()  # type: ignore[no-untyped-call]
        self._update.finish_unit(micro.unit, self._digest, micro.weight, loss)

    def step(self, *, clip_grad_norm: float | None = None) -> bool:
        """Reduce the units' gradients and apply the update on all ranks, or on none.

        clip_grad_norm: largest 2-norm of the reduced gradient over all parameters. True: applied (or, after a loss-scale overflow,
        committed as skipped). False: a collective failed, everything is as at the step's beginning, the same units come again.
        Cost: two collectives of the gradient's size in all; see `capture.update`.
        """
        self._require_open()
        self._streams.leave()
        if self._outcome is not None:
            raise RuntimeError("run.step() was called twice for one batch")
        done, due = len(self._update.collected), len(self._cursor.block)
        if done != due:
            raise RuntimeError(f"run.step() after {done} of {due} units: iterate over the whole batch")
        failpoint("step.reduce")
        try:
            reduced = self._update.reduce(self._keeping.word(self._stop.requested))
        except ExchangeFailed as error:
            self._outcome = False
            self._refuse(error)
            return False
        self._torn = True  # until everything that belongs to the step is done
        applied = self._update.apply(reduced, clip_grad_norm)
        self._outcome = True
        self._inside = False
        self._words = [rank.word for rank in reduced.facts]
        self._count(applied)
        self._boundary_open, self._torn = True, False
        failpoint("step.applied")
        return True

    def _count(self, applied: Applied) -> None:
        counters = self._counters
        counters.step += 1
        counters.samples += applied.num_samples
        counters.applied += applied.status == "applied"
        counters.skipped += applied.status == "skipped"
        self.loss = applied.loss
        self._keeping.stepped(self._attempt, applied, self._clock.monotonic())
        self._attempt = 0

    def _refuse(self, error: ExchangeFailed) -> None:
        """A retry in place needs every member's word that it has applied nothing: a failed collective proves nothing about others."""
        step = self._counters.step + 1
        self._exchange.abandon()
        self._attempt = self._keeping.retry(step, self._attempt, error)
        self._update.undo()
        self._streams.back()
        self._exchange.connect(f"{self._keeping.generation}/{step}/{self._attempt}")
        self._cursor.repeat(step)

    # -- boundaries and snapshots -------------------------------------------------------------------------------------------

    def save(self, *, milestone: bool = False, wait: bool = False) -> None:
        """Take a snapshot of the step just applied; every rank must call it. A milestone is never pruned.

        In the loop it is taken at the boundary, so that what follows in the loop's body (an EMA update) belongs to it; elsewhere at once.
        wait: the boundary (or this call) returns only when it is durable, and raises SaveFailed with the cause if it is not.
        """
        self._require_open()
        if self._inside:
            raise RuntimeError("run.save() belongs after run.step() or outside the loop: inside a step there is no whole state to save")
        if self._looping:
            self._keeping.want(milestone, wait)
        else:
            self._keeping.save(milestone, wait)

    def _boundary(self) -> None:
        if self._boundary_open:
            self._boundary_open = False
            if self._keeping.boundary(self._words, last=self._at_end()):
                self._keeping.stopped(self._stop.name)
                self.close()
                sys.exit(0)
        self._streams.mark()
