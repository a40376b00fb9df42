"""The saving half of a run, against a daemon's end that commits, fails, stays silent or dies (I4, I9)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.rigs.daemon_end import DaemonEnd, HandClock, Said
from tests.rigs.step_rank import CPU, stack_of
from unbroken.cluster.preempt import EVALUATION_S
from unbroken.config import Interval, resolve
from unbroken.core.errors import SaveFailed, SaveWarning, StepLost, UnbrokenError
from unbroken.core.limits import MAX_ATTEMPTS
from unbroken.core.messages import Committed, Failed, Journal, Message, Plan, Ready, Refuse, Status, StatusReply, Verdict
from unbroken.core.ports import SystemClock, position
from unbroken.core.records import EventRecord, StepRecord
from unbroken.data.loader import Batches, as_source
from unbroken.keeping import Keeping, LongEvaluations, Pace
from unbroken.opening import Opening
from unbroken.recover.start import Counters
from unbroken.step.exchange import Exchange
from unbroken.step.reduce import Flags
from unbroken.step.update import Applied

STEP = Applied(loss=1.0, loss_bits="0" * 16, status="applied", num_samples=8, units=("0" * 32,))
QUIET, LOST, STOP = [Flags()], [Flags(daemon_lost=True)], [Flags(stop=True)]


def committing(message: Message) -> Iterable[Said]:
    """A daemon that makes everything durable at once."""
    if isinstance(message, Ready):
        yield Committed(step=message.step, generation=message.generation, milestone=message.milestone, state_root="00", seconds=0.0)
    if isinstance(message, Status):
        yield StatusReply(phase="idle", facts={})


class Half:
    """A Keeping with everything it needs, and the daemon's end."""

    def __init__(self, answer: Any = committing, interval: str = "1 steps", source: str = "fresh", step: int = 0) -> None:
        self.daemon = DaemonEnd(answer)
        self.clock = HandClock()
        self.extras: dict[str, Any] = {"note": "x"}
        self.counters = Counters(step=step)
        stack = stack_of(nn.Linear(2, 2), held=self.extras)
        data = as_source(Batches(TensorDataset(torch.zeros(8, 2)), global_batch=8))
        self.opening = Opening("run", resolve(interval, "auto", {"log_to": None}), stack, data, CPU, SystemClock(), {"align": 1.0})
        self.opening._sheet = self.opening._fact_sheet(Plan(generation=2, step=step, source=source))  # type: ignore[arg-type]
        self.opening.exchange, self.opening.link = Exchange(CPU), self.daemon.link
        self.plan = Plan(generation=2, step=step, source=source)  # type: ignore[arg-type]
        self.keeping = Keeping(self.opening, self.plan, self.counters, self.clock)

    def step(self) -> None:
        self.counters.step += 1
        self.keeping.stepped(0, STEP, self.clock.now)

    def saved(self, num: int) -> list[tuple[int, bool]]:
        """(step, milestone) of all snapshots so far, of which there must be `num`."""
        ready = self.daemon.wait_for(Ready, num) if num else []
        self.daemon.link.send(Status())
        self.daemon.wait_for(Status)
        assert len([m for m in self.daemon.heard if isinstance(m, Ready)]) == num
        return [(r.step, r.milestone) for r in ready]

    def journalled(self) -> list[str]:
        """Names of events and numbers of steps, in order, as the daemon heard them until now."""
        found = []
        for message in self.daemon.heard:
            for record in message.records if isinstance(message, Journal) else ():
                found.append(record.name if isinstance(record, EventRecord) else str(getattr(record, "step", "")))
        return found


@pytest.fixture
def half() -> Iterator[Callable[..., Half]]:
    made: list[Half] = []

    def new(*args: Any, **options: Any) -> Half:
        made.append(Half(*args, **options))
        return made[-1]

    yield new
    for one in made:
        one.keeping._snapshots.close()
        one.daemon.close()


def snapshots(clock: HandClock, pace: Pace, length: float, steps: range) -> list[int]:
    """The steps of a run at whose boundary a snapshot is taken: rank 0's word travels with the step before."""
    taken = []
    for step in steps:
        word = pace.due_after(step + 1)
        clock.sleep(length)
        pace.step_done()
        if pace.due:
            pace.saved()
            taken.append(step)
        pace.due = word
    return taken


