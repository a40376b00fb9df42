"""Parts of a stored state, and states that were flattened part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unbroken.capture.select import assemble, pointer_of, select
from unbroken.capture.tree import Pieces, flatten, load_into, write_item
from unbroken.core.errors import Damaged
from unbroken.core.records import Piece


def saved(state: Any, pointer: str = "") -> dict[str, tuple[Piece, bytes]]:
    out = {}
    for item in flatten(state, pointer):
        raw = bytearray(item.nbytes)
        write_item(item, memoryview(raw))
        out[item.piece.pointer] = (item.piece, bytes(raw))
    return out


def reader(pieces: Pieces, asked: list[str]) -> Callable[[Callable[[str], bool]], Pieces]:
    def read(wanted: Callable[[str], bool]) -> Pieces:
        found = {pointer: pieces[pointer] for pointer in pieces if wanted(pointer)}
        asked.extend(found)
        return found

    return read


def test_parts_flattened_apart_become_nested_dicts() -> None:
    pieces = saved({"w": 1}, "/model/parameters") | saved([2], "/model/buffers") | saved({"a/b": 3}, "/extras") | saved(4, "/n")
    assert assemble(pieces) == {"model": {"parameters": {"w": 1}, "buffers": [2]}, "extras": {"a/b": 3}, "n": 4}
    assert assemble(saved({"x": 1})) == {"x": 1}
    asked: list[str] = []
    found = select(reader(pieces, asked), {"model": "/model", "b": "/model/buffers/0"})
    assert found == {"model": {"parameters": {"w": 1}, "buffers": [2]}, "b": 2}
    assert not any(pointer.startswith("/extras") for pointer in asked)


def test_only_what_is_asked_for_is_read_and_aliases_find_their_tensor() -> None:
    weight = torch.arange(3.0)
    pieces = saved({"emb": weight, "big": torch.zeros(100), "head": weight, "head2": torch.ones(1)})
    asked: list[str] = []
    found = select(reader(pieces, asked), {"head": pointer_of("head")})
    assert torch.equal(found["head"], weight)
    assert asked == ["/head", "/emb"]


def test_names_and_pointers_of_parts() -> None:
    assert [pointer_of(key) for key in ("model", "a~b", "/model/w")] == ["/model", "/a~0b", "/model/w"]
    with pytest.raises(KeyError, match="no part 'mod'"):
        select(reader(saved({"model": 1}), []), {"mod": "/mod"})


def test_a_part_beneath_a_value_is_damage() -> None:
    pieces = saved(1, "/a") | saved(2, "/a/b/c")
    with pytest.raises(Damaged, match="/a/b/c"):
        assemble(pieces)


def test_deep_pieces_are_damage_for_a_load_too() -> None:
    pieces = {"": (Piece(pointer="", dtype="py:dict"), b'["x","t"]'), "/t": (Piece(pointer="/t", dtype="float32", shape=(1,)), b"\0" * 4)}
    for i in range(1500):
        pointer = "/x" + "/0" * i
        pieces[pointer] = (Piece(pointer=pointer, dtype="py:list"), b"1")
    with pytest.raises(Damaged, match="deep"):
        load_into(pieces, {"x": [1], "t": torch.zeros(1)})
