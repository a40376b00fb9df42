"""Signals that ask the launcher to end, as something that can be waited for beside process descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def named(names: str) -> set[signal.Signals]:
    """Signals from a comma-separated list of names; ValueError names an unknown one."""
    found = set()
    for name in filter(None, (word.strip() for word in names.split(","))):
        try:
            found.add(signal.Signals[name])
        except KeyError:
            raise ValueError(f"--signals-to-handle: no signal is called {name!r}") from None
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"--signals-to-handle: no process can handle {name}")
    return found


class Interrupted(BaseException):
    """A signal came while nobody looks into the inbox: what is in progress ends. `signal` is what came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


class SignalInbox:
    """Collects signals. `fd` is readable while some wait to be taken. Only for the main thread of a process that owns its signals."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._arrived: list[signal.Signals] = []
        self._interrupts = False
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def install(self) -> None:
        """Take the signals over."""
        for sig in self._signals:
            signal.signal(sig, self._arrive)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal that has arrived or arrives inside raises Interrupted there."""
        self._interrupts = True
        try:
            if self._arrived:
                raise Interrupted(self._arrived[0])
            yield
        finally:
            self._interrupts = False

    def take(self) -> list[signal.Signals]:
        """Signals that arrived since the last call, oldest first."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(signal.Signals(number))
        if self._interrupts:
            raise Interrupted(number)