def test_steps_are_counted_from_the_runs_beginning_not_from_this_start() -> None:
    clock = HandClock()
    assert not Pace(Interval(steps=4), clock, 6).due
    assert snapshots(clock, Pace(Interval(steps=4), clock, 6), 1.0, range(7, 18)) == [8, 12, 16]
    assert snapshots(clock, Pace(Interval(steps=4), clock, 7), 1.0, range(8, 18)) == [8, 12, 16], "the very next boundary, too"
    assert snapshots(clock, Pace(Interval(steps=1), clock, 0), 1.0, range(1, 5)) == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [0.1, 0.7, 3.0, 4.9])
def test_no_more_work_than_was_said_lies_between_snapshots_and_not_much_less(length: float) -> None:
    """In seconds, with steps of equal length."""
    clock = HandClock()
    taken = snapshots(clock, Pace(Interval(seconds=10), clock, 0), length, range(1, 1000))
    gaps = [(b - a) * length for a, b in pairwise(taken)]
    assert len(gaps) > 7 and max(gaps) <= 10 + 1e-9
    assert min(gaps) >= 10 - 2 * length


def test_steps_longer_than_the_interval_are_all_saved() -> None:
    clock = HandClock()
    taken = snapshots(clock, Pace(Interval(seconds=1), clock, 0), 30.0, range(1, 20))
    assert taken == list(range(taken[0], 20)) and taken[0] <= 3


def test_B34_the_boundary_before_a_long_evaluation_is_kept_once_there_is_a_habit() -> None:
    habit = LongEvaluations()
    for step in (99, 99, 199):
        assert not any(habit.expected_after(boundary) for boundary in range(400))
        habit.took(EVALUATION_S, step)
    assert [boundary for boundary in range(1000) if habit.expected_after(boundary)] == [299]
    habit.took(EVALUATION_S, 299)
    assert [boundary for boundary in range(1000) if habit.expected_after(boundary)] == [399]
    habit.took(EVALUATION_S - 0.1, 350)
    assert habit.expected_after(399), "short ones are never cut"


def test_B34_with_two_long_evaluations_ten_steps_apart_the_next_one_finds_a_snapshot(half: Callable[..., Half]) -> None:
    one = half(interval="1000 steps")
    asked = []
    for step in range(1, 40):
        asked.append((step + 1, one.keeping.flags(False).snapshot_next))  # said with this step, for the boundary after it
        one.step()
        if step % 10 == 0:
            one.keeping.evaluations.took(EVALUATION_S, one.counters.step - 1)
    assert [boundary for boundary, is_due in asked if is_due] == [29, 39]


def test_one_long_step_is_remembered_for_a_while_and_then_forgotten() -> None:
    clock = HandClock()
    pace = Pace(Interval(seconds=100), clock, 0)
    clock.sleep(60)
    pace.step_done()
    pace.saved()
    assert pace.due_after(2), "another such step would be too much"
    clock.sleep(0.1)
    pace.step_done()
    assert pace.due_after(3), "and may come at any time"
    for _ in range(20):
        clock.sleep(0.1)
        pace.step_done()
    pace.saved()
    assert not pace.due_after(22)


# -- when ----------------------------------------------------------------------------------------------------------------------


def test_the_birth_of_a_run_is_saved_and_a_resumed_step_is_not_saved_again(half: Callable[..., Half]) -> None:
    born = half(interval="100 steps")
    assert not born.keeping.boundary(QUIET, last=False)
    assert born.saved(1) == [(0, False)]
    resumed = half(interval="100 steps", source="disk", step=7)
    resumed.keeping.close()
    assert resumed.saved(0) == []


def test_rank_0s_word_decides_about_the_boundary_after_next(half: Callable[..., Half]) -> None:
    one = half(interval="3 steps")
    words, taken = [], []
    for step in range(1, 8):
        word = one.keeping.flags(False)
        words.append(word.snapshot_next)
        one.step()
        before = len([m for m in one.daemon.heard if isinstance(m, Ready)])
        one.keeping.boundary([word, Flags(snapshot_next=True)], last=False)
        one.daemon.link.send(Status())
        one.daemon.wait_for(Status, step)
        if len([m for m in one.daemon.heard if isinstance(m, Ready)]) > before:
            taken.append(step)
    assert words == [False, True, False, False, True, False, False]
    assert taken == [3, 6]


