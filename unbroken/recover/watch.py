"""The trainer's half of the watchdog: where this rank says how far it is, and what the daemon may do to it when it hangs."""

from __future__ import annotations

import os
import sys

from unbroken.core.errors import UnbrokenError
from unbroken.core.messages import Watch, Watched
from unbroken.core.os import heed_watchdog, ignore_watchdog
from unbroken.core.ports import Clock, environment
from unbroken.recover.link import Link
from unbroken.shm.pulse import Pulse


class Watching:
    """This rank under the daemon's eyes. `hang_timeout`: seconds, "auto" (learned) or None (nobody watches)."""

    def __init__(self, hang_timeout: float | str | None, clock: Clock) -> None:
        self.pulse = Pulse(clock.monotonic)
        self._hang_timeout = hang_timeout
        self._fd = -1

    def start(self, link: Link) -> None:
        """Be watched by the daemon at the other end; also by the next one when the first has gone. Not in a notebook or prompt.

        Whoever types there may think for an hour between two steps.
        """
        self.stop()
        if self._hang_timeout is None or hasattr(sys, "ps1") or "IPython" in sys.modules:
            return
        timeout_s = self._hang_timeout if isinstance(self._hang_timeout, float) else None
        try:
            _, fds = link.ask(Watch(timeout_s=timeout_s, aloud=not environment("UNBROKEN_LAUNCH_FILE")), Watched)
        except UnbrokenError as error:  # safe: training needs no watchdog
            print(f"unbroken: nobody watches this rank for hangs: {error}", file=sys.stderr)
            return
        self._fd = fds[0]
        self.pulse.attach(self._fd)
        heed_watchdog(self._fd)

    def stop(self) -> None:
        """Be watched no more."""
        if self._fd < 0:
            return
        ignore_watchdog(self._fd)
        self.pulse.detach()
        os.close(self._fd)
        self._fd = -1
