"""torch's metadata through our index and back, and an index that lies: every claim is checked before it is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import unbroken
from tests.rigs.memory import at_most
from unbroken.archive import sharing
from unbroken.archive.sharded import _decoded
from unbroken.core.errors import Damaged
from unbroken.core.records import ShardRef, StateIndex, TensorEntry, ValueEntry
from unbroken.integrations.dcp import StorageReader, StorageWriter
from unbroken.integrations.metadata import index_of, metadata_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(shape: tuple[int, ...], *chunks: ChunkStorageMetadata, **properties: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(**properties), torch.Size(shape), list(chunks))


GOOD = Metadata(
    {
        "m.w": tensor(
            (5, 3), chunk((0, 0), (3, 3)), chunk((3, 0), (2, 3)), chunk((5, 0), (0, 3)), dtype=torch.bfloat16, requires_grad=True
        ),
        "m.s": tensor((), chunk((), ()), dtype=torch.float8_e5m2),
        "opt.0.lr": BytesStorageMetadata(),
        "free": tensor((2,), chunk((0,), (2,)), dtype=torch.bool, memory_format=torch.channels_last),
    },
    planner_data={"m.w": ("m", "w"), "m.s": ("m", "s"), "opt.0.lr": ("opt", 0, "lr")},
)
OWNERS = {
    MetadataIndex("m.w", (0, 0)): 0,
    MetadataIndex("m.w", (3, 0)): 1,
    MetadataIndex("m.s", ()): 1,
    MetadataIndex("opt.0.lr"): 0,
    MetadataIndex("free", (0,)): 1,
}


def test_metadata_comes_back_as_it_was() -> None:
    raw = msgspec.json.encode(index_of(30, GOOD, OWNERS))
    found = metadata_of(_decoded(raw, "p", 30, 2))
    assert found.state_dict_metadata == GOOD.state_dict_metadata and found.planner_data == GOOD.planner_data


@pytest.mark.parametrize(
    ("metadata", "owners", "kind", "reason"),
    [
        (GOOD, {}, ValueError, "m.w: the plan has a shard at .* that no rank has written"),
        (Metadata({"w": tensor((4,), chunk((0,), (2,)))}), {MetadataIndex("w", (0,)): 0}, ValueError, "w: 2 of 4 elements are in the plan"),
        (Metadata({}, planner_data=[1]), {}, TypeError, "planner data of type list"),
        (Metadata({}, planner_data={"w": object()}), {}, TypeError, "planner data of 'w' is object"),
    ],
)
def test_what_cannot_be_an_index_is_refused(metadata: Metadata, owners: Any, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        index_of(1, metadata, owners)


W = TensorEntry(name="w", path=("w",), dtype="float32", shape=(4,), shards=(ShardRef((0,), (4,), 0),))


def changed(**changes: Any) -> StateIndex:
    return StateIndex(step=7, entries=(msgspec.structs.replace(W, **changes),))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (changed(shards=(ShardRef((0,), (3,), 0),)), "missing: 3 of 4"),
        (changed(shards=(ShardRef((0,), (4,), 0), ShardRef((3,), (1,), 0))), "overlap"),
        (changed(shards=(ShardRef((2,), (4,), 0),)), "outside"),
        (changed(shards=(ShardRef((0,), (4,), 2),)), "node 2 of 2"),
        (changed(shards=(ShardRef((0,), (4,), -1),)), "node -1 of 2"),
        (changed(shards=(ShardRef((0, 0), (4, 1), 0),)), "other dimensions"),
        (changed(dtype="float33"), "a dtype or shape"),
        (changed(shape=(1 << 62,)), "out of bounds"),
        (changed(shape=(1,) * 65), "a dtype or shape"),
        (StateIndex(step=7, entries=(W, W)), "names 'w' twice"),
        (StateIndex(step=8, entries=(W,)), "that of step 8"),
        (StateIndex(step=7, entries=(ValueEntry(name="v", path=None, node=2),)), "node 2 of 2"),
        (b'{"step":7,"entries":[{"type":"tensor","name":1}]}', "wrong type"),
        (b'{"step":7,"entries":[{"type":"pickle"}]}', "wrong type"),
        (b'{"step":7,"entries":[{"type":"value","name":"v","path":[["a"]],"node":0}]}', "wrong type"),
        (b'{"step":7,"entries":[{"type":"value","name":"v","path":[],"node":-1}]}', "wrong type"),
        (b"[" * 100_000, "wrong type"),
        (b"\x80\x02cposix\nsystem\n.", "wrong type"),
    ],
)
def test_an_index_that_lies_is_refused(index: StateIndex | bytes, reason: str) -> None:
    raw = index if isinstance(index, bytes) else msgspec.json.encode(index)
    with pytest.raises(Damaged, match=reason), at_most(20 << 20):
        _decoded(raw, "p", 7, 2)


HUGE = (1 << 40,)
BELIED = [
    changed(shape=HUGE, shards=(ShardRef((0,), HUGE, 0),)),
    changed(dtype="int32"),
    changed(shape=(8,), shards=(ShardRef((0,), (8,), 0),)),
    changed(name="other"),
    changed(shape=(2, 2), shards=(ShardRef((0, 0), (2, 2), 0),)),
    StateIndex(step=7, entries=(ValueEntry(name="w", path=("w",), node=0),)),
]
MISPLACED = [
    StateIndex(step=7, entries=(W, ValueEntry(name="v", path=("w", "x"), node=0))),
    StateIndex(step=7, entries=(msgspec.structs.replace(W, path=("l", 1)),)),
]


def committed(index: StateIndex, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of w = [0, 1, 2, 3] with an index that was not compared with it."""
    monkeypatch.setattr(sharing, "check_shares", lambda index, manifests: None)
    monkeypatch.setattr("unbroken.integrations.dcp.index_of", lambda step, metadata, owners: index)
    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(folder, step=7))


@pytest.mark.parametrize("index", BELIED, ids=["huge", "dtype", "longer", "name", "shape", "value"])
def test_I3_a_committed_index_that_its_shards_belie_gives_nothing(
    tmp_path: Path, index: StateIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(index, tmp_path, monkeypatch)
    entry = index.entries[0]
    shape = entry.shape if isinstance(entry, TensorEntry) and entry.shape != HUGE else (4,)
    dtype = torch.int32 if isinstance(entry, TensorEntry) and entry.dtype == "int32" else torch.float32
    wanted = {entry.name: torch.full(shape, -1, dtype=dtype)}
    with pytest.raises(CheckpointException):
        dcp.load(wanted, storage_reader=StorageReader(tmp_path, 7))
    assert bool((wanted[entry.name] == -1).all())
    with at_most(20 << 20), pytest.raises(Damaged):
        unbroken.open(tmp_path).load(7)


@pytest.mark.parametrize("index", MISPLACED, ids=["beneath a tensor", "a list without a beginning"])
def test_I3_an_index_that_nests_values_where_they_cannot_be_is_damage(
    tmp_path: Path, index: StateIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(index, tmp_path, monkeypatch)
    with pytest.raises(Damaged, match=r"beneath a value|leaves items of the list"):
        unbroken.open(tmp_path).load(7)


def test_the_leader_refuses_shares_that_belie_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying = changed(shape=(8,), shards=(ShardRef((0,), (8,), 0),))
    monkeypatch.setattr("unbroken.integrations.dcp.index_of", lambda step, metadata, owners: lying)
    with pytest.raises(CheckpointException, match="with another dtype or shape than planned"):
        dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path, step=7))
    assert unbroken.open(tmp_path).steps() == []
