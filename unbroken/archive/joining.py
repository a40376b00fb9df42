"""A sharded checkpoint as one state: whole tensors, nested as they were, for whoever reads without ranks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from unbroken.archive.sharded import Sharded, state_pointer
from unbroken.capture import pointers
from unbroken.codec.items import ITEM_BYTES
from unbroken.core.boxes import whole
from unbroken.core.errors import Damaged
from unbroken.core.ports import Buffer
from unbroken.core.records import CommitEntry, Piece, StoredPiece, TensorEntry, ValueEntry
from unbroken.store.loading import fresh
from unbroken.store.repository import Repository

_ALIAS = "alias"

Source = tuple[Piece, Callable[[], Buffer]]


class Joined(Mapping[str, tuple[Piece, Buffer]]):
    """The state by pointer, as that of an unsharded checkpoint; a tensor is put together when it is asked for.

    Memory: one tensor and one of its shards. Reads all manifests.
    """

    def __init__(self, repository: Repository, commit: CommitEntry) -> None:
        self._sharded = Sharded(repository, commit)
        self._sources: dict[str, Source] = {}
        self._where = commit.manifests[-1].path
        tree: dict[str | int, Any] = {}
        for entry in self._sharded.entries.values():
            self._put(tree, entry)
        self._walk("", tree)

    def __getitem__(self, pointer: str) -> tuple[Piece, Buffer]:
        piece, read = self._sources[pointer]
        return piece, read()

    def __contains__(self, pointer: object) -> bool:
        return pointer in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def piece(self, pointer: str) -> Piece:
        """What a piece is, without its bytes."""
        return self._sources[pointer][0]

    def _put(self, tree: dict[str | int, Any], entry: TensorEntry | ValueEntry) -> None:
        path = entry.path or (entry.name,)
        place: Any = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise Damaged(self._where, f"the index places {entry.name!r} beneath a value")
        if path[-1] in place:
            raise Damaged(self._where, f"the index places {entry.name!r} where something else is")
        place[path[-1]] = entry

    def _walk(self, pointer: str, node: Any) -> None:
        if isinstance(node, TensorEntry):
            self._sources[pointer] = Piece(pointer=pointer, dtype=node.dtype, shape=node.shape), lambda: self._tensor(node)
        elif isinstance(node, ValueEntry):
            self._value(pointer, node)
        elif any(isinstance(key, int) for key in node):
            if sorted(key for key in node if isinstance(key, int)) != list(range(len(node))):
                raise Damaged(self._where, f"the index leaves items of the list {pointer!r} out")
            self._container(pointer, "py:list", len(node))
            for i in range(len(node)):
                self._walk(f"{pointer}/{i}", node[i])
        else:
            names = {key: pointers.token(key) for key in node}
            self._container(pointer, "py:dict", list(names.values()))
            for key, name in names.items():
                self._walk(f"{pointer}/{name}", node[key])

    def _container(self, pointer: str, dtype: str, content: Any) -> None:
        raw = msgspec.json.encode(content)
        self._sources[pointer] = Piece(pointer=pointer, dtype=dtype, kind="container"), lambda: raw

    def _value(self, pointer: str, entry: ValueEntry) -> None:
        top = state_pointer(entry.name)
        for stored in self._sharded.value_pieces(entry):
            at = pointer + stored.piece.pointer.removeprefix(top)
            self._sources[at] = msgspec.structs.replace(stored.piece, pointer=at), self._reader(entry.node, stored, top, pointer)

    def _reader(self, node: int, stored: StoredPiece, top: str, pointer: str) -> Callable[[], Buffer]:
        def read() -> Buffer:
            data = self._sharded.piece(node, stored)
            if stored.piece.dtype != _ALIAS:
                return data
            return (
                pointer + bytes(data).decode("utf-8", "replace").removeprefix(top)
            ).encode()  # an alias names its tensor, which is moved, too

        return read

    def _tensor(self, entry: TensorEntry) -> Buffer:
        region = whole(entry.shape)
        needs = self._sharded.needs(entry, region)
        self._sharded.check_claims(needs)
        item = ITEM_BYTES[entry.dtype]
        if not region.volume:
            return b""
        memory = memoryview(fresh(region.volume * item))[: region.volume * item]  # which the tensor may take over
        out = np.frombuffer(memory, np.uint8).reshape(*entry.shape, item)
        for need in needs:
            out[need.box.slices(region)] = self._sharded.read(need)
        return memory
