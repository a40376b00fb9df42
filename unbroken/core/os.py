"""The only calls that depend on the operating system (Linux): processes by pidfd, memory files, locks, priorities."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import faulthandler
import fcntl
import glob
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from unbroken.core.cgroups import limits

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

DUMP_SIGNAL = 42
"""A watched rank that gets it writes the stacks of all its threads. A real-time signal: no scheduler and no library sends it."""

HANG_EXIT_CODE = 43
"""A watched rank that gets the signal of this number ends at once, with this exit code: it was hanging, and may be started again."""


def hostname() -> str:
    """This host's name."""
    return socket.gethostname()


def current_pid() -> int:
    """This process."""
    return os.getpid()


def parent_pid() -> int:
    """The process that made this one."""
    return os.getppid()


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


def orphans(name: str) -> list[int]:
    """Processes of this name whose argument `--pid` names one that has ended: helpers that have outlived whom they help."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as f:
                words = f.read().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if os.path.basename(words[0]) == name.encode() and b"--pid" in words[:-1]:
            owner = words[words.index(b"--pid") + 1]
            if owner.isdigit() and not is_alive(int(owner)):
                found.append(int(path.split("/")[2]))
    return found


def descendants(pid: int) -> list[int]:
    """Pids of all living children of a process, and of theirs; those that end meanwhile may be missing."""
    found: list[int] = []
    for task in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(task, encoding="ascii") as f:
                children = [int(child) for child in f.read().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


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


def adopt_orphans(is_wanted: bool) -> None:
    """While wanted, processes below us that lose their parent become our children instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def num_threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def peek_exit(pid: int) -> int | None:
    """Exit code of a child of ours that has ended (minus the number of the signal that ended it), None while it lives.

    The child is not reaped: until it is, neither its pid nor its group can be given to anybody else.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def kill_group(leader: int, sig: int = signal.SIGKILL) -> None:
    """Signal every process of the group that `leader` made, whether or not it lives; no error when none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, sig)


def processes_with(entry: str) -> Iterator[tuple[int, int]]:
    """Processes of this user that were started with `entry` ("NAME=value") in their environment: pid, and a descriptor.

    The caller closes the descriptors. This process is passed over. Cost: 3 us per process of the host, 15 us more for this user's.
    """
    wanted = entry.encode()
    for found in os.scandir("/proc"):
        if not found.name.isdigit() or int(found.name) == os.getpid():
            continue
        fd = -1
        try:
            if found.stat().st_uid != os.geteuid():
                continue
            fd = os.pidfd_open(int(found.name))  # before it is looked at: from here on the number cannot become another process's
            with open(f"/proc/{found.name}/environ", "rb") as f:
                matches = wanted in f.read().split(b"\0")
        except OSError:  # it has ended, or hides what it is
            matches = False
        if matches:
            yield int(found.name), fd
        elif fd >= 0:
            os.close(fd)


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


