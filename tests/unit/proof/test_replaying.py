"""What is recorded of surviving steps, told by synthetic runs: superseded attempts do not count, and damage is named."""

from __future__ import annotations

import msgspec
import pytest

from tests.rigs.synthetic_run import SyntheticRun, interrupted, uninterrupted
from unbroken.core.errors import Damaged
from unbroken.core.records import StepRecord
from unbroken.proof.replaying import Check, Surviving, parted, prove, recorded, replayable
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier


def opened(run: SyntheticRun) -> Repository:
    return Repository.open(run.repository.tier)


def test_steps_that_were_done_twice_are_told_once_as_they_survive() -> None:
    run = interrupted(MemoryTier())
    told = Surviving(opened(run), 3, 12)
    steps = list(told)
    assert [step.step for step in steps] == [*range(4, 13)]
    assert [step.clock[0][0] for step in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert told.roots == {step: run.root(step) for step in (6, 9, 12)}


def test_the_steps_between_checkpoints_are_what_can_be_made_again() -> None:
    run = interrupted(MemoryTier())
    found = replayable(opened(run))
    assert [(one.base, one.first, one.last, one.roots, one.problem) for one in found] == [
        (3, 4, 5, [], ""),
        (6, 7, 8, [], ""),
        (9, 10, 11, [], ""),
    ]


def test_two_tellings_of_the_same_steps_prove_each_other() -> None:
    one, other = uninterrupted(MemoryTier()), interrupted(MemoryTier())
    proof = prove(opened(one), opened(other), 3, opened(other).visible()[-1])
    assert (proof.parted, proof.steps, proof.roots, proof.by_root, proof.root) == (None, 9, 3, True, one.root(12))


def test_the_first_step_that_is_another_is_named_with_both_values() -> None:
    one, other = uninterrupted(MemoryTier()), SyntheticRun(MemoryTier())
    other.begin()
    other.train(4)
    other.train(1, loss="4000000000000000")
    other.train(1)
    other.save()
    proof = prove(opened(one), opened(other), 0, opened(other).visible()[-1])
    assert proof.parted is not None
    assert (proof.parted.step, proof.parted.what, proof.parted.replayed) == (5, "loss", "2.0 (bits 4000000000000000)")
    assert "step 5: the loss is 2.0" in str(proof.parted)


@pytest.mark.parametrize(
    ("old", "new", "words"), [(b'"num_samples":8', b'"num_samples":9', "does not continue the chain"), (b"", b"", "ends")]
)
def test_I3_a_journal_that_is_not_whole_is_named_and_proves_nothing(old: bytes, new: bytes, words: str) -> None:
    run = interrupted(MemoryTier())
    tier, path = run.repository.tier, paths.journal("main", 1)
    raw = tier.read(path)
    tier.delete(path)
    tier.create(path, [raw.replace(old, new, 1) if old else raw[: len(raw) // 2]])
    with pytest.raises(Damaged, match=f"journal/00000001.jsonl.*{words}"):
        recorded(opened(run), 6, 9)
    first, second, third = replayable(opened(run))
    assert (first.problem, third.problem) == ("", "") and words in second.problem
    tier.delete(path)
    assert "ends" in replayable(opened(run))[1].problem


def test_what_nobody_told_cannot_be_compared() -> None:
    run = SyntheticRun(MemoryTier())
    run.begin()
    for _ in range(2):
        run.train(3, loss="7ff8000000000000")
        run.save()
    (only,) = replayable(opened(run))
    assert only.problem == "no loss was told and no state root is recorded: nothing to compare with"


def test_every_difference_of_a_step_that_counts_is_one() -> None:
    step = StepRecord(step=5, units=("a", "b"), num_samples=8, loss="3ff0000000000000", clock=((0, 5, 1),), time_s=1.0)

    def changed(**fields: object) -> str | None:
        found = parted(msgspec.structs.replace(step, **fields), step)
        return None if found is None else found.what

    assert changed(clock=((7, 5, 3),), time_s=9.0, attempt=2) is None
    assert changed(units=("a", "c"), loss="0000000000000000") == "samples"
    assert changed(num_samples=9) == "number of samples"
    assert changed(loss="3ff0000000000001") == "loss"
    assert changed(status="skipped", reason="x") == "status"


def test_a_step_given_up_later_is_in_doubt_until_the_run_goes_back_and_at_the_end_it_is_another() -> None:
    run = SyntheticRun(MemoryTier())
    run.begin()
    run.train(2)
    run.save()
    run.train(1, not_applied="a window", loss="7ff8000000000000")
    run.train(2)
    run.save()
    steps = list(Surviving(opened(run), 2, 5))
    check = Check(opened(run), 2, 5)
    assert check.step(msgspec.structs.replace(steps[0], status="applied", reason=msgspec.UNSET, loss="3ff0000000000000"))
    assert not check.keeps(3) and not check.wants_root(5)
    assert check.step(steps[1]) and check.step(steps[2])
    assert not check.boundary(5, None)
    assert check.found is not None and (check.found.step, check.found.what) == (3, "loss")
    assert not check.keeps(5)
