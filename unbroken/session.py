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

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import torch

from unbroken.capture.stack import Parts, keyed_parts
from unbroken.cluster.exitcode import use_exit_codes
from unbroken.config import Options, configure
from unbroken.core.errors import EnvironmentChanged, SaveWarning, StepLost
from unbroken.core.ports import SystemClock
from unbroken.life import Life
from unbroken.shm.pulse import Phase
from unbroken.step.micro import Batch
from unbroken.store.tiers.disk import local_path
from unbroken.updating import OwnUpdate

__all__ = ["EnvironmentChanged", "Run", "SaveWarning", "StepLost"]


class Run(Life):
    """A training run that continues where it was, whoever is killed. The same script under python, torchrun and `unbroken run`.

    directory: folder of the run, created if missing. model, optimizer, scheduler: one, a list or a dict of them; you wrap, move and
    compile them, Run never does. data: `Batches`, or a DataLoader. extras: anything else with state (EMA, generators, dicts).
    lose_at_most: how much work a failure may cost, "30s" or "100 steps" (default "60s"). resume: "auto" (default) starts fresh only
    where nothing is, "must" never does, "never" refuses a folder that holds a run. options: see `unbroken.config.Options`. What is not
    given here comes from UNBROKEN_* variables or unbroken.toml, see docs/configuration.md.

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
        lose_at_most: str | None = None,
        resume: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        moments = {"process": SystemClock().monotonic()}
        use_exit_codes()
        self.model = model
        parts = Parts(
            models=keyed_parts(model, "model"),
            optimizers=keyed_parts(optimizer, "optimizer"),
            schedulers=keyed_parts(scheduler, "scheduler"),
            scaler=scaler,
            extras=_extras(extras),
        )
        self.loss = float("nan")
        super().__init__(os.path.abspath(local_path(directory)), configure(lose_at_most, resume, options), parts, data, moments)

    def __repr__(self) -> str:
        counters = getattr(self, "_counters", None)
        done = "not started" if counters is None else f"{counters.step} steps done, loss {self.loss:.6g}"
        state = "gave way to a newer Run" if self._is_overtaken else "closed" if self._closed else "open"
        return f"<unbroken.Run {self._directory!r}: {done}, {state}>"

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
        with self._interrupt.waiting():
            self._stepping.give_up()  # the loop may have been left inside one
        self._require_open()
        self._require_unchanged()
        self._looping = True
        self._stop.underway()
        self._loop = sys._getframe(1).f_code
        try:
            self._boundary()
            if any(self._exchange.share(self._stop.requested, bool)):
                self._obey()
            if self._at_end() and self._exchange.rank == 0:
                print(f"unbroken: {self._directory}: nothing to do, all {self._counters.step} steps are done")
            while self._goes_on():
                if self._stepping.pass_over(self._stop.requested, self._clock.monotonic):
                    self._boundary_open = self._stepping.was_applied
                else:
                    yield self._stepping.begin()
                    self._stepping.end()
                if self._stepping.was_applied:
                    self._boundary()
                self._interrupt.release()
        except Exception as error:  # raised again: the others must not wait for this rank, nor go on without it
            self._opening.leave(error)
            raise
        finally:
            self._looping = False
            self._pulse.mark(Phase.OUTSIDE)
            self._interrupt.hold()
            if hasattr(sys, "ps1") and not self._closed and os.getpid() == self._owner:
                self._leave_loop()
            self._interrupt.let_go()
        self.close()
        if self._config.replay is not None and self._counters.step >= self._config.replay.step:
            sys.exit(0)  # what the script does after its loop is for the end of the run

    def _goes_on(self) -> bool:
        """Is there another step? Where the state has become non-finite, the run goes back first."""
        if self._guard.must_go_back:
            self._go_back()
        return not self._at_end() and self._stepping.has_data()

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
        committed as skipped). False: a collective failed, everything is as at the step's beginning, the same units come again; or the
        run goes back (`Anomalies`), and earlier ones come.
        Cost: two collectives of the gradient's size in all; see `step.update`.
        """
        self._require_open()
        with self._interrupt.waiting(after_success=True):  # until the boundary
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
        with self._stepping.update(lambda: self._stop.requested) as update:
            yield update
        with self._interrupt.waiting(after_success=True):  # until the boundary
            self.loss = self._stepping.close_update(self._clock.monotonic).loss
        self._boundary_open = True

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Evaluate without a trace: modules in evaluation mode, no gradients; then modes and random numbers are what they were.

        Anywhere in the loop's body or outside the loop, on all ranks or on some. What you swap in (an average's weights) you swap back.
        Asked to stop, it has 2 s to end (12 s where that saves more than a step), then the process ends inside it: see docs/guarantees.md.
        Cost: 90 us, and 3 us per module.
        """
        self._require_open()
        obeying, began_s = self._stop.evaluating(lambda: self._keeping.num_unsaved), self._clock.monotonic()
        with obeying, self._pulse.within(Phase.EVAL), self._streams.aside(), self._stack.evaluating(), torch.no_grad():
            yield
        self._keeping.evaluations.took(self._clock.monotonic() - began_s, self._counters.step - self._boundary_open)

    def log(self, **metrics: Any) -> None:
        """Log metrics of the step just completed: after `run.step`, until the next batch is asked for; several calls merge.

        metrics: numbers, 0-dim tensors, bools, short texts. All ranks may call it, rank 0's values count. Sinks show them once the step
        is committed, see `log_to`. Of a step that was refused nothing is kept: it comes again. TypeError names what is no metric.
        Cost: 2 us per value, and one more message to the daemon per step; no device synchronisation.
        """
        self._require_open()
        if self._stepping.was_refused:
            return
        if self._stepping.is_inside or not self._boundary_open or not self._counters.step:
            raise RuntimeError("run.log() belongs after run.step(), before the next batch: metrics are those of the step just completed")
        self._keeping.log(metrics)

    def once(self, key: str) -> bool:
        """True for the first call with this key in the whole run, on rank 0; False on other ranks, and for what was done before.

        It becomes durable with the next snapshot: after a kill before that it is True once more (at least once; exactly once where
        the effect and the commit both survive). Ranks other than 0 may leave the call out. Cost: none.
        """
        self._require_open()
        return self._opening.once(key)

    # -- boundaries and snapshots -------------------------------------------------------------------------------------------

    def save(self, *, milestone: bool = False, wait: bool = False) -> None:
        """Take a snapshot of the step just applied; every rank must call it. A milestone is never pruned.

        In the loop it is taken at the boundary, so that what follows in the loop's body (an EMA update) belongs to it; elsewhere at once.
        wait: the boundary (or this call) returns only when it is durable, and raises SaveFailed with the cause if it is not.
        """
        self._require_open()
        milestone = milestone and self._config.replay is None  # of steps made again the last one alone is kept
        if self._stepping.is_inside:
            raise RuntimeError("run.save() belongs after run.step() or outside the loop: inside a step there is no whole state to save")
        if self._looping:
            self._keeping.want(milestone, wait)
        else:
            with self._pulse.within(Phase.SAVE):
                self._keeping.save(milestone, wait)

    def _boundary(self) -> None:
        if self._boundary_open:
            self._boundary_open, last = False, self._at_end()
            if self._guard.finds_poison(asked=last or self._keeping.must_wait, bad_norm=self._stepping.has_bad_norm()):
                return
            with self._pulse.within(Phase.SAVE):
                stop = self._keeping.boundary(self._stepping.told, last=last, put_off=self._stepping.was_skipped)
            if stop:
                self._obey()
        self._stepping.mark()

    def _obey(self) -> None:
        """A rank was asked to stop, and this is a boundary: commit it and end."""
        self._keeping.note("stopped", step=self._counters.step, signal=self._stop.name)
        self._stop.obeyed()
        self.close()
        news = self._opening.link.committed
        if self._exchange.rank == 0 and news is not None and news.step == self._counters.step:
            print(f"unbroken: {self._directory}: asked to stop; step {self._counters.step} is committed, start again to go on")
        sys.exit(0)


def _extras(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's own dict, so that plain values in it are saved as they are then, and put back where the script reads them."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"extras= got a {type(given).__name__}: pass a dict of names and objects, such as extras={{'ema': ema}}")
    return given if isinstance(given, dict) else dict(given or {})
