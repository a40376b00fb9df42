"""B40: memory does not grow with saves, loading needs the state once, many small tensors cost what they should."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unbroken
from tests.rigs.growth import assert_grows
from tests.rigs.store_run import WRITER, StillClock, part, start
from unbroken.core.messages import Plan
from unbroken.core.records import ManifestRef
from unbroken.recover.sources import from_disk
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier

MIB = 1 << 20
CHECKOUT = Path(__file__).parents[2]

PRELUDE = """
import resource, sys, torch, unbroken
folder = sys.argv[1]
MIB = 1 << 20
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return rss()
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
"""


def in_child(code: str, folder: Path) -> list[int]:
    """The numbers that a fresh process prints."""
    command = [sys.executable, "-c", PRELUDE + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_B40_a_memory_does_not_grow_with_saves_and_one_copy_is_all_it_takes(tmp_path: Path, wait: bool) -> None:
    """64 MiB, thirty saves; between two asynchronous ones the first is written, as in a training."""
    code = f"""
state = {{"w": torch.zeros(16 * MIB)}}
before = forget_peak()
store = unbroken.Store(folder, keep=1)
seen = []
for step in range(30):
    state["w"] += 1
    store.save(step, state, wait={wait})
    store._background.join(60)
    seen.append(rss())
store.close()
print(seen[4] - before, seen[29] - seen[4], peak() - before)
"""
    first, growth, most = in_child(code, tmp_path)
    assert growth < 32 * MIB
    assert first < 1.1 * 64 * MIB + 32 * MIB
    assert most < 1.1 * 64 * MIB + 32 * MIB, "one copy of the state, and what writing needs"


def test_B40_a_two_saves_in_flight_are_two_copies_and_no_more(tmp_path: Path) -> None:
    code = """
state = {"w": torch.zeros(16 * MIB)}
before = forget_peak()
store = unbroken.Store(folder, keep=1)
for step in range(20):
    state["w"] += 1
    store.save(step, state)
store.close()
print(peak() - before)
"""
    (most,) = in_child(code, tmp_path)
    assert most < 2.1 * 64 * MIB + 32 * MIB


@pytest.mark.parametrize("kind", ["dict", "one", "anew"])
def test_B40_b_loading_needs_the_state_once(tmp_path: Path, kind: str) -> None:
    """Peak above the imported library: the state, its largest tensor and 32 MiB; in place, the target is the state."""
    num, each = (1, 64) if kind == "one" else (8, 8)
    state = {f"w{i}": torch.full((each * MIB // 4,), float(i + 1)) for i in range(num)}
    with unbroken.Store(tmp_path) as store:
        store.save(1, state)
    into = "" if kind == "anew" else f"into={{f'w{{i}}': torch.zeros({each} * MIB // 4) for i in range({num})}}"
    code = f"""
import unbroken.capture.tree, unbroken.store.repository, numpy
torch.zeros(1).add_(1)
store = unbroken.Store(folder)
store.latest()
before = forget_peak()
target = dict({into})
report = store.load({"into=target['into']" if into else ""})
state = target["into"] if target else report
assert all(bool((state[f"w{{i}}"] == i + 1).all()) for i in range({num}))
print(peak() - before)
"""
    (most,) = in_child(code, tmp_path)
    comparing = each * MIB // 4  # `==` above makes a tensor of booleans
    assert most < 64 * MIB + each * MIB + 32 * MIB + comparing


def test_B40_c_twenty_thousand_small_tensors(tmp_path: Path) -> None:
    """Save and load; twice as many may cost three times as much, and few files."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def save_and_load(num: int) -> None:
        state, folder = {f"layer.{i}.weight": torch.full((4,), float(i)) for i in range(num)}, next(folders)
        with unbroken.Store(folder) as store:
            store.save(1, state)
        back = unbroken.Store(folder).load()
        assert len(back) == num
        assert torch.equal(back[f"layer.{num - 1}.weight"], torch.full((4,), float(num - 1)))
        assert sum(path.is_file() for path in folder.rglob("*")) <= 100

    assert_grows(save_and_load, 10_000, 20_000, at_most=3)


def test_B40_d_a_checkpoint_of_many_ranks_is_planned_in_linear_time() -> None:
    """256 pieces of 64, then of 128 ranks: laid out, checked, committed, read back and chosen from."""

    def commit_and_choose(num_ranks: int) -> None:
        tier = MemoryTier()
        trainer = start(tier, world_size=num_ranks)
        per_rank = {rank: [part(f"/rank/{i:03d}", bytes([rank, i]) * 8, scope="rank") for i in range(256)] for rank in range(num_ranks)}
        g = trainer.generation
        written = trainer.repository.write(
            step=1, generation=g.number, nonce=g.nonce, node=0, world_size=num_ranks, logical=[], per_rank=per_rank
        )
        trainer.repository.commit(manifests=[written], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=StillClock())
        reader = Repository.open(tier)
        (manifest,) = reader.manifests(reader.visible()[-1])
        assert len(manifest.pieces) == 256 * num_ranks

    assert_grows(commit_and_choose, 64, 128, at_most=2.5)


def test_B40_e_a_rank_reads_what_is_its_own_and_not_what_is_another_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of 8 MiB each, nothing in common: each reads a quarter of the bytes. (What all have in common, each reads.)"""
    tier = DiskTier(str(tmp_path))
    trainer = start(tier, world_size=4)
    per_rank = {rank: [part("/own", bytes([rank]) * (8 * MIB), scope="rank")] for rank in range(4)}
    g = trainer.generation
    written = trainer.repository.write(
        step=1, generation=g.number, nonce=g.nonce, node=0, world_size=4, logical=[part("/step", b"1", dtype="py:int")], per_rank=per_rank
    )
    commit = trainer.repository.commit(
        manifests=[written], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=StillClock()
    )
    refs: tuple[ManifestRef, ...] = commit.manifests
    plan = Plan(generation=1, step=1, source="disk", stored_generation=0, manifests=refs, stored_world_size=4)
    read = 0
    whole = DiskTier.read

    def counted(self: DiskTier, path: str, offset: int = 0, length: int | None = None) -> bytes:
        nonlocal read
        data = whole(self, path, offset, length)
        read += len(data) if path.startswith("packs/") else 0
        return data

    monkeypatch.setattr(DiskTier, "read", counted)
    for rank in range(4):
        read = 0
        loaded = from_disk(tier, plan, rank)
        assert bytes(loaded.pieces["/own"][1])[:2] == bytes([rank, rank])
        assert read <= 1.2 * 8 * MIB
