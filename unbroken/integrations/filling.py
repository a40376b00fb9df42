"""A verified checkpoint into the tensors and containers that torch's load planner names."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from unbroken.archive.sharded import Array, Need, Sharded, state_pointer
from unbroken.capture import tensors
from unbroken.capture.tree import rebuild
from unbroken.core.errors import Damaged
from unbroken.integrations.choosing import needs_of, region_of


def fill(sharded: Sharded, plan: LoadPlan, planner: LoadPlanner, *, cast: bool) -> None:
    """Read what the plan needs and put it where the planner says.

    ValueError before anything is changed for a tensor of another dtype (unless `cast`) or one that cannot be filled, TypeError for a
    planner that wants pickles. Damaged naming the file; some tensors may have been filled then. Memory: the rows wanted of one piece.
    """
    values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
    if values:
        _require_default(planner)
    targets = [(item, planner.resolve_tensor(item).detach()) for item in plan.items if item.type != LoadItemType.BYTE_IO]
    work: list[tuple[Need, ReadItem, torch.Tensor]] = []
    for item, target in targets:
        _require_fit(sharded, item, target, cast)
        work += [(need, item, target) for need in needs_of(sharded, item)]
    for need, item, target in sorted(work, key=lambda one: _place(one[0])):
        _copy(sharded.read(need), need, item, target)
    for item, target in targets:
        planner.commit_tensor(item, target)
    for item in values:
        name = item.storage_index.fqn
        _put(planner, item, rebuild(sharded.value(name), state_pointer(name)))


def _place(need: Need) -> tuple[int, int]:
    """Parts that share a chunk one after another."""
    return need.node, need.stored.extents[0].chunk if need.stored.extents else -1


def _copy(data: Array, need: Need, item: ReadItem, target: torch.Tensor) -> None:
    dtype = need.stored.piece.dtype
    try:
        source = tensors.read(dtype, need.box.shape, data.reshape(-1).data)
    except ValueError as error:
        raise Damaged(need.stored.piece.pointer, str(error)) from error
    place = need.box.slices(region_of(item))
    with torch.no_grad():
        (target[place] if place else target).copy_(source)


def _require_fit(sharded: Sharded, item: ReadItem, target: torch.Tensor, cast: bool) -> None:
    name, entry = item.dest_index.fqn, sharded.tensor(item.storage_index.fqn)
    if tuple(target.shape) != tuple(item.lengths):
        raise ValueError(f"{name}: the planner gives a tensor of {list(target.shape)} for {list(item.lengths)} elements")
    if target.dtype is not tensors.DTYPES[entry.dtype] and not cast:
        raise ValueError(
            f"{name}: stored as {entry.dtype}, wanted as {tensors.name_of(target.dtype)}: give StorageReader(..., cast=True) to convert"
        )
    if reason := tensors.unwritable(target):
        raise ValueError(f"{name} is {reason}")


def _require_default(planner: LoadPlanner) -> None:
    own = type(planner).load_bytes
    if not isinstance(planner, DefaultLoadPlanner) or own is not DefaultLoadPlanner.load_bytes:
        raise TypeError(
            f"{type(planner).__qualname__} has a load_bytes of its own, which expects a pickle, and there is none: use "
            "torch.distributed.checkpoint.DefaultLoadPlanner, or a class that inherits its load_bytes"
        )


def _put(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """As DefaultLoadPlanner.load_bytes does with what it has unpickled."""
    assert isinstance(planner, DefaultLoadPlanner)
    name = item.dest_index.fqn
    if not planner.flatten_state_dict:
        planner.state_dict[name] = value
        return
    *outer, last = planner.mappings[name]
    place: Any = planner.original_state_dict
    for key in outer:
        place = place[key]
    place[last] = value
