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
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Unpack
from weakref import WeakValueDictionary

import torch

from unbroken.capture.stack import Parts, Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.chaos import arm_from_environment
from unbroken.cluster.exitcode import use_exit_codes
from unbroken.cluster.preempt import StopRequest
from unbroken.config import Options, RunConfig, resolve
from unbroken.core.errors import EnvironmentChanged, SaveWarning, StepLost, UnbrokenError
from unbroken.core.limits import DRAIN_TIMEOUT_S, EXIT_TIMEOUT_S
from unbroken.core.ports import Clock, SystemClock, position
from unbroken.data.loader import Source, as_source
from unbroken.keeping import Keeping
from unbroken.opening import Opening, device_of, refuse_metric_schedulers, refuse_sync_batch_norm
from unbroken.step.micro import Batch
from unbroken.stepping import Stepping
from unbroken.store.tiers.disk import local_path
from unbroken.updating import OwnUpdate

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
            extras=_extras(extras),
        )
        device = device_of(parts.models)
        refuse_sync_batch_norm(parts.models)
        refuse_metric_schedulers(parts.schedulers)
        self._source: Source = as_source(data, units=self._config.units)
        seed = self._config.seed if self._config.seed is not None else int(self._source.facts().get("seed") or 0)
        self._stop = StopRequest()
        self._streams = Streams(seed, device)
        self._stack = Stack(parts, self._streams)
        self._owner = os.getpid()
        self.loss = float("nan")
        self._closed = self._is_overtaken = False
        self._opening = Opening(self._directory, self._config, self._stack, self._source, device, self._clock, moments)
        try:
            self._begin()
        except UnbrokenError as error:
            self._let_go()
            raise error.with_traceback(None) from None  # the text says it all; our frames would only hide it
        except BaseException:  # raised again: whatever it was, the daemon and the other ranks must not wait for us
            self._let_go()
            raise

    # -- life ---------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        opening = self._opening
        plan, self._counters = opening.open()
        self._exchange = opening.exchange
        self._keeping = Keeping(opening, plan, self._counters, self._clock)
        self._stop.install()
        self._stepping = Stepping(opening, self._counters, self._keeping)
        rank = self._exchange.rank
        arm_from_environment(rank, plan.generation, self._keeping.phase)
        position[:] = [self._counters.step + 1, plan.generation]
        self._looping = False
        self._boundary_open = plan.source == "fresh"
        self._streams_at_start: dict[str, Any] | None = self._streams.read()
        self._versions: Any = self._stack.versions()
        opening.moments["align"] = self._clock.monotonic()
        opening.announce(plan, self._stepping.gradient_bytes, self._keeping.start())
        atexit.register(self._at_exit)
        place = os.path.realpath(self._directory)
        earlier = _open_runs.get(place)
        if earlier is not None:
            earlier._overtaken()
        _open_runs[place] = self

    def close(self) -> None:
        """Commit the last boundary, wait until it is durable, let the daemon go. Warns where an automatic save had failed. Idempotent.

        Called while an error leaves the loop, it saves nothing of a step whose boundary was not reached: that state is not whole.
        """
        self._close(DRAIN_TIMEOUT_S, whole=not (self._boundary_open and self._counters.step and sys.exc_info()[0] is not None))

    def _close(self, timeout_s: float, *, whole: bool = True) -> None:
        if self._closed or os.getpid() != self._owner:  # a forked child has a copy of this object, not the run
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._stepping.give_up()
            whole = whole and self._stepping.is_whole
            if not whole:
                step = self._counters.step + (not self._boundary_open)
                warnings.warn(f"step {step} was left half-way by an error: what it did is not saved", SaveWarning, stacklevel=3)
            self._keeping.close(timeout_s, whole=whole)
        finally:
            self._let_go()

    def _overtaken(self) -> None:
        """The same process has opened this folder again (a notebook's cell run twice): this object must not write any more."""
        if not self._closed:
            self._closed = self._is_overtaken = True
            atexit.unregister(self._at_exit)
            self._let_go()

    def _let_go(self) -> None:
        """Give back what a failed start or an ended run holds."""
        self._source.close()
        if hasattr(self, "_stepping"):
            self._stepping.close()
        self._opening.close()
        self._stop.remove()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _at_exit(self) -> None:
        """The script ended inside or after its loop without close(). With several ranks, who knows whether all did: wait, but not long."""
        if getattr(sys, "last_value", None) is None and os.getpid() == self._owner:
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
        self._stepping.give_up()  # the loop may have been left inside one
        self._require_open()
        self._require_unchanged()
        self._looping = True
        try:
            self._boundary()
            if self._at_end() and self._exchange.rank == 0:
                print(f"unbroken: {self._directory}: nothing to do, all {self._counters.step} steps are done")
            while not self._at_end() and self._stepping.has_data():
                yield self._stepping.begin()
                self._stepping.end()
                if self._stepping.was_applied:
                    self._boundary()
        finally:
            self._looping = False
        self.close()

    def _require_open(self) -> None:
        if self._is_overtaken:
            raise RuntimeError(f"another Run in this process has opened {self._directory} since, and this one gave way to it: use that one")
        if self._closed:  # also true after the loop has ended by itself
            raise RuntimeError("this run is closed; make a new Run to go on")
        if not (self._stepping.is_whole or self._stepping.is_own):
            raise RuntimeError("a step was left half-way by an error, so this state is not whole; make a new Run, which goes back")

    def _require_unchanged(self) -> None:
        """RuntimeError where parameters were written between Run() and the loop: at a resume that would undo what was restored."""
        versions, self._versions = self._versions, None
        if versions is not None and versions != self._stack.versions():
            changed = self._opening.changed_parameters()
            if changed:
                raise RuntimeError(
                    f"{len(changed)} parameters changed between Run(...) and the loop, first {changed[0]!r}: load or draw weights "
                    "before Run(...), else a resumed run would lose what it has learned"
                )

    def _at_end(self) -> bool:
        ends = [n for n in (self._config.total_steps, self._source.num_steps()) if n is not None]
        return bool(ends) and self._counters.step >= min(ends)

    def step(self, *, clip_grad_norm: float | None = None) -> bool:
        """Reduce the units' gradients and apply the update on all ranks, or on none.

        clip_grad_norm: largest 2-norm of the reduced gradient over all parameters. True: applied (or, after a loss-scale overflow,
        committed as skipped). False: a collective failed, everything is as at the step's beginning, the same units come again.
        Cost: two collectives of the gradient's size in all; see `step.update`.
        """
        self._require_open()
        applied = self._stepping.step(self._stop.requested, clip_grad_norm, self._clock.monotonic)
        if applied is None:
            return False
        self.loss = applied.loss
        self._boundary_open = True
        return True

    @contextmanager
    def update(self) -> Iterator[OwnUpdate]:
        """In place of `step`, for optimizers that the loop steps itself, at other times or several times: see `unbroken.updating`.

        The block is one update: applied when it ends, lost (back to a snapshot) when it is left by an error. In it you unscale, clip and
        call the `step` of optimizers, schedulers and scaler; `loss` is afterwards that of the last pass.
        """
        self._require_open()
        with self._stepping.giving_up():
            yield OwnUpdate(self._stepping, lambda: self._stop.requested)
        self.loss = self._stepping.close_update(self._clock.monotonic).loss
        self._boundary_open = True

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Evaluate without a trace: modules in evaluation mode, no gradients; then modes and random numbers are what they were.

        Anywhere in the loop's body or outside the loop, on all ranks or on some. What you swap in (an average's weights) you swap back.
        Cost: 90 us, and 3 us per module.
        """
        self._require_open()
        with self._streams.aside(), self._stack.evaluating(), torch.no_grad():
            yield

    # -- boundaries and snapshots -------------------------------------------------------------------------------------------

    def save(self, *, milestone: bool = False, wait: bool = False) -> None:
        """Take a snapshot of the step just applied; every rank must call it. A milestone is never pruned.

        In the loop it is taken at the boundary, so that what follows in the loop's body (an EMA update) belongs to it; elsewhere at once.
        wait: the boundary (or this call) returns only when it is durable, and raises SaveFailed with the cause if it is not.
        """
        self._require_open()
        if self._stepping.is_inside:
            raise RuntimeError("run.save() belongs after run.step() or outside the loop: inside a step there is no whole state to save")
        if self._looping:
            self._keeping.want(milestone, wait)
        else:
            self._keeping.save(milestone, wait)

    def _boundary(self) -> None:
        if self._boundary_open:
            self._boundary_open = False
            if self._keeping.boundary(self._stepping.told, last=self._at_end()):
                self._keeping.stopped(self._stop.name)
                self.close()
                sys.exit(0)
        self._stepping.mark()


def _extras(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's own dict, so that plain values in it are saved as they are then, and put back where the script reads them."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"extras= got a {type(given).__name__}: pass a dict of names and objects, such as extras={{'ema': ema}}")
    return given if isinstance(given, dict) else dict(given or {})
