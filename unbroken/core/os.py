"""The only calls that depend on the operating system (Linux): processes by pidfd, memory files, locks, priorities."""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23


def hostname() -> str:
    """This host's name."""
    return socket.gethostname()


def boot_id() -> str:
    """A name of this boot of this host: a pid means something only within it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return "unknown"


def is_alive(pid: int) -> bool:
    """True while a process with this pid exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; raises ProcessLookupError if it is gone."""
    return os.pidfd_open(pid)


def wait_any(fds: Sequence[int], timeout_s: float) -> list[int]:
    """Those of `fds` that are readable, waiting at most `timeout_s`."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that made it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)


def start_module(module: str, args: Sequence[str], env: Mapping[str, str], log: str) -> int:
    """Start `python -m module args` in a session of its own, detached from our terminal and pipes; its pid.

    The child is not ours to wait for: it is made through an intermediate process, so that it never becomes our zombie.
    """
    code = (
        "import os,sys,subprocess;"
        "p=subprocess.Popen(sys.argv[2:],stdin=subprocess.DEVNULL,stdout=open(sys.argv[1],'ab'),"
        "stderr=subprocess.STDOUT,start_new_session=True,close_fds=True);print(p.pid);os._exit(0)"
    )
    command = [sys.executable, "-S", "-c", code, log, sys.executable, "-m", module, *args]
    done = subprocess.run(command, env=dict(env), stdout=subprocess.PIPE, check=True, timeout=30)
    return int(done.stdout)


def memory_file(name: str, size_bytes: int) -> int:
    """Descriptor of an anonymous memory file of this size, its pages already there (a copy into fresh pages is 5-10x slower)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def try_lock(fd: int) -> bool:
    """Take an exclusive lock on an open file without waiting; it goes away with the process, however that ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def be_polite() -> None:
    """Run at idle priority: training must not feel us. Errors are harmless (containers may forbid it)."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def sync_directory(path: str) -> None:
    """Make the names inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
