"""What torch's planner wants written, as parts of a store: tensors cut into tiles, everything else as a typed tree.

A large shard is cut along its second dimension into up to TILES pieces: each lies in one row of chunks, so that a rank of a mesh that is
sharded along that dimension need not read, and verify, the rest of every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from unbroken.archive.sharded import state_pointer
from unbroken.capture import tensors
from unbroken.capture.tree import flatten, write_item
from unbroken.core.boxes import Box
from unbroken.core.limits import MAX_POINTER_CHARS
from unbroken.core.records import Piece
from unbroken.store.layout import AnyPart, LatePart, Part
from unbroken.store.shards import shard_pointer

TILES = 8
"""Pieces along the second dimension: exact for tensor parallelism of 2, 4 and 8, at most an eighth too much elsewhere."""

_MIN_TILE_BYTES = 256 << 10
"""Smaller tiles would cost more metadata than they save reading."""


def parts_of(plan: SavePlan, planner: SavePlanner) -> list[AnyPart]:
    """The parts of one rank's plan; tensors are referenced, and copied when their turn has come.

    TypeError names what cannot be stored, ValueError what the plan says wrongly; nothing has been written then.
    """
    found: list[AnyPart] = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            found += _value_parts(item.index.fqn, _looked_up(planner, item))
        else:
            found += _tensor_parts(item, planner.resolve_data(item))
    return found


def _looked_up(planner: SavePlanner, item: WriteItem) -> Any:
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise TypeError(f"{type(planner).__qualname__} has no lookup_object(index), and its pickled bytes are not stored: derive it from "
                        "torch.distributed.checkpoint.DefaultSavePlanner")  # fmt: skip
    return look_up(item.index)


def _value_parts(name: str, value: Any) -> Iterator[Part]:
    try:
        items = flatten(value, state_pointer(name))
    except TypeError as error:
        raise TypeError(str(error).replace(f'state["{name}"]', name).replace(f"state.{name}", name)) from None
    for item in items:
        if isinstance(item.data, bytes):
            yield Part(item.piece, memoryview(item.data))
        else:
            data = bytearray(item.nbytes)
            write_item(item, memoryview(data))
            yield Part(item.piece, memoryview(data))


def _tensor_parts(item: WriteItem, value: Any) -> Iterator[AnyPart]:
    name, about = item.index.fqn, item.tensor_data
    if not isinstance(value, torch.Tensor) or about is None or about.chunk is None:
        raise TypeError(f"{name}: the planner gives {type(value).__qualname__} where a tensor with its place belongs")
    if reason := tensors.refusal(value):
        raise TypeError(f"{name}: cannot store {reason}")
    box, shape = Box(tuple(about.chunk.offsets), tuple(about.chunk.sizes)), tuple(about.size)
    if tuple(value.shape) != box.shape:
        raise ValueError(f"{name}: the planner says a shard of {list(box.shape)}, and gives a tensor of {list(value.shape)}")
    if not box.volume and 0 not in shape:
        return
    pointer = state_pointer(name)
    if len(pointer) + 24 * len(shape) > MAX_POINTER_CHARS:
        raise TypeError(f"{name[:200]}: a name of more than {MAX_POINTER_CHARS} characters")
    tensor = value.detach()
    for tile in _tiles(box, tensor.element_size()):
        piece = Piece(
            pointer=shard_pointer(pointer, tile.offsets),
            dtype=tensors.name_of(tensor.dtype),
            shape=tile.shape,
            kind="shard",
            global_shape=shape,
            offsets=tile.offsets,
        )
        yield LatePart(piece, tile.volume * tensor.element_size(), _Reader(tensor, tile.slices(box)))


class _Reader:
    """The bytes of a tile, when they are asked for."""

    def __init__(self, tensor: torch.Tensor, place: Sequence[slice]) -> None:
        self._tensor = tensor
        self._place = tuple(place)

    def __call__(self) -> memoryview:
        """Without a copy where the tile lies in one row on the CPU."""
        tile = self._tensor[self._place] if self._place else self._tensor
        tile = tile.resolve_conj().resolve_neg().contiguous().cpu()
        return tile.reshape(-1).view(torch.uint8).numpy().data


def _tiles(box: Box, item_bytes: int) -> Iterator[Box]:
    """The box, cut along its second dimension where its parts are then large enough."""
    num = min(TILES, box.volume * item_bytes // _MIN_TILE_BYTES, box.shape[1] if len(box.shape) > 1 else 1)
    if num < 2:
        yield box
        return
    width = box.shape[1]
    for start, end in itertools.pairwise(i * width // num for i in range(num + 1)):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[1], shape[1] = box.offsets[1] + start, end - start
        yield Box(tuple(offsets), tuple(shape))
