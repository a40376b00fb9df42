"""Options: what is accepted, what is refused with its remedy, and when a snapshot is due."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.config import Interval, Options, RunConfig, parse_interval, resolve
from unbroken.core.limits import KEEP_NEWEST
from unbroken.loggers.choose import Target


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("30s", Interval(seconds=30)),
        ("0.5 sec", Interval(seconds=0.5)),
        (" 1 second ", Interval(seconds=1)),
        ("90seconds", Interval(seconds=90)),
        ("5 min", Interval(seconds=300)),
        ("1m", Interval(seconds=60)),
        ("1 minute", Interval(seconds=60)),
        ("2 minutes", Interval(seconds=120)),
        ("1.5h", Interval(seconds=5400)),
        ("1 hour", Interval(seconds=3600)),
        ("2 hours", Interval(seconds=7200)),
        ("100 steps", Interval(steps=100)),
        ("1 step", Interval(steps=1)),
        ("2.0 steps", Interval(steps=2)),
    ],
)
def test_times_and_steps(text: str, interval: Interval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize(
    "text",
    ["", "30", "s", "0s", "0 steps", "0.5 steps", "1.5 steps", "-1s", "1e3 steps", "30 S", "1d", "inf s", "nan steps", "1 s 2", 30, None],
)
def test_anything_else_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(ValueError, match=r'lose_at_most=.*"30s", "5 min", "1h", or "100 steps"'):
        parse_interval(text)


@given(st.text(max_size=20))
def test_no_text_is_more_than_refused(text: str) -> None:
    try:
        interval = parse_interval(text)
    except ValueError:
        return
    assert (interval.steps is None) != (interval.seconds is None)
    assert (interval.steps or interval.seconds or 0) > 0


def test_an_interval_in_steps_is_due_at_its_multiples() -> None:
    interval = Interval(steps=3)
    assert [step for step in range(10) if interval.due(step, math.inf, math.inf)] == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("since", "step", "due"), [(0, 0, False), (9.9, 0, False), (10, 0, True), (7, 2, False), (7, 3, True), (0, 10, True)]
)
def test_an_interval_in_seconds_is_due_before_another_step_would_exceed_it(since: float, step: float, due: bool) -> None:
    assert Interval(seconds=10).due(5, since, step) is due


def test_defaults() -> None:
    assert resolve("60s", "auto", {}) == RunConfig(interval=Interval(seconds=60), resume="auto", reduce="ordered", keep=KEEP_NEWEST)


def test_every_option_is_taken_over() -> None:
    options: Options = {"total_steps": 5, "units": 4, "seed": 2**64 - 1, "threads": 2, "keep": 7, "reduce": "ring", "log_to": "wandb:x"}
    expected = RunConfig(
        interval=Interval(steps=3),
        resume="must",
        reduce="ring",
        total_steps=5,
        units=4,
        seed=2**64 - 1,
        threads=2,
        keep=7,
        log_to=(Target("wandb", "x"),),
    )
    assert resolve("3 steps", "must", options) == expected
    assert resolve("1s", "auto", {"hang_timeout": "10 min"}).hang_timeout == 600.0
    nothing: Options = {"total_steps": None, "units": None, "seed": None, "threads": None}
    assert resolve("3 steps", "never", nothing) == RunConfig(interval=Interval(steps=3), resume="never")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 5, "x": 1}, TypeError, r"unknown options \['steps', 'x'\]; known are .*'total_steps'"),
        ({"reduce": "mean"}, ValueError, 'reduce=\'mean\': give "ordered".*"ring"'),
        ({"reduce": None}, ValueError, "reduce=None"),
        ({"total_steps": 0}, ValueError, "total_steps=0: give a whole number of at least 1"),
        ({"units": -1}, ValueError, "units=-1"),
        ({"units": 2.0}, ValueError, r"units=2\.0"),
        ({"threads": True}, ValueError, "threads=True"),
        ({"keep": "3"}, ValueError, "keep='3'"),
        ({"keep": 0}, ValueError, "keep=0"),
        ({"keep": None}, ValueError, "keep=None"),
        ({"hang_timeout": "0.5s"}, ValueError, r"hang_timeout='0\.5s': give \"auto\", a time of at least 1 s such as \"600s\", or None"),
        ({"hang_timeout": "100 steps"}, ValueError, "hang_timeout='100 steps'"),
        ({"hang_timeout": 600}, ValueError, "hang_timeout=600: give"),
        ({"hang_timeout": "of"}, ValueError, "hang_timeout='of'"),
        ({"seed": -1}, ValueError, "seed must be an integer from 0"),
        ({"seed": 2**64}, ValueError, "seed must be an integer from 0"),
        ({"seed": 1.0}, ValueError, "seed must be an integer from 0"),
        ({"seed": True}, ValueError, "seed must be an integer from 0"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_accepted(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve("60s", "auto", options)


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "auto"), (None, None), ("none", None), ("1s", 1.0), ("1.5 h", 5400.0), ("600 seconds", 600.0)]
)
def test_a_hang_timeout_is_learned_given_or_switched_off(given: str | None, meant: float | str | None) -> None:
    assert resolve("60s", "auto", {"hang_timeout": given}).hang_timeout == meant
    assert resolve("60s", "auto", {}).hang_timeout == "auto"


@pytest.mark.parametrize("resume", ["yes", "", None, "MUST"])
def test_a_wrong_resume_is_named_with_what_is_accepted(resume: Any) -> None:
    with pytest.raises(ValueError, match=r'resume=.*give "auto", "must" or "never"'):
        resolve("60s", resume, {})
