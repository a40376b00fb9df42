"""Rows from journals: each committed step of the surviving lineage once, whatever the generations before tried."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.rigs.synthetic_run import SyntheticRun, interrupted
from unbroken.codec import metrics
from unbroken.core.errors import Damaged, Refused
from unbroken.core.ports import SystemClock
from unbroken.core.records import EventRecord, RunFacts
from unbroken.loggers.rows import Row, Rows
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier


def steps(rows: list[Row]) -> list[int]:
    return [row.step for row in rows]


def log(run: SyntheticRun, step: int, **values: Any) -> None:
    """Metrics of a step, as the trainer journals them."""
    run.journal.add(EventRecord(name=metrics.EVENT, step=step, facts=metrics.encode(values)))


def test_I8_each_committed_step_of_the_surviving_lineage_comes_once() -> None:
    tier = MemoryTier()
    interrupted(tier)  # steps 7, 8 and 10 were done twice
    rows = Rows(tier)
    assert rows.committed() == 12
    found = list(rows.after(0, 12))
    assert steps(found) == list(range(1, 13))
    assert all(list(row.values) == ["loss", "samples"] and row.values["samples"] == 8 for row in found)
    assert steps(list(rows.after(7, 9))) == [8, 9]
    assert list(rows.after(12, 12)) == []


def test_the_values_are_those_of_the_attempt_that_survives() -> None:
    tier = MemoryTier()
    run = SyntheticRun(tier)
    run.begin()
    for attempt, base in ((1, 0), (2, 2)):
        if base:
            run.begin(base)
        for _ in range(2):
            run.train(1)
            log(run, run.step, attempt=attempt)
        run.save()
        run.train(1)
        log(run, run.step, attempt=attempt)  # beyond the commit
        run.journal.sync()
    rows = Rows(tier)
    found = list(rows.after(0, rows.committed()))
    assert [(row.step, row.values["attempt"]) for row in found] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_metrics_merge_may_come_a_step_late_and_replace_what_comes_by_itself() -> None:
    tier = MemoryTier()
    run = SyntheticRun(tier)
    run.begin()
    run.train(1)
    log(run, 1, a=1, b=math.nan)
    log(run, 1, a=2)
    run.train(1)  # step 2: its metrics come behind step 3's line
    run.train(1)
    log(run, 2, late=True)
    log(run, 3, loss=7.5, note="x", samples=3)
    run.save()
    one, two, three = Rows(tier).after(0, 3)
    assert list(one.values) == ["loss", "a", "b", "samples"] and one.values["a"] == 2 and math.isnan(float(one.values["b"]))
    assert two.values["late"] is True
    assert list(three.values.items()) == [("loss", 7.5), ("note", "x"), ("samples", 3)]


def test_reading_goes_on_where_it_was_while_the_journal_grows() -> None:
    tier = MemoryTier()
    run = SyntheticRun(tier)
    run.begin()
    run.train(2)
    run.save()
    rows = Rows(tier)
    assert steps(list(rows.after(0, rows.committed()))) == [1, 2]
    run.train(1)
    log(run, 3, a=3)
    run.journal.sync()
    assert rows.committed() == 2, "on disk, but not committed"
    assert list(rows.after(2, 2)) == []
    run.train(1)
    log(run, 4, a=4)
    run.save()
    assert [(row.step, row.values["a"]) for row in rows.after(2, rows.committed())] == [(3, 3), (4, 4)]
    assert steps(list(rows.after(0, 4))) == [1, 2, 3, 4], "and again from the beginning"


def test_a_reader_that_was_left_half_way_loses_nothing() -> None:
    tier = MemoryTier()
    interrupted(tier)
    rows = Rows(tier)
    rows.committed()
    reading = rows.after(9, 12)
    assert next(reading).step == 10
    reading.close()
    assert steps(list(rows.after(9, 12))) == [10, 11, 12]
    assert steps(list(rows.after(10, 12))) == [11, 12]


def test_I3_a_step_that_is_not_in_its_journal_is_damage_not_a_gap() -> None:
    tier = MemoryTier()
    run = SyntheticRun(tier)
    run.begin()
    run.train(2)
    run.train(1, skip=1)  # there is no line of step 3
    run.save()
    rows = Rows(tier)
    with pytest.raises(Damaged, match=r"journal/00000000\.jsonl: step 3 is committed but cannot be read here: restore the file"):
        list(rows.after(0, rows.committed()))
    tier.delete("runs/main/journal/00000000.jsonl")
    with pytest.raises(Damaged, match="step 1 is committed but cannot be read"):
        list(Rows(tier).after(0, 4))


def test_journals_whose_steps_are_held_are_not_read() -> None:
    tier = MemoryTier()
    interrupted(tier)
    tier.delete("runs/main/journal/00000000.jsonl")
    rows = Rows(tier)
    rows.committed()
    assert steps(list(rows.after(6, 12))) == [7, 8, 9, 10, 11, 12]


def test_a_stores_folder_has_no_rows() -> None:
    tier = MemoryTier()
    Repository.create(tier, RunFacts(run_id="x", created=SystemClock().utc(), options={"writer": "store"}))
    with pytest.raises(Refused, match="holds checkpoints of a Store"):
        Rows(tier)
