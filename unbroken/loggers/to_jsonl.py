"""JSON lines: one object per step, `{"step":12,"loss":0.25,...,"samples":64}`, in a file that grows by whole lines.

NaN and infinities stand as `NaN`, `Infinity` and `-Infinity`, as Python's json writes and reads them. A reader that comes while lines are
written may find the last one without its end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from typing import Any

from unbroken.core.errors import Damaged, Refused
from unbroken.core.os import sync_directory, try_lock
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo

_BLOCK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
_MAX_OWNER_CHARS = 1 << 10


class JsonLines:
    """A file, "" for the one in the run folder. What it holds is what its last whole line says.

    A file elsewhere may be somebody else's: `FILE.run` beside it names the run, or branch, that its rows are of. Nothing of others is cut.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def open(self, run: RunInfo) -> int:
        path = self._path or run.file
        if self._path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._fd = _opened(path, follow=bool(self._path))
        if not try_lock(self._fd):
            raise Refused(f"{path}: another process writes it: end that one first, or log to another file")
        if self._path:
            self._claim(path, run.tracker_id)
        return self._cut(path, run.step)

    def write(self, rows: Sequence[Row]) -> None:
        data = b"".join(json.dumps({"step": row.step, **row.values}, separators=(",", ":")).encode() + b"\n" for row in rows)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _claim(self, path: str, owner: str) -> None:
        """Refused where the file holds what is not known to be this run's; an empty one becomes its own."""
        mark = f"{path}.run"
        try:
            with open(mark, encoding="utf-8", errors="replace") as file:
                is_ours = file.read(_MAX_OWNER_CHARS) == owner
        except FileNotFoundError:
            is_ours = False
        if is_ours:
            return
        if os.fstat(self._fd).st_size:
            raise Refused(f"{path}: holds lines that are not of this run or branch: log to another file, or move it away")
        with open(mark, "w", encoding="utf-8") as file:
            file.write(owner)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(os.path.dirname(path))  # before the first row: a file without its mark counts as somebody else's

    def _cut(self, path: str, newest: int) -> int:
        """Cut off a torn end and steps beyond `newest`; the step of the line that is last then."""
        size_bytes = os.fstat(self._fd).st_size
        end = self._line_end(path, size_bytes)
        step = 0
        while end:
            begin = self._line_end(path, end - 1)
            step = _step_of(os.pread(self._fd, end - begin, begin), path)
            if step <= newest:
                break
            end, step = begin, 0
        if end != size_bytes:
            os.ftruncate(self._fd, end)
        return step

    def _line_end(self, path: str, before: int) -> int:
        """Where the last line that ends before this offset ends, 0 where there is none."""
        block_end = before
        while block_end:
            begin = max(0, block_end - _BLOCK_BYTES)
            found = os.pread(self._fd, block_end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            if before - begin > _MAX_LINE_BYTES:
                raise _foreign(path, "a line is longer than a row can be")
            block_end = begin
        return 0


def _opened(path: str, *, follow: bool) -> int:
    """The file, made if missing. In the run folder a link would lead out of it; a path that the user gave may lead anywhere."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_a_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_file(path)
    return fd


def _not_a_file(path: str) -> Refused:
    return Refused(f"{path}: not a regular file but a link, folder or device, which metrics are never written to: move it away")


def _step_of(line: bytes, path: str) -> int:
    try:
        row: Any = json.loads(line)
        step = row["step"]
        if isinstance(step, int) and step > 0:
            return step
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _foreign(path, f"its last line {line[:80]!r} is not the row of a step")


def _foreign(path: str, reason: str) -> Damaged:
    return Damaged(path, f"{reason}: move the file away, and all rows are written anew from the journals")