def memory_file(name: str, size_bytes: int, *, fill: bool = True) -> int:
    """Descriptor of an anonymous memory file of this size, its pages already there (a copy into fresh pages is 5-10x slower).

    Without `fill` they are not: `fill_memory` brings them in, as many at a time as the caller likes.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        if fill:
            fill_memory(fd, 0, size_bytes)
        # Its size is fixed from here on: a process that cut it short would kill every other one that has it mapped.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def fill_memory(fd: int, offset: int, size_bytes: int) -> None:
    """Bring in some pages of a memory file, about 0.2 s per GB; OSError if there is no memory for them."""
    os.posix_fallocate(fd, offset, size_bytes)


def available_memory_bytes() -> int:
    """Memory that can still be had here without swapping: the host's, or what this process's container has left of its limit."""
    _, available = host_memory_bytes()
    free = limits().memory_free_bytes
    return available if free is None else min(available, free)


def host_memory_bytes() -> tuple[int, int]:
    """(all memory, what can be had without swapping) of the host, whatever a container allows."""
    found = {"MemTotal": 1 << 62, "MemAvailable": 1 << 62}
    with open("/proc/meminfo", encoding="ascii") as f:
        for line in f:
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found["MemTotal"], found["MemAvailable"]


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def try_lock(fd: int) -> bool:
    """Take an exclusive lock on an open file without waiting; it goes away with the process, however that ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give a lock back even if a forked child still has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def yield_to_others() -> None:
    """Give the calling thread the lowest ordinary priority.

    Not the idle class: a thread of it that holds the interpreter's lock on busy cores would hold up its whole process.
    """
    with contextlib.suppress(OSError):  # a container may forbid it; then the thread is merely less polite
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def sync_directory(path: str) -> None:
    """Make the names inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def heed_only(pid: int, ignored: Sequence[signal.Signals] = ()) -> None:
    """From now on SIGTERM ends this process only when `pid` sent it, and those `ignored` never do.

    A signal to a whole job also reaches a trainer's loader processes, whose trainer still needs them to finish its step.
    """
    for sig in ignored:
        if sig != signal.SIGTERM:
            signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
            pass
        os._exit(0)

    threading.Thread(target=watch, name="unbroken-heed", daemon=True).start()


def forget_pages(fd: int) -> None:
    """Let the page cache drop a durable file that will hardly be read again: training must not lose its cached data to checkpoints."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


_heeded: list[int] = []
"""The descriptor that stacks go to now."""


def heed_watchdog(fd: int) -> None:
    """From now on DUMP_SIGNAL writes all stacks to `fd`, and the signal HANG_EXIT_CODE ends this process with that code.

    Both are handled in C, without the interpreter: also while it waits for ever, sits in C code or one thread keeps its lock.
    """
    _heeded[:] = [fd]
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(HANG_EXIT_CODE, ctypes.cast(libc._exit, ctypes.c_void_p))  # a handler is called with its signal's number


def ask_for_stacks(pid: int) -> None:
    """Make the main thread of a process that heeds a watchdog write all stacks; nothing happens to one that does not, or has gone.

    To that thread, not to the process: when one that was stopped is continued, any thread may take a signal that was sent to the
    process, and the main thread would have gone on by then.
    """
    if process_facts(pid).catches(DUMP_SIGNAL):
        ctypes.CDLL(None).tgkill(pid, pid, DUMP_SIGNAL)


def ignore_watchdog(fd: int) -> None:
    """Neither signal does anything any more, if they were heeded for this descriptor last."""
    if _heeded != [fd]:
        return
    _heeded.clear()
    faulthandler.unregister(DUMP_SIGNAL)
    for sig in (DUMP_SIGNAL, HANG_EXIT_CODE):  # one may be on its way still
        ctypes.CDLL(None).signal(sig, ctypes.c_void_p(int(signal.SIG_IGN)))


class ProcessFacts(NamedTuple):
    """The kernel's view: `state` as in ps ("R", "S", "D", "T", ... or "" when gone), the tracing process or 0, signals it handles."""

    state: str
    tracer: int
    caught: int

    def catches(self, sig: int) -> bool:
        """Does it have a handler for this signal?"""
        return bool(self.caught >> (sig - 1) & 1)


def process_facts(pid: int) -> ProcessFacts:
    """What /proc says of a process."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as f:
            fields = dict(line.split(":", 1) for line in f if ":" in line)
        return ProcessFacts(fields["State"].split()[0], int(fields["TracerPid"]), int(fields["SigCgt"], 16))
    except (OSError, LookupError, ValueError):
        return ProcessFacts("", 0, 0)


def say_for(pids: Sequence[int], text: str) -> None:
    """Write to other processes' standard error, where their user looks, once where several share it. Never waits, never fails."""
    said = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) not in said:
                    said.add((found.st_dev, found.st_ino))
                    os.write(fd, text.encode(errors="replace"))
            finally:
                os.close(fd)
