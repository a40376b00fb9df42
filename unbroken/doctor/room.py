"""What a run has on its host: memory that is free or held by its slots, and the disk under its folder."""

from __future__ import annotations

import os

from msgspec import Struct

from unbroken.core.os import available_memory_bytes
from unbroken.doctor.findings import Finding
from unbroken.doctor.needs import Needs, judge_disk, judge_memory


class Room(Struct, frozen=True, kw_only=True):
    """`held_bytes`: slots that exist already, from the daemon. `stored_bytes`: packs in the folder."""

    available_bytes: int
    held_bytes: int
    free_bytes: int
    stored_bytes: int

    def judge(self, needs: Needs) -> list[Finding]:
        """Memory and disk."""
        return [judge_memory(needs, self.available_bytes, self.held_bytes), judge_disk(needs, self.free_bytes, self.stored_bytes)]


def look_around(directory: str, held_bytes: int) -> Room:
    """Measure. Cost: a look at each file below packs/, one per 256 MiB."""
    free_bytes, _, _ = space(existing(directory))
    return Room(
        available_bytes=available_memory_bytes(), held_bytes=held_bytes, free_bytes=free_bytes, stored_bytes=_stored_bytes(directory)
    )


def existing(path: str) -> str:
    """The folder itself, or the nearest one above it that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def space(path: str) -> tuple[int, int, int | None]:
    """(free bytes, all bytes, free inodes or None where they are not counted)."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail if found.f_files else None


def _stored_bytes(directory: str) -> int:
    total = 0
    for folder, _, names in os.walk(os.path.join(directory, "packs")):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pruned meanwhile
                continue
    return total
