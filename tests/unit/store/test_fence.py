"""Fencing: who may write what, asked of the repository as its users do."""

from __future__ import annotations

import msgspec
import pytest

from tests.rigs.store_run import WRITER, CountedNonces, StillClock, Trainer, load, start, steps, with_objects
from unbroken.core.errors import Fenced, Transient
from unbroken.core.records import CommitEntry, Generation
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


def open_next(repository: Repository, base: CommitEntry | None, source: str, step: int | None = None, name: str = "next") -> Generation:
    return repository.open_generation(
        base_step=step if step is not None else base.step if base else 0,
        base_root=base.state_root if base else "",
        source=source,
        nonce=CountedNonces(name).nonce(),
        world_size=2,
        writer=WRITER,
        clock=CLOCK,
    )


def test_generations_are_numbered_from_0_and_descend() -> None:
    tier = MemoryTier()
    first = start(tier)
    first.save(10)
    second, third = start(tier), start(tier)
    assert [(t.generation.number, t.generation.parent, t.generation.base_step) for t in (first, second, third)] == [
        (0, None, 0),
        (1, 0, 10),
        (2, 1, 10),
    ]


def test_I6_a_writer_of_an_older_generation_can_change_nothing() -> None:
    tier = MemoryTier()
    zombie = start(tier)
    zombie.save(10)
    zombie.save(20)
    newer = start(tier)
    newer.save(30)
    seen = Repository.open(tier).visible()
    for act in (
        lambda: zombie.save(30),
        lambda: zombie.save(25),
        lambda: zombie.collect(1),
        lambda: zombie.repository.condemn(20, 0, ["packs/x"], "no", writer=WRITER, clock=CLOCK),
    ):
        with pytest.raises(Fenced, match="generation 1"):
            act()
    repository = Repository.open(tier)
    assert repository.visible() == seen
    for commit in seen:
        load(repository, commit)


def test_I6_a_generation_nobody_opened_cannot_commit() -> None:
    trainer = start(MemoryTier())
    stranger = Trainer(trainer.repository, msgspec.structs.replace(trainer.generation, nonce="ff" * 16))
    with pytest.raises(Fenced, match="knows no such generation"):
        stranger.save(10)


def test_a_snapshot_frozen_in_memory_is_drained_after_its_successor_was_opened_on_it() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    repository = trainer.repository
    trainer.save(10)
    root = start(MemoryTier()).save(17).state_root
    later = repository.open_generation(
        base_step=17, base_root=root, source="memory", nonce="ee" * 16, world_size=2, writer=WRITER, clock=CLOCK
    )
    assert steps(tier) == [10]
    trainer.save(17)
    assert steps(tier) == [10, 17]
    with pytest.raises(Fenced, match="left it behind"):
        trainer.save(18)
    Trainer(repository, later).save(20)
    assert steps(tier) == [10, 17, 20]


def test_I6_only_the_opener_of_the_newest_generation_may_drain_late() -> None:
    tier = MemoryTier()
    zombie = start(tier)
    zombie.save(10)
    other = Repository.open(tier)
    open_next(other, None, "memory", step=17)
    with pytest.raises(Fenced, match="generation 1 was opened meanwhile"):
        zombie.save(17)


def test_a_base_that_was_withdrawn_meanwhile_is_an_error_to_choose_again() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    recoverer = Repository.open(tier)
    base = recoverer.visible()[-1]
    trainer.save(20)
    trainer.collect(1)
    with pytest.raises(Transient, match="step 10 is no longer visible: choose again"):
        open_next(recoverer, base, "disk")
    open_next(recoverer, recoverer.visible()[-1], "disk")
    assert steps(tier) == [20]


def test_I10_a_fresh_start_does_not_hide_a_checkpoint_committed_meanwhile() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    beginner = Repository.open(tier)
    trainer.save(10)
    with pytest.raises(Transient, match="committed meanwhile"):
        open_next(beginner, None, "fresh")
    assert steps(tier) == [10]


def test_a_memory_base_is_worth_nothing_once_another_generation_was_opened() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    open_next(Repository.open(tier), Repository.open(tier).visible()[-1], "disk")
    with pytest.raises(Transient, match="generation 1 was opened meanwhile"):
        open_next(trainer.repository, None, "memory", step=17, name="mine")


def test_a_wrong_source_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="one of 'fresh', 'memory', 'disk'"):
        open_next(start(MemoryTier()).repository, None, "tape")


def test_a_generation_number_is_not_reused_after_the_head_of_the_log_was_lost() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    second = start(tier)
    second.journal.sync()
    lost = with_objects(tier, {tier.list("runs/main/log")[-1]: None})
    third = start(lost)
    assert (third.generation.number, third.generation.parent) == (2, 0)
    third.save(20)
    assert Repository.open(lost).verify().ok
