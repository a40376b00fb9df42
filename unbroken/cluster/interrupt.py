"""Ctrl-C, and a notebook's interrupt: heard where nothing is half done.

From `run.step()` to the boundary a KeyboardInterrupt waits, because a half-applied update or a half-updated average is no state to go on
from. In forward and backward it comes at once: that step is begun again. A second one comes at once anywhere. A handler of the
program's own is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

TOLD = "unbroken: interrupt: the step and what follows it are finished first; interrupt again to stop at once\n"

REDELIVERY_S = 0.05
"""Where nothing can be raised (a generator that is being closed), the interrupt comes a moment later."""


class Interrupt:
    """Cost of `hold` and `release`: two calls of the system, 2 us. Outside the main thread nothing happens."""

    def __init__(self) -> None:
        self._is_held = self._has_come = False

    def hold(self) -> None:
        """From now on the first interrupt waits."""
        is_main = threading.current_thread() is threading.main_thread()
        if not self._is_held and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._arrive)
            self._is_held = True

    @contextlib.contextmanager
    def waiting(self, *, after_success: bool = False) -> Iterator[None]:
        """Held within; and until the next `release` where that is wanted and no error comes out of it."""
        self.hold()
        try:
            yield
        except BaseException:  # raised again: an interrupt that has waited must not be lost with it
            self.let_go()
            raise
        if not after_success:
            self.release()

    def release(self) -> None:
        """This is a harmless place: KeyboardInterrupt if one has come."""
        if self._give_back():
            raise KeyboardInterrupt

    def let_go(self) -> None:
        """As `release`, where nothing may be raised."""
        if self._give_back():
            timer = threading.Timer(REDELIVERY_S, signal.raise_signal, (signal.SIGINT,))
            timer.daemon = True
            timer.start()

    def _give_back(self) -> bool:
        if self._is_held and threading.current_thread() is threading.main_thread():
            self._is_held = False
            if signal.getsignal(signal.SIGINT) == self._arrive:  # else somebody, a debugger, has put another one over it
                signal.signal(signal.SIGINT, signal.default_int_handler)
        came, self._has_come = self._has_come, False
        return came

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if not self._is_held or self._has_come:
            self._give_back()
            raise KeyboardInterrupt
        self._has_come = True
        with contextlib.suppress(OSError):
            os.write(2, TOLD.encode())


def left_by_error(code: CodeType | None) -> bool:
    """Did the last error that an interactive session has shown come through a frame that ran this code, the loop's?"""
    error = getattr(sys, "last_value", None)
    frames = error.__traceback__ if isinstance(error, BaseException) else None
    while frames is not None:
        if frames.tb_frame.f_code is code:
            return True
        frames = frames.tb_next
    return False
