"""How a checkpoint is named in one word: `DIR`, `DIR@STEP`, `DIR@LINEAGE` or `DIR@LINEAGE:STEP`."""

from __future__ import annotations

import os
from typing import NamedTuple

from unbroken.store.paths import MAIN, check_lineage


class Place(NamedTuple):
    """A folder, one of its histories, and a step of that; None: the newest."""

    directory: str
    lineage: str
    step: int | None


def parse_place(text: str) -> Place:
    """The place that `text` names. A folder whose own name holds an `@` is that folder. ValueError says what is accepted."""
    directory, separator, rest = text.rpartition("@")
    if not separator or os.path.lexists(text):
        return Place(text, MAIN, None)
    lineage, colon, step = rest.rpartition(":") if ":" in rest else (("", "", rest) if rest.isdecimal() else (rest, "", ""))
    if not directory or not rest or (colon and not step) or (step and not (step.isascii() and step.isdecimal())):
        raise ValueError(f"{text!r}: give DIR, DIR@STEP, DIR@LINEAGE or DIR@LINEAGE:STEP")
    return Place(directory, check_lineage(lineage or MAIN), int(step) if step else None)
