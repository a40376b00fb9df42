"""What rank 0 tells the journal: steps, snapshots, how a recovery went. Sending costs some 30 us and never waits."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from unbroken.codec import metrics
from unbroken.codec.metrics import Value
from unbroken.core.errors import SaveWarning, StepLost
from unbroken.core.limits import MAX_MESSAGE_BYTES, MAX_REASON_CHARS
from unbroken.core.messages import Journal, Plan
from unbroken.core.records import EventRecord, Record, StepRecord
from unbroken.recover.link import DaemonLost, Link
from unbroken.recover.snapshots import Taken
from unbroken.step.update import Applied

RECORDS_BYTES = MAX_MESSAGE_BYTES - 1024
"""Of records in one message; a step's takes some 150 bytes and 35 per unit."""

MAX_FACT_CHARS = 4000
"""Of a text of the user's, such as an error, in an event: a larger message is refused."""

MAX_UNCOVERED = 1 << 16
"""Steps beyond the newest checkpoint that are kept for another daemon's journal; those that fall out cannot be continued over."""


class JournalClient:
    """The journal as one generation of a run writes it. On other ranks than 0 every call does nothing."""

    def __init__(self, link: Link, plan: Plan, rank: int, world_size: int) -> None:
        self._link = link
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._aligned_s = 0.0
        self._compensated_s = 0.0
        self._uncovered: deque[StepRecord] = deque(maxlen=MAX_UNCOVERED)
        self._uncovered_metrics: deque[EventRecord] = deque(maxlen=MAX_UNCOVERED)

    def continued(self, link: Link, plan: Plan) -> JournalClient:
        """The journal of the next generation, after the daemon has died: it starts with the steps that no checkpoint covers.

        StepLost when steps between the newest checkpoint and those kept here are missing (a checkpoint was damaged meanwhile).
        """
        kept = [record for record in self._uncovered if record.step > plan.step]
        if kept and kept[0].step != plan.step + 1:
            raise StepLost(f"the daemon died, and steps {plan.step + 1} to {kept[0].step - 1} are in no checkpoint that can be read")
        journal = JournalClient(link, plan, self._rank, self._world_size)
        journal._aligned_s = journal._compensated_s = self._aligned_s
        clock = [msgspec.structs.replace(r, clock=((plan.generation, r.step, self._world_size),)) for r in kept]
        journal._uncovered.extend(clock)
        told = [event for event in self._uncovered_metrics if event.step > plan.step]
        journal._uncovered_metrics.extend(told)
        records: list[StepRecord | EventRecord] = [*clock, *told]
        in_order = sorted(records, key=lambda record: record.step)  # a step stays before its metrics
        journal.write(EventRecord(name="continued", step=plan.step, facts={"steps": len(kept)}), *in_order)
        return journal

    def start(self, moments: dict[str, float]) -> None:
        """The phases of the start; `moments` are when each ended, on the last rank, in monotonic seconds."""
        self._aligned_s = self._compensated_s = moments["align"]
        self.write(EventRecord(name="start", step=self._plan.step, at=moments, facts={"source": self._plan.source}))

    def step(self, step: int, attempt: int, applied: Applied, now_s: float) -> None:
        """One step applied by all ranks; after a failure also the moment at which the lost step was done again."""
        record = StepRecord(
            step=step,
            attempt=attempt,
            units=applied.units,
            num_samples=applied.num_samples,
            loss=applied.loss_bits,
            clock=((self._plan.generation, step, self._world_size),),
            status=applied.status,
            reason=applied.reason[:MAX_REASON_CHARS] or msgspec.UNSET,
            time_s=now_s,
        )
        covered = self._link.committed.step if self._link.committed is not None else -1
        for kept in (self._uncovered, self._uncovered_metrics):
            while kept and kept[0].step <= covered:
                kept.popleft()
        if self._rank == 0:
            self._uncovered.append(record)
        self.write(record, *self._caught_up(step, now_s))

    def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """What the loop logged for a step, in time for the snapshot of that step."""
        event = EventRecord(name=metrics.EVENT, step=step, facts=metrics.encode(values))
        if self._rank == 0:
            self._uncovered_metrics.append(event)
        self.write(event)

    def captured(self, taken: Taken) -> None:
        """One snapshot frozen: seconds of copying, seconds that training waited."""
        numbers = {"capture_s": taken.capture_s, "stall_s": taken.stall_s, "size_bytes": taken.size_bytes}
        self.write(EventRecord(name="captured", step=taken.step, facts=numbers))

    def event(self, name: str, step: int, **facts: str) -> None:
        """Anything else."""
        self.write(EventRecord(name=name, step=step, facts={key: text[:MAX_FACT_CHARS] for key, text in facts.items()}))

    def write(self, *records: Record) -> None:
        """Send records; without a daemon, one warning."""
        if self._rank != 0 or self._link.lost is not None:
            return
        try:
            for part in _parts(records):
                self._link.send(Journal(generation=self._plan.generation, records=part))
        except DaemonLost as error:
            warnings.warn(f"{error}; training goes on, another daemon is started at the next boundary", SaveWarning, stacklevel=3)

    def _caught_up(self, step: int, now_s: float) -> list[EventRecord]:
        """The step after the newest one in the old journal was in flight when the failure came."""
        lost = self._plan.last_step + 1
        if self._plan.generation == 0 or step > lost:
            return []
        if step < lost:
            self._compensated_s = now_s
            return []
        at = {"compensate": self._compensated_s, "first_step": now_s}
        return [EventRecord(name="caught_up", step=step, at=at, facts={"lost_step": lost})]


def _parts(records: tuple[Record, ...]) -> Iterator[tuple[Record, ...]]:
    """The records in order, as many together as one message holds."""
    part: list[Record] = []
    size_bytes = 0
    for record in records:
        record_bytes = len(msgspec.json.encode(record)) + 1 if len(records) > 1 else 0
        if part and size_bytes + record_bytes > RECORDS_BYTES:
            yield tuple(part)
            part, size_bytes = [], 0
        part.append(record)
        size_bytes += record_bytes
    if part:
        yield tuple(part)
