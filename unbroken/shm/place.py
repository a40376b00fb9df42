"""The lock beside a daemon's socket: whoever holds it is the only daemon of its run folder. It goes away with the process."""

from __future__ import annotations

import contextlib
import os
import socket

from unbroken.core.os import try_lock
from unbroken.core.ports import Clock

RETRY_S = 0.05


class PlaceLock:
    """Held from `take` on until the process ends."""

    def __init__(self) -> None:
        self._fd = -1

    def take(self, path: str, clock: Clock, wait_s: float = 0.0) -> bool:
        """Be the only daemon whose socket is at `path`; False if another one serves it. One that is just ending is waited for.

        Called again it holds what it held, or takes the lock anew where somebody has removed its file or it lies elsewhere now.
        """
        fd = os.open(path.removesuffix(".sock") + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if self._fd >= 0 and os.path.sameopenfile(fd, self._fd):
            os.close(fd)
            return True
        deadline_s = clock.monotonic() + wait_s
        while not try_lock(fd):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                answers = probe.connect_ex(path) == 0
            if answers or clock.monotonic() >= deadline_s:
                os.close(fd)
                return False
            clock.sleep(RETRY_S)
        with contextlib.suppress(OSError):  # there was none before the first time
            os.close(self._fd)
        self._fd = fd
        return True
