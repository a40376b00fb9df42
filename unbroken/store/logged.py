"""What journals say that decides what stays: the values of a metric at checkpoints, and the rules that the newest start was given."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import msgspec

from unbroken.codec import metrics
from unbroken.core.errors import Damaged, Refused
from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.ports import Tier
from unbroken.core.records import BeginRecord, CommitEntry, EventRecord, Generation, Keep, LogState, Record, RunFacts, StepRecord
from unbroken.store.journal import JournalTail, read_journal
from unbroken.store.log import Key, key_of
from unbroken.store.retention import told

EVENT = "retention"
"""Name of the journal event that holds the rules of a start, where they are not those of the run's birth."""

_FIRST_LINES = 4


class LoggedValues:
    """A metric's value at checkpoints. Each call reads what the journals have got since the one before: some 8 us per step.

    `loss` is the step's own unless the loop has logged another under that name.
    """

    def __init__(self, tier: Tier, lineage: str, metric: str) -> None:
        self.metric = metric
        self._tier = tier
        self._lineage = lineage
        self._readings: dict[Generation, _Reading] = {}

    def of(self, state: LogState, commits: Sequence[CommitEntry]) -> dict[Key, float | None]:
        """By commit; not there: not logged. None: its journal cannot be read so far. Raises Transient."""
        found: dict[Key, float | None] = {}
        for generation in state.generations:
            mine = [commit for commit in commits if commit.generation == generation.number]
            if not mine:
                self._readings.pop(generation, None)
                continue
            reading = self._readings.get(generation)
            if reading is None:
                tail = JournalTail(self._tier, self._lineage, generation.number, generation.nonce)
                reading = self._readings[generation] = _Reading(tail, self.metric)
            reading.go_on()
            for commit in mine:
                if commit.step in reading.values:
                    found[key_of(commit)] = reading.values[commit.step]
                elif reading.num_lines < commit.journal_lines:
                    found[key_of(commit)] = None
            reading.forget_others({commit.step for commit in mine})
        return found


class _Reading:
    """One journal, as far as it has been read."""

    def __init__(self, tail: JournalTail, metric: str) -> None:
        self.values: dict[int, float] = {}
        self.num_lines = 0
        self._tail = tail
        self._metric = metric

    def go_on(self) -> None:
        with suppress(Damaged):  # safe: what lies beyond is not known, so that its checkpoints stay; `verify` names the damage
            for line in self._tail.read():
                self.num_lines += 1
                self._take(line.record)

    def forget_others(self, steps: set[int]) -> None:
        """Only checkpoints are asked for, and those to come are newer."""
        newest = max(steps)
        self.values = {step: value for step, value in self.values.items() if step in steps or step > newest}

    def _take(self, record: Record) -> None:
        if isinstance(record, StepRecord) and self._metric == "loss":
            with suppress(ValueError, struct.error):  # safe: a line without a loss; `certify` names it
                self.values[record.step] = struct.unpack(">d", bytes.fromhex(record.loss))[0]
        elif isinstance(record, EventRecord) and record.name == metrics.EVENT:
            value = metrics.decode(record.facts).get(self._metric)
            if isinstance(value, float | int):
                self.values[record.step] = _as_float(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer that no writer of ours has logged
        return math.nan


def event_of(keep: Keep, step: int, facts: RunFacts) -> list[EventRecord]:
    """What a start has to journal of its rules: nothing where they are those of the run's birth."""
    if keep == born_with(facts):
        return []
    return [EventRecord(name=EVENT, step=step, facts=msgspec.to_builtins(keep) | {"told": told(keep)})]


def born_with(facts: RunFacts) -> Keep:
    """The rules of a run of which no start has said anything else."""
    newest = facts.options.get("keep")
    return Keep(newest=newest if type(newest) is int and newest >= 1 else KEEP_NEWEST)


def rules_in_force(tier: Tier, lineage: str, state: LogState, facts: RunFacts) -> Keep:
    """The rules of the newest start. Refused where its journal cannot be read, or a newer version has written them."""
    for generation in reversed(state.generations):
        try:
            lines = read_journal(tier, lineage, generation.number, generation.nonce)
            records = [line.record for line in islice(lines, _FIRST_LINES)]
            if not any(isinstance(record, BeginRecord) for record in records):
                continue  # nothing was started: it was opened to remove something
            for record in records:
                if isinstance(record, EventRecord) and record.name == EVENT:
                    return msgspec.convert({name: fact for name, fact in record.facts.items() if name != "told"}, Keep)
        except (Damaged, msgspec.ValidationError) as error:
            raise Refused(f"the run's own rules cannot be read ({error}): say what is to be kept") from error
        return born_with(facts)
    return born_with(facts)
