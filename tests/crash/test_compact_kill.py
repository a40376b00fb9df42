"""SIGKILL of `compact` anywhere, two at once, and random histories: every checkpoint keeps its bits, in old files or new (I2, I3)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, killed_at
from tests.rigs.store_run import drifting, load, objects_of, opened, start, steps
from unbroken.archive.branching import list_lineages, make_branch
from unbroken.archive.compacting import Compaction, compact
from unbroken.core.errors import Fenced
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

PLACES = [
    "compact.opened",
    "store.create.before_fsync",
    "store.create.before_link",
    "store.create.after_link",
    "compact.copied",
    "store.write.after_manifest",
    "compact.before_commit",
    "store.log.before_create",
    "store.log.after_create",
    "compact.committed",
    "store.collect.after_prune",
    "store.collect.after_manifests",
    "store.delete",
]


def prepared(root: Path) -> DiskTier:
    """Three checkpoints that are left of six, as differences from those that are gone."""
    tier = DiskTier(str(root))
    trainer = start(tier, nonces=SystemNonces(), encoding=Encoding(max_depth=9))
    for step in range(1, 7):
        trainer.save(step, logical=drifting(step))
    trainer.collect(3)
    return tier


def run_compact(tier: DiskTier, lineage: str = "main") -> Compaction:
    return compact(tier, lineage, dry_run=False, clock=SystemClock(), nonces=SystemNonces())


def assert_same_bits(tier: DiskTier, lineage: str = "main", wanted: tuple[int, ...] = (4, 5, 6)) -> None:
    repository = Repository.open(tier, lineage)
    assert tuple(steps(tier, lineage)) == wanted
    for commit in repository.visible():
        assert load(repository, commit) == {part.piece.pointer: bytes(part.data) for part in drifting(commit.step)}
    report = repository.verify()
    assert report.ok, report.bad


def assert_completed(tier: DiskTier) -> None:
    """One more leaves what is needed and nothing else, and has nothing more to do after that; the next writer goes on from the newest."""
    run_compact(tier)
    assert_same_bits(tier)
    assert run_compact(tier).num_packs == 0
    repository = Repository.open(tier)
    trainer = start(tier, nonces=SystemNonces(), encoding=Encoding(max_depth=9))
    assert trainer.generation.base_step == 6
    trainer.save(7, logical=drifting(7))
    trainer.collect(4)
    assert_same_bits(tier, wanted=(4, 5, 6, 7))
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(repository, Repository.open(tier).visible())
    assert [path for path in Path(tier.root).rglob(".*") if ".tmp-" in path.name] == []


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_I2_I3_a_compacting_killed_at_a_named_place_is_completed_by_the_next(tmp_path: Path, place: str, nth: int) -> None:
    tier = prepared(tmp_path / "run")

    assert killed_at(place, nth, lambda: run_compact(tier)) or nth > 1, "every place is passed"
    assert_same_bits(tier)
    assert_completed(tier)


@pytest.mark.parametrize("seed", range(5))
def test_I2_I3_a_compacting_killed_at_any_moment_is_completed_by_the_next(tmp_path: Path, seed: int) -> None:
    tier = prepared(tmp_path / "run")

    def act(say: Callable[[str], None]) -> None:
        say("begins")
        run_compact(tier)

    _, status = in_child(act, kill_after_s=random.Random(seed).uniform(0.001, 0.08))
    assert status in (0, signal.SIGKILL)
    assert_same_bits(tier)
    assert_completed(tier)


def test_B12_two_at_once_one_does_it_and_none_harms(tmp_path: Path) -> None:
    tier = prepared(tmp_path / "run")
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                run_compact(tier)
                code = 0
            except Fenced:
                code = 4
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert 0 in codes and set(codes) <= {0, 4}, codes
    assert_same_bits(tier)
    assert_completed(tier)


@pytest.mark.parametrize("seed", [1, 3, 7, 9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 60))])
def test_I2_I3_whatever_the_history_every_checkpoint_of_every_lineage_keeps_its_bits(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    tier = DiskTier(str(tmp_path / "run"))
    lineages = ["main"]
    for turn in range(dice.randint(2, 5)):
        lineage = dice.choice(lineages)
        encoding = dice.choice([None, Encoding(max_depth=9), Encoding(max_depth=2)])
        trainer = start(tier, nonces=SystemNonces(), encoding=encoding, lineage=lineage)
        if turn and dice.random() < 0.3:  # back to an earlier one
            repository = Repository.open(tier, lineage, nonces=SystemNonces())
            trainer = opened(repository, dice.choice(repository.visible()), SystemNonces(), encoding=encoding)
        for _ in range(dice.randint(1, 6)):
            visible = trainer.repository.visible()
            step = (visible[-1].step if visible else 0) + dice.randint(1, 3)
            value = step if dice.random() < 0.8 else dice.randint(1, step)
            trainer.save(step, logical=drifting(value), milestone=dice.random() < 0.2)
        trainer.collect(dice.randint(1, 4))
        if dice.random() < 0.5:
            name, there = f"b{turn}", Repository.open(tier, lineage)
            make_branch(there, tier, dice.choice(steps(tier, lineage)), name, {}, clock=SystemClock(), nonces=SystemNonces())
            lineages.append(name)
    before = {name: contents(tier, name) for name in lineages}
    size = sum(tier.size(path) for path in (*tier.list("packs"), *tier.list("manifests")))
    for name in dice.sample(lineages, len(lineages)):
        foreseen = compact(tier, name, dry_run=True, clock=SystemClock(), nonces=SystemNonces())
        made = run_compact(tier, name)
        assert (made.steps, made.num_packs) == (foreseen.steps, foreseen.num_packs) or made.num_packs
        assert {one: contents(tier, one) for one in lineages} == before
    assert sum(tier.size(path) for path in (*tier.list("packs"), *tier.list("manifests"))) <= size
    assert [one.name for one in list_lineages(tier)] == ["main", *sorted(lineages[1:])]
    for name in lineages:
        assert Repository.open(tier, name).verify().ok
        start(tier, nonces=SystemNonces(), lineage=name).save(1000, logical=drifting(3))
        assert Repository.open(tier, name).verify().ok


def contents(tier: DiskTier, lineage: str) -> dict[int, dict[str, bytes]]:
    repository = Repository.open(tier, lineage)
    return {commit.step: load(repository, commit) for commit in repository.visible()}
