"""A request to stop, from scheduler or launcher: the trainer finishes its step, commits and exits 0."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Set by SIGTERM or SIGUSR1. The user's own handlers are called too. Outside the main thread nothing is installed."""

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._listening = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Listen from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._listening = True
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._arrive)

    def remove(self) -> None:
        """Give the signals back to whoever had them. If a later handler wraps ours, stay in the chain and forward to the earlier one."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._listening = False
        for number, previous in list(self._previous.items()):
            if signal.getsignal(number) == self._arrive and previous is not None:
                signal.signal(number, previous)
                del self._previous[number]

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._listening:
            self.requested = True
            self.name = signal.Signals(number).name
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL and not self._listening and signal.getsignal(number) == self._arrive:
            signal.signal(number, previous)  # whoever came after us has gone too: the signal does what it would without us
            signal.raise_signal(number)
