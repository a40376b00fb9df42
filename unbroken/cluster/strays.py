"""Processes that an attempt's workers have started and that left their session: the next attempt must not meet them.

Those of a worker's own session are killed as its group. What has made a session of its own has lost its parent by the time anybody
looks, but not the environment it was started with, which names this launch. The node daemon's does not: it has to stay.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

from unbroken.core.os import processes_with, wait_any
from unbroken.core.ports import Clock

GONE_WITHIN_S = 5.0
"""A killed process that lives on sits in the kernel; it must not hold up the job for longer."""


def end_strays(mark: str, spared: Collection[int], clock: Clock) -> list[int]:
    """Kill every process started with `mark` ("NAME=value") in its environment, and wait until it is gone; the pids that are not."""
    deadline_s = clock.monotonic() + GONE_WITHIN_S
    while True:
        living = {}
        for pid, fd in processes_with(mark):
            if pid in spared:
                os.close(fd)
                continue
            living[pid] = fd
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        left = _wait(living, deadline_s, clock)
        if left or not living:
            return left


def _wait(living: dict[int, int], deadline_s: float, clock: Clock) -> list[int]:
    """Until all are gone or it is time; those that are not. Closes the descriptors."""
    waiting = dict(living)
    while waiting and (left_s := deadline_s - clock.monotonic()) > 0:
        gone = wait_any(list(waiting.values()), left_s)
        waiting = {pid: fd for pid, fd in waiting.items() if fd not in gone}
    for fd in living.values():
        os.close(fd)
    return list(waiting)
