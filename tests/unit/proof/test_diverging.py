"""Where two histories part: first by samples, by losses, by roots; on surviving steps only, through branches too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.synthetic_run import SyntheticRun, interrupted, uninterrupted
from unbroken.archive.branching import make_branch
from unbroken.core.errors import Damaged
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.proof.diverging import part_ways
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier


def opened(tier: MemoryTier | DiskTier, lineage: str = "main") -> Repository:
    return Repository.open(tier, lineage)


def test_an_interrupted_run_parts_nowhere_from_an_uninterrupted_one() -> None:
    one, two = MemoryTier(), MemoryTier()
    uninterrupted(one)
    interrupted(two)
    found = part_ways(opened(one), opened(two), (12, 12))
    assert (found.steps, found.num_steps, found.samples, found.losses, found.roots) == (12, [12, 12], None, None, None)
    assert found.is_equal


def parted(**wrong: object) -> MemoryTier:
    """Twelve steps of which the seventh is wrong."""
    tier = MemoryTier()
    run = SyntheticRun(tier)
    run.begin()
    run.train(6)
    run.save()
    run.train(1, **wrong)  # type: ignore[arg-type]
    run.train(5)
    run.save()
    return tier


def test_the_first_step_of_each_kind_is_named() -> None:
    one = MemoryTier()
    uninterrupted(one)
    loss = part_ways(opened(one), opened(parted(loss="0" * 16)), (12, 12))
    assert (loss.samples, loss.losses, loss.roots) == (None, 7, None)
    samples = part_ways(opened(parted(units=("0" * 32,) * 4)), opened(one), (12, 12))
    assert (samples.samples, samples.losses, samples.roots) == (7, None, None)
    assert not samples.is_equal


def test_roots_are_compared_where_both_have_a_snapshot() -> None:
    one, two = MemoryTier(), MemoryTier()
    uninterrupted(one, every=2)
    run = SyntheticRun(two, piece_bytes=300)
    run.begin()
    run.train(3)
    run.save()
    run.train(1)
    run.save()
    assert part_ways(opened(one), opened(two), (12, 4)).roots == 4


def test_only_the_steps_asked_for_count() -> None:
    one = MemoryTier()
    uninterrupted(one)
    found = part_ways(opened(one), opened(parted(loss="0" * 16)), (6, 12))
    assert (found.steps, found.num_steps, found.is_equal) == (6, [6, 12], True)


def test_a_branch_has_the_history_of_its_parent_up_to_its_base(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    interrupted(tier)
    make_branch(opened(tier), tier, 9, "hot", {}, clock=SystemClock(), nonces=SystemNonces())
    found = part_ways(opened(tier), opened(tier, "hot"), (12, 9))
    assert (found.steps, found.num_steps, found.is_equal) == (9, [12, 9], True)


def test_I3_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    uninterrupted(tier)
    journal = tmp_path / paths.journal("main", 0)
    raw = bytearray(journal.read_bytes())
    raw[-300] ^= 1
    journal.write_bytes(raw)
    with pytest.raises(Damaged, match=r"00000000\.jsonl"):
        part_ways(opened(tier), opened(tier), (12, 12))
