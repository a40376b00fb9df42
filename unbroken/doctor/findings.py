"""What a check says."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True, kw_only=True):
    """`seen` is what is there, in words; `remedy` what to do about it, "" where nothing has to be done.

    A "problem" keeps a run from working or from being safe, a "warning" costs speed, or bites in some use.
    """

    name: str
    status: Status
    seen: str
    remedy: str = ""


def judged(name: str, seen: str, *, problem: str = "", warning: str = "") -> Finding:
    """A finding whose status follows from which remedy there is; a problem's comes before a warning's."""
    return Finding(name=name, status="problem" if problem else "warning" if warning else "ok", seen=seen, remedy=problem or warning)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
