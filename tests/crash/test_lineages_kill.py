"""Two lineages of one folder, each with a writer of its own, and SIGKILL: a branch is there or not, and neither lineage harms the other."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, suicide
from tests.rigs.store_run import load, objects_of, start, steps, whole_value
from unbroken.archive.branching import list_lineages, make_branch
from unbroken.core.errors import Damaged, Fenced, NoCheckpoint, Transient
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import Writer
from unbroken.store import paths
from unbroken.store.lease import WriterLease
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

PLACES = [
    "store.log.before_create",
    "store.log.after_create",
    "branch.pinned",
    "store.create.before_fsync",
    "store.create.before_link",
    "store.create.after_link",
    "store.write.after_packs",
    "store.write.after_manifest",
    "store.journal.before_append",
    "store.append.before_fsync",
    "branch.before_commit",
]
FLOATS = 20_000
"""80 kB: an array with chunks of its own, which lineages share."""


def branch(tier: DiskTier, step: int, name: str) -> None:
    make_branch(Repository.open(tier), tier, step, name, {}, clock=SystemClock(), nonces=SystemNonces())


def prepared(root: Path) -> DiskTier:
    tier = DiskTier(str(root))
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
    for step in (1, 2, 3):
        trainer.save(step)
    return tier


def assert_tidy(tier: DiskTier, lineages: list[str]) -> None:
    """All that is visible is whole. After a start and a collection in each lineage nothing is left that none of them needs."""
    for lineage in lineages:
        repository = Repository.open(tier, lineage)
        assert [whole_value(load(repository, commit)) for commit in repository.visible()] == steps(tier, lineage)
    trainers = [start(tier, nonces=SystemNonces(), num_floats=FLOATS, lineage=lineage) for lineage in lineages]
    for trainer in trainers:
        trainer.save(trainer.generation.base_step + 1)
    for trainer in trainers * 2:  # what one lineage withdraws may have been another's to delete
        trainer.collect(1)
    needed: set[str] = set()
    for trainer in trainers:
        needed |= objects_of(trainer.repository, trainer.repository.visible())
        report = trainer.repository.verify()
        assert report.ok, report.bad
    assert {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)} == needed


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_I1_I2_a_branch_killed_at_a_named_place_is_there_or_not(tmp_path: Path, place: str, nth: int) -> None:
    tier = prepared(tmp_path / "run")
    roots = [commit.state_root for commit in Repository.open(tier).visible()]

    def act(say: Callable[[str], None]) -> None:
        left = [nth]

        def strike() -> None:
            left[0] -= 1
            if left[0] == 0:
                suicide()

        arm(place, strike)
        branch(tier, 2, "hot")
        say("made")

    said, _ = in_child(act)
    there = "hot" in [one.name for one in list_lineages(tier)]
    assert there or not said
    assert [commit.state_root for commit in Repository.open(tier).visible()] == roots
    if not there:
        main = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
        main.save(4)
        main.collect(1)
        branch(tier, 4, "hot")
    assert_tidy(tier, ["main", "hot"])


def job(root: str, lineage: str, seed: int, say: Callable[[str], None]) -> None:
    """Save and collect for ever; every third state is one that the other lineage has, too."""
    tier = DiskTier(root)
    lease = WriterLease.acquire(root, Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now"), lineage)
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS, lineage=lineage)
    say(f"from {trainer.generation.base_step}")
    for step in range(trainer.generation.base_step + 1, 100_000):
        try:
            trainer.save(step)
        except Transient:
            trainer.save(step)
        say(f"saved {step}")
        trainer.collect(1 + seed % 2)
    del lease


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_B12_I2_I6_two_writers_on_two_lineages_are_killed_and_neither_loses_anything(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "run"
    tier = prepared(root)
    branch(tier, 2, "hot")
    saved = {"main": 3, "hot": 2}
    dice = random.Random(seed)

    def lives(lineage: str, pauses: list[float]) -> None:
        for pause_s in pauses:
            said, status = in_child(lambda say: job(str(root), lineage, seed, say), kill_after_s=pause_s)
            assert os.WIFSIGNALED(status), said
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert int(said[0].split()[1]) >= saved[lineage], "a start lost what a save had promised"
            saved[lineage] = max([saved[lineage], *(int(line.split()[1]) for line in said if line.startswith("saved"))])

    pauses = {lineage: [dice.uniform(0.02, 0.3) for _ in range(4)] for lineage in saved}
    threads = [threading.Thread(target=lives, args=(lineage, pauses[lineage])) for lineage in saved]
    for thread in threads:
        thread.start()
    made = 0
    while any(thread.is_alive() for thread in threads):
        for lineage in ("main", "hot"):
            look(tier, lineage)
        made += try_branch(tier, f"b{made}")
    assert all(steps(tier, lineage)[-1] >= step for lineage, step in saved.items())
    assert_tidy(tier, [one.name for one in list_lineages(tier)])


def look(tier: DiskTier, lineage: str) -> None:
    """What a third process reads of a lineage while both are written: whole, or withdrawn meanwhile."""
    repository = Repository.open(tier, lineage)
    commit = repository.visible()[-1]
    try:
        whole_value(load(repository, commit))
    except Damaged:
        repository.refresh()
        assert commit not in repository.visible(), "a visible checkpoint could not be read"


def try_branch(tier: DiskTier, name: str) -> int:
    """Branch from the newest checkpoint of main, whose writer removes old ones meanwhile; 1 if it came in time."""
    try:
        branch(tier, steps(tier)[-1], name)
    except (NoCheckpoint, Damaged):
        return 0
    look(tier, name)
    return 1


def test_B12_a_second_writer_on_one_lineage_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    tier = prepared(tmp_path / "run")
    branch(tier, 2, "hot")
    me = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now")
    leases = [WriterLease.acquire(tier.root, me, lineage) for lineage in ("main", "hot")]

    def act(say: Callable[[str], None]) -> None:
        try:
            job(tier.root, "hot", 0, say)
        except Fenced as error:
            say(str(error))

    said, _ = in_child(act)
    assert said == [
        f"{tier.root}/runs/hot/writer.json: process {os.getpid()} on {hostname()} (since now) is writing this run: stop it, "
        "or choose another folder"
    ]
    del leases
