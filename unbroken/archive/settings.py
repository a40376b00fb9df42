"""Hyper-parameters in a stored state: found by the names people use, checked against what is there, written as the bytes of their pieces.

Pure: pieces in, changed pieces out. A value keeps its type; what is changed is told as (pointer, before, after).

    lr             every group of every optimizer            0.lr        group 0
    disc.lr        every group of optimizer "disc"           disc.0.lr   one group of it
    /scheduler/base_lrs/0                                    exactly this piece, beneath /optimizer/groups or /scheduler
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from unbroken.capture.scalars import decode, encode, is_array, is_scalar
from unbroken.core.ports import Buffer
from unbroken.core.records import Change, Piece

Pieces = Mapping[str, tuple[Piece, Buffer]]

GROUPS, SCHEDULER = "/optimizer/groups", "/scheduler"
WHERE = (GROUPS, SCHEDULER)

_LISTS = ("py:list", "py:tuple")
_FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}
_OWN_RATES = ("max_lr", "max_lrs", "min_lr", "min_lrs", "_schedulers", "_milestones", "total_steps")
"""Keys of schedules that hold learning rates, or schedules, of their own."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The pieces that get other bytes, by pointer, and the same told for people."""

    pieces: dict[str, bytes]
    told: tuple[Change, ...]


def is_setting(pointer: str) -> bool:
    """Does a piece of this name belong to what may be changed?"""
    return any(pointer == top or pointer.startswith(top + "/") for top in WHERE)


def change_settings(pieces: Pieces, wanted: Mapping[str, Any]) -> Changed:
    """The settings `wanted` by name, texts as from a command line or values of Python.

    ValueError names an unknown setting and lists those there are, or says why a value does not fit.
    """
    found = _Settings(pieces)
    new: dict[str, Any] = {}
    for name, value in wanted.items():
        for pointer in found.pointers(name):
            new |= found.fitted(pointer, value, name)
    new |= _following(found, new, wanted)
    told = []
    for pointer in sorted(new):
        before = found.value(pointer)
        if not _same(before, new[pointer]):
            told.append(Change(pointer=pointer, before=_shown(before), after=_shown(new[pointer])))
    return Changed({change.pointer: found.bytes_of(change.pointer, new[change.pointer]) for change in told}, tuple(told))


class _Settings:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = {pointer: found for pointer, found in pieces.items() if is_setting(pointer)}
        self.groups = sorted(_group_tops(self._pieces))

    def has(self, pointer: str) -> bool:
        return pointer in self._pieces

    def pointers(self, name: str) -> list[str]:
        """The pieces that a name means."""
        if name.startswith("/"):
            if name not in self._pieces or _last(name) == "params" or "/params/" in name:
                raise ValueError(f"{name}: no such setting in the checkpoint; there are {', '.join(self._listed())}")
            return [name]
        *chosen, option = name.split(".")
        tops = [top for top in self.groups if _is_meant(top, chosen)]
        found = [f"{top}/{option}" for top in tops if f"{top}/{option}" in self._pieces and option != "params"]
        if not found:
            options = sorted({_last(p) for p in self._pieces for top in self.groups if p.rpartition("/")[0] == top} - {"params"})
            groups = ", ".join(top.removeprefix(GROUPS + "/").replace("/", ".") for top in self.groups) or "none"
            raise ValueError(
                f"{name!r}: no such setting in the checkpoint; options are {', '.join(options) or 'none'}, groups {groups} "
                "(as in 0.lr), or give the pointer of a value beneath /optimizer/groups or /scheduler"
            )
        return found

    def value(self, pointer: str) -> Any:
        """What stands there now; ValueError for what is no plain value."""
        piece, data = self._pieces[pointer]
        view = memoryview(data).cast("B")
        if piece.dtype in _FLOATS and not piece.shape:
            return struct.unpack(_FLOATS[piece.dtype], view)[0]
        if not is_scalar(piece.dtype) or is_array(piece.dtype):
            raise ValueError(f"{pointer}: a value of type {piece.dtype}, which cannot be changed")
        return decode(piece.dtype, piece.shape, view)

    def fitted(self, pointer: str, value: Any, name: str) -> dict[str, Any]:
        """The new value of each piece at or beneath `pointer`, of the type that it has now."""
        piece, data = self._pieces[pointer]
        if piece.dtype in _LISTS:
            num = msgspec.json.decode(bytes(data), type=int)
            values = _items(value)
            if len(values) != num:
                raise ValueError(f"{name}={value}: {num} values are wanted, such as {name}={self._spelled(pointer, num)}")
            out: dict[str, Any] = {}
            for i, one in enumerate(values):
                out |= self.fitted(f"{pointer}/{i}", one, name)
            return out
        return {pointer: _cast(self.value(pointer), value, name)}

    def bytes_of(self, pointer: str, value: Any) -> bytes:
        """The bytes of a new value of the piece there."""
        piece, _ = self._pieces[pointer]
        if piece.dtype in _FLOATS:
            return struct.pack(_FLOATS[piece.dtype], value)
        leaf = encode(value)
        assert leaf is not None and leaf[0] == piece.dtype, f"{pointer}: {leaf and leaf[0]} in place of {piece.dtype}"
        return leaf[2]

    def _spelled(self, pointer: str, num: int) -> str:
        return ",".join(_shown(self.value(f"{pointer}/{i}")) for i in range(num))

    def _listed(self) -> list[str]:
        return sorted(p for p, (piece, _) in self._pieces.items() if is_scalar(piece.dtype) and "/params" not in p)


