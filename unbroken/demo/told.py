"""What the demo says while it runs: plain lines, each of a kind, so that whoever shows them can give them their colour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

Kind = Literal["act", "note", "save", "strike", "start", "good", "bad", "progress"]


class Told(Struct, frozen=True):
    """One line. "act" opens a chapter, "progress" (where training stands) is worth showing only until the next line comes."""

    kind: Kind
    text: str


Tell = Callable[[Told], Any]
