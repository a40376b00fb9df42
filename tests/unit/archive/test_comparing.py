"""Differences between checkpoints: every kind is told, equal pieces are not read, memory is a few chunks."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.odd_tensors import MAKERS
from unbroken.archive.comparing import Difference
from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.limits import CHUNK_BYTES
from unbroken.store.tiers.disk import DiskTier

MIB = 1 << 20


def saved(folder: Path, *states: Any) -> Path:
    """A Store's folder with these states as steps 1, 2, ..."""
    with unbroken.Store(folder, keep=100) as store:
        for step, state in enumerate(states, start=1):
            store.save(step, state)
    return folder


def diff(folder: Path, a: int = 1, b: int = 2) -> list[Difference]:
    archive = unbroken.open(folder)
    return archive.diff(archive, a, b).differences


@pytest.mark.parametrize("name", MAKERS)
def test_B16_an_odd_tensor_equals_itself(tmp_path: Path, name: str) -> None:
    one, two = saved(tmp_path / "a", {"x": MAKERS[name]()}), saved(tmp_path / "b", {"x": MAKERS[name]()})
    found = unbroken.open(one).diff(two)
    assert (found.equal, found.state_equal, found.differences) == (True, True, [])


def test_each_kind_of_difference_is_told(tmp_path: Path) -> None:
    before = {
        "gone": torch.ones(2),
        "retyped": torch.ones(2, 3),
        "reshaped": torch.ones(2, 3),
        "scalar": 3,
        "text": "a",
        "same": torch.ones(5),
        "value": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "list": [1, 2],
        "array": np.arange(3),
    }
    after = before | {
        "new": torch.ones(1),
        "retyped": torch.ones(2, 3, dtype=torch.float64),
        "reshaped": torch.ones(3, 2),
        "scalar": 4,
        "text": "b",
        "value": torch.tensor([[1.0, 2.5], [3.0, 2.0]]),
        "list": [1, 2, 3],
        "array": np.array([0, 1, 9]),
    }
    del after["gone"]
    found = {one.name: one for one in diff(saved(tmp_path, before, after))}
    told = {name: (one.what, one.before, one.after) for name, one in found.items()}
    assert told == {
        "/array": ("value", "np.array:int64[3]", "np.array:int64[3]"),
        "/gone": ("removed", "float32[2]", ""),
        "/list/2": ("added", "", "py:int"),
        "/new": ("added", "", "float32[1]"),
        "/reshaped": ("type", "float32[2, 3]", "float32[3, 2]"),
        "/retyped": ("type", "float32[2, 3]", "float64[2, 3]"),
        "/scalar": ("value", "3", "4"),
        "/text": ("value", "'a'", "'b'"),
        "/value": ("value", "float32[2, 2]", "float32[2, 2]"),
    }
    value = found["/value"]
    assert (value.num_differing, value.num_elements, value.max_abs, value.first, value.role) == (2, 4, 2.0, [0, 1], "restored")
    assert found["/array"].max_abs == 7


