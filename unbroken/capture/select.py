"""Parts of a stored state by name, and states whose parts were flattened one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unbroken.capture import pointers
from unbroken.capture.flatten import ALIAS
from unbroken.capture.rebuild import Builder, Pieces, raw
from unbroken.core.errors import Damaged


def pointer_of(key: str) -> str:
    """The pointer of a top-level name; a JSON pointer stays as it is."""
    return key if key.startswith("/") else f"/{pointers.token(key)}"


def select(read: Callable[[Callable[[str], bool]], Pieces], wanted: Mapping[str, str]) -> dict[str, Any]:
    """The wanted parts {key: pointer} of a state. `read` gets the pieces whose pointers it is asked for. KeyError for a part not there."""
    tops = tuple(wanted.values())
    pieces = dict(read(lambda pointer: any(pointer == top or pointer.startswith(top + "/") for top in tops)))
    firsts = {bytes(raw(data)).decode("utf-8", "replace") for piece, data in pieces.values() if piece.dtype == ALIAS} - pieces.keys()
    if firsts:
        pieces.update(read(lambda pointer: pointer in firsts))
    builder = Builder(pieces, adopt=True)
    return {key: _part(builder, pieces, top, key) for key, top in wanted.items()}


def _part(builder: Builder, pieces: Pieces, top: str, key: str) -> Any:
    if top in pieces:
        return builder.build(top)
    beneath = {pointer: pieces[pointer] for pointer in pieces if pointer.startswith(top + "/")}
    if not beneath:
        raise KeyError(f"the checkpoint has no part {key!r}")
    return _nested(builder, beneath, top)


def assemble(pieces: Pieces) -> Any:
    """The whole state. Parts flattened apart ("/model/parameters", "/optimizer") become nested dicts. The pieces' memory is taken over."""
    builder = Builder(pieces, adopt=True)
    return builder.build("") if "" in pieces else _nested(builder, pieces, "")


def _nested(builder: Builder, pieces: Pieces, top: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for pointer in pieces:
        if pointer.rpartition("/")[0] in pieces:
            continue
        *outer, last = pointer.removeprefix(top).split("/")[1:]
        place: Any = out
        for name in outer:
            place = place.setdefault(_key(name, pointer), {})
            if not isinstance(place, dict):
                raise Damaged(pointer, "lies beneath a value that is no container")
        place[_key(last, pointer)] = builder.build(pointer)
    return out


def _key(name: str, pointer: str) -> Any:
    try:
        return pointers.key(name)
    except ValueError as error:
        raise Damaged(pointer, str(error)) from error
