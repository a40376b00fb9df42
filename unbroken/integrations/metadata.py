"""torch's metadata of a checkpoint as our index, and back: JSON of known fields in place of a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken.capture import tensors
from unbroken.core.records import ShardRef, StateIndex, TensorEntry, ValueEntry

Owners = Mapping[MetadataIndex, int]
"""Which node has written what."""

_LAYOUTS = {"strided": torch.strided}
_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")}
NOBODY = -1


def index_of(step: int, metadata: Metadata, owners: Owners) -> StateIndex:
    """The index of what has been written for a step. TypeError for planner data that is no path, ValueError for shards that are missing."""
    paths = _paths(metadata.planner_data)
    entries: list[TensorEntry | ValueEntry] = []
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            entries.append(_tensor_entry(name, found, paths.get(name), owners))
        else:
            entries.append(ValueEntry(name=name, path=paths.get(name), node=_owner(owners, MetadataIndex(name), name)))
    return StateIndex(step=step, entries=tuple(entries))


def metadata_of(entries: Mapping[str, TensorEntry | ValueEntry]) -> Metadata:
    """What torch's planners expect, from a checked index."""
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        found[name] = BytesStorageMetadata() if isinstance(entry, ValueEntry) else _tensor_metadata(entry)
    return Metadata(found, planner_data={name: entry.path for name, entry in entries.items() if entry.path is not None})


def _tensor_entry(name: str, found: TensorStorageMetadata, path: tuple[str | int, ...] | None, owners: Owners) -> TensorEntry:
    shape = tuple(found.size)
    shards = []
    for chunk in found.chunks:
        is_empty = 0 in chunk.sizes
        node = NOBODY if is_empty else _owner(owners, MetadataIndex(name, chunk.offsets), name)
        shards.append(ShardRef(tuple(chunk.offsets), tuple(chunk.sizes), node))
    held = sum(torch.Size(shard.shape).numel() for shard in shards)
    if held != torch.Size(shape).numel():
        raise ValueError(
            f"{name}: {held} of {torch.Size(shape).numel()} elements are in the plan: all ranks of the tensor's mesh must save together"
        )
    return TensorEntry(
        name=name,
        path=path,
        dtype=tensors.name_of(found.properties.dtype),
        shape=shape,
        shards=tuple(shards),
        layout=str(found.properties.layout).removeprefix("torch."),
        memory_format=str(found.properties.memory_format).removeprefix("torch."),
        requires_grad=found.properties.requires_grad,
        pin_memory=found.properties.pin_memory,
    )


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    properties = TensorProperties(
        dtype=tensors.DTYPES[entry.dtype],
        layout=_LAYOUTS.get(entry.layout, torch.strided),
        requires_grad=entry.requires_grad,
        memory_format=_FORMATS.get(entry.memory_format, torch.contiguous_format),
        pin_memory=entry.pin_memory,
    )
    chunks = [ChunkStorageMetadata(offsets=torch.Size(one.offsets), sizes=torch.Size(one.shape)) for one in entry.shards]
    return TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=chunks)


def _owner(owners: Owners, index: MetadataIndex, name: str) -> int:
    if index not in owners:
        place = "" if index.offset is None else f" at {list(index.offset)}"
        raise ValueError(f"{name}: the plan has a shard{place} that no rank has written")
    return owners[index]


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Where each value lies in the nested state, as torch's own planners say it; {} where they do not."""
    if planner_data is None:
        return {}
    if not isinstance(planner_data, Mapping):
        raise TypeError(f"planner data of type {type(planner_data).__qualname__} cannot be stored: only paths by name can")
    found: dict[str, tuple[str | int, ...]] = {}
    for name, path in planner_data.items():
        if not isinstance(path, tuple | list) or not path or not all(type(key) in (str, int) for key in path):
            raise TypeError(f"planner data of {name!r} is {type(path).__qualname__}, not a path of keys and indices: it cannot be stored")
        found[name] = tuple(path)
    return found