def test_another_rank_than_0_decides_nothing(half: Callable[..., Half]) -> None:
    one = half()
    one.opening.exchange.rank = 1
    other = Keeping(one.opening, one.plan, one.counters, one.clock)
    assert other.flags(True) == Flags(stop=True, snapshot_next=False)


@pytest.mark.parametrize(("told", "last", "stops"), [(STOP, False, True), (QUIET, True, False), ([Flags(), Flags(stop=True)], False, True)])
def test_B34_a_request_to_stop_and_the_last_step_are_saved_whatever_the_interval(
    half: Callable[..., Half], told: list[Flags], last: bool, stops: bool
) -> None:
    one = half(interval="100 steps")
    one.step()
    assert one.keeping.boundary(told, last=last) is stops
    assert one.saved(1) == [(1, False)]


def test_a_wish_is_granted_at_the_coming_boundary_and_wishes_add_up(half: Callable[..., Half]) -> None:
    one = half(interval="100 steps")
    one.step()
    one.keeping.want(True, False)
    one.keeping.want(False, True)
    assert one.saved(0) == []
    one.keeping.boundary(QUIET, last=False)
    one.step()
    one.keeping.boundary(QUIET, last=False)
    assert one.saved(1) == [(1, True)]


def test_a_step_is_saved_once_but_a_milestone_of_it_again(half: Callable[..., Half]) -> None:
    one = half()
    one.step()
    for milestone in (False, False, True):
        one.keeping.save(milestone, True)
    one.keeping.close()
    assert one.saved(2) == [(1, False), (1, True)]


# -- what goes wrong -----------------------------------------------------------------------------------------------------------


def test_I9_each_failure_is_one_warning_and_what_was_overtaken_is_no_failure(half: Callable[..., Half]) -> None:
    def answer(message: Message) -> Iterable[Said]:
        if isinstance(message, Ready):
            yield Failed(step=message.step, generation=2, text="no space", superseded=message.step == 2)

    one = half(answer)
    with pytest.warns(SaveWarning) as caught:
        for number in range(1, 4):
            one.step()
            one.keeping._pace.due = True
            one.keeping.boundary(QUIET, last=False)
            one.daemon.wait_for(Ready, number)
        one.keeping.boundary(QUIET, last=False)
    assert [str(w.message) for w in caught] == [f"checkpoint of step {n} not saved, training goes on: no space" for n in (1, 3)]
    assert [failed.step for failed in one.daemon.link.superseded] == [2]


def test_I9_a_save_that_is_waited_for_raises_the_cause(half: Callable[..., Half]) -> None:
    def answer(message: Message) -> Iterable[Said]:
        if isinstance(message, Ready):
            yield Failed(step=message.step, generation=2, text="OSError: no space")
        if isinstance(message, Status):
            yield StatusReply(phase="idle", facts={})

    one = half(answer)
    one.step()
    with pytest.warns(SaveWarning), pytest.raises(SaveFailed, match="step 1 was not saved: OSError: no space"):
        one.keeping.save(False, True)


