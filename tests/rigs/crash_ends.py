"""Ends of processes for the crash campaigns, and a place for what they leave behind."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rigs.crash_life import Say
from tests.rigs.crash_oracle import Loss
from tests.rigs.store_child import in_child, suicide


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is room: a campaign syncs more than a disk likes."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    folder = tempfile.mkdtemp(prefix="crash", dir=memory if roomy else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ended(act: Callable[[Say], None], kill_after_s: float | None = None) -> list[str]:
    """What a child said until it ended or was killed. Loss when it ended with an error of its own."""
    said, status = in_child(act, kill_after_s)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise Loss("the writer ended with an error: " + "\n".join(said[-40:]))
    return said


def strike_at(count: int) -> Callable[[], None]:
    """A strike that kills this process when it is passed for the `count`th time."""
    left = [count]

    def strike() -> None:
        left[0] -= 1
        if left[0] == 0:
            suicide()

    return strike


@contextmanager
def killed_at_call(count: int) -> Iterator[list[int]]:
    """This process is killed at its `count`th call of a function, of Python or of C; 0: never. Yields [calls so far]."""
    done = [0]

    def see(frame: Any, event: str, argument: Any) -> None:
        done[0] += 1
        if done[0] == count:
            suicide()

    sys.setprofile(see)
    try:
        yield done
    finally:
        sys.setprofile(None)
