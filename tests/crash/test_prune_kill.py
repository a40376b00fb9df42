"""SIGKILL of `prune` anywhere, and two of them at once: what the rules keep is whole, and the next one completes it (I2)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, killed_at
from tests.rigs.store_run import load, objects_of, start, steps, whole_value
from unbroken.archive.pruning import prune
from unbroken.archive.reading import newest_good
from unbroken.core.errors import Fenced
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.core.records import Keep
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

PLACES = [
    "store.log.before_create",
    "store.create.before_fsync",
    "store.create.before_link",
    "store.create.after_link",
    "store.log.after_create",
    "prune.opened",
    "store.collect.after_prune",
    "store.collect.after_manifests",
    "store.delete",
]
FLOATS = 20_000


def prepared(root: Path, encoding: Encoding | None = None) -> DiskTier:
    """Six checkpoints, a milestone among them, and what a dead writer left."""
    tier = DiskTier(str(root))
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS, encoding=encoding)
    for step in range(1, 7):
        trainer.save(step, milestone=step == 2)
    trainer.write(7)
    return tier


def run_prune(tier: DiskTier, newest: int = 1) -> None:
    prune(tier, "main", Keep(newest=newest), dry_run=False, clock=SystemClock(), nonces=SystemNonces())


def assert_whole(tier: DiskTier) -> list[int]:
    repository = Repository.open(tier)
    values = [whole_value(load(repository, commit)) for commit in repository.visible()]
    assert values == steps(tier)
    assert {2, 6} <= set(values)
    report = repository.verify()
    assert report.ok, report.bad
    return values


def assert_completed(tier: DiskTier) -> None:
    """One more pruning leaves what the rules keep and nothing else; the next writer goes on from the newest."""
    run_prune(tier)
    assert assert_whole(tier) == [2, 6]
    repository = Repository.open(tier)
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(repository, repository.visible())
    assert [path for path in Path(tier.root).rglob(".*") if ".tmp-" in path.name] == []
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
    assert trainer.generation.base_step == 6
    trainer.save(7)
    assert whole_value(load(Repository.open(tier), Repository.open(tier).visible()[-1])) == 7


@pytest.mark.parametrize("encoding", [None, Encoding(max_depth=3)], ids=["whole", "differences"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_I2_B10_a_prune_killed_at_a_named_place_is_completed_by_the_next(
    tmp_path: Path, place: str, nth: int, encoding: Encoding | None
) -> None:
    tier = prepared(tmp_path / "run", encoding)

    assert killed_at(place, nth, lambda: run_prune(tier)) or nth > 1, "every place is passed"
    assert_whole(tier)
    assert_completed(tier)


@pytest.mark.parametrize("seed", range(6))
def test_I2_a_prune_killed_at_any_moment_is_completed_by_the_next(tmp_path: Path, seed: int) -> None:
    tier = prepared(tmp_path / "run")

    def act(say: Callable[[str], None]) -> None:
        say("begins")
        run_prune(tier)

    _, status = in_child(act, kill_after_s=random.Random(seed).uniform(0.001, 0.03))
    assert status in (0, signal.SIGKILL)
    assert_whole(tier)
    assert_completed(tier)


@pytest.mark.parametrize("seed", range(3))
def test_B10_g_two_prunes_at_once_one_is_refused_or_finds_nothing_and_none_harms(tmp_path: Path, seed: int) -> None:
    tier = prepared(tmp_path / "run")
    reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
    pids = []
    for n in range(3):
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                os.read(reads[n], 1)
                run_prune(tier, newest=1 + (n + seed) % 2)
                code = 0
            except Fenced:
                code = 4
            finally:
                os._exit(code)
        pids.append(pid)
    for write in writes:
        os.write(write, b"x")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert 0 in codes and set(codes) <= {0, 4}, codes
    assert_whole(tier)
    assert_completed(tier)


def test_I2_B13_c_a_reader_beside_a_prune_always_finds_the_newest_whole(tmp_path: Path) -> None:
    tier = prepared(tmp_path / "run")
    pid = os.fork()
    if pid == 0:
        try:
            for newest in (5, 4, 3, 2, 1):
                run_prune(tier, newest)
        finally:
            os._exit(0)
    done, num_looks = 0, 0
    while not done:
        repository = Repository.open(tier)
        assert newest_good(repository, lambda commit: whole_value(load(repository, commit))).value == 6  # noqa: B023  (used at once)
        num_looks += 1
        done = os.waitpid(pid, os.WNOHANG)[0]
    assert num_looks > 1
    assert assert_whole(tier) == [2, 6]