def _following(found: _Settings, new: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """What must follow a learning rate where a schedule computes it: `initial_lr`, and the schedule's `base_lrs` and `_last_lr`.

    They are scaled alike, so that the rate is the wanted one now and the schedule keeps its shape. ValueError for a schedule that holds
    rates in other places: which of them are meant, only the user can say.
    """
    out: dict[str, Any] = {}
    if any(name.startswith("/") for name in wanted):  # who names pieces knows what they do
        return out
    for top in found.groups:
        rate = f"{top}/lr"
        if rate not in new or not found.has(f"{top}/initial_lr"):
            continue
        schedule, index = _schedule_of(found, top)
        own = [key for key in _OWN_RATES if found.has(f"{top}/{key}") or (schedule and found.has(f"{schedule}/{key}"))]
        bases = [f"{schedule}/base_lrs/{index}", f"{schedule}/_last_lr/{index}"] if schedule else []
        if own or not schedule or not all(map(found.has, bases)):
            why = f"keeps rates of its own ({', '.join(own)})" if own else "cannot be told apart from the others"
            raise ValueError(
                f"lr: a scheduler moves it, and this one {why}: name each value by its pointer, such as {top}/lr and /scheduler/..."
            )
        before = found.value(rate)
        scale = _scaling(before, new[rate])
        out |= {place: scale(found.value(place)) for place in (f"{top}/initial_lr", *bases) if place not in new}
    return out


def _scaling(before: Any, after: Any) -> Callable[[Any], float]:
    if before == 0:
        raise ValueError("lr: it is 0 at this step, so the schedule cannot be scaled to it: branch from another step, or set base_lrs")
    return lambda value: float(after) if value == before else float(value) * (float(after) / float(before))


def _schedule_of(found: _Settings, top: str) -> tuple[str, str]:
    """The scheduler that moves a group's rate, as far as names tell, and the group's number."""
    key, _, index = top.removeprefix(GROUPS + "/").rpartition("/")
    schedule = f"{SCHEDULER}/{key}" if key else SCHEDULER
    return (schedule if found.has(f"{schedule}/base_lrs") else ""), index


def _group_tops(pieces: Pieces) -> set[str]:
    return {pointer.rpartition("/")[0] for pointer in pieces if pointer.startswith(GROUPS + "/") and pointer.endswith("/params")}


def _is_meant(top: str, chosen: list[str]) -> bool:
    names = top.removeprefix(GROUPS + "/").split("/")
    if not chosen:
        return True
    if len(chosen) == len(names):
        return chosen == names
    return len(names) == 2 and len(chosen) == 1 and chosen[0] == names[0]


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value.strip()
        if (text[:1], text[-1:]) in {("(", ")"), ("[", "]")}:
            text = text[1:-1]
        return [part.strip() for part in text.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _cast(before: Any, value: Any, name: str) -> Any:
    """`value` as the type of `before`, or a ValueError that says which is wanted."""
    kind = type(before)
    try:
        if kind is bool:
            return _bool(value)
        if kind is float or isinstance(before, np.floating):
            number = float(value) if not isinstance(value, bool) else math.nan
            if not math.isfinite(number):
                raise ValueError
            return number if kind is float else kind(number)
        if kind is int and not isinstance(value, bool | float):
            return int(value)
        if kind is str and isinstance(value, str):
            return value
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(f"{name}={value}: a {'finite number' if kind is float else kind.__name__} is wanted, as {_shown(before)} is now")


def _bool(value: Any) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)


def _last(pointer: str) -> str:
    return pointer.rpartition("/")[2]
