"""The restart rule, as tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from unbroken.cluster.decide import Failure, Options, Place, decide, describe, exit_code, workers_without


def failure(
    code: int = -9,
    *,
    step: int | None = None,
    committed: int | None = None,
    text: str = "",
    rank: int = 0,
    at_s: float = 0.0,
    device: str | None = None,
) -> Failure:
    error = describe(code) + (f": {text}" if text else "")
    place = None if device is None else Place("a", device)
    return Failure(at_s=at_s, codes=((rank, code),), rank=rank, error=error, step=step, committed=committed, place=place)


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


def test_B36_a_a_budget_of_three_means_four_launches() -> None:
    options = Options(max_restarts=3, same_start=None)
    assert decisions([failure(7)] * 10, options) == ["restart"] * 3 + ["stop"]
    decision, reason = decide(42.0, [failure(7, at_s=2.0)] * 4, options)
    assert (decision, reason) == ("stop", "3 restarts in 40 s brought no new committed step: rank 0 ended with exit code 7")


def test_B36_b_ranks_share_one_budget() -> None:
    history = [failure(1, rank=num % 2, text=f"of its own {num}") for num in range(9)]
    assert decisions(history, Options(max_restarts=3, same_start=None)) == ["restart"] * 3 + ["stop"]


def test_no_budget_no_restart() -> None:
    assert decisions([failure()], Options(max_restarts=0)) == ["stop"]


def test_B36_c_only_a_new_committed_step_refills_the_budget() -> None:
    options = Options(max_restarts=2)
    stuck = [failure(committed=10, step=step) for step in (11, 12, 13)]
    assert decisions(stuck, options) == ["restart", "restart", "stop"]
    moving = [failure(committed=committed) for committed in (10, 10, 15, 15, 20, 20)]
    assert decisions(moving, options) == ["restart"] * 6


def test_B36_c_falling_back_and_committing_the_same_steps_anew_is_no_progress() -> None:
    history = [failure(committed=committed, step=step) for step, committed in ((16, 15), (11, 10), (17, 15), (18, 15))]
    assert decisions(history, Options(max_restarts=3)) == ["restart"] * 3 + ["stop"]


def test_B36_c_the_same_step_and_error_three_times_is_named() -> None:
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


SHRINKING = Options(devices=3, min_workers=1, max_workers=3)
DAY_S = 86400.0


def at(*places: tuple[str | None, int | None]) -> list[Failure]:
    """Failures with errors of their own, one after the other: (device, step)."""
    return [failure(1, device=device, step=step, text=f"{step} {num}", at_s=float(num)) for num, (device, step) in enumerate(places)]


@pytest.mark.parametrize(
    ("history", "expected", "why"),
    [
        (at(("1", 5), ("1", 9)), "evict", "twice in a row, at different steps"),
        (at(("1", None), ("1", None)), "evict", "it does not get as far as a step"),
        (at(("0", 3), ("1", 5), ("1", 9)), "evict", "what another one did before does not acquit it"),
        (at(("1", 5)), "restart", "once is chance"),
        (at(("1", 5), ("0", 9)), "restart", "two devices"),
        (at(("1", 5), ("0", 7), ("1", 9)), "restart", "others fail as well"),
        (at(("1", 5), ("1", 5)), "restart", "it may be the step"),
        (at((None, 5), (None, 9)), "restart", "no device is known, or the program made the error"),
        (at(("1", 5), (None, 7), ("1", 9)), "restart", "the program fails as well"),
        ([failure(device="1", step=5), failure(device="1", step=9, at_s=DAY_S + 1)], "restart", "too far apart"),
        ([failure(device="1", step=5), failure(3, device="1", step=9)], "stop", "a refusal is final wherever it happens"),
        ([failure(1, device=d, step=5, text="x") for d in ("0", "1", "2")], "stop", "one step, three devices"),
    ],
)
def test_B36_what_follows_a_device_evicts_it(history: list[Failure], expected: str, why: str) -> None:
    assert decide(99.0, history, SHRINKING)[0] == expected, why


def test_B36_the_reason_names_device_host_and_steps() -> None:
    history = at(("1", 5), ("1", 9))
    _, reason = decide(9.0, history, SHRINKING)
    assert reason == "rank 0 ended with exit code 1: 9 1; device 1 of a failed 2 times (steps: 5, 9) while others did not, and is left out"
    _, reason = decide(9.0, [failure(1, device=d, step=5, text="x") for d in ("0", "1", "1")], SHRINKING)
    assert reason == "step 5 failed 3 times with the same error on 2 devices: rank 0 ended with exit code 1: x"


@pytest.mark.parametrize(
    ("options", "expected", "left"),
    [
        (Options(devices=3, min_workers=2, max_workers=3), "evict", 2),
        (Options(devices=3, min_workers=3, max_workers=3), "restart", 2),
        (Options(devices=4, min_workers=3, max_workers=3), "evict", 3),
        (Options(devices=0, min_workers=1, max_workers=3), "restart", -1),
        (Options(devices=2, min_workers=1, max_workers=1), "restart", 1),
    ],
    ids=["fewer workers", "nobody may be missing", "a spare", "unknown devices", "one worker proves nothing"],
)
def test_B36_a_device_is_evicted_only_where_enough_workers_can_go_on(options: Options, expected: str, left: int) -> None:
    history = at(("1", 5), ("1", 9))
    decision, reason = decide(9.0, history, options)
    assert (decision, workers_without(history, options)) == (expected, left)
    assert ("nothing can take its place" in reason) is (expected == "restart" and options.max_workers > 1)


def test_B36_an_eviction_costs_nothing_of_the_budget() -> None:
    options = Options(max_restarts=2, devices=3, min_workers=1, max_workers=3)
    bad = at(("1", 5), ("1", 9))
    gone = [bad[0], structs.replace(bad[1], evicted=True)]
    assert decide(9.0, bad, options)[0] == "evict"
    rest = [failure(device="0", step=11), failure(device="2", step=12), failure(device="0", step=13)]
    assert [decide(9.0, gone + rest[:num], options)[0] for num in (1, 2, 3)] == ["restart", "restart", "stop"]
    assert decide(9.0, gone + rest[:1], options)[1].endswith("restart 1 of 2 without a new committed step")


def test_B36_what_an_evicted_device_did_is_not_held_against_others() -> None:
    other, bad = at(("2", 3), ("1", 5), ("1", 9))[:1], at(("1", 5), ("1", 9))
    gone = [*other, bad[0], structs.replace(bad[1], evicted=True)]
    assert decide(9.0, [*gone, failure(device="2", step=11)], SHRINKING)[0] == "evict", "the one in between is gone"


@dataclass(frozen=True)
class Guilty:
    """What strikes: this device, this step, or chance."""

    device: str | None = None
    step: int | None = None


def play(guilty: Guilty, luck: list[tuple[int, int]], options: Options, num_devices: int) -> tuple[list[str], list[Failure]]:
    """Attempt after attempt until the rule stops or nothing fails any more: decisions, and the history."""
    devices, history, decisions = [str(n) for n in range(num_devices)], [], []
    for num, (step, rank) in enumerate(luck):
        if guilty.device is not None and guilty.device not in devices:
            break
        workers = min(options.max_workers, len(devices))
        device = guilty.device if guilty.device in devices[:workers] else devices[rank % workers]
        where = guilty.step if guilty.step is not None else step
        history.append(failure(1, device=device, step=where, committed=where - 1, text="x", at_s=60.0 * num))
        decisions.append(decide(60.0 * num, history, options)[0])
        if decisions[-1] == "evict":
            history[-1] = structs.replace(history[-1], evicted=True)
            devices.remove(device)
        elif decisions[-1] == "stop":
            break
    return decisions, history


@given(
    guilty=st.one_of(st.builds(Guilty, device=st.sampled_from("012")), st.builds(Guilty, step=st.integers(1, 9)), st.just(Guilty())),
    luck=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 9)), min_size=8, max_size=40),
    least=st.integers(1, 3),
    spares=st.integers(0, 2),
)
def test_B36_never_fewer_workers_than_allowed_and_the_guilty_is_found(
    guilty: Guilty, luck: list[tuple[int, int]], least: int, spares: int
) -> None:
    """A bad step stops the job at its third failure; a bad device is gone after two, if it may be missing; the budget is never exceeded."""
    options = Options(max_restarts=5, devices=3 + spares, min_workers=least, max_workers=3)
    decisions, history = play(guilty, luck, options, 3 + spares)
    gone = [failure.place for failure in history if failure.evicted]
    assert len(set(gone)) == len(gone) == decisions.count("evict")
    assert min(3, 3 + spares - len(gone)) >= least
    assert decisions.count("stop") <= 1
    if guilty.step is not None:
        assert decisions == ["restart", "restart", "stop"]
        assert not gone
    if guilty.device is not None:
        steps = [step for step, _ in luck]
        if steps[0] != steps[1] and 2 + spares >= least:
            assert decisions == ["restart", "evict"]
            assert gone == [Place("a", guilty.device)]
