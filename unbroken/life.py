"""The life of a run in a training process: from opening its folder to letting go of it, with all that can come between.

A run ends by `close`, at the end of the process, by an error, because it was asked to stop, or because the same process has opened the
folder again (a notebook's cell run twice). It may also begin anew in mid-life, from an earlier step (`_go_back`).
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from types import CodeType, TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from unbroken.capture.stack import Parts, Stack
from unbroken.capture.streams import Streams
from unbroken.chaos import arm_from_environment
from unbroken.cluster.interrupt import Interrupt, left_by_error
from unbroken.cluster.preempt import StopRequest
from unbroken.config import RunConfig
from unbroken.core.errors import SaveWarning, UnbrokenError
from unbroken.core.limits import DRAIN_TIMEOUT_S, EXIT_TIMEOUT_S
from unbroken.core.messages import Plan
from unbroken.core.ports import Clock, SystemClock, position
from unbroken.data.loader import Source, as_source
from unbroken.guarding import Guard
from unbroken.keeping import Keeping
from unbroken.opening import Opening, device_of, refuse_metric_schedulers, refuse_sync_batch_norm
from unbroken.recover.start import Counters
from unbroken.updating import Updating

_open_runs: WeakValueDictionary[str, Life] = WeakValueDictionary()


class Life:
    """What `Run` is made of besides its loop. `_boundary_open`: a step was applied whose boundary has not been reached."""

    def __init__(self, directory: str, config: RunConfig, parts: Parts, data: Any, moments: dict[str, float]) -> None:
        self._clock: Clock = SystemClock()
        self._directory, self._config = directory, config
        device = device_of(parts.models)
        refuse_sync_batch_norm(parts.models)
        refuse_metric_schedulers(parts.schedulers)
        self._source: Source = as_source(data, units=config.units)
        seed = config.seed if config.seed is not None else int(self._source.facts().get("seed") or 0)
        self._stop, self._interrupt = StopRequest(self._clock), Interrupt()
        self._streams = Streams(seed, device)
        self._stack = Stack(parts, self._streams)
        self._owner = os.getpid()
        self._closed = self._is_overtaken = False
        self._opening = Opening(directory, config, self._stack, self._source, device, self._clock, moments)
        try:
            self._begin()
        except UnbrokenError as error:
            self._let_go()
            raise error.with_traceback(None) from None  # the text says it all; our frames would only hide it
        except BaseException:  # raised again: whatever it was, the daemon and the other ranks must not wait for us
            self._let_go()
            raise

    def _begin(self) -> None:
        opening, place = self._opening, f"{os.path.realpath(self._directory)}@{self._config.lineage}"
        earlier = _open_runs.get(place)
        if earlier is not None:
            earlier._hand_over()
        plan, counters = opening.open()
        self._exchange = opening.exchange
        self._stop.install()
        self._looping, self._pulse = False, opening.watching.pulse
        self._loop: CodeType | None = None
        self._versions_left: Any = None
        self._guard = Guard(self._config.anomalies)
        self._enter(plan, counters)
        self._streams_at_start: dict[str, Any] | None = self._streams.read()
        self._versions: Any = self._stack.versions()
        atexit.register(self._at_exit)
        if earlier is not None:
            earlier._overtaken()
        _open_runs[place] = self

    def _enter(self, plan: Plan, counters: Counters) -> None:
        """The live objects hold what the plan says: go on from there, in its generation."""
        opening, self._counters = self._opening, counters
        self._keeping = Keeping(opening, plan, counters, self._clock)
        self._guard.enter(opening, counters, self._keeping)
        self._stepping = Updating(opening, counters, self._keeping, self._guard)
        arm_from_environment(self._exchange.rank, plan.generation, opening.phase)
        position[:] = [counters.step + 1, plan.generation]
        self._boundary_open = plan.source == "fresh"
        opening.moments["align"] = self._clock.monotonic()
        opening.announce(plan, self._stepping.gradient_bytes, opening.expected_slot_bytes(counters))  # before memory is taken: it may fail
        self._keeping.start()

    def _go_back(self) -> None:
        """The state has become non-finite, or a rule says so: all ranks go on from an earlier one."""
        self._stepping.is_whole = False
        plan, counters = self._guard.go_back()
        self._stepping.close()
        self._keeping.leave()
        self._enter(plan, counters)
        self._stepping.mark()

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
            if self._guard.gave_up:  # GaveUp has said what is kept
                whole = False
            elif not whole:
                step = self._counters.step + (not self._boundary_open)
                warnings.warn(f"step {step} was left half-way by an error: what it did is not saved", SaveWarning, stacklevel=3)
            self._keeping.close(timeout_s, whole=whole)
        finally:
            self._let_go()

    def _leave_loop(self) -> None:
        """A person has left the loop (error, interrupt, break): what is whole goes into memory, as nobody knows what comes next."""
        self._stepping.give_up()
        if self._stepping.is_whole and not self._boundary_open:
            self._keeping.hand_over()
        self._versions_left = self._stack.versions()

    def _hand_over(self) -> None:
        """This process is about to open the folder again. A step whose boundary a `break` let not come counts, if nothing was touched."""
        is_left_whole = self._boundary_open and not self._looping and self._stepping.is_whole and not left_by_error(self._loop)
        if not self._closed and is_left_whole and self._versions_left == self._stack.versions():
            self._keeping.hand_over()

    def _overtaken(self) -> None:
        """The same process has opened this folder again (a notebook's cell run twice): this object must not write any more."""
        if not self._closed:
            self._closed = self._is_overtaken = True
            atexit.unregister(self._at_exit)
            self._keeping.reporting.end(complete=False)  # ours must not meet those of who goes on from here
            self._let_go()

    def _let_go(self) -> None:
        """Give back what a failed start or an ended run holds."""
        self._source.close()
        if hasattr(self, "_stepping"):
            self._stepping.close()
        self._opening.close()
        self._stop.remove()
        self._interrupt.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _at_exit(self) -> None:
        """The script ended inside or after its loop without close(). With several ranks, who knows whether all did: wait, but not long."""
        if os.getpid() != self._owner:
            return
        if error := getattr(sys, "last_value", None):
            self._opening.leave(error)
        else:
            self._exchange.abandon()
            self._close(DRAIN_TIMEOUT_S if self._exchange.world_size == 1 else EXIT_TIMEOUT_S)