def test_I9_a_save_that_is_waited_for_and_could_not_even_begin_raises_too(half: Callable[..., Half]) -> None:
    """An older checkpoint that is durable must not stand in for it."""
    one = half()
    one.step()
    one.keeping.save(False, True)
    one.daemon.hang_up()
    with pytest.warns(SaveWarning, match="daemon has gone"):
        one.step()
    with pytest.warns(SaveWarning, match="no snapshot at step 2"), pytest.raises(SaveFailed, match=r"step 2"):
        one.keeping.save(False, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        one.keeping.save(False, False)


def test_I9_an_unstorable_value_costs_automatic_snapshots_and_ends_only_a_save_that_was_asked_for(half: Callable[..., Half]) -> None:
    one = half()
    one.step()
    one.extras["note"] = print
    with pytest.warns(SaveWarning, match=r"no snapshot at step 1, training goes on: .*held.*note") as caught:
        one.keeping.boundary(QUIET, last=True)
    assert len(caught) == 1
    with pytest.raises(TypeError, match=r"held.*note"):
        one.keeping.save(False, False)
    one.extras["note"] = "y"
    one.keeping.save(False, True)
    assert one.saved(1) == [(1, False)]
    assert [name for name in one.journalled() if name != "caught_up"] == ["1", "save_failed", "captured"]


def test_I9_closing_waits_for_the_last_snapshot_and_says_what_was_not_saved(half: Callable[..., Half]) -> None:
    one = half()
    one.step()
    one.keeping.close()
    assert one.saved(1) == [(1, False)]
    lost = half()
    lost.step()
    lost.daemon.hang_up()
    with pytest.warns(SaveWarning, match="no snapshot at step 1"):
        lost.keeping.close()


def test_a_run_resumed_from_memory_is_durable_before_it_closes(half: Callable[..., Half]) -> None:
    """The step it came from may be in memory only: nobody has seen its commit yet."""

    def answer(message: Message) -> Iterable[Said]:
        if isinstance(message, Status):
            yield StatusReply(phase="draining", facts={"last_committed": 3})
            yield Failed(step=4, generation=1, text="no space")

    one = half(answer, source="memory", step=4)
    with pytest.warns(SaveWarning) as caught:
        one.keeping.close(5.0)
    assert str(caught[-1].message) == "the checkpoint of step 4 was not saved: no space; older checkpoints are untouched"


# -- another daemon ------------------------------------------------------------------------------------------------------------


def test_I9_a_lost_daemon_is_replaced_when_a_snapshot_is_due_and_hears_what_is_not_covered(half: Callable[..., Half]) -> None:
    one = half(interval="100 steps")
    one.keeping.boundary(QUIET, last=False)
    second = DaemonEnd(committing)
    joined = []

    def reattach() -> Plan:
        joined.append(one.counters.step)
        one.opening.link = second.link
        return Plan(generation=3, step=0, source="disk")

    one.opening.reattach = reattach  # type: ignore[method-assign]
    one.step()
    one.daemon.hang_up()
    with pytest.warns(SaveWarning, match="another daemon is started at the next boundary"):
        one.step()
    assert one.keeping.flags(False).daemon_lost
    one.keeping.boundary(LOST, last=False)
    assert joined == [], "not before it is needed"
    one.keeping._pace.due = True
    position[1] = 2
    one.keeping.boundary([Flags(), Flags(daemon_lost=True)], last=False)
    assert (joined, one.keeping.generation, position[1]) == ([2], 3, 3)
    (ready,) = second.wait_for(Ready)
    assert (ready.step, ready.generation) == (2, 3)
    steps = [r.step for m in second.wait_for(Journal) for r in m.records if isinstance(r, StepRecord)]
    assert steps == [1, 2]
    one.keeping.close()
    second.close()


def test_I9_when_no_daemon_can_be_started_training_goes_on_and_tries_again(half: Callable[..., Half]) -> None:
    one = half()
    tried = []

    def reattach() -> Plan:
        tried.append(1)
        raise UnbrokenError("no memory")

    one.opening.reattach = reattach  # type: ignore[method-assign]
    one.daemon.hang_up()
    for number in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.step()
            one.keeping._pace.due = True
            assert not one.keeping.boundary(LOST, last=False)
        assert len(tried) == number
        assert any("no daemon could be started, nothing is saved for now: no memory" in str(w.message) for w in caught)
    assert one.keeping.generation == 2


# -- retry ---------------------------------------------------------------------------------------------------------------------


def test_I8_a_refused_step_is_asked_about_and_not_tried_for_ever(half: Callable[..., Half]) -> None:
    one = half(lambda m: [Verdict(retry=True, attempt=m.attempt + 1, reason="")] if isinstance(m, Refuse) else [])
    attempt = 0
    for expected in range(1, MAX_ATTEMPTS):
        attempt = one.keeping.retry(5, attempt, RuntimeError("x" * 5000))
        assert attempt == expected
    refused = one.daemon.wait_for(Refuse, MAX_ATTEMPTS - 1)
    assert {(r.generation, r.step, r.rank) for r in refused} == {(2, 5, 0)}
    assert all(len(r.reason) <= 1000 for r in refused)
    with pytest.raises(StepLost, match=f"step 5 was refused {MAX_ATTEMPTS} times in place: y"):
        one.keeping.retry(5, attempt, RuntimeError("y"))


# -- the start -----------------------------------------------------------------------------------------------------------------


def test_the_start_reserves_memory_and_is_the_first_line_of_the_journal(half: Callable[..., Half]) -> None:
    one = half()
    slot_bytes = one.keeping.start()
    assert slot_bytes == one.daemon.table.need(0, 4096, 2)[0].size_bytes
    one.keeping.note("stopped", step=0, signal="SIGTERM")
    one.daemon.link.send(Status())
    one.daemon.wait_for(Status)
    assert one.journalled() == ["start", "stopped"]
