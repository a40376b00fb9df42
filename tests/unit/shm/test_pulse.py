"""The page between a rank and its daemon: what is written there is read there, and nothing a rank writes harms the reader."""

from __future__ import annotations

import os
import struct
import sys
import timeit
from collections.abc import Iterator

import pytest

from unbroken.core.limits import PULSE_BYTES
from unbroken.shm.pulse import HEAD_BYTES, NUM_TIMES, Phase, Pulse, PulsePage

now = [0.0]


@pytest.fixture
def page() -> Iterator[PulsePage]:
    made = PulsePage(1)
    yield made
    made.close()


@pytest.fixture
def pulse(page: PulsePage) -> Iterator[Pulse]:
    now[0] = 100.0
    made = Pulse(lambda: now[0])
    made.attach(page.fd)
    yield made
    made.detach()


def step(pulse: Pulse, number: int, seconds: float) -> None:
    pulse.begin(number)
    pulse.mark(Phase.DATA, 2)
    pulse.mark(Phase.UNIT, 2)
    now[0] += seconds
    pulse.mark(Phase.COLLECTIVE)
    pulse.mark(Phase.UPDATE)
    pulse.done()


def test_what_a_rank_marks_is_read(page: PulsePage, pulse: Pulse) -> None:
    assert page.read().phase == Phase.OUTSIDE
    pulse.begin(7)
    pulse.mark(Phase.UNIT, 5)
    first = page.read()
    assert (first.phase, first.step, first.unit, first.steps) == (Phase.UNIT, 7, 5, 0)
    pulse.mark(Phase.UNIT, 5)
    assert page.read().marks == first.marks + 1, "the same place again is progress"


def test_times_are_those_of_the_last_steps(page: PulsePage, pulse: Pulse) -> None:
    for number in range(1, NUM_TIMES + 4):
        step(pulse, number, float(number))
    reading = page.read()
    assert reading.steps == NUM_TIMES + 3
    assert sorted(reading.times) == [float(n) for n in range(4, NUM_TIMES + 4)]


def test_evaluations_and_saves_are_not_the_steps_time_and_the_place_before_comes_back(page: PulsePage, pulse: Pulse) -> None:
    pulse.begin(1)
    pulse.mark(Phase.UNIT, 3)
    now[0] += 1.0
    with pulse.within(Phase.EVAL):
        assert page.read().phase == Phase.EVAL
        now[0] += 50.0
    assert (page.read().phase, page.read().unit) == (Phase.UNIT, 3)
    pulse.done()
    assert page.read().times == (1.0,)


def test_an_error_leaves_the_place_as_well(page: PulsePage, pulse: Pulse) -> None:
    pulse.mark(Phase.BODY)
    with pytest.raises(ValueError, match="x"), pulse.within(Phase.SAVE):
        raise ValueError("x")
    assert page.read().phase == Phase.BODY


def test_a_tracer_is_seen_at_the_next_step(page: PulsePage, pulse: Pulse) -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        pulse.begin(1)
        assert page.read().traced
        sys.settrace(None)
        pulse.begin(2)
        assert not page.read().traced
    finally:
        sys.settrace(before)


def test_without_a_daemon_all_calls_go_nowhere_and_a_page_that_comes_later_knows_the_place(page: PulsePage) -> None:
    pulse = Pulse(lambda: 0.0)
    pulse.begin(9)
    with pulse.within(Phase.SAVE):
        pulse.attach(page.fd)
        reading = page.read()
        assert (reading.phase, reading.step) == (Phase.SAVE, 9)
    pulse.done()
    pulse.detach()
    assert page.read().phase == Phase.OUTSIDE
    pulse.done()


def test_what_was_learned_goes_into_the_page_of_the_next_life() -> None:
    page = PulsePage(0, (1.0, 2.0, 3.0))
    pulse = Pulse(lambda: now[0])
    pulse.attach(page.fd)
    step(pulse, 1, 4.0)
    assert page.read().times == (1.0, 2.0, 3.0, 4.0)
    assert page.read().steps == 1, "of this life"
    pulse.detach()
    page.close()


def test_stacks_are_what_was_written_since_they_were_asked_for(page: PulsePage) -> None:
    page.ask()
    os.write(page.fd, b"first")
    assert page.stacks() == "first"
    page.ask()
    assert page.stacks() == ""
    os.write(page.fd, b"2nd")
    assert page.stacks() == "2nd"


def test_I11_stacks_without_end_fill_the_page_and_no_more(page: PulsePage) -> None:
    page.ask()
    with pytest.raises(OSError, match="not permitted"):
        while os.write(page.fd, b"x" * 4096):
            pass
    assert len(page.stacks()) == PULSE_BYTES - HEAD_BYTES
    assert os.fstat(page.fd).st_size == PULSE_BYTES


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300, 99.0])
def test_B39_a_confused_rank_does_not_harm_the_reader(page: PulsePage, value: float) -> None:
    os.pwrite(page.fd, struct.pack("d", value) * (HEAD_BYTES // 8), 0)
    reading = page.read()
    assert reading.phase == Phase.OUTSIDE
    assert all(0 <= seconds < float("inf") for seconds in reading.times)
    os.lseek(page.fd, 1 << 40, os.SEEK_SET)
    assert page.stacks() is not None
    os.lseek(page.fd, 0, os.SEEK_SET)
    assert page.stacks() == ""


def test_a_step_costs_microseconds(pulse: Pulse) -> None:
    """The docstring's 5.5 us, with room for a busy machine."""
    best_s = min(timeit.repeat(lambda: step(pulse, 1, 0.0), number=200, repeat=20)) / 200
    assert best_s < 30e-6
