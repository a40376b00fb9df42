"""The restart rule, as tables."""

from __future__ import annotations

import pytest

from unbroken.cluster.decide import Failure, Options, decide, describe, exit_code


def failure(
    code: int = -9, *, step: int | None = None, committed: int | None = None, text: str = "", rank: int = 0, at_s: float = 0.0
) -> Failure:
    error = describe(code) + (f": {text}" if text else "")
    return Failure(at_s=at_s, codes=((rank, code),), rank=rank, error=error, step=step, committed=committed)


def decisions(history: list[Failure], options: Options) -> list[str]:
    """What is decided after each failure in turn, up to and including the first stop."""
    found = []
    for num in range(1, len(history) + 1):
        found.append(decide(100.0, history[:num], options)[0])
        if found[-1] != "restart":
            break
    return found


def test_nothing_failed() -> None:
    assert decide(0.0, [], Options()) == ("done", "all workers ended by themselves")


def test_B36a_a_budget_of_three_means_four_launches() -> None:
    options = Options(max_restarts=3, same_start=None)
    assert decisions([failure(7)] * 10, options) == ["restart"] * 3 + ["stop"]
    decision, reason = decide(42.0, [failure(7, at_s=2.0)] * 4, options)
    assert (decision, reason) == ("stop", "3 restarts in 40 s brought no new committed step: rank 0 ended with exit code 7")


def test_B36b_ranks_share_one_budget() -> None:
    history = [failure(1, rank=num % 2, text=f"of its own {num}") for num in range(9)]
    assert decisions(history, Options(max_restarts=3, same_start=None)) == ["restart"] * 3 + ["stop"]


def test_no_budget_no_restart() -> None:
    assert decisions([failure()], Options(max_restarts=0)) == ["stop"]


def test_B36c_only_a_new_committed_step_refills_the_budget() -> None:
    options = Options(max_restarts=2)
    stuck = [failure(committed=10, step=step) for step in (11, 12, 13)]
    assert decisions(stuck, options) == ["restart", "restart", "stop"]
    moving = [failure(committed=committed) for committed in (10, 10, 15, 15, 20, 20)]
    assert decisions(moving, options) == ["restart"] * 6


def test_B36c_falling_back_and_committing_the_same_steps_anew_is_no_progress() -> None:
    history = [failure(committed=committed, step=step) for step, committed in ((16, 15), (11, 10), (17, 15), (18, 15))]
    assert decisions(history, Options(max_restarts=3)) == ["restart"] * 3 + ["stop"]


def test_B36c_the_same_step_and_error_three_times_is_named() -> None:
    history = [failure(1, step=13, committed=10, text="ValueError: bad batch", rank=rank) for rank in (0, 2, 1)]
    assert decisions(history, Options()) == ["restart", "restart", "stop"]
    _, reason = decide(0.0, history, Options())
    assert reason == "step 13 failed 3 times with the same error: rank 1 ended with exit code 1: ValueError: bad batch"


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([failure(1, step=13, text=text) for text in ("ValueError: a", "ValueError: b", "ValueError: a")], "errors differ"),
        ([failure(1, step=step, text="ValueError: a") for step in (13, 14, 13)], "steps differ"),
        ([failure(code, step=13) for code in (1, 2, 1)], "exit codes differ"),
        ([failure(code, step=13) for code in (-9, -11, -9)], "signals differ"),
        ([failure(-9)] * 3, "a signal before any step comes from outside"),
    ],
)
def test_what_is_not_the_same_failure_goes_on(history: list[Failure], why: str) -> None:
    assert decisions(history, Options()) == ["restart"] * 3, why


def test_ports_and_addresses_do_not_make_errors_different() -> None:
    texts = [f"RuntimeError: [127.0.0.1]:{port} at 0x{port:x}" for port in (38104, 51941, 40000)]
    assert decisions([failure(1, step=5, text=text) for text in texts], Options()) == ["restart", "restart", "stop"]


def test_a_program_that_fails_before_any_step_stops_early_unless_a_budget_was_given() -> None:
    history = [failure(1, text="ImportError: no module named x")] * 5
    assert decisions(history, Options()) == ["restart", "restart", "stop"]
    assert decisions(history, Options(max_restarts=4, same_start=None)) == ["restart"] * 4 + ["stop"]


@pytest.mark.parametrize("code", [3, 4, 5])
def test_final_codes_stop_at_once_and_are_kept(code: int) -> None:
    history = [failure(-9), failure(code)]
    assert decisions(history, Options()) == ["restart", "stop"]
    assert exit_code(history, None) == code
    assert exit_code(history, 15) == code


def test_a_mistake_of_all_ranks_before_a_run_was_opened_stops_at_once_with_its_code() -> None:
    mistake = Failure(at_s=0.0, codes=((0, 1), (1, 1)), rank=0, error="exit code 1: ValueError: x", is_mistake=True)
    decision, reason = decide(0.0, [failure(-9), mistake], Options())
    assert (decision, reason.partition(";")[2]) == ("stop", " no run was opened, and starting again cannot change that")
    assert exit_code([mistake], None) == 1
    assert exit_code([mistake], 15) == 143, "asked to end"
    by_hand = Options(max_restarts=2, same_start=None)
    assert decisions([mistake] * 5, by_hand) == ["restart", "restart", "stop"]
    assert exit_code([mistake] * 3, None, by_hand) == 5


def test_after_a_wish_to_end_nothing_is_started_again() -> None:
    asked = Failure(at_s=0.0, codes=((1, -15),), rank=1, error="SIGTERM", asked_to_end=True)
    assert decide(0.0, [asked], Options()) == ("stop", "asked to end, and rank 1 ended with SIGTERM")
    assert exit_code([asked], 15) == 143


def test_giving_up_is_5_whatever_the_program_returned() -> None:
    assert [exit_code([failure(code)], None) for code in (1, 2, 7, -9)] == [5] * 4


def test_codes_in_words() -> None:
    assert [describe(code) for code in (0, 7, -9, -11, -1000)] == ["exit code 0", "exit code 7", "SIGKILL", "SIGSEGV", "signal 1000"]
