"""Which sinks `log_to=` means: checked when the run is made, imported when there is something to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from unbroken.core.errors import MissingExtra
from unbroken.loggers.sink import Sink

LogTo = str | Sink | Sequence[str | Sink] | None

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab"}
"""Which package each kind needs; JSON lines need none."""

JSON_LINES = "jsonl"

_METHODS = ("open", "write", "close")
_USE = '"jsonl", "jsonl:FILE", "tensorboard:DIR", "wandb:PROJECT", "mlflow:URI", "swanlab:PROJECT", a list of them, or an object with '
_USE += "the methods open, write and close"


@dataclass(frozen=True)
class Target:
    """One sink that was asked for: `kind` and `place`, or the user's `own`."""

    kind: str
    place: str = ""
    own: Any = None

    def __str__(self) -> str:
        return type(self.own).__name__ if self.own is not None else f"{self.kind}:{self.place}" if self.place else self.kind


def targets(log_to: LogTo) -> tuple[Target, ...]:
    """What was asked for; paths made absolute, because a program may change its folder later.

    ValueError or TypeError says what is accepted, MissingExtra which package to install.
    """
    several = log_to if isinstance(log_to, list | tuple) else () if log_to is None else (log_to,)
    found = tuple(_target(one) for one in several)
    names = [str(target) for target in found if target.own is None]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"log_to={log_to!r}: {min(twice)} is named twice")
    return found


def _target(one: Any) -> Target:
    if not isinstance(one, str):
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in _METHODS):
            raise TypeError(f"log_to= got {one!r:.100}: give {_USE}")
        return Target("own", own=one)
    kind, colon, place = one.partition(":")
    if kind == JSON_LINES and bool(colon) == bool(place):
        return Target(kind, os.path.abspath(place) if place else "")
    if kind not in PACKAGES or not place:
        raise ValueError(f"log_to={one!r}: give {_USE}")
    if find_spec(PACKAGES[kind]) is None:
        raise MissingExtra(PACKAGES[kind], kind)
    is_path = kind == "tensorboard" or (kind == "mlflow" and ":" not in place and place != "databricks")
    return Target(kind, os.path.abspath(place) if is_path else place)


def make(target: Target) -> Sink:
    """The sink itself; only here is its library imported, which takes up to seconds."""
    if target.own is not None:
        own: Sink = target.own
        return own
    if target.kind == "tensorboard":
        from unbroken.loggers.to_tensorboard import TensorBoard

        return TensorBoard(target.place)
    if target.kind == "wandb":
        from unbroken.loggers.to_wandb import Wandb

        return Wandb(target.place)
    if target.kind == "mlflow":
        from unbroken.loggers.to_mlflow import MLflow

        return MLflow(target.place)
    if target.kind == "swanlab":
        from unbroken.loggers.to_swanlab import SwanLab

        return SwanLab(target.place)
    from unbroken.loggers.to_jsonl import JsonLines

    return JsonLines(target.place)
