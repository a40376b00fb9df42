"""Copies of checkpoints in a second tier: what is sent, when, in which order, who may write there, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.rigs.store_run import (
    FACTS,
    WRITER,
    CountedNonces,
    StillClock,
    Trainer,
    flipped,
    load,
    objects_of,
    opened,
    start,
    steps,
    whole_value,
)
from unbroken.core.errors import Damaged, Fenced, ForeignFolder, Refused
from unbroken.core.ports import Buffer, arm
from unbroken.core.records import LogState
from unbroken.store import paths
from unbroken.store.copying import Cadence, Carrier, Passed, Thinner, candidates, facts_at, next_to_copy
from unbroken.store.deltas import Encoding
from unbroken.store.log import Log, visible
from unbroken.store.repository import Repository
from unbroken.store.sealed import seal
from unbroken.store.tiers.memory import MemoryTier


@dataclass
class Counting(MemoryTier):
    """A tier that remembers what was made in it, in order."""

    made: list[str] = field(default_factory=list)

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        size = super().create(path, parts)
        self.made.append(path)
        return size

    def append(self, path: str, data: Buffer) -> None:
        super().append(path, data)
        self.made.append(path)


def copier(trainer: Trainer, there: MemoryTier) -> Carrier:
    return Carrier(source=Log.open(trainer.repository.tier), there=Log.open(there), writer=WRITER, clock=StillClock())


def copy_all(trainer: Trainer, there: MemoryTier) -> Carrier:
    carrier = copier(trainer, there)
    carrier.put_facts()
    carrier.follow()
    for commit in visible(carrier.source.state):
        with suppress(Passed):
            carrier.carry(commit)
    return carrier


def back(copy: MemoryTier, local: MemoryTier) -> Carrier:
    carrier = Carrier(source=Log.open(copy), there=Log.open(local), writer=WRITER, clock=StillClock(), is_back=True)
    carrier.carry(candidates(carrier.there.state, carrier.source.state)[0])
    carrier.put_facts()
    return carrier


def test_I1_a_copy_holds_the_same_bytes_and_its_entry_comes_last() -> None:
    local, there = MemoryTier(), Counting()
    trainer = start(local)
    trainer.save(1)
    copy_all(trainer, there)
    kinds = [path.split("/")[0] if not path.startswith("runs") else path.split("/")[2] for path in there.made]
    assert kinds == ["run.json", "log", "packs", "manifests", "journal", "log"]
    for path in there.made:
        if not path.startswith("runs/main/log"):
            assert there.read(path) == local.read(path)
    report = Repository.open(there).verify()
    assert report.ok, report.bad
    assert whole_value(load(Repository.open(there), visible(Log.open(there).state)[0])) == 1


def test_what_is_there_is_not_sent_again() -> None:
    local, there = MemoryTier(), Counting()
    trainer = start(local)
    for step in (1, 2, 3):
        trainer.save(step, logical=None)
    copy_all(trainer, there)
    made = len(there.made)
    assert copy_all(trainer, there).sent_bytes == 0
    assert len(there.made) == made


def test_a_copy_of_differences_brings_their_bases() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local, num_floats=50_000, encoding=Encoding())
    for step in (1, 2, 3):
        trainer.save(step)
    carrier = copier(trainer, there)
    carrier.put_facts()
    carrier.carry(visible(carrier.source.state)[-1])
    repository = Repository.open(there)
    assert steps(there) == [3]
    assert whole_value(load(repository, repository.visible()[0])) == 3
    assert repository.verify().ok


@pytest.mark.parametrize("point", ["copying.followed", "copying.pack", "copying.objects", "copying.before_commit"])
def test_I1_a_copy_cut_off_anywhere_shows_nothing_and_is_finished_by_the_next(point: str) -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    trainer.save(1)

    def strike() -> None:
        raise KeyboardInterrupt

    arm(point, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            copy_all(trainer, there)
    finally:
        arm(point, None)
    assert steps(there) == []
    copy_all(trainer, there)
    assert steps(there) == [1]
    assert Repository.open(there).verify().ok


def test_generations_and_their_journals_come_along_and_the_copy_verifies() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    trainer.save(1)
    trainer.save(2)
    for _ in range(3):
        trainer = start(local)
        trainer.save(trainer.generation.base_step + 1)
    copy_all(trainer, there)
    trainer = start(local)
    trainer.save(9)
    copy_all(trainer, there)
    assert [g.number for g in Log.open(there).state.generations] == [0, 1, 2, 3, 4]
    assert steps(there) == [1, 2, 3, 4, 5, 9]
    report = Repository.open(there).verify()
    assert report.ok, report.bad


def test_I6_who_has_been_left_behind_can_change_nothing_in_the_copy() -> None:
    local, there, elsewhere = MemoryTier(), MemoryTier(), MemoryTier()
    first = start(local)
    first.save(1)
    copy_all(first, there)
    back(there, elsewhere)
    second = start(elsewhere)
    second.save(2, value=7)
    copy_all(second, there)
    first.save(2)
    before = there.snapshot()
    with pytest.raises(Fenced, match="generation 1 was opened there by another start"):
        copier(first, there).carry(visible(first.repository.log.state)[-1])
    with pytest.raises(Fenced):
        Thinner(Log.open(there)).run(1, 0, writer=WRITER, clock=StillClock())
    assert there.snapshot() == before
    third = start(local)
    third.save(3)
    with pytest.raises(Fenced, match="another history of this run from generation 1 on"):
        copy_all(third, there)
    assert there.snapshot() == before


def test_another_run_in_the_place_is_refused_by_name() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    trainer.save(1)
    there.create(paths.RUN, [seal("run", msgspec.structs.replace(FACTS, run_id="other"))])
    with pytest.raises(Refused, match="holds the run other, and this is the run run"):
        copy_all(trainer, there)
    strange = MemoryTier()
    strange.create("notes.txt", [b"x"])
    with pytest.raises(ForeignFolder, match=r"notes\.txt"):
        facts_at(strange)


def test_I3_a_damaged_pack_is_not_copied() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    commit = trainer.save(1)
    pack = next(path for path in objects_of(trainer.repository, [commit]) if path.startswith("packs"))
    bad = flipped(local, pack, 4100)
    carrier = Carrier(source=Log.open(bad), there=Log.open(there), writer=WRITER, clock=StillClock())
    carrier.put_facts()
    with pytest.raises(Damaged, match=pack):
        carrier.carry(commit)
    assert steps(there) == []
    assert pack not in there.list("packs")


def test_retention_there_is_its_own_and_milestones_stay() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    for step in range(1, 7):
        trainer.save(step, milestone=step == 2)
    carrier = copy_all(trainer, there)
    Thinner(carrier.there).run(1, 0, writer=WRITER, clock=StillClock())
    assert steps(there) == [2, 6]
    repository = Repository.open(there)
    assert {*there.list("packs"), *there.list("manifests")} == objects_of(repository, repository.visible())
    assert repository.verify().ok
    assert copy_all(trainer, there).sent_bytes > 0, "what was thinned out would be sent again: who chooses leaves it out"
    assert next_to_copy(carrier.source.state, Log.open(there).state, Cadence()) is None


def chosen(trainer: Trainer, there: MemoryTier, cadence: Cadence = Cadence(), *, at_once: bool = False) -> int | None:  # noqa: B008
    commit = next_to_copy(Log.open(trainer.repository.tier).state, Log.open(there).state, cadence, at_once=at_once)
    return None if commit is None else commit.step


def test_the_newest_is_next_then_milestones_that_were_missed() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    for step in range(1, 7):
        trainer.save(step, milestone=step in (2, 4))
    order = []
    carrier = copier(trainer, there)
    carrier.put_facts()
    while (step := chosen(trainer, there)) is not None:
        order.append(step)
        carrier.carry(next(c for c in visible(carrier.source.state) if c.step == step))
    assert order == [6, 4, 2]


def test_a_cadence_in_steps_and_the_end_of_a_run() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    due = []
    carrier = None
    for step in range(1, 13):
        trainer.save(step)
        if chosen(trainer, there, Cadence(steps=5)) is not None:
            due.append(step)
            carrier = carrier or copier(trainer, there)
            carrier.source.refresh()
            carrier.carry(visible(carrier.source.state)[-1])
    assert due == [1, 5, 10]
    assert chosen(trainer, there, Cadence(steps=5), at_once=True) == 12


@pytest.mark.parametrize(("at", "is_due"), [("2026-01-01T00:09:59.000Z", False), ("2026-01-01T00:10:00.000Z", True), ("", True)])
def test_a_cadence_in_seconds_counts_from_commit_to_commit(at: str, is_due: bool) -> None:
    trainer = start(MemoryTier())
    last = trainer.save(1)
    assert Cadence(seconds=600).is_due(msgspec.structs.replace(last, step=2, time=at), last) is is_due


def test_a_milestone_made_of_a_checkpoint_that_is_there_becomes_one_there() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    commit = trainer.save(1)
    copy_all(trainer, there)
    manifests = [(m, ref) for m, ref in zip(trainer.repository.manifests(commit), commit.manifests, strict=True)]
    trainer.repository.commit(
        manifests=manifests, milestone=True, journal_head=commit.journal_head, journal_lines=commit.journal_lines, writer=WRITER,
        clock=StillClock(),
    )  # fmt: skip
    assert chosen(trainer, there) == 1
    copy_all(trainer, there)
    assert [c.milestone for c in visible(Log.open(there).state)] == [True]
    assert chosen(trainer, there) is None


def test_a_commit_that_is_copied_is_not_withdrawn_meanwhile() -> None:
    trainer = start(MemoryTier())
    for step in (1, 2, 3):
        trainer.save(step)
    with trainer.repository.holds.keeping((1, 0)):
        trainer.collect(1)
        assert steps(trainer.repository.tier) == [1, 3]
    trainer.collect(1)
    assert steps(trainer.repository.tier) == [3]


def test_an_empty_folder_gets_the_newest_back_and_the_run_goes_on() -> None:
    local, there, empty = MemoryTier(), MemoryTier(), MemoryTier()
    trainer = start(local)
    for step in (1, 2, 3):
        trainer.save(step)
    copy_all(trainer, there)
    back(there, empty)
    assert steps(empty) == [3]
    report = Repository.open(empty).verify()
    assert report.ok, report.bad
    assert Repository.open(empty).facts == FACTS
    again = start(empty)
    assert (again.generation.number, again.generation.base_step) == (1, 3)
    again.save(4)
    copy_all(again, there)
    assert steps(there) == [1, 2, 3, 4]
    assert Repository.open(there).verify().ok
    assert Repository.open(empty).verify().ok


@pytest.mark.parametrize("point", ["copying.pack", "copying.objects", "copying.followed", "copying.before_commit", "copying.committed"])
def test_a_way_back_cut_off_anywhere_is_no_run_and_is_repeated(point: str) -> None:
    local, there, empty = MemoryTier(), MemoryTier(), MemoryTier()
    trainer = start(local)
    trainer.save(1)
    copy_all(trainer, there)

    def strike() -> None:
        raise KeyboardInterrupt

    arm(point, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            back(there, empty)
    finally:
        arm(point, None)
    with pytest.raises(Damaged, match="missing, though checkpoints of a run lie here"):
        Repository.exists(empty)
    log = Log.open(empty)
    carrier = Carrier(source=Log.open(there), there=log, writer=WRITER, clock=StillClock(), is_back=True)
    commit = visible(carrier.source.state)[-1]
    with suppress(Passed):
        carrier.carry(commit)
    carrier.put_facts()
    assert steps(empty) == [1]
    assert Repository.open(empty).verify().ok


def test_a_folder_that_is_behind_gets_the_newer_one_and_a_damaged_object_is_replaced() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    first = trainer.save(1)
    behind = MemoryTier(local.snapshot())
    second = trainer.save(2)
    copy_all(trainer, there)
    shared = sorted(objects_of(trainer.repository, [first]) & objects_of(trainer.repository, [second]))
    if shared:
        behind = flipped(behind, shared[0], 4100)
    back(there, behind)
    assert steps(behind) == [1, 2]
    assert Repository.open(behind).verify().ok


def test_a_checkpoint_beyond_the_base_of_a_newer_start_is_no_candidate() -> None:
    local, there = MemoryTier(), MemoryTier()
    trainer = start(local)
    base = trainer.save(1)
    trainer.save(2)
    copy_all(trainer, there)
    repository = Repository.open(local, nonces=CountedNonces("again"))
    opened(repository, base, CountedNonces("further"))
    found = candidates(Log.open(local).state, Log.open(there).state)
    assert [commit.step for commit in found] == [1]


def test_nothing_is_a_candidate_where_nothing_is() -> None:
    assert candidates(LogState(), LogState()) == []
    assert next_to_copy(LogState(), LogState(), Cadence()) is None
