"""The lease on a lineage of a run folder: one live writer. The lock is the kernel's, on a `writer.json`, and goes with the process.

What stands in the file is for people and for taking over. The lock file is never removed by us: a lock on a removed file is nobody's.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

import msgspec

from unbroken.core.errors import Fenced, Refused
from unbroken.core.os import boot_id, is_alive, try_lock, unlock
from unbroken.core.records import Writer
from unbroken.store import paths

_MAX_BYTES = 64 << 10
_NOT_A_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""What the system says of a link, of a folder, and of a socket or device without a driver."""

_held: dict[str, WriterLease] = {}


class WriterLease:
    """Held from `acquire` to `release` or the end of the process. `took_over` says from whom it was taken, None for nobody."""

    def __init__(self, path: str, fd: int, took_over: str | None) -> None:
        self.path = path
        self.took_over = took_over
        self._fd = fd
        self._pid = os.getpid()

    @classmethod
    def acquire(cls, root: str, writer: Writer, lineage: str = paths.MAIN) -> WriterLease:
        """Become the writer of a lineage of the run in `root`; both are made if missing. Never waits.

        A process takes over its own lease (a notebook cell run again). Raises Fenced naming the holder when another process has it, and
        when a process of another host left it, which cannot be asked whether it lives. Refused when `writer.json` is no regular file.
        """
        path = os.path.join(os.path.realpath(root), *paths.writer(lineage).split("/"))
        with suppress(FileExistsError):  # another process made it first; a file of that name fails below
            os.makedirs(os.path.dirname(path), exist_ok=True)
        earlier = _held.pop(path, None)
        is_own = earlier is not None and earlier.is_held
        if earlier is not None:
            earlier.release()
        fd = _locked(path)
        try:
            left = _read(fd)
            if left is not None and left.host != writer.host:
                raise Fenced(f"{path}: {_who(left)} may still write this run. If that process is gone for good, delete {path}")
            _write(fd, writer)
        except BaseException:  # raised again: whatever it was, the lock must not stay taken
            os.close(fd)
            raise
        own = "an earlier lease of this process" if is_own else None
        lease = cls(path, fd, _who(left) if left is not None else own)
        _held[path] = lease
        return lease

    @property
    def is_held(self) -> bool:
        """False once released or taken over within this process, and in a forked child of the holder."""
        return self._fd >= 0 and self._pid == os.getpid()

    def release(self) -> None:
        """Let the next writer in; a second call does nothing. A forked child only lets go of its copy, the lease stays its parent's."""
        if self._fd < 0:
            return
        if self.is_held:
            with suppress(OSError):  # safe: then the file still names us, and the next writer of this host takes over and says from whom
                os.ftruncate(self._fd, 0)
            unlock(self._fd)
        os.close(self._fd)
        self._fd = -1
        if _held.get(self.path) is self:
            del _held[self.path]


def is_held_here(root: str, lineage: str = paths.MAIN) -> bool:
    """Does this very process write a lineage of the run in `root`? It could have its own lease for the asking."""
    lease = _held.get(os.path.join(os.path.realpath(root), *paths.writer(lineage).split("/")))
    return lease is not None and lease.is_held


def holder(root: str, lineage: str = paths.MAIN) -> Writer | None:
    """The living process of this host that says it writes a lineage of the run in `root`; only read, so it may have just come or gone."""
    try:
        fd = os.open(os.path.join(root, *paths.writer(lineage).split("/")), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        writer = _read(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    is_here = writer is not None and writer.boot_id == boot_id() and is_alive(writer.pid)
    return writer if is_here else None


def _locked(path: str) -> int:
    """Descriptor of the lock file that `path` names now, locked by us."""
    while True:
        fd = _opened(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _not_a_file(path)
            if not try_lock(fd):
                raise Fenced(_refusal(path, _read(fd)))
            if _is_same_file(path, fd):
                return fd
        except BaseException:  # raised again: whatever it was, the lock must not stay taken
            os.close(fd)
            raise
        os.close(fd)  # somebody removed the file while we locked it: that lock would protect nothing


def _opened(path: str) -> int:
    """The file itself, made if missing: a link may lead to a file that is not ours, and this one is about to be emptied."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as e:
        if e.errno in _NOT_A_FILE:
            raise _not_a_file(path) from e
        raise


def _not_a_file(path: str) -> Refused:
    return Refused(f"{path}: not a regular file but a link, folder or device, which we never write to: remove it and start again")


def _is_same_file(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read(fd: int) -> Writer | None:
    """Who is written in the file; None for an empty or torn one."""
    try:
        return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=Writer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _write(fd: int, writer: Writer) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, msgspec.json.format(msgspec.json.encode(writer)) + b"\n", 0)
    os.fsync(fd)


def _who(writer: Writer) -> str:
    return f"process {writer.pid} on {writer.host} (since {writer.since})"


def _refusal(path: str, holder: Writer | None) -> str:
    if holder is None:
        return f"{path}: another process is just taking this run: stop it, or choose another folder"
    if not is_alive(holder.pid):
        return f"{path}: {_who(holder)} is not alive here, but it or a process that it started still holds the run: end that one first"
    return f"{path}: {_who(holder)} is writing this run: stop it, or choose another folder"
