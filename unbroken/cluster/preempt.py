"""A request to stop, from scheduler or launcher: the trainer finishes its step, commits and exits 0.

Where nothing is to be finished the signal does what it would do without us: before the first batch of the first loop, unless the script
has a handler of its own, the process ends by it. An evaluation may go on for a while; then the process ends inside it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from unbroken.core.ports import Clock, environment, stop_signals

EVALUATION_S = 2.0
"""What an evaluation gets to end by itself when it costs no more than the step that it belongs to."""

LONG_EVALUATION_S = 12.0
"""What it gets when older steps would be lost with it: half of what schedulers leave (Slurm and Kubernetes: 30 s)."""


POLL_S = 0.05
"""Between looks at an evaluation once a request has come; before that nobody looks."""

FLUSH_S = 0.5
"""For what the script has printed; the main thread may hold its lock for ever."""


class StopRequest:
    """Set by SIGTERM, SIGUSR1 and what the launcher names besides; the user's own handlers are called, too.

    Outside the main thread nothing is installed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.requested = False
        self.name = ""
        self._at_s = 0.0
        self._is_underway = False
        self._listening = False
        self._is_passing_on = False
        self._previous: dict[int, Any] = {}
        self._later: dict[int, Any] = {}
        self._evaluation: tuple[float, Callable[[], int]] | None = None
        self._wake = -1

    def install(self) -> None:
        """Listen from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._listening = True
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._arrive)
        self._ask_launcher()

    def underway(self) -> None:
        """The first batch is asked for: there is something to finish now. Handlers set since `install` are called by ours."""
        self._is_underway = True
        self._ask_launcher()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._previous:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), StopRequest):
                self._later[number] = signal.signal(number, self._arrive)

    def _ask_launcher(self) -> None:
        """It may have been signalled, and what it passed on was heard by a handler of the script's that stood in place of ours."""
        if not self.requested and os.path.exists(environment("UNBROKEN_STOP_FILE")):
            self._note(signal.SIGTERM)

    def obeyed(self) -> None:
        """All is committed and the process ends with 0: a second signal must not change that, not even while the interpreter ends."""
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
            self._previous.clear()

    def remove(self) -> None:
        """Give the signals back to whoever had them. If a later handler wraps ours, stay in the chain and forward to the earlier one."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._listening = False
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        for number, previous in list(self._previous.items()):
            if signal.getsignal(number) == self._arrive and previous is not None:
                later = self._later.pop(number, None)
                signal.signal(number, previous if later is None else later)
                if later is None:
                    del self._previous[number]

    @contextlib.contextmanager
    def evaluating(self, unsaved: Callable[[], int]) -> Iterator[None]:
        """An evaluation, which a request must not wait for without end. `unsaved`: steps that no snapshot holds. Cost: 5 us."""
        if self._listening and self._wake < 0:
            reading, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            threading.Thread(target=self._watch, args=(reading,), name="unbroken-stop", daemon=True).start()
        outer, self._evaluation = self._evaluation, (self._clock.monotonic(), unsaved)
        try:
            yield
        finally:
            self._evaluation = outer

    def _watch(self, reading: int) -> None:
        """A thread of its own, because the main thread may sit in a library for longer than there is time."""
        while self._listening:
            select.select([reading], [], [], POLL_S if self.requested else None)
            with contextlib.suppress(BlockingIOError):
                if not os.read(reading, 64):
                    break
            evaluation = self._evaluation
            if self.requested and evaluation is not None:
                began_s, unsaved = evaluation
                if self._clock.monotonic() >= max(began_s, self._at_s) + evaluation_s(unsaved()):
                    self._end_inside(unsaved())
        os.close(reading)

    def _end_inside(self, num_unsaved: int) -> None:
        """Nothing is saved here, because the state is not a boundary's: the daemon holds what was saved before."""
        waited_s = self._clock.monotonic() - self._at_s
        came = f"{self.name} came {waited_s:.1f} s ago and the evaluation is not over"
        text = f"unbroken: {came}: ends inside it, steps to be done again: {num_unsaved}\n"
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(128 + signal.Signals[self.name])

    def _note(self, sig: signal.Signals) -> None:
        self._at_s = self._clock.monotonic()
        self.name = sig.name
        self.requested = True
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.write(self._wake, b"!")

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._listening and not self.requested:
            self._note(signal.Signals(number))
        later, previous = self._later.get(number), self._previous.get(number)
        if later is not None and not self._is_passing_on:
            self._is_passing_on = True  # it may call us again, as the handler that it has found
            try:
                later(number, frame)
            finally:
                self._is_passing_on = False
        elif callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL and signal.getsignal(number) == self._arrive and not (self._listening and self._is_underway):
            signal.signal(number, previous)  # nothing to finish, or whoever came after us has gone too: what it would do without us
            signal.raise_signal(number)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all: nothing can be said there any more
        sys.stdout.flush()


def evaluation_s(num_unsaved: int) -> float:
    """How long after a request an evaluation may go on. Ending inside it costs the step it belongs to and all that no snapshot holds."""
    return EVALUATION_S if num_unsaved <= 1 else LONG_EVALUATION_S
