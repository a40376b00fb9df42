"""The rows that sinks show, read from the journals: one per committed step of the surviving lineage, in step order.

The journal is the queue between a run and its sinks: it is on disk before a step counts as committed, so a row can be had again as
often as a sink needs it, by whoever comes later. Reading costs some 8 us per step; a journal whose steps a sink holds is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from unbroken.codec import metrics
from unbroken.codec.metrics import Value
from unbroken.core.errors import Damaged, Refused
from unbroken.core.ports import Tier
from unbroken.core.records import MAIN_LINEAGE, EventRecord, Generation, RootRecord, StepRecord
from unbroken.store import paths
from unbroken.store.journal import JournalTail
from unbroken.store.log import reach
from unbroken.store.repository import Repository


class Row(Struct, frozen=True, kw_only=True):
    """What is known of one step: `loss` (NaN where the loop told none), `samples` of the step, and what `run.log` was given.

    The last of `values` is always `samples`: a sink that keeps values one by one has the whole step when it has that one.
    """

    step: int
    values: dict[str, Value]


class Rows:
    """Reads a run's folder, alive or not. Not thread-safe: each sink's thread has its own."""

    def __init__(self, tier: Tier, lineage: str = MAIN_LINEAGE) -> None:
        self._tier = tier
        self._repository = Repository.open(tier, lineage)
        if "units" not in self._repository.facts.options:
            raise Refused("holds checkpoints of a Store, which has no steps to show: give the folder of a run")
        self._reader: _Reader | None = None

    @property
    def run_id(self) -> str:
        """Name of the run, the same in all its restarts."""
        return self._repository.facts.run_id

    @property
    def base(self) -> int:
        """The step at which a branch has parted from what it stands on, whose rows are another lineage's; 0 for the run itself."""
        generations = self._repository.log.state.generations
        return generations[0].base_step if generations else 0

    def committed(self) -> int:
        """The newest committed step, 0 before there is one. Cost: the log entries since the last call."""
        self._repository.refresh()
        return max((commit.step for commit in self._repository.visible()), default=0)

    def after(self, step: int, upto: int) -> Iterator[Row]:
        """The rows of steps step + 1 to `upto`, which must be committed. Raises Damaged, naming the journal, when one cannot be had."""
        state = self._repository.log.state
        reached = reach(state)
        for generation in state.generations:
            end = min(reached.get(generation.number, 0), upto)
            if end <= max(step, generation.base_step):
                continue
            for row in self._reader_of(generation, step).rows(end):
                if row.step <= step:
                    continue
                if row.step != step + 1:
                    raise self._missing(generation, step + 1)
                yield row
                step = row.step
            if step != end:
                raise self._missing(generation, step + 1)

    def _reader_of(self, generation: Generation, step: int) -> _Reader:
        """Where the newest journal was left is where the next call goes on."""
        reader = self._reader
        if reader is None or reader.generation != generation or reader.given > step:
            self._reader = reader = _Reader(self._tier, self._repository.lineage, generation)
        return reader

    def _missing(self, generation: Generation, step: int) -> Damaged:
        return Damaged(
            paths.journal(self._repository.lineage, generation.number),
            f"step {step} is committed but cannot be read here: restore the file from a copy",
        )


class _Reader:
    """Rows of one generation's journal. Those beyond `end` wait here for the next call: they are not committed yet."""

    def __init__(self, tier: Tier, lineage: str, generation: Generation) -> None:
        self.generation = generation
        self.given = generation.base_step
        self._path = paths.journal(lineage, generation.number)
        self._tail = JournalTail(tier, lineage, generation.number, generation.nonce)
        self._steps: dict[int, dict[str, Any]] = {}
        self._metrics: dict[int, dict[str, Value]] = {}

    def rows(self, end: int) -> Iterator[Row]:
        """Rows up to step `end`. Metrics of a step come before the second step after it, and before the root of its snapshot."""
        for line in self._tail.read():
            record = line.record
            if isinstance(record, StepRecord):
                yield from self._upto(min(end, record.step - 2))
                self._steps[record.step] = {"loss": self._loss(record), "samples": record.num_samples}
            elif isinstance(record, EventRecord) and record.name == metrics.EVENT and record.step > self.given:
                self._metrics.setdefault(record.step, {}).update(metrics.decode(record.facts))
            elif isinstance(record, RootRecord):
                yield from self._upto(min(end, record.step))
        yield from self._upto(end)

    def _upto(self, step: int) -> Iterator[Row]:
        while self.given < step and self.given + 1 in self._steps:
            self.given += 1
            values = self._steps.pop(self.given) | self._metrics.pop(self.given, {})
            values["samples"] = values.pop("samples")
            yield Row(step=self.given, values=values)

    def _loss(self, record: StepRecord) -> float:
        try:
            return float(struct.unpack(">d", bytes.fromhex(record.loss))[0])
        except (ValueError, struct.error):
            raise Damaged(self._path, f"step {record.step}: {record.loss!r} are not the bits of a loss") from None
