"""What the journal is told: each step once, what a new daemon must hear again, and when a recovery had caught up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.rigs.daemon_end import heard_on, line
from unbroken.core.errors import SaveWarning, StepLost
from unbroken.core.limits import MAX_MESSAGE_BYTES
from unbroken.core.messages import Committed, Journal, Plan
from unbroken.core.records import EventRecord, Record, StepRecord
from unbroken.recover.journal_client import JournalClient
from unbroken.recover.link import Link
from unbroken.recover.snapshots import Taken
from unbroken.shm.channel import Channel, encode
from unbroken.step.update import Applied

Ends = tuple[Link, Channel]


@pytest.fixture
def dial() -> Iterator[Callable[[], Ends]]:
    """Makes lines to daemons, one after the other."""
    made: list[Ends] = []

    def new() -> Ends:
        made.append(line())
        return made[-1]

    yield new
    for link, peer in made:
        link.close()
        peer.close()


@pytest.fixture
def ends(dial: Callable[[], Ends]) -> Ends:
    return dial()


@pytest.fixture
def others(dial: Callable[[], Ends]) -> Ends:
    """The line to the daemon that replaces the first."""
    return dial()


def plan(step: int = 0, generation: int = 0, last_step: int = 0) -> Plan:
    return Plan(generation=generation, step=step, source="disk" if generation else "fresh", last_step=last_step)


def applied(step: int, num_units: int = 2) -> Applied:
    units = tuple(f"{step:016x}{unit:016x}" for unit in range(num_units))
    return Applied(loss=1.0, loss_bits=f"{step:016x}", status="applied", num_samples=8, units=units)


def told(peer: Channel) -> list[Record]:
    """The records that arrived, in order; each message must belong to one generation."""
    found = []
    for message in heard_on(peer):
        assert isinstance(message, Journal)
        found += list(message.records)
    return found


def committed(step: int) -> Committed:
    return Committed(step=step, generation=0, state_root="00", seconds=0.1)


def test_a_step_is_told_with_everything_that_certifies_it(ends: Ends) -> None:
    journal = JournalClient(ends[0], plan(generation=2), 0, 3)
    journal.step(1, 1, applied(1), 12.5)
    (message,) = heard_on(ends[1])
    assert message == Journal(
        generation=2,
        records=(
            StepRecord(step=1, attempt=1, units=applied(1).units, num_samples=8, loss=f"{1:016x}", clock=((2, 1, 3),), time_s=12.5),
            *([EventRecord(name="caught_up", step=1, at={"compensate": 0.0, "first_step": 12.5}, facts={"lost_step": 1})]),
        ),
    )


def test_only_rank_0_writes(ends: Ends) -> None:
    journal = JournalClient(ends[0], plan(), 1, 3)
    journal.start({"align": 1.0})
    journal.step(1, 0, applied(1), 2.0)
    journal.captured(Taken(1, 0.1, 0.2, 3))
    journal.event("stopped", 1, signal="SIGTERM")
    assert heard_on(ends[1]) == []


def test_what_else_happened_is_told_as_events(ends: Ends) -> None:
    journal = JournalClient(ends[0], plan(), 0, 1)
    journal.start({"process": 0.5, "align": 1.0})
    journal.captured(Taken(3, 0.1, 0.2, 300))
    journal.event("stopped", 4, signal="SIGTERM")
    assert told(ends[1]) == [
        EventRecord(name="start", step=0, at={"process": 0.5, "align": 1.0}, facts={"source": "fresh"}),
        EventRecord(name="captured", step=3, facts={"capture_s": 0.1, "stall_s": 0.2, "size_bytes": 300}),
        EventRecord(name="stopped", step=4, facts={"signal": "SIGTERM"}),
    ]


@pytest.mark.parametrize(("base", "last", "compensated"), [(5, 8, 108.0), (5, 6, 106.0), (5, 5, 100.0)])
def test_catching_up_ends_with_the_step_that_was_lost_in_flight(ends: Ends, base: int, last: int, compensated: float) -> None:
    journal = JournalClient(ends[0], plan(base, 1, last), 0, 1)
    journal.start({"align": 100.0})
    for step in range(base + 1, last + 4):
        journal.step(step, 0, applied(step), 100.0 + step)
    events = [record for record in told(ends[1]) if isinstance(record, EventRecord) and record.name == "caught_up"]
    at = {"compensate": compensated, "first_step": 101.0 + last}
    assert events == [EventRecord(name="caught_up", step=last + 1, at=at, facts={"lost_step": last + 1})]


def test_I9_without_a_daemon_there_is_one_warning_and_training_goes_on(ends: Ends) -> None:
    journal = JournalClient(ends[0], plan(), 0, 1)
    ends[1].close()
    with pytest.warns(SaveWarning, match="gone.*another daemon is started at the next boundary") as caught:
        journal.step(1, 0, applied(1), 1.0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        journal.step(2, 0, applied(2), 2.0)


def test_I9_a_new_daemon_hears_again_exactly_what_no_checkpoint_covers(ends: Ends, others: Ends) -> None:
    journal = JournalClient(ends[0], plan(), 0, 2)
    for step in range(1, 6):
        journal.step(step, 0, applied(step), float(step))
    ends[0].committed = committed(4)
    journal.step(6, 2, applied(6), 6.0)
    ends[0].committed = committed(5)
    journal.continued(others[0], plan(4, 1))
    event, *steps = told(others[1])
    assert event == EventRecord(name="continued", step=4, facts={"steps": 2})
    assert [(s.step, s.clock, s.attempt, s.time_s) for s in steps if isinstance(s, StepRecord)] == [
        (5, ((1, 5, 2),), 0, 5.0),
        (6, ((1, 6, 2),), 2, 6.0),
    ]


def test_I9_a_second_death_loses_nothing_either(ends: Ends, others: Ends, dial: Callable[[], Ends]) -> None:
    journal = JournalClient(ends[0], plan(), 0, 2)
    for step in range(1, 4):
        journal.step(step, 0, applied(step), float(step))
    second = journal.continued(others[0], plan(0, 1))
    second.step(4, 0, applied(4), 4.0)
    assert not [r for r in told(others[1]) if isinstance(r, EventRecord) and r.name == "caught_up"], "nothing was lost in flight"
    link, peer = dial()
    second.continued(link, plan(2, 2))
    steps = [record for record in told(peer) if isinstance(record, StepRecord)]
    assert [(s.step, s.clock) for s in steps] == [(3, ((2, 3, 2),)), (4, ((2, 4, 2),))]


@pytest.mark.parametrize(("covered", "base"), [(4, 2), (5, 0)])
def test_I9_a_gap_between_checkpoint_and_memory_ends_the_process(ends: Ends, others: Ends, covered: int, base: int) -> None:
    """A checkpoint that covered steps was found damaged meanwhile: what it covered is kept nowhere else."""
    journal = JournalClient(ends[0], plan(), 0, 1)
    for step in range(1, 6):
        journal.step(step, 0, applied(step), float(step))
    ends[0].committed = committed(covered)
    journal.step(6, 0, applied(6), 6.0)
    with pytest.raises(StepLost, match=f"steps {base + 1} to {covered} are in no checkpoint"):
        journal.continued(others[0], plan(base, 1))
    assert heard_on(others[1]) == []


def test_records_are_kept_only_until_a_checkpoint_covers_them(ends: Ends) -> None:
    journal = JournalClient(ends[0], plan(), 0, 1)
    for step in range(1, 301):
        journal.step(step, 0, applied(step), float(step))
        told(ends[1])
        if step % 10 == 0:
            ends[0].committed = committed(step)
        assert len(journal._uncovered) <= 11


@pytest.mark.parametrize("num_units", [1, 64, 300, 3000])
def test_I9_however_many_units_a_step_has_the_messages_stay_small_enough(ends: Ends, others: Ends, num_units: int) -> None:
    """The channel refuses what is larger than a message may be, and a refusal here would end training."""
    journal = JournalClient(ends[0], plan(), 0, 1)
    for step in range(1, 41):
        journal.step(step, 0, applied(step, num_units), float(step))
        told(ends[1])
    sent: list[Any] = []
    others[0].send = lambda message, fds=(): sent.append(message)  # type: ignore[method-assign]
    journal.continued(others[0], plan(0, 1))
    sizes = [len(encode(message)) for message in sent]
    assert [r.step for message in sent for r in message.records if isinstance(r, StepRecord)] == list(range(1, 41))
    assert len(sizes) == 1 or min(a + b for a, b in pairwise(sizes)) > MAX_MESSAGE_BYTES - 2048, "nor are there more than need be"


def test_a_users_text_of_any_length_fits_into_a_message(ends: Ends) -> None:
    link, peer = ends
    JournalClient(link, plan(), 0, 1).event("save_failed", 1, reason="\0" * 1_000_000)
    (event,) = told(peer)
    assert isinstance(event, EventRecord) and event.facts["reason"].startswith("\0\0")
