"""System calls that fail as planned below one folder, and stores that are broken on purpose, to show that a campaign would notice."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from unbroken.core.ports import Buffer
from unbroken.store.tiers import disk

CALLS = ("writev", "write", "fsync", "link", "open", "mkdir", "unlink", "ftruncate", "pread")
SHORT = ("writev", "write")
"""Calls that may do half of what they were asked."""

SYSTEM = {name: getattr(os, name) for name in CALLS}


class Fault:
    """While entered, calls of one kind about files below `root` fail with `number`: `count` of them, from the `nth` on.

    number 0: a write is cut short. short_first: the first one is, the others fail. nth 0: none fails, they are counted.
    """

    def __init__(self, root: Path, call: str, number: int, nth: int, count: int, *, short_first: bool = False) -> None:
        self.number = number
        self.struck = 0
        self.seen = 0
        self._root = str(root)
        self._call = call
        self._nth = nth
        self._count = count
        self._short_first = short_first

    def __enter__(self) -> Fault:
        setattr(os, self._call, self._act)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(os, self._call, SYSTEM[self._call])

    def _act(self, first: Any, *more: Any, **named: Any) -> Any:
        genuine = SYSTEM[self._call]
        if not self._is_meant(first, more):
            return genuine(first, *more, **named)
        self.seen += 1
        if not (self._nth and self._nth <= self.seen < self._nth + self._count):
            return genuine(first, *more, **named)
        self.struck += 1
        if self._call in SHORT and (not self.number or (self._short_first and self.struck == 1)):
            return genuine(first, _half(more[0]) if self._call == "write" else [_half(more[0][0])])
        raise OSError(self.number, os.strerror(self.number), str(first))

    def _is_meant(self, first: Any, more: tuple[Any, ...]) -> bool:
        if self._call == "open" and not (more and more[0] & os.O_CREAT):
            return False
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        return path.startswith(self._root)


def _half(data: Buffer) -> memoryview:
    view = memoryview(data).cast("B")
    half = len(view) // 2
    return view[: max(1, half - half % 4096 if half > 4096 else half)]


def _no_fsync() -> None:
    os.fsync = lambda fd: None


def _no_file_fsync() -> None:
    os.fsync = lambda fd: SYSTEM["fsync"](fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None


def _no_folder_fsync() -> None:
    os.fsync = lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else SYSTEM["fsync"](fd)


def _in_place() -> None:
    """Objects are written under their own name instead of a temporary's."""

    def create(self: disk.DiskTier, path: str, parts: Iterable[Buffer]) -> int:
        final = self._locate(path)
        if os.path.lexists(final):
            raise FileExistsError(path)
        self._make_folder(os.path.dirname(final))
        size = disk._write_new(final, parts)
        disk.sync_directory(os.path.dirname(final))
        return size

    disk.DiskTier.create = create  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "no fsync": _no_fsync,
    "no fsync of files": _no_file_fsync,
    "no fsync of folders": _no_folder_fsync,
    "written in place": _in_place,
}
"""Each breaks the store of this process for good."""
