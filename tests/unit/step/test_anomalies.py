"""The rules about NaN and spikes, as tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unbroken.step.anomalies import Anomalies, Spike, Watch, Window, judge, spike_height, window_of

NAN, INF = math.nan, math.inf
CALM = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.05, 0.95]
SPIKE = Spike(action="warn", threshold=10.0, window=8, warmup=8, back=3, ahead=2)


@pytest.mark.parametrize(
    ("loss", "nan", "action"),
    [
        (1.0, "skip", "apply"),
        (None, "skip", "apply"),
        (NAN, "skip", "skip"),
        (INF, "skip", "skip"),
        (-INF, "skip", "skip"),
        (NAN, "stop", "stop"),
        (1.0, "stop", "apply"),
        (None, "stop", "apply"),
        (NAN, "ignore", "apply"),
    ],
)
def test_B38_what_becomes_of_a_loss(loss: float | None, nan: Any, action: str) -> None:
    assert judge(loss, [], Anomalies(nan=nan))[0] == action


@pytest.mark.parametrize(
    ("loss", "losses", "is_spike"),
    [
        (1.0, CALM, False),
        (2.0, CALM, False),
        (2.2, CALM, True),
        (-100.0, CALM, False),
        (100.0, CALM[:7], False),
        (1.001, [1.0] * 8, False),
        (1.02, [1.0] * 8, True),
        (1e-9, [0.0] * 8, True),
        (0.0, [0.0] * 8, False),
        (3e300, [1e300] * 8, True),
    ],
)
def test_a_spike_is_judged_by_median_and_deviation(loss: float, losses: list[float], is_spike: bool) -> None:
    assert (spike_height(loss, losses, SPIKE) is not None) == is_spike
    assert judge(loss, losses, Anomalies(spike=SPIKE))[0] == ("warn" if is_spike else "apply")


@pytest.mark.parametrize("action", ["warn", "skip", "rollback"])
def test_a_spike_leads_to_the_action_that_was_asked_for_and_says_how_high_it_was(action: Any) -> None:
    rules = Anomalies(spike=Spike(action=action, window=8, warmup=8))
    found, reason = judge(3.0, CALM, rules)
    assert found == action
    assert reason == "the loss 3 is a spike, 18.0 deviations above the median of 8 steps"


@pytest.mark.parametrize(
    ("step", "windows", "first", "last"),
    [(10, [], 8, 12), (2, [], 1, 4), (10, [(5, 8)], 9, 12), (10, [(5, 9)], 10, 12), (10, [(1, 2)], 8, 12), (1, [], 1, 3)],
)
def test_a_window_reaches_back_and_ahead_and_never_into_an_earlier_one(step: int, windows: Any, first: int, last: int) -> None:
    assert window_of(step, SPIKE, windows, "why") == Window(first, last, "why")


def test_I13_what_the_rules_remember_comes_back_as_it_was() -> None:
    watch = Watch()
    assert watch.as_dict() == {}
    for loss in range(12):
        watch.applied(float(loss), SPIKE)
    watch.applied(NAN, SPIKE)
    watch.streak = 2
    for number in range(20):
        watch.entered(Window(number, number + 1, "why"))
        watch.entered(Window(number, number + 1, "why"))
    assert watch.losses == [float(loss) for loss in range(4, 12)]
    assert watch.windows == [(number, number + 1) for number in range(4, 20)]
    assert Watch.restored(watch.as_dict()) == watch
    watch.applied(1.0, None)
    assert (watch.streak, watch.losses) == (0, [])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Anomalies(nan="explode"), ValueError, 'give "skip", "stop" or "ignore"'),
        (lambda: Anomalies(spike="skip"), TypeError, r"give unbroken\.Spike"),
        (lambda: Anomalies(max_skipped=-1), ValueError, "max_skipped=-1.*at least 0"),
        (lambda: Anomalies(max_rollbacks=True), ValueError, "max_rollbacks=True.*at least 0"),
        (lambda: Spike(action="jump"), ValueError, 'give "warn", "skip" or "rollback"'),
        (lambda: Spike(threshold=0), ValueError, "threshold=0"),
        (lambda: Spike(threshold=NAN), ValueError, "threshold=nan"),
        (lambda: Spike(window=8), ValueError, "warmup must be at most window"),
        (lambda: Spike(back=0), ValueError, "back=0.*at least 1"),
        (lambda: Spike(ahead=-1), ValueError, "ahead=-1.*at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
