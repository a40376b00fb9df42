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


def chosen(text: str, lineage: str = MAIN, step: int | None = None) -> Place:
    """What a word and two options name together. ValueError where they say different things."""
    place = parse_place(text)
    for name, of_word, of_option, default in (("lineage", place.lineage, lineage, MAIN), ("step", place.step, step, None)):
        if default not in (of_word, of_option) and of_word != of_option:
            raise ValueError(f"{text!r} and --{name} {of_option} name two: give one of them")
    return Place(place.directory, lineage if place.lineage == MAIN else place.lineage, place.step if step is None else step)


def chosen_lineage(text: str, lineage: str = MAIN) -> tuple[str, str]:
    """Folder and lineage, where no step is asked for. ValueError where one is given."""
    place = chosen(text, lineage)
    if place.step is not None:
        raise ValueError(f"{text!r}: this looks at all checkpoints of a lineage: give DIR or DIR@LINEAGE")
    return place.directory, place.lineage


def parse_place(text: str) -> Place:
    """The place that `text` names. A folder whose own name holds an `@` is that folder. ValueError says what is accepted."""
    directory, separator, rest = text.rpartition("@")
    if not separator or os.path.lexists(text):
        return Place(text, MAIN, None)
    lineage, colon, step = rest.rpartition(":") if ":" in rest else (("", "", rest) if rest.isdecimal() else (rest, "", ""))
    if not directory or not rest or (colon and not step) or (step and not (step.isascii() and step.isdecimal())):
        raise ValueError(f"{text!r}: give DIR, DIR@STEP, DIR@LINEAGE or DIR@LINEAGE:STEP")
    return Place(directory, check_lineage(lineage or MAIN), int(step) if step else None)