def test_keys_in_another_order_are_a_difference(tmp_path: Path) -> None:
    (one,) = diff(saved(tmp_path, {"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert (one.name, one.what, one.before, one.after) == ("", "value", '["a","b"]', '["b","a"]')


class Counted:
    """What is read of a folder's packs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        whole = DiskTier.read

        def read(tier: DiskTier, path: str, offset: int = 0, length: int | None = None) -> bytes:
            data = whole(tier, path, offset, length)
            if path.startswith("packs/"):
                self.ranges.append((path, offset, len(data)))
            return data

        monkeypatch.setattr(DiskTier, "read", read)

    @property
    def num_bytes(self) -> int:
        return sum(size for *_, size in self.ranges)


def test_equal_pieces_are_not_read_and_of_unequal_ones_only_the_chunks_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.arange(6 * MIB, dtype=torch.float32)  # 24 MiB: 6 chunks
    changed = big.clone()
    changed[5 * MIB + 7] += 1
    saved(tmp_path, {"same": big, "x": big + 1}, {"same": big, "x": changed + 1}, {"same": big, "x": big + 1})
    read = Counted(monkeypatch)
    (one,) = diff(tmp_path)
    assert (one.name, one.num_differing, one.first) == ("/x", 1, [5 * MIB + 7])
    assert read.num_bytes == 2 * CHUNK_BYTES
    read.ranges.clear()
    assert diff(tmp_path, 1, 3) == []
    assert read.ranges == []


@pytest.mark.parametrize("cuts", [[1], [3, 5, 7], [2, 4, 1, 9], list(range(1, 11))])
def test_elements_that_lie_across_extents_are_compared_whole(cuts: list[int]) -> None:
    """Another writer may cut a piece anywhere, on each side elsewhere."""
    from unbroken.archive import comparing
    from unbroken.codec.digest import digest
    from unbroken.core.records import ChunkRef, Extent, Manifest, Piece, StoredPiece
    from unbroken.store.packs import Read

    a = np.arange(5, dtype=np.float32)
    b = a.copy()
    b[3] = 9.0

    class InMemory:
        def __init__(self, chunks: list[bytes]) -> None:
            self.chunks = chunks

        def get(self, number: int) -> Read:
            return Read(self.chunks[number], [])

    def side(raw: bytes, cuts: Iterable[int]) -> Any:
        edges = [0, *cuts, len(raw)]
        chunks = [raw[i:j] for i, j in itertools.pairwise(edges)]
        refs = tuple(
            ChunkRef(id=digest(c), pack="packs/00/" + "0" * 32 + ".pack", offset=4096, stored_bytes=1, raw_bytes=1) for c in chunks
        )
        extents = tuple(Extent(i, 0, len(c)) for i, c in enumerate(chunks))
        piece = Piece(pointer="/x", dtype="float32", shape=(5,))
        stored = StoredPiece(piece=piece, size_bytes=len(raw), digest=digest(raw), extents=extents)
        manifest = Manifest(
            step=1,
            generation=0,
            nonce="",
            node=0,
            world_size=1,
            ranks=(),
            state_root="0" * 64,
            rank_roots=(),
            chunks=refs,
            pieces=(stored,),
        )
        return comparing._Side(stored, manifest, InMemory(chunks))  # type: ignore[arg-type]

    edges = sorted(np.cumsum(cuts)) if sum(cuts) < 20 else cuts
    blocks = list(comparing._blocks(side(a.tobytes(), edges), side(b.tobytes(), [8, 13]), 4))
    assert all(len(x) == len(y) and len(x) % 4 == 0 for _, x, y in blocks)
    differing = [offset // 4 + i for offset, x, y in blocks for i in range(len(x) // 4) if x[4 * i : 4 * i + 4] != y[4 * i : 4 * i + 4]]
    assert differing == [3]


def test_B40_memory_does_not_grow_with_the_piece(tmp_path: Path) -> None:
    """192 MiB on each side, of which every chunk differs."""
    big = torch.zeros(48 * MIB)
    saved(tmp_path, {"x": big}, {"x": big + torch.arange(48 * MIB)})
    code = f"""
import resource, unbroken
archive = unbroken.open({str(tmp_path)!r})
archive.diff(archive, 1, 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(one,) = archive.diff(archive, 1, 2).differences
assert one.num_differing == {48 * MIB} - 1, one
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
import sys; assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) * 1024 < 150 * MIB


def test_I3_damage_is_named_and_not_compared(tmp_path: Path) -> None:
    saved(tmp_path, {"x": torch.zeros(MIB)}, {"x": torch.ones(MIB)})
    pack = max(tmp_path.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    raw = bytearray(pack.read_bytes())
    raw[5000] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(Damaged, match=r"packs/.*\.pack: chunk at 4096 does not match"):
        diff(tmp_path)


def test_without_steps_the_newest_that_both_hold_are_compared(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "a", 1, 2, 3), saved(tmp_path / "b", 1, 7)
    found = unbroken.open(one).diff(two)
    assert (found.steps, [d.after for d in found.differences]) == ([2, 2], ["7"])
    assert unbroken.open(one).diff(two, 3).steps == [3, 2]
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 9"):
        unbroken.open(one).diff(two, None, 9)
