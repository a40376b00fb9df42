"""Every seed gives a story that can be told."""

from __future__ import annotations

import itertools

import pytest

from unbroken.demo.plan import INTERVAL_STEPS, TOTAL_STEPS, plan_faults


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_seed_loses_steps_and_comes_back_on_other_ranks(ranks: int) -> None:
    for seed in range(300):
        plan = plan_faults(seed, ranks)
        assert plan.ranks_after != ranks
        assert ranks == 2 or (plan.ranks_after % ranks and ranks % plan.ranks_after)
        assert len({fault.at for fault in plan.kills}) == 3
        assert [fault.generation for fault in plan.faults] == [0, 1, 2, 3, 4]
        assert [fault.action for fault in plan.faults] == ["kill", "kill", "kill", "stop", "preempt"]
        assert all(0 <= fault.rank < ranks for fault in plan.faults)
        steps = [fault.step for fault in plan.faults]
        assert all(later - earlier >= INTERVAL_STEPS for earlier, later in itertools.pairwise(steps))
        assert steps[0] > 2 * INTERVAL_STEPS and steps[-1] < TOTAL_STEPS - INTERVAL_STEPS
        assert any(fault.at.startswith("step.") and (fault.step - 1) % INTERVAL_STEPS >= 2 for fault in plan.kills)


def test_all_moments_are_drawn_and_a_seed_always_gives_the_same_plan() -> None:
    drawn = {fault.at for seed in range(60) for fault in plan_faults(seed, 3).kills}
    assert drawn == {"step.forward", "step.backward", "step.reduce", "step.optimizer", "capture.copied", "drain"}
    assert plan_faults(7, 3) == plan_faults(7, 3)
    assert plan_faults(7, 3) != plan_faults(8, 3)


def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 3 or 4"):
        plan_faults(0, 5)
