"""What journals say that decides what stays: values of a metric, and the rules of the newest start."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from tests.rigs.store_run import FACTS, WRITER, CountedNonces, StillClock, Trainer, opened, start, steps
from unbroken.codec import metrics
from unbroken.core.errors import Refused
from unbroken.core.records import BeginRecord, Best, EventRecord, Keep, StepRecord
from unbroken.store import paths
from unbroken.store.logged import LoggedValues, born_with, event_of, rules_in_force
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


def step_of(step: int, loss: float) -> StepRecord:
    bits = struct.pack(">d", loss).hex()
    return StepRecord(step=step, units=(), num_samples=8, loss=bits, clock=((0, step, 1),), time_s=0.0)


def log(trainer: Trainer, step: int, **values: metrics.Value) -> None:
    trainer.journal.add(EventRecord(name=metrics.EVENT, step=step, facts=metrics.encode(values)))


def values_of(trainer: Trainer, metric: str = "m") -> dict[int, float | None]:
    state = trainer.repository.log.state
    found = LoggedValues(trainer.repository.tier, "main", metric).of(state, state.commits)
    return {step: value for (step, _), value in found.items()}


def test_values_are_those_of_the_checkpoints_steps_and_the_last_one_given_counts() -> None:
    trainer = start(MemoryTier())
    log(trainer, 10, m=0.5, other=1)
    log(trainer, 10, m=0.25)
    trainer.save(10)
    log(trainer, 15, m=0.1)
    trainer.save(20)
    log(trainer, 30, m=math.nan)
    trainer.save(30)
    log(trainer, 40, m="a word")
    trainer.save(40)
    log(trainer, 50, m=10**18)
    trainer.save(50)
    found = values_of(trainer)
    assert math.isnan(found.pop(30) or 0.0)
    assert found == {10: 0.25, 50: 1e18}
    assert values_of(trainer, "nothing") == {}


def test_the_loss_is_that_of_the_step_unless_another_was_logged_under_its_name() -> None:
    trainer = start(MemoryTier())
    for step, loss in ((10, 0.5), (20, 0.25)):
        trainer.journal.add(step_of(step, loss))
        if step == 20:
            log(trainer, 20, loss=7.0)
        trainer.save(step)
    assert values_of(trainer, "loss") == {10: 0.5, 20: 7.0}


def test_each_line_is_read_once_and_what_is_no_checkpoint_is_forgotten() -> None:
    class Counting(MemoryTier):
        num_bytes = 0

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            data = super().read(path, offset, length)
            self.num_bytes += len(data) if path.endswith(".jsonl") else 0
            return data

    tier = Counting()
    trainer = start(tier)
    values = LoggedValues(tier, "main", "m")
    for step in range(1, 51):
        log(trainer, step, m=step / 7)
        if step % 10 == 0:
            trainer.save(step)
            state = trainer.repository.log.state
            assert values.of(state, state.commits)[step, 0] == step / 7
    size = tier.size(paths.journal("main", 0))
    assert tier.num_bytes <= size + 6, "a torn end may be read again, whole lines may not"
    (reading,) = values._readings.values()
    assert sorted(reading.values) == [10, 20, 30, 40, 50]


def test_I2_what_a_damaged_or_missing_journal_may_have_said_is_not_known() -> None:
    tier = MemoryTier()
    first = start(tier)
    log(first, 10, m=0.5)
    first.save(10)
    log(first, 20, m=0.25)
    first.save(20)
    second = start(tier)
    second.save(30)
    path = paths.journal("main", 0)
    lines = tier.read(path).split(b"\n")
    lines[3] = lines[3].replace(b"0.25", b"0.35")
    tier.delete(path)
    tier.create(path, [b"\n".join(lines)])
    assert values_of(second) == {10: 0.5, 20: None}, "the line is before the root of step 20, so nothing is known of that one"
    tier.delete(path)
    assert values_of(second) == {10: None, 20: None}
    second.repository.collect(Keep(newest=1, best=Best(metric="m")), writer=WRITER, clock=CLOCK)
    assert steps(tier) == [10, 20, 30]


def test_the_best_stay_over_restarts_and_go_when_better_ones_come() -> None:
    tier = MemoryTier()
    keep = Keep(newest=1, best=Best(metric="m", num=2))
    kept = []
    for begin in (1, 4):
        trainer = start(tier)
        for step in range(begin, begin + 3):
            log(trainer, step, m={1: 3.0, 2: 1.0, 3: 2.0, 4: 9.0, 5: 0.5, 6: 9.0}[step])
            trainer.save(step)
            trainer.repository.collect(keep, writer=WRITER, clock=CLOCK)
            kept.append(steps(tier))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 5], [2, 5, 6]]
    assert Repository.open(tier).verify().ok


def begun(trainer: Trainer, keep: Keep) -> Trainer:
    generation = trainer.generation
    trainer.journal.add(
        BeginRecord(
            generation=generation.number, base_step=generation.base_step, source="x", loaded_root="", world_size=1, time_s=0.0
        )
    )  # fmt: skip
    for event in event_of(keep, generation.base_step, FACTS):
        trainer.journal.add(event)
    trainer.journal.sync()
    return trainer


def in_force(tier: MemoryTier) -> Keep:
    repository = Repository.open(tier)
    return rules_in_force(tier, "main", repository.log.state, repository.facts)


def test_the_rules_in_force_are_those_of_the_newest_start() -> None:
    tier = MemoryTier()
    trainer = begun(start(tier), Keep())
    assert trainer.journal.num_lines == 1, "the rules of the birth need no line"
    trainer.save(1)
    assert in_force(tier) == Keep()
    rich = Keep(newest=7, every_steps=10, hours=3, best=Best(metric="m", largest=True, num=2), reach_back=5)
    begun(start(tier), rich)
    assert in_force(tier) == rich
    repository = Repository.open(tier, nonces=CountedNonces("prune"))
    opened(repository, repository.visible()[-1], CountedNonces("prune 2"))
    assert in_force(tier) == rich, "a generation that was opened only to remove something has no rules"
    begun(start(tier), Keep())
    assert in_force(tier) == Keep()


@pytest.mark.parametrize("facts", [{"newest": 0}, {"newest": 3, "keep_moons": 4}, {"best": 7}])
def test_rules_that_cannot_be_read_are_not_guessed(facts: dict[str, int], tmp_path: Path) -> None:
    tier = MemoryTier()
    trainer = begun(start(tier), Keep())
    trainer.journal.add(EventRecord(name="retention", step=0, facts=facts))
    trainer.journal.sync()
    with pytest.raises(Refused, match=r"own rules cannot be read .*: say what is to be kept"):
        in_force(tier)


def test_a_runs_birth_says_how_many() -> None:
    assert born_with(FACTS) == Keep()
    for given, newest in ((5, 5), (0, 3), ("7", 3), (True, 3)):
        facts = type(FACTS)(run_id="r", created="", options={"keep": given})
        assert born_with(facts).newest == newest
