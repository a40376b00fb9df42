"""A sharded checkpoint, opened for reading: what it is made of, and any box of any tensor, from no more bytes than hold it. No torch.

Its last manifest has an index: every tensor and value by its flat name, and which node's manifest holds which box. Of the other manifests
only those are read that something is wanted of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from unbroken.capture import pointers
from unbroken.codec.items import ITEM_BYTES
from unbroken.core.boxes import Box, misfit, whole
from unbroken.core.errors import Damaged
from unbroken.core.ports import Buffer
from unbroken.core.records import CommitEntry, Manifest, Piece, StateIndex, StoredPiece, TensorEntry, ValueEntry
from unbroken.store.loading import Chunks, assemble, check_claim
from unbroken.store.manifests import load_manifest
from unbroken.store.repository import Repository
from unbroken.store.sealed import BROKEN_INPUT
from unbroken.store.shards import box_of, tensor_pointer

INDEX = "/index"
HELD_BYTES = 2 << 30
"""Verified chunks that are kept in memory between `verify` and their use; what is beyond is read, and verified, again."""

Array = np.ndarray[Any, Any]


def state_pointer(name: str) -> str:
    """Where the pieces of a tensor or value lie, by its flat name."""
    return f"/state/{pointers.token(name)}"


class Need(NamedTuple):
    """A part of a tensor that lies in one stored piece: `box` is what is wanted of the piece at `place`, in the tensor's coordinates."""

    node: int
    stored: StoredPiece
    place: Box
    box: Box


class _Node(NamedTuple):
    """A node's manifest, its shards by the pointer of their tensor, and its other pieces by that of the value whose tree they are in."""

    manifest: Manifest
    chunks: Chunks
    shards: dict[str, list[StoredPiece]]
    others: dict[str, list[StoredPiece]]


class Sharded:
    """One sharded commit. Every byte that it gives was verified against the digest of its chunk; errors are Damaged, naming the file."""

    def __init__(self, repository: Repository, commit: CommitEntry) -> None:
        """Reads the last manifest and the index in it."""
        self.commit = commit
        self._repository = repository
        self._nodes: dict[int, _Node] = {}
        self._held: dict[tuple[int, int], bytes] = {}
        self._held_bytes = 0
        self._values: dict[str, dict[str, tuple[Piece, Buffer]]] = {}
        self.world_size = len(commit.manifests) - 1
        last = self._node(self.world_size)
        if last.manifest.world_size != self.world_size or INDEX not in last.others:
            raise Damaged(commit.manifests[-1].path, "holds no index of the sharded state")
        (index,) = last.others[INDEX]
        raw = assemble(index, last.chunks)
        where = last.manifest.chunks[index.extents[0].chunk].pack if index.extents else commit.manifests[-1].path
        self.entries = _decoded(raw, where, commit.step, self.world_size)

    def tensor(self, name: str) -> TensorEntry:
        """A tensor by its name. Damaged if that is a value; KeyError if there is none."""
        entry = self.entries[name]
        if not isinstance(entry, TensorEntry):
            raise Damaged(self._last_path, f"{name!r} is a value where a tensor is wanted")
        return entry

    def value(self, name: str) -> dict[str, tuple[Piece, Buffer]]:
        """The pieces of a value by pointer, read and verified. Damaged if that is a tensor; KeyError if there is none."""
        entry = self.entries[name]
        if not isinstance(entry, ValueEntry):
            raise Damaged(self._last_path, f"{name!r} is a tensor where a value is wanted")
        if name not in self._values:
            chunks = self._node(entry.node).chunks
            self._values[name] = {one.piece.pointer: (one.piece, assemble(one, chunks)) for one in self.value_pieces(entry)}
        return self._values[name]

    def value_pieces(self, entry: ValueEntry) -> list[StoredPiece]:
        """The stored pieces of a value, in the order of their chunks."""
        found = self._node(entry.node).others.get(state_pointer(entry.name))
        if not found:
            raise Damaged(self.commit.manifests[entry.node].path, f"holds no piece of {entry.name!r}")
        return sorted(found, key=lambda stored: stored.extents[0].chunk if stored.extents else -1)

    def piece(self, node: int, stored: StoredPiece) -> Buffer:
        """All bytes of a stored piece."""
        return assemble(stored, self._node(node).chunks)

    def needs(self, entry: TensorEntry, region: Box) -> list[Need]:
        """Which stored pieces make up this box of a tensor. Damaged where shards of it are missing, or overlap."""
        nodes = {shard.node for shard in entry.shards if Box(shard.offsets, shard.shape).common(region)}
        found: list[Need] = []
        for node in sorted(nodes):
            for stored in self._node(node).shards.get(state_pointer(entry.name), ()):
                place = box_of(stored.piece)
                assert place is not None
                if (stored.piece.dtype, stored.piece.global_shape) != (entry.dtype, entry.shape):
                    raise Damaged(self.commit.manifests[node].path, f"{entry.name!r} is of another dtype or shape than the index says")
                if common := place.common(region):
                    found.append(Need(node, stored, place, common))
        if reason := misfit(region, (need.box for need in found)):
            raise Damaged(self.commit.manifests[min(nodes, default=-1)].path, f"tensor {entry.name!r}: {reason}")
        return found

    def verify(self, needs: Iterable[Need]) -> None:
        """Read every chunk that these parts need, and keep HELD_BYTES of them for their use."""
        wanted = {(need.node, number) for need in needs for number, _, _ in _spans(need)}
        for node, number in sorted(wanted - self._held.keys()):
            data = self._chunk(node, number)
            if self._held_bytes + len(data) <= HELD_BYTES:
                self._held[node, number] = bytes(data)
                self._held_bytes += len(data)

    def read(self, need: Need) -> Array:
        """The bytes of a part, as an array of its shape with one more dimension for the bytes of an element; it owns its memory."""
        item = ITEM_BYTES[need.stored.piece.dtype]
        data = bytearray()
        for number, start, end in _spans(need):
            data += memoryview(self._chunk(need.node, number))[start:end]
        if not need.place.shape:
            return np.frombuffer(data, np.uint8)
        rows = np.frombuffer(data, np.uint8).reshape(need.box.shape[0], *need.place.shape[1:], item)
        inner = need.box.slices(need.place)[1:]
        return np.ascontiguousarray(rows[(slice(None), *inner)])

    def check_claims(self, needs: Iterable[Need]) -> None:
        """Before memory is set aside for these parts: is there what the manifests claim? Damaged if not."""
        for need in needs:
            check_claim(need.stored, self._node(need.node).chunks)

    def let_go(self) -> None:
        """Forget what was kept in memory."""
        self._values.clear()
        self._held.clear()
        self._held_bytes = 0

    @property
    def _last_path(self) -> str:
        return self.commit.manifests[-1].path

    def _chunk(self, node: int, number: int) -> Buffer:
        held = self._held.get((node, number))
        return held if held is not None else self._node(node).chunks.get(number).data

    def _node(self, number: int) -> _Node:
        if number not in self._nodes:
            ref = self.commit.manifests[number]
            manifest = load_manifest(self._repository.tier, ref, self.commit)
            if manifest.node != number or manifest.partial is UNSET:
                raise Damaged(ref.path, f"is of node {manifest.node} where that of node {number} must be")
            shards: dict[str, list[StoredPiece]] = {}
            others: dict[str, list[StoredPiece]] = {}
            for stored in manifest.pieces:
                if stored.piece.offsets is UNSET:
                    others.setdefault(_top(stored.piece.pointer), []).append(stored)
                else:
                    shards.setdefault(tensor_pointer(stored.piece), []).append(stored)
            self._nodes[number] = _Node(manifest, Chunks(self._repository.tier, manifest), shards, others)
        return self._nodes[number]


