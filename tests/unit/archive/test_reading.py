"""Readers beside a writer: what retention takes away while it is read is not damage, and what was just committed is not lost."""

from __future__ import annotations

import pytest

from tests.rigs.store_run import StillClock, as_of_an_older_writer, load, objects_of, start, whole_value
from unbroken.archive.reading import commit_times, exactly, newest_good
from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.records import CommitEntry
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier


def test_B10_a_reader_that_retention_has_outrun_reads_the_newest_and_calls_nothing_damaged() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    reader = Repository.open(tier)
    trainer.save(20)
    trainer.collect(1)
    found = newest_good(reader, lambda commit: whole_value(load(reader, commit)))
    assert (found.commit.step, found.value, found.passed_over) == (20, 20, ())


def test_I11_a_reader_that_is_always_outrun_ends_with_an_error() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(1)
    reader = Repository.open(tier)
    tries: list[int] = []

    def use(commit: CommitEntry) -> int:
        tries.append(commit.step)
        assert len(tries) < 100
        trainer.save(commit.step + 1)
        trainer.collect(1)
        return whole_value(load(reader, commit))

    with pytest.raises(NoCheckpoint, match="no usable checkpoint"):
        newest_good(reader, use)
    assert tries == list(range(1, len(tries) + 1))


def test_a_step_that_was_withdrawn_while_it_was_read_is_not_called_damaged() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    reader = Repository.open(tier)
    trainer.save(20)
    trainer.collect(1)
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 10; there are 20"):
        exactly(reader, 10, lambda commit: load(reader, commit))


def test_I3_a_damaged_step_is_still_called_damaged() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    reader = Repository.open(tier)
    for path in objects_of(reader, reader.visible()):
        tier.delete(path)
    with pytest.raises(Damaged):
        exactly(reader, 10, lambda commit: load(reader, commit))
    with pytest.raises(NoCheckpoint, match="missing"):
        newest_good(reader, lambda commit: load(reader, commit))


def test_a_checkpoint_committed_since_the_log_was_read_is_not_called_lost() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    reader = Repository.open(tier)
    trainer.save(20)
    found = newest_good(reader, lambda commit: whole_value(load(reader, commit)))
    assert (found.commit.step, found.passed_over) == (10, ())


class Counting(MemoryTier):
    reads = 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return super().read(path, offset, length)


@pytest.mark.parametrize("is_old", [False, True])
def test_the_time_of_a_commit_stands_in_its_entry_and_is_looked_for_only_in_older_logs(is_old: bool) -> None:
    tier = Counting()
    trainer = start(tier)
    for step in (10, 20, 30):
        trainer.save(step)
    if is_old:
        as_of_an_older_writer(tier)
    reader = Repository.open(tier)
    tier.reads = 0
    times = commit_times(tier, "main", reader.log.head, reader.visible())
    assert times == {(step, 0): StillClock().utc() for step in (10, 20, 30)}
    assert tier.reads == (3 if is_old else 0)
