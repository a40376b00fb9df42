"""Which folder and step a caller means: the folder that holds all steps, or torch's habit of one folder a step, `folder/step-100`."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from unbroken.store.tiers.disk import local_path

Url = str | os.PathLike[str]

_STEP = re.compile(r"step[-_](\d{1,12})")
MAX_STEP = 10**12 - 1


class Place(NamedTuple):
    """A folder that holds all steps, and one of them; None where none was named."""

    folder: str
    step: int | None


def checked_step(step: int | None) -> int | None:
    """The step itself; ValueError for what is none."""
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
        raise ValueError(f"step={step!r}: a whole number from 0 to {MAX_STEP}")
    return step


def place_of(url: Url | None, checkpoint_id: Url | None, step: int | None) -> Place:
    """What a writer or reader made with `url` and `step` means by `checkpoint_id`. ValueError where they contradict each other."""
    folder = None if url is None else local_path(url)
    if checkpoint_id is None:
        if folder is None:
            raise ValueError("no folder: give one as the first argument, or by checkpoint_id='folder/step-100'")
        return Place(folder, step)
    named = local_path(checkpoint_id)
    above, last = os.path.split(named.rstrip("/") or named)
    match = _STEP.fullmatch(last)
    if match is not None and (folder is None or not _is_same(folder, named)):
        named = above or "."
        if step is not None and step != int(match[1]):
            raise ValueError(
                f"checkpoint_id {os.fspath(checkpoint_id)!r} means step {int(match[1])}, but step={step} was given: leave one out"
            )
        step = int(match[1])
    if folder is not None and not _is_same(folder, named):
        raise ValueError(
            f"checkpoint_id {os.fspath(checkpoint_id)!r} means the folder {named!r}, but {folder!r} was given: one folder holds all steps; "
            f"give {os.path.join(folder, 'step-100')!r}, or leave one of them out"
        )
    return Place(named if folder is None else folder, step)


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
