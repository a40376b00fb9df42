"""Is a rank hanging? The decision, case by case: nothing here runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from unbroken.core.limits import EVAL_TIMEOUT_S, HANG_FACTOR, HANG_FLOOR_S, STEP_TIMEOUT_S
from unbroken.daemon.hang import Idle, Patience, View, advance, allowed, blamed, doing, held_by, is_typing, judge, limit, main_frames
from unbroken.shm.pulse import Phase, Reading

STEPS = (1.0,) * 10
AUTO = Patience()


def view(
    rank: int, phase: Phase, *, marks: int = 7, state: str = "S", tracer: int = 0, steps: int = 9, traced: bool = False, times=STEPS
) -> View:
    return View(rank, Reading(marks, phase, 10, 3, steps, traced, times), state, tracer)


def waited(views: Sequence[View], *seconds: float) -> dict[int, Idle]:
    return {one.rank: Idle(one.reading.marks, s) for one, s in zip(views, seconds, strict=True)}


# -- what is learned --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "patience", "seconds"),
    [
        ((), AUTO, STEP_TIMEOUT_S),
        ((1.0,) * 4, AUTO, STEP_TIMEOUT_S),
        ((1.0,) * 5, AUTO, HANG_FLOOR_S),
        ((10.0,) * 64, AUTO, HANG_FACTOR * 10),
        ((10.0,) * 40 + (500.0,) * 20, AUTO, HANG_FACTOR * 10),
        ((8.0, 9.0, 10.0, 11.0, 12.0), AUTO, HANG_FACTOR * (10 + 1.4826)),
        ((10.0,) * 64, Patience(None, 4.0), HANG_FACTOR * 40),
        ((10.0,) * 64, Patience(2.0), 2.0),
        ((), Patience(2.0), 2.0),
        ((10.0,) * 64, Patience(2.0, 4.0), 2.0),
    ],
)
def test_the_limit_is_learned_from_median_and_spread_or_given(times: tuple[float, ...], patience: Patience, seconds: float) -> None:
    assert limit(times, patience)[0] == pytest.approx(seconds)


# -- what a place allows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "patience", "seconds"),
    [
        (view(0, Phase.UNIT), AUTO, 30),
        (view(0, Phase.DATA), AUTO, 30),
        (view(0, Phase.UPDATE), AUTO, 30),
        (view(0, Phase.COLLECTIVE), AUTO, STEP_TIMEOUT_S),
        (view(0, Phase.BODY), AUTO, STEP_TIMEOUT_S),
        (view(0, Phase.BODY), Patience(5.0), 5),
        (view(0, Phase.SAVE), Patience(5.0), STEP_TIMEOUT_S),
        (view(0, Phase.EVAL), Patience(5.0), EVAL_TIMEOUT_S),
        (view(0, Phase.VERDICT), Patience(5.0), STEP_TIMEOUT_S),
        (view(0, Phase.OUTSIDE), Patience(5.0), float("inf")),
        (view(0, Phase.UNIT, steps=0), Patience(5.0), STEP_TIMEOUT_S),
        (view(0, Phase.UNIT, steps=1), Patience(5.0), STEP_TIMEOUT_S),
        (view(0, Phase.UNIT, steps=2), Patience(5.0), 5),
        (view(0, Phase.EVAL, state="T"), AUTO, 30),
        (view(0, Phase.COLLECTIVE, state="T"), Patience(5.0), 5),
    ],
)
def test_what_a_place_allows(one: View, patience: Patience, seconds: float) -> None:
    assert allowed(one, limit(STEPS, patience), patience)[0] == seconds


# -- whose time counts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("views", "counted"),
    [
        ([view(0, Phase.COLLECTIVE), view(1, Phase.UNIT)], [3, 3]),
        ([view(0, Phase.EVAL), view(1, Phase.UNIT)], [3, 0]),
        ([view(0, Phase.SAVE), view(1, Phase.BODY)], [3, 0]),
        ([view(0, Phase.OUTSIDE), view(1, Phase.COLLECTIVE)], [3, 0]),
        ([view(0, Phase.EVAL), view(1, Phase.UNIT, state="T")], [3, 3]),
        ([view(0, Phase.EVAL, state="T"), view(1, Phase.UNIT)], [3, 3]),
        ([view(0, Phase.UNIT, state="T"), view(1, Phase.UNIT, state="T")], [0, 0]),
        ([view(0, Phase.UNIT, state="T")], [0]),
        ([view(0, Phase.UNIT, traced=True), view(1, Phase.UNIT)], [0, 0]),
        ([view(0, Phase.UNIT, tracer=99), view(1, Phase.UNIT)], [0, 0]),
        ([view(0, Phase.UNIT, marks=8), view(1, Phase.UNIT)], [-5, 3]),
        ([view(0, Phase.UNIT), view(2, Phase.UNIT)], [3, -5]),
    ],
)
def test_whose_time_counts(views: list[View], counted: list[int]) -> None:
    """-5: it has made a mark, or is new: from the beginning."""
    before = {0: Idle(7, 5.0), 1: Idle(7, 5.0)}
    idle = advance(before, views, 3.0)
    assert [idle[one.rank].seconds - 5.0 for one in views] == counted


# -- the decision -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("views", "seconds", "guilty", "words"),
    [
        ([view(0, Phase.COLLECTIVE), view(1, Phase.UNIT), view(2, Phase.COLLECTIVE)], (29, 29, 29), None, "progress"),
        (
            [view(0, Phase.COLLECTIVE), view(1, Phase.UNIT), view(2, Phase.COLLECTIVE)],
            (31, 31, 31),
            (1,),
            "rank 1 has made no progress for 31.0 s (limit 30 s: steps take 1 s, give or take 0 s): it computes unit 3 of step 10; "
            "waiting for it in the collective of step 10: rank 0, 2",
        ),
        ([view(0, Phase.DATA), view(1, Phase.COLLECTIVE)], (31, 31), (0,), "it waits for its data, unit 3 of step 10"),
        ([view(0, Phase.DATA), view(1, Phase.DATA)], (31, 31), (0, 1), "rank 1 has made no progress"),
        ([view(0, Phase.COLLECTIVE), view(1, Phase.COLLECTIVE)], (3000, 3000), None, "progress"),
        ([view(0, Phase.COLLECTIVE), view(1, Phase.COLLECTIVE)], (3601, 3601), (), "it waits in the collective of step 10"),
        ([view(0, Phase.COLLECTIVE, state="T"), view(1, Phase.COLLECTIVE)], (31, 31), (0,), "stopped by a signal"),
        ([view(0, Phase.EVAL), view(1, Phase.COLLECTIVE)], (4000, 0), None, "progress"),
        ([view(0, Phase.EVAL), view(1, Phase.COLLECTIVE)], (EVAL_TIMEOUT_S + 1, 0), (0,), "it evaluates"),
        ([view(0, Phase.SAVE), view(1, Phase.COLLECTIVE)], (3601, 0), (0,), "it saves"),
        ([view(0, Phase.UNIT, steps=0), view(1, Phase.COLLECTIVE, steps=0)], (3000, 3000), None, "progress"),
        ([view(0, Phase.UNIT, steps=0), view(1, Phase.COLLECTIVE, steps=0)], (3601, 3000), (0,), "one of the first steps"),
        ([view(0, Phase.UNIT, times=()), view(1, Phase.COLLECTIVE)], (3000, 31), None, "progress"),
        ([view(0, Phase.UNIT, traced=True)], (9999,), None, "rank 0 is under a debugger"),
        ([view(0, Phase.UNIT, tracer=4), view(1, Phase.UNIT)], (9999, 9999), None, "rank 0 is under a debugger"),
        ([view(0, Phase.UNIT, state="T"), view(1, Phase.UNIT, state="T")], (9999, 9999), None, "all ranks are stopped"),
        ([], (), None, "nobody is watched"),
    ],
)
def test_B37_the_decision_and_its_reason(views: list[View], seconds: tuple[float, ...], guilty: tuple[int, ...] | None, words: str) -> None:
    judgement = judge(views, waited(views, *seconds), AUTO)
    assert judgement.decision == ("wait" if guilty is None else "alarm")
    assert judgement.ranks == (guilty or ())
    assert words in judgement.reason


def test_the_most_patient_rank_sets_the_limit() -> None:
    """A rank without units has short steps of its own; it is not the measure for the others."""
    views = [view(0, Phase.UNIT, times=(0.001,) * 10), view(1, Phase.COLLECTIVE, times=(20.0,) * 10)]
    assert judge(views, waited(views, 99, 0), AUTO).decision == "wait"
    assert judge(views, waited(views, 101, 0), AUTO).decision == "alarm"


def test_every_place_has_words() -> None:
    assert len({doing(view(0, phase)) for phase in Phase}) == len(Phase)
    assert doing(view(0, Phase.DATA, state="D")).endswith("in a system call that cannot be interrupted")


def test_nobody_holds_a_run_that_trains() -> None:
    assert held_by([view(0, Phase.UNIT, state="R"), view(1, Phase.COLLECTIVE, state="T")]) == ""


# -- what stacks tell -------------------------------------------------------------------------------------------------------------------

THREADS = """Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 1 in run

