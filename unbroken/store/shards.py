"""Sharded states: what the manifests of all nodes must say together. Each holds boxes of tensors, and values that it alone has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from unbroken.codec.digest import state_root, text_digest
from unbroken.core.boxes import Box, misfit, whole
from unbroken.core.errors import Damaged
from unbroken.core.records import Manifest, Piece, StoredPiece

_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 62


def box_of(piece: Piece) -> Box | None:
    """Where a shard lies in its tensor; None for a piece that is no shard."""
    return None if piece.offsets is UNSET else Box(piece.offsets, piece.shape)


def global_shape(piece: Piece) -> tuple[int, ...]:
    """Shape of the tensor that a shard belongs to."""
    assert piece.global_shape is not UNSET, "no shard"
    return piece.global_shape


def tensor_pointer(piece: Piece) -> str:
    """Pointer of the tensor that a shard belongs to: all but the last token of its own."""
    return piece.pointer.rpartition("/")[0]


def shard_pointer(tensor: str, offsets: Sequence[int]) -> str:
    """Pointer of the shard that begins at `offsets`."""
    return f"{tensor}/{','.join(map(str, offsets))}"


def check_shard(stored: StoredPiece, path: str) -> None:
    """Raises Damaged for a shard that lies outside its tensor or is named otherwise."""
    piece = stored.piece
    if piece.offsets is UNSET and piece.global_shape is UNSET:
        return
    if piece.offsets is UNSET or piece.global_shape is UNSET or not len(piece.offsets) == len(piece.shape) == len(piece.global_shape):
        raise Damaged(path, f"shard {piece.pointer!r} has offsets, shape and global shape of different lengths")
    if len(piece.shape) > _MAX_DIMS or math.prod(max(n, 1) for n in piece.global_shape) > _MAX_ELEMENTS:
        raise Damaged(path, f"shard {piece.pointer!r} belongs to a tensor of a shape that none can have")
    if any(at + n > end for at, n, end in zip(piece.offsets, piece.shape, piece.global_shape, strict=True)):
        raise Damaged(path, f"shard {piece.pointer!r} at {list(piece.offsets)} leads outside {list(piece.global_shape)}")
    if piece.pointer != shard_pointer(tensor_pointer(piece), piece.offsets):
        raise Damaged(path, f"shard {piece.pointer!r} at {list(piece.offsets)} has the name of another one")


def check_partials(manifests: Sequence[Manifest], name: str) -> str:
    """The state root over the pieces of all nodes. Raises Damaged where two hold the same, or shards do not make up their tensor."""
    seen: set[str] = set()
    tensors: dict[str, list[Piece]] = {}
    for manifest in manifests:
        for stored in manifest.pieces:
            if stored.rank is not None:
                continue
            if stored.piece.pointer in seen:
                raise Damaged(name, f"piece {stored.piece.pointer!r} is there twice")
            seen.add(stored.piece.pointer)
            if stored.piece.offsets is not UNSET:
                tensors.setdefault(tensor_pointer(stored.piece), []).append(stored.piece)
    for pointer, shards in tensors.items():
        check_tensor(pointer, shards, name)
    return joined_root(manifests)


def check_tensor(pointer: str, shards: Sequence[Piece], name: str) -> None:
    """Raises Damaged unless these shards are all of one tensor."""
    first = shards[0]
    if any((one.dtype, one.global_shape) != (first.dtype, first.global_shape) for one in shards):
        raise Damaged(name, f"tensor {pointer!r} has shards of different tensors")
    if reason := misfit(whole(global_shape(first)), (Box(one.offsets, one.shape) for one in shards if one.offsets is not UNSET)):
        raise Damaged(name, f"tensor {pointer!r}: {reason}")


def merged(pieces: Iterable[StoredPiece]) -> list[StoredPiece]:
    """Each tensor whose shards are among these as one piece, for people: its digest is over those of the shards. Others as they are."""
    found: list[StoredPiece] = []
    tensors: dict[str, list[StoredPiece]] = {}
    for stored in pieces:
        if stored.piece.offsets is UNSET:
            found.append(stored)
        else:
            tensors.setdefault(tensor_pointer(stored.piece), []).append(stored)
    for pointer, shards in tensors.items():
        shape = global_shape(shards[0].piece)
        piece = replace(shards[0].piece, pointer=pointer, shape=shape, kind="tensor", global_shape=UNSET, offsets=UNSET)
        value = text_digest(*(text for one in sorted(shards, key=lambda s: s.piece.pointer) for text in (one.piece.pointer, one.digest)))
        found.append(StoredPiece(piece=piece, size_bytes=sum(one.size_bytes for one in shards), digest=value, extents=()))
    return found


def joined_root(manifests: Iterable[Manifest]) -> str:
    """State root over the logical pieces of all these manifests."""
    return state_root((stored.piece, stored.digest) for manifest in manifests for stored in manifest.pieces if stored.rank is None)
