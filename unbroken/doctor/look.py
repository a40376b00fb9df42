"""What is there: reads limits and mounts, tries what a run will do. Changes nothing but a temporary file in the folder, which it removes.

torch is imported in a process of its own only, where the fork server's warm-up is tried.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

import msgspec
from msgspec import Struct

from unbroken.cluster.warm import ONE_THREAD, Warmed
from unbroken.core.os import memory_file
from unbroken.core.ports import Clock, whole_environment
from unbroken.store.tiers.direct import BLOCK_BYTES, BlockWriter

PACKAGES = ("torch", "numpy", "blake3", "msgspec", "rich", "setproctitle", "typer")
TRIAL_BYTES = 64 << 20
"""Written to measure: 1 s on a slow disk, and past what a drive answers from its own memory."""

MAX_TRIAL_SHARE = 0.1
"""Of the free space that the trial may take for a moment."""

NUM_SYNCS = 5
WARM_UP_TIMEOUT_S = 120.0
WARM_UP = "import sys, msgspec; from unbroken.cluster.warm import preload; print(msgspec.json.encode(preload(sys.argv[1:])).decode())"


class Trial(Struct, frozen=True, kw_only=True):
    """What came of writing in a folder. `sync_s`: median of small writes with fsync; `ahead_s`: the new file's time less ours."""

    bytes_per_s: float
    sync_s: float
    direct: bool
    link_error: str
    ahead_s: float


def versions() -> dict[str, str | None]:
    """Installed versions, without importing anything."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def limit(kind: int, scale: int = 1) -> int | None:
    """A soft limit of this process, None where there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft * scale


def signal_sets() -> tuple[list[str], list[str]]:
    """Names of the signals that are (blocked, ignored) in this process."""
    masks = {"SigBlk": 0, "SigIgn": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in masks:
                masks[name] = int(value, 16)
    blocked, ignored = ([s.name for s in signal.Signals if masks[kind] >> (s - 1) & 1] for kind in ("SigBlk", "SigIgn"))
    return blocked, ignored


def core_pattern() -> str:
    """Where the kernel puts core dumps."""
    try:
        with open("/proc/sys/kernel/core_pattern", encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def fabrics() -> list[str]:
    """InfiniBand and RoCE devices."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def shared_memory() -> tuple[int | None, int]:
    """(size, free) of /dev/shm in bytes; (None, 0) where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def try_memory_file() -> str:
    """Make, seal and map a memory file as the daemon does; what went wrong, or ""."""
    try:
        fd = memory_file("unbroken-doctor", mmap.PAGESIZE)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    try:
        mmap.mmap(fd, mmap.PAGESIZE).close()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.close(fd)
    return ""


def try_fork_server(modules: list[str]) -> tuple[dict[str, str], str]:
    """Import modules as the warm fork server does, in a process of its own: (what it leaves out and why, what went wrong or "")."""
    command = [sys.executable, "-c", WARM_UP, *modules]
    environment = whole_environment() | dict.fromkeys(ONE_THREAD, "1")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WARM_UP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"{type(error).__name__}: {error}"[:300]
    try:
        warmed = msgspec.json.decode(done.stdout.splitlines()[-1], type=Warmed)
    except (IndexError, msgspec.MsgspecError):
        return {}, f"it ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    return warmed.dropped, ""


def addresses(name: str) -> list[str]:
    """What a host's name resolves to, [] for nothing."""
    with suppress(OSError, UnicodeError):
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    return []


def try_loopback() -> str:
    """Listen on the loopback interface and connect to it; what went wrong, or ""."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5.0):
            return ""
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def file_system(path: str) -> str:
    """Type of the file system that a path lies on."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) < 3:
                continue
            mount = words[1].encode().decode("unicode_escape", errors="replace")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, words[2]
    return kind


def try_writing(folder: str, clock: Clock, free_bytes: int) -> Trial:
    """Write, sync and link temporary files as the store does. OSError where that cannot be done."""
    num_bytes = min(TRIAL_BYTES, int(free_bytes * MAX_TRIAL_SHARE)) // BLOCK_BYTES * BLOCK_BYTES
    with _temporary(folder) as path:
        with _opened(path, os.O_CREAT | os.O_EXCL) as fd:
            ahead_s = os.fstat(fd).st_mtime - datetime.fromisoformat(clock.utc()).timestamp()
            direct, bytes_per_s = _write(fd, num_bytes, clock)
        with _opened(path, os.O_APPEND) as fd:
            sync_s = sorted(_sync(fd, clock) for _ in range(NUM_SYNCS))[NUM_SYNCS // 2]
        return Trial(bytes_per_s=bytes_per_s, sync_s=sync_s, direct=direct, link_error=_link(path), ahead_s=ahead_s)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _temporary(folder: str) -> Iterator[str]:
    path = os.path.join(folder, f".unbroken-doctor-{secrets.token_hex(8)}")
    try:
        yield path
    finally:
        for name in (path, f"{path}-link"):
            with suppress(FileNotFoundError):
                os.unlink(name)


def _write(fd: int, num_bytes: int, clock: Clock) -> tuple[bool, float]:
    """(does O_DIRECT work, bytes per second with fsync). Random bytes: some file systems compress."""
    block = os.urandom(BLOCK_BYTES)
    began_s = clock.monotonic()
    writer = BlockWriter(fd)
    for _ in range(num_bytes // BLOCK_BYTES):
        writer.add(block)
    direct = writer.is_direct
    written = writer.finish()
    os.fsync(fd)
    return direct and written > 0, written / max(clock.monotonic() - began_s, 1e-9)


def _sync(fd: int, clock: Clock) -> float:
    began_s = clock.monotonic()
    os.write(fd, b"unbroken")
    os.fsync(fd)
    return clock.monotonic() - began_s


def _link(path: str) -> str:
    try:
        os.link(path, f"{path}-link", follow_symlinks=False)
        os.link(path, f"{path}-link", follow_symlinks=False)
    except FileExistsError:
        return ""
    except OSError as error:
        return f"does not work ({error.strerror})"
    return "replaces a name that is taken"