def _top(pointer: str) -> str:
    """Of a piece beneath `/state` its first two tokens, the value's name with them; of another one itself."""
    return "/".join(pointer.split("/", 3)[:3]) if pointer.startswith("/state/") else pointer


def _spans(need: Need) -> Iterator[tuple[int, int, int]]:
    """(chunk, start, end) of the bytes of those rows of a piece that a part needs, in order."""
    size = need.stored.size_bytes
    first, last = 0, size
    if need.place.shape:
        row = size // need.place.shape[0]
        first = (need.box.offsets[0] - need.place.offsets[0]) * row
        last = first + need.box.shape[0] * row
    at = 0
    for extent in need.stored.extents:
        start, end = max(first, at), min(last, at + extent.length)
        if start < end:
            yield extent.chunk, extent.offset + start - at, extent.offset + end - at
        at += extent.length


def _decoded(raw: Buffer, path: str, step: int, world_size: int) -> dict[str, TensorEntry | ValueEntry]:
    """The index by name, every claim in it checked. Raises Damaged."""
    try:
        index = msgspec.json.decode(raw, type=StateIndex)
    except BROKEN_INPUT as error:
        raise Damaged(path, f"the index has a field of the wrong type or out of bounds ({error})") from error
    if index.step != step:
        raise Damaged(path, f"the index is that of step {index.step}")
    found: dict[str, TensorEntry | ValueEntry] = {}
    for entry in index.entries:
        if entry.name in found:
            raise Damaged(path, f"the index names {entry.name!r} twice")
        found[entry.name] = entry
        if isinstance(entry, ValueEntry):
            if entry.node >= world_size:
                raise Damaged(path, f"the index says that node {entry.node} of {world_size} holds {entry.name!r}")
            continue
        if entry.dtype not in ITEM_BYTES or len(entry.shape) > 64 or any(n >= 1 << 62 for n in entry.shape):
            raise Damaged(path, f"the index gives {entry.name!r} a dtype or shape that no tensor has")
        for shard in entry.shards:
            box = Box(shard.offsets, shard.shape)
            if len(shard.offsets) == len(shard.shape) and box.volume and not 0 <= shard.node < world_size:
                raise Damaged(path, f"the index says that node {shard.node} of {world_size} holds a shard of {entry.name!r}")
            if len(shard.offsets) != len(entry.shape) or len(shard.shape) != len(entry.shape):
                raise Damaged(path, f"the index gives {entry.name!r} a shard of other dimensions")
        if reason := misfit(whole(entry.shape), (Box(shard.offsets, shard.shape) for shard in entry.shards)):
            raise Damaged(path, f"the index of tensor {entry.name!r}: {reason}")
    return found
