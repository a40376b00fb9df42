"""The bytes behind a plan, from memory and from disk: what each rank gets, and damage by the name of its object (I3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from tests.rigs.daemon_end import DaemonEnd
from tests.rigs.stack_run import StackRun, items_of, plan_for
from tests.rigs.step_rank import raw, stack_of
from unbroken.capture.freeze import freeze, needed_bytes, plan_slot
from unbroken.capture.stack import Stack
from unbroken.core.errors import Damaged, UnbrokenError
from unbroken.core.messages import Error, Plan, SlotSource
from unbroken.core.records import CommitEntry
from unbroken.recover.sources import from_disk, from_memory, require_sound
from unbroken.store.tiers.disk import DiskTier

WORLD = 3


@pytest.fixture(scope="module")
def stack() -> Stack:
    torch.manual_seed(0)
    return stack_of(nn.Linear(30, 30))


def expected(stack: Stack, step: int, rank: int) -> dict[str, bytes]:
    return {item.piece.pointer: raw(item) for item in items_of(stack, step, rank)}


# -- memory --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(stack: Stack) -> Iterator[DaemonEnd]:
    """Holds a cut of step 5 on three ranks."""
    made = DaemonEnd()
    for rank in range(WORLD):
        items = items_of(stack, 5, rank)
        index = plan_slot(items, generation=2, step=5, rank=rank, world_size=WORLD, milestone=False)
        freeze(made.table.need(rank, needed_bytes(index), 1)[0], index, items)
    yield made
    made.close()


def memory_plan(daemon: DaemonEnd, step: int = 5, generation: int = 2) -> Plan:
    (cut,) = daemon.table.cuts()
    return Plan(generation=3, step=step, source="memory", stored_generation=generation, slots=cut.slots, stored_world_size=WORLD)


def test_B38_a_poisoned_slot_that_nobody_has_looked_at_is_no_source(daemon: DaemonEnd, stack: Stack) -> None:
    plan = memory_plan(daemon)
    loaded = from_memory(daemon.link, plan, 1)
    require_sound(loaded, plan, 1)
    piece, data = loaded.pieces["/model/parameters/weight"]
    loaded.pieces["/model/parameters/weight"] = (piece, bytes(data[:-4]) + b"\0\0\xc0\x7f")
    with pytest.raises(Damaged, match="memory slot of rank 1: the state of step 5 in it is poisoned: /model/parameters/weight holds NaN"):
        require_sound(loaded, plan, 1)
    require_sound(loaded, msgspec.structs.replace(plan, state_root="00"), 1)  # a checkpoint: the daemon has looked at it
    loaded.close()


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_finds_its_own_slot(daemon: DaemonEnd, stack: Stack, rank: int) -> None:
    loaded = from_memory(daemon.link, memory_plan(daemon), rank)
    assert loaded.own
    assert {pointer: bytes(data) for pointer, (_, data) in loaded.pieces.items()} == expected(stack, 5, rank)
    loaded.close()
    assert loaded.pieces == {}


def test_a_rank_that_was_not_there_gets_what_is_common_and_compares_itself_with_rank_0(daemon: DaemonEnd, stack: Stack) -> None:
    loaded = from_memory(daemon.link, memory_plan(daemon), 3)
    assert not loaded.own
    wanted = {item.piece.pointer for item in items_of(stack, 5, 0) if item.piece.scope == "logical" or item.piece.role == "compared"}
    assert loaded.pieces.keys() == wanted
    assert bytes(loaded.pieces["/environment/host"][1]) == b"host0"
    assert not any(pointer.startswith(("/rng", "/loader")) for pointer in loaded.pieces), "another rank's streams are not ours"
    loaded.close()


@pytest.mark.parametrize(("step", "generation"), [(6, 2), (5, 1)])
def test_I5_a_slot_that_holds_another_snapshot_is_damage_not_a_source(daemon: DaemonEnd, step: int, generation: int) -> None:
    with pytest.raises(Damaged, match=r"slot \d of rank 1: holds step 5"):
        from_memory(daemon.link, memory_plan(daemon, step, generation), 1)


def test_I3_a_slot_whose_index_is_damaged_is_named_and_nothing_stays_open(daemon: DaemonEnd) -> None:
    plan = memory_plan(daemon)
    (slot,) = daemon.table.find(plan.slots[1:2])
    os.pwrite(slot.fd, b"\xff", 4096 + 20)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Damaged, match="rank 1, generation 2, step 5: index does not match its digest"):
        from_memory(daemon.link, plan, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slot_that_is_gone_is_said_by_the_daemon() -> None:
    daemon = DaemonEnd()
    daemon._slots = lambda message: [Error(kind="UnbrokenError", text="slot 0 of rank 0 does not exist", code=1)]  # type: ignore[method-assign]
    plan = Plan(generation=1, step=5, source="memory", slots=(SlotSource(rank=0, slot=0),))
    with pytest.raises(UnbrokenError, match="does not exist"):
        from_memory(daemon.link, plan, 0)
    daemon.close()


# -- disk ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, stack: Stack) -> tuple[DiskTier, CommitEntry]:
    """A checkpoint of step 3 on three ranks."""
    tier = DiskTier(str(tmp_path / "run"))
    run = StackRun(tier, stack)
    run.begin(world_size=WORLD)
    run.train(3)
    return tier, run.save()


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_reads_its_own_pieces_and_the_common_ones(stored: tuple[DiskTier, CommitEntry], stack: Stack, rank: int) -> None:
    tier, commit = stored
    loaded = from_disk(tier, plan_for(commit), rank)
    assert loaded.own
    assert {pointer: bytes(data) for pointer, (_, data) in loaded.pieces.items()} == expected(stack, 3, rank)


def test_a_rank_that_no_checkpoint_knows_reads_rank_0s_facts_only_to_compare_them(stored: tuple[DiskTier, CommitEntry]) -> None:
    tier, commit = stored
    loaded = from_disk(tier, plan_for(commit), 7)
    assert not loaded.own
    assert bytes(loaded.pieces["/environment/host"][1]) == b"host0"
    assert "/model/parameters/weight" in loaded.pieces
    assert not any(pointer.startswith(("/rng", "/loader")) for pointer in loaded.pieces)


def test_I3_a_changed_byte_is_damage_by_the_name_of_its_pack(stored: tuple[DiskTier, CommitEntry]) -> None:
    tier, commit = stored
    (pack,) = sorted((Path(tier.root) / "packs").rglob("*.pack"))
    changed = bytearray(pack.read_bytes())
    changed[4096 + 10] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(changed)
    with pytest.raises(Damaged) as caught:
        from_disk(tier, plan_for(commit), 0)
    assert caught.value.path == str(pack.relative_to(tier.root))


@pytest.mark.parametrize("missing", ["step", "generation"])
def test_I1_a_commit_that_is_not_visible_is_no_source(stored: tuple[DiskTier, CommitEntry], missing: str) -> None:
    tier, commit = stored
    plan = plan_for(commit)
    wrong = {"step": 2} if missing == "step" else {"stored_generation": 4}
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__} | wrong
    with pytest.raises(Damaged, match=r"^log: the commit of step \d, generation \d, is not visible"):
        from_disk(tier, Plan(**fields), 0)
