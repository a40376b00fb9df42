"""SIGKILL of the writer anywhere in the store: what is visible is whole, and the next run goes on from it and cleans up."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, suicide
from tests.rigs.store_run import load, newest_good, objects_of, start, whole_value
from unbroken.core.errors import NoCheckpoint
from unbroken.core.ports import SystemNonces, arm
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

PLACES = [
    "store.create.part",
    "store.create.before_fsync",
    "store.create.before_link",
    "store.create.after_link",
    "store.write.after_packs",
    "store.write.after_manifest",
    "store.journal.before_append",
    "store.append.before_fsync",
    "store.log.before_create",
    "store.log.after_create",
    "store.collect.after_prune",
    "store.collect.after_manifests",
    "store.delete",
]


LARGE = 20_000
"""Numbers of which a piece has chunks of its own, so that they can be differences."""


def train(tier: DiskTier, steps: range, say: Callable[[str], None], keep: int = 2, encoding: Encoding | None = None) -> None:
    trainer = start(tier, nonces=SystemNonces(), num_floats=1000 if encoding is None else LARGE, encoding=encoding)
    say("ready")
    for step in steps:
        say(f"begin {step}")
        trainer.save(step)
        say(f"end {step}")
        trainer.collect(keep)


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if ".tmp-" in path.name]


def assert_recovers(root: Path, at_least: int, at_most: int) -> None:
    """Every visible checkpoint is whole, the newest within bounds; a good run afterwards leaves nothing behind."""
    tier = DiskTier(str(root))
    repository = Repository.open(tier)
    values = [whole_value(load(repository, commit)) for commit in repository.visible()]
    assert values == [commit.step for commit in repository.visible()]
    newest = values[-1] if values else 0
    assert at_least <= newest <= at_most
    trainer = start(tier, nonces=SystemNonces()) if values else None
    if trainer is None:
        return
    assert trainer.generation.base_step == newest
    trainer.save(newest + 1)
    trainer.collect(1)
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(trainer.repository, trainer.repository.visible())
    assert temporaries(root) == []
    report = trainer.repository.verify()
    assert report.ok, report.bad


@pytest.mark.parametrize("encoding", [None, Encoding(max_depth=3)], ids=["whole", "differences"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_B01_I1_I2_killed_at_a_named_place_nothing_is_half_there(tmp_path: Path, place: str, nth: int, encoding: Encoding | None) -> None:
    tier = DiskTier(str(tmp_path / "run"))

    def act(say: Callable[[str], None]) -> None:
        train(tier, range(1, 4), lambda line: None, keep=1, encoding=encoding)
        left = [nth]

        def strike() -> None:
            left[0] -= 1
            if left[0] == 0:
                suicide()

        arm(place, strike)
        train(tier, range(4, 9), say, keep=1, encoding=encoding)

    said, status = in_child(act)
    assert os.WIFSIGNALED(status), said
    assert os.WTERMSIG(status) == signal.SIGKILL
    ended = [int(line.split()[1]) for line in said if line.startswith("end")]
    begun = [int(line.split()[1]) for line in said if line.startswith("begin")]
    assert_recovers(tmp_path / "run", max([3, *ended]), max([3, *begun]))


@pytest.mark.parametrize("encoding", [None, Encoding(max_depth=3)], ids=["whole", "differences"])
@pytest.mark.parametrize("seed", range(30))
def test_B01_e_killed_at_any_moment_the_newest_is_whole_and_not_older_than_the_last_save_that_returned(
    tmp_path: Path, seed: int, encoding: Encoding | None
) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    delay_s = random.Random(seed).uniform(0.001, 0.05)
    said, status = in_child(lambda say: train(tier, range(1, 100_000), say, encoding=encoding), kill_after_s=delay_s)
    assert os.WTERMSIG(status) == signal.SIGKILL
    ended = [int(line.split()[1]) for line in said if line.startswith("end")]
    begun = [int(line.split()[1]) for line in said if line.startswith("begin")]
    assert_recovers(tmp_path / "run", max([0, *ended]), max([0, *begun]))


def test_B01_f_nothing_whole_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    train(tier, range(1, 4), lambda line: None)
    for path in tier.list("packs"):
        with open(tmp_path / path, "r+b") as f:
            f.truncate(4096)
    with pytest.raises(NoCheckpoint, match=r"step 3: .*step 2: "):
        newest_good(Repository.open(tier))
