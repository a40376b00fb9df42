"""What the container or job around this process allows: memory, processors, processes. Control groups of version 2 and of version 1.

The limit that counts is the lowest on the way from our group to the root of what can be seen. File pages that the kernel may drop at
any time are counted as free: else a container that has just written a checkpoint would look full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = "/sys/fs/cgroup"
MEMBERSHIP = "/proc/self/cgroup"

_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number of about 2**63."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """None: not limited, or not to be seen. `memory_free_bytes` is what the tightest group has left."""

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    processors: float | None = None
    processes_free: int | None = None


def limits(root: str = ROOT, membership: str = MEMBERSHIP) -> Limits:
    """The limits in force."""
    groups = _groups(root, membership)
    memory = [found for found in map(_memory, _upwards(*groups["memory"])) if found is not None]
    quotas = [found for found in map(_processors, _upwards(*groups["cpu"])) if found is not None]
    processes = [found for found in map(_processes, _upwards(*groups["pids"])) if found is not None]
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_free_bytes=min((free for _, free in memory), default=None),
        processors=min(quotas, default=None),
        processes_free=min(processes, default=None),
    )


def _groups(root: str, membership: str) -> dict[str, tuple[str, str]]:
    """(mount, group below it) of each controller that we ask about."""
    mine = {name: (root, "/") for name in ("memory", "cpu", "pids")}
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for name, known in list(mine.items()):
            if name in controllers.split(","):
                mine[name] = (os.path.join(root, name), group)
            elif number == "0" and not controllers and known == (root, "/"):
                mine[name] = (root, group)
    return mine


def _upwards(mount: str, group: str) -> Iterator[str]:
    """Our group's folder and all above it; a group that lies outside of what is mounted here is passed over."""
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        folder = os.path.join(mount, *parts[:length])
        if os.path.isdir(folder):
            yield folder


def _memory(folder: str) -> tuple[int, int] | None:
    """(limit, what is left of it) in bytes."""
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(os.path.join(folder, limit_name)), _number(os.path.join(folder, used_name))
        if limit is not None and used is not None:
            droppable = _field(os.path.join(folder, "memory.stat"), cache)
            return limit, max(0, min(limit, limit - used + min(droppable, used)))
    return None


def _processors(folder: str) -> float | None:
    words = _text(os.path.join(folder, "cpu.max")).split()
    quota = int(words[0]) if len(words) == 2 and words[0].isdigit() else _number(os.path.join(folder, "cpu.cfs_quota_us"))
    period = int(words[1]) if len(words) == 2 and words[1].isdigit() else _number(os.path.join(folder, "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _processes(folder: str) -> int | None:
    limit, used = _number(os.path.join(folder, "pids.max")), _number(os.path.join(folder, "pids.current"))
    return None if limit is None or used is None else max(0, limit - used)


def _number(path: str) -> int | None:
    text = _text(path).strip()
    try:
        number = int(text)
    except ValueError:  # "max", or no such file
        return None
    return None if number >= _NO_LIMIT else number


def _field(path: str, name: str) -> int:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
