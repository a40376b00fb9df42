"""A run's whole life on a real S3 server: made, killed, gone on with, collected, raced for, fenced; the same with answers that are lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rigs.lossy_proxy import lossy_proxy
from tests.rigs.store_run import load, newest_good, objects_of, opened, start, steps, whole_value
from unbroken.core.errors import Fenced, NoCheckpoint
from unbroken.core.ports import SystemNonces
from unbroken.store import paths
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unbroken[object]'")

from tests.rigs.s3_server import S3Server
from unbroken.store.tiers.object import ObjectTier

ROOT = Path(__file__).resolve().parents[2]
NUM_FLOATS = 200_000

WRITER_PROCESS = """
import sys
from tests.rigs.store_run import start
from unbroken.core.ports import SystemNonces
from unbroken.store.tiers.object import ObjectTier
trainer = start(ObjectTier(sys.argv[1]), nonces=SystemNonces(), num_floats=200_000)
step = trainer.generation.base_step
while True:
    step += 1
    print("begin", step, flush=True)
    trainer.save(step)
    print("end", step, flush=True)
    trainer.collect(2)
"""


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.place()


def values(repository: Repository) -> list[int]:
    """What the visible checkpoints hold, each read whole and verified."""
    return [whole_value(load(repository, commit)) for commit in repository.visible()]


def test_a_run_lives_in_a_bucket(url: str) -> None:
    with pytest.raises(NoCheckpoint):
        Repository.open(ObjectTier(url))
    trainer = start(ObjectTier(url), nonces=SystemNonces(), num_floats=NUM_FLOATS)
    for step in range(1, 6):
        trainer.save(step)
    removed = trainer.collect(keep_newest=2)
    assert any(path.startswith("packs/") for path in removed)
    repository = Repository.open(ObjectTier(url))
    assert steps(ObjectTier(url)) == values(repository) == [4, 5]
    again = start(ObjectTier(url), nonces=SystemNonces(), num_floats=NUM_FLOATS)
    assert (again.generation.number, again.generation.base_step) == (1, 5)
    again.save(6)
    again.collect(keep_newest=1)
    tier = ObjectTier(url)
    assert steps(tier) == [6]
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(again.repository, again.repository.visible())
    assert tier.list(paths.journal_folder("main")) == [paths.journal("main", 0), paths.journal("main", 1)]
    lines = list(read_journal(tier, "main", 0, trainer.generation.nonce))
    assert len(lines) == 5
    assert lines[-1].chain == trainer.journal.head
    report = Repository.open(tier).verify()
    assert report.ok, report.bad


def test_B12_I6_a_second_start_fences_the_first_writer(url: str) -> None:
    first = start(ObjectTier(url), nonces=SystemNonces())
    first.save(1)
    second = start(ObjectTier(url), nonces=SystemNonces())
    second.save(2, value=2)
    before = ObjectTier(url).list("")
    with pytest.raises(Fenced):
        first.save(2, value=7)
    tier = ObjectTier(url)
    assert steps(tier) == values(Repository.open(tier)) == [1, 2]
    assert set(before) <= set(tier.list(""))
    second.collect(keep_newest=3)
    assert values(Repository.open(tier)) == [1, 2]


def test_B12_of_starts_at_once_each_has_a_generation_and_the_newest_alone_commits(url: str) -> None:
    start(ObjectTier(url), nonces=SystemNonces()).save(1)

    def go(_: int) -> int:
        repository = Repository.open(ObjectTier(url), nonces=SystemNonces())
        trainer = opened(repository, newest_good(repository)[0], SystemNonces())
        try:
            trainer.save(2, value=2)
        except Fenced:
            return -1
        return trainer.generation.number

    with ThreadPoolExecutor(4) as pool:
        committed = [number for number in pool.map(go, range(4)) if number >= 0]
    repository = Repository.open(ObjectTier(url))
    assert sorted(g.number for g in repository.log.state.generations) == [0, 1, 2, 3, 4]
    assert max(committed) == 4
    assert values(repository) == [1, 2]
    assert repository.verify().ok


@pytest.mark.parametrize("seed", range(3))
def test_B01_e_killed_at_a_random_moment_what_is_visible_is_whole(url: str, seed: int) -> None:
    at_least = at_most = 0
    chance = random.Random(seed)
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER_PROCESS, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        said = [process.stdout.readline()]
        time.sleep(chance.uniform(0, 0.6))
        process.kill()
        said += process.communicate(timeout=60)[0].splitlines()
        told = [line.split() for line in said if line.strip()]
        at_least = max([at_least, *(int(step) for word, step in told if word == "end")])
        at_most = max([at_most, *(int(step) for word, step in told if word == "begin")])
        repository = Repository.open(ObjectTier(url))
        found = values(repository)
        assert found == [commit.step for commit in repository.visible()]
        assert at_least <= max(found, default=0) <= at_most
    trainer = start(ObjectTier(url), nonces=SystemNonces(), num_floats=NUM_FLOATS)
    trainer.save(at_most + 1)
    trainer.collect(1)
    tier = ObjectTier(url)
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(trainer.repository, trainer.repository.visible())
    report = trainer.repository.verify()
    assert report.ok, report.bad


def test_B12_lost_answers_write_no_entry_twice_and_lose_none(s3: S3Server, url: str) -> None:
    with lossy_proxy(s3.endpoint) as proxy:
        trainer = start(ObjectTier(url, endpoint=proxy.endpoint), nonces=SystemNonces())
        for step in range(1, 6):
            proxy.lose = step % 3 + 1
            trainer.save(step)
        assert len(proxy.lost) >= 8
    tier = ObjectTier(url)
    assert values(Repository.open(tier)) == [1, 2, 3, 4, 5]
    assert len(tier.list(paths.log_folder("main"))) == 6, "the generation and five commits"
    assert len(list(read_journal(tier, "main", 0, trainer.generation.nonce))) == 5


@pytest.mark.parametrize("part", ["log", "manifests", "packs"])
def test_B01_a_what_is_gone_from_the_bucket_makes_the_next_older_the_newest(url: str, part: str) -> None:
    trainer = start(ObjectTier(url), nonces=SystemNonces())
    for step in (10, 20, 30):
        trainer.save(step)
    tier = ObjectTier(url)
    repository = Repository.open(tier)
    last, others = repository.visible()[-1], repository.visible()[:-1]
    if part == "log":
        tier.delete(tier.list(paths.log_folder("main"))[-1])
    else:
        for path in sorted(objects_of(repository, [last]) - objects_of(repository, others)):
            if path.startswith(part):
                tier.delete(path)
    commit, pieces, _ = newest_good(Repository.open(ObjectTier(url)))
    assert (commit.step, whole_value(pieces)) == (20, 20)
