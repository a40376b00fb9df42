"""I12: the timeouts form one ladder, and a wrong one is named."""

from __future__ import annotations

import pytest

from unbroken.cluster.settings import GRACE_S
from unbroken.core.limits import (
    COLLECTIVE_TIMEOUT_S,
    HANG_FLOOR_S,
    HEARTBEAT_S,
    LADDER,
    MIN_HANG_TIMEOUT_S,
    ORDERS,
    STEP_TIMEOUT_S,
    VERDICT_TIMEOUT_S,
    ladder_faults,
)

NAMES = ["heartbeat", "collective", "quorum", "step", "restart", "scheduler"]


def test_I12_the_timeouts_form_one_ladder() -> None:
    assert ladder_faults() == []
    names = [name for name, _ in LADDER]
    assert names == NAMES[: len(names)], "levels are in the order of the invariant; none is left out in between"
    assert len(names) >= 4


def test_I12_the_ladder_is_made_of_the_limits_that_are_waited_for() -> None:
    assert dict(LADDER) == {
        "heartbeat": HEARTBEAT_S,
        "collective": COLLECTIVE_TIMEOUT_S,
        "quorum": COLLECTIVE_TIMEOUT_S + VERDICT_TIMEOUT_S,
        "step": STEP_TIMEOUT_S,
    }
    assert HEARTBEAT_S < HANG_FLOOR_S < COLLECTIVE_TIMEOUT_S
    assert MIN_HANG_TIMEOUT_S <= HANG_FLOOR_S
    assert GRACE_S <= HANG_FLOOR_S, "who was asked to end is killed by the launcher, not taken for a hang"


@pytest.mark.parametrize("place", range(len(LADDER) - 1))
def test_I12_a_level_that_acts_too_early_is_named(place: int) -> None:
    wrong = list(LADDER)
    wrong[place + 1] = (wrong[place + 1][0], wrong[place][1])
    (fault, *_) = ladder_faults(wrong)
    assert fault.startswith(f"{LADDER[place][0]} waits ")
    assert f"must be shorter than {LADDER[place + 1][0]}" in fault


def test_I12_a_wait_that_contains_another_is_checked_too() -> None:
    low, low_s, high, _ = ORDERS[0]
    assert ladder_faults(LADDER, [(low, low_s, high, low_s)]) == [
        f"{low} waits {low_s:g} s and must be shorter than {high}, which waits {low_s:g} s"
    ]
    assert ladder_faults([("a", 0.0), ("b", 1.0)], []) != [], "no wait is nothing"