Current thread 0x00007e (most recent call first):
  File "{innermost}", line 12 in wait
  File "/srv/train.py", line 3 in main
"""


def test_the_main_thread_is_the_last_one() -> None:
    assert main_frames(THREADS.format(innermost="/a b/x.py")) == ["/a b/x.py", "/srv/train.py"]
    assert main_frames('nonsense\n  File "half') == []


@pytest.mark.parametrize(
    ("file", "typing"),
    [
        ("/usr/lib/python3.11/pdb.py", True),
        ("/usr/lib/python3.11/bdb.py", True),
        ("/site-packages/_pydevd_bundle/pydevd_frame.py", True),
        ("/site-packages/IPython/core/debugger.py", True),
        ("/srv/model.py", False),
        ("/srv/my_pdb.py", False),
    ],
)
def test_a_prompt_is_seen_in_the_stacks(file: str, typing: bool) -> None:
    assert is_typing(THREADS.format(innermost=file)) is typing


def test_ranks_in_a_collective_of_the_users_own_wait_for_the_one_that_is_not() -> None:
    waits = THREADS.format(innermost="/site-packages/torch/distributed/distributed_c10d.py")
    works = THREADS.format(innermost="/srv/model.py")
    assert blamed((0, 1, 2), {0: waits, 1: works, 2: waits}) == (1,)
    assert blamed((0, 1), {0: waits, 1: waits}) == (0, 1)
    assert blamed((0, 1), {}) == (0, 1)
