"""What `start_from=` accepts, checked once. No torch: options are read where it is not loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct

Part = Literal["model", "optimizer", "scheduler", "scaler", "extras", "rng"]
PARTS: tuple[str, ...] = get_args(Part)

_KEYS = ("source", "step", "take", "strict", "cast")


class StartFrom(Struct, frozen=True, kw_only=True):
    """Where a fresh run takes its state from. `take`: which parts; `strict`: weights match one to one; `cast`: dtypes may be converted."""

    source: str
    step: int | None = None
    take: tuple[str, ...] = PARTS
    strict: bool = True
    cast: bool = False


def check_start_from(value: Any) -> StartFrom | None:
    """A path, or a dict of source, step, take, strict and cast; None for none. ValueError says what is accepted, and nothing else."""
    if value is None or value == "":
        return None
    given = value if isinstance(value, Mapping) else {"source": value}
    unknown = sorted(str(key) for key in given if key not in _KEYS)
    if unknown or "source" not in given:
        raise ValueError(
            f"give a path, or a dict with 'source' and any of {', '.join(_KEYS[1:])}" + (f"; not {unknown[0]!r}" if unknown else "")
        )
    source, step = given["source"], given.get("step")
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ValueError("give the path of a checkpoint: a file or a folder, DIR@STEP for a run's")
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step={step!r}: give a whole number")
    for key in ("strict", "cast"):
        if not isinstance(given.get(key, False), bool):
            raise ValueError(f"{key}={given[key]!r}: give True or False")
    return StartFrom(
        source=os.path.abspath(_path(os.fspath(source))),
        step=step,
        take=_taken(given.get("take", PARTS)),
        strict=given.get("strict", True),
        cast=given.get("cast", False),
    )


def _path(text: str) -> str:
    return text.removeprefix("file://")


def _taken(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    wrong = [name for name in names if name not in PARTS]
    if not names or wrong:
        raise ValueError(f"take={value!r}: give any of {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)
