"""Chunks with what they are differences from: a manifest names the whole chain, so that it alone says which packs a checkpoint needs.

In a manifest's table a chunk names its base by number, and bases come before what is built on them: there can be no cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from unbroken.core.records import ChunkRef


class Located(NamedTuple):
    """A chunk and what it is a difference from. `ref.base` says nothing here."""

    ref: ChunkRef
    base: Located | None = None

    def chain(self) -> Iterator[Located]:
        """This one, then its base, and so on."""
        at: Located | None = self
        while at is not None:
            yield at
            at = at.base

    @property
    def depth(self) -> int:
        """How many others have to be read first."""
        return sum(1 for _ in self.chain()) - 1

    @property
    def packs(self) -> set[str]:
        """All that must be there for it to be read."""
        return {one.ref.pack for one in self.chain()}


def locate(chunks: Sequence[ChunkRef]) -> tuple[Located, ...]:
    """A manifest's table, each chunk with its chain."""
    found: list[Located] = []
    for ref in chunks:
        found.append(Located(ref, None if ref.base is UNSET else found[ref.base]))
    return tuple(found)


def tabulate(chunks: Iterable[Located]) -> tuple[tuple[ChunkRef, ...], int]:
    """A manifest's table: first what is only there as a base, then `chunks` in their order; where those begin."""
    wanted = list(chunks)
    numbers: dict[tuple[str, int], int] = {}
    table: list[ChunkRef] = []

    def put(one: Located) -> None:
        base = UNSET if one.base is None else numbers[_place(one.base)]
        numbers[_place(one)] = len(table)
        table.append(replace(one.ref, base=base))

    for one in wanted:
        for below in reversed([*one.chain()][1:]):
            if _place(below) not in numbers:
                put(below)
    first = len(table)
    for one in wanted:
        put(one)
    return tuple(table), first


def _place(one: Located) -> tuple[str, int]:
    return one.ref.pack, one.ref.offset
