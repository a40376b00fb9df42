"""Run a function in a forked child, to be killed or limited there; what it says comes back as text."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

from unbroken.core.ports import arm


def in_child(act: Callable[[Callable[[str], None]], None], kill_after_s: float | None = None) -> tuple[list[str], int]:
    """`act(say)` in a child; the lines it said and its wait status. With `kill_after_s` it gets SIGKILL so long after its first line."""
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(act, read_fd, write_fd)
    os.close(write_fd)
    said, deadline = b"", None
    with os.fdopen(read_fd, "rb", buffering=0) as pipe:
        while True:
            wait_s = 60.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait_s)[0] or (deadline is not None and time.monotonic() >= deadline):
                os.kill(pid, signal.SIGKILL)
                deadline = None
            block = pipe.read(1 << 16)
            if not block:
                break
            if kill_after_s is not None and not said:
                deadline = time.monotonic() + kill_after_s
            said += block
    _, status = os.waitpid(pid, 0)
    return said.decode().splitlines(), status


def killed_at(place: str, nth: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that dies as by SIGKILL the `nth` time it passes a failpoint; False if it came to its end before that."""

    def act(say: Callable[[str], None]) -> None:
        left = [nth]

        def strike() -> None:
            left[0] -= 1
            if left[0] == 0:
                suicide()

        arm(place, strike)
        work()
        say("done")

    said, status = in_child(act)
    was_killed = os.WIFSIGNALED(status)
    assert said == [] and os.WTERMSIG(status) == signal.SIGKILL if was_killed else said == ["done"], said
    return was_killed


def _child(act: Callable[[Callable[[str], None]], None], read_fd: int, write_fd: int) -> None:
    code = 1
    try:
        os.close(read_fd)
        act(lambda line: os.write(write_fd, f"{line}\n".encode()) and None)
        code = 0
    except BaseException:
        os.write(write_fd, f"\n{traceback.format_exc()}".encode())
    finally:
        os._exit(code)


def suicide() -> None:
    """A strike for a failpoint: this process is gone, as by SIGKILL from outside."""
    os.kill(os.getpid(), signal.SIGKILL)
