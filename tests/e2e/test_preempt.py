"""Asked to stop, anywhere and anyhow (B34): the step is finished and committed, all end in time, nothing is lost, nothing done twice.

Two ranks under `unbroken run`. With `lose_at_most="1000 steps"` only the stop itself commits, so what is committed is its work alone.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.rigs.launched import launched
from tests.rigs.preempted import AT, Strike, Struck, events, finish, strike_job, wait_for_no_daemon

LIMIT_S = 15.0
"""Of a stop where tests share two cores with others."""

IDLE_LIMIT_S = float(os.environ.get("UNBROKEN_TEST_STOP_LIMIT_S", "10"))
"""In the campaign. 5 s are wanted of an idle machine; on busy cores interpreters that hold torch take 2 to 4 s of them just to end."""

BEFORE_RUN = ("import", "construct")


def check(struck: Struck, strike: Strike, limit_s: float = LIMIT_S) -> None:
    """What must hold whatever was struck."""
    text = struck.job.stderr
    assert struck.seconds < limit_s, text
    assert not struck.survivors, text
    assert "Traceback" not in text, text
    outcome = struck.job.outcome()
    assert (outcome["restarts"], outcome["exit_code"]) == (0, struck.code), text
    is_early = (strike.stage in BEFORE_RUN and strike.own_handler != "before") or (strike.stage == "warm-up" and not strike.own_handler)
    assert struck.code == (128 + signal.Signals[strike.sig] if is_early else 0), text
    if is_early:
        assert struck.committed == struck.applied == 0
        return
    assert struck.committed == struck.applied, text
    if strike.own_handler:
        assert len({mark["rank"] for mark in struck.job.marks("heard")}) == (1 if strike.to == "one" else 2)
    wait_for_no_daemon(struck.run)
    captured = [event.step for event in events(struck.run, "captured")]
    assert len(captured) == len(set(captured)), "never two saves of one step"
    if strike.stage != "last":
        assert [event.step for event in events(struck.run, "stopped")] == [struck.applied]
        assert f"step {struck.applied} is committed, start again to go on" in (struck.job.folder / "out").read_text()
    if strike.to in ("launcher", "all"):
        assert f"; committed step {struck.applied}" in text.splitlines()[-1]
        assert (outcome["end_signal"], outcome["committed"]) == (strike.sig, struck.applied)


def check_resume(struck: Struck, strike: Strike) -> None:
    """The next start goes on with the step after the committed one, and each step is done once."""
    step = struck.committed
    marks = finish(struck, strike, step + 3)
    assert {mark["step"] for mark in marks if mark["name"] == "opened"} == {step}
    again = [mark["step"] for mark in marks if mark["name"] == "applied" and mark["rank"] == 0]
    assert again == [step + 1, step + 2, step + 3]


SHORT = [
    Strike("import", "one"),
    Strike("warm-up", "groups"),
    Strike("warm-up", "launcher", own_handler="before"),
    Strike("evaluation", "launcher", sig="SIGUSR1"),
    Strike("", "all", loaders=2, twice=True, own_handler="after", after_s=0.1),
]


@pytest.mark.parametrize("strike", SHORT, ids=str)
def test_B34_asked_to_stop(tmp_path: Path, strike: Strike) -> None:
    struck = strike_job(tmp_path, strike)
    check(struck, strike)
    if strike.to == "all":
        check_resume(struck, strike)


def test_B34_an_evaluation_without_end_is_left_and_costs_one_step(tmp_path: Path) -> None:
    """The boundary before it is in memory and becomes durable; the step that the evaluation belongs to is done again."""
    strike = Strike("evaluation", "launcher", dwell_s=600, lose="1 steps")
    struck = strike_job(tmp_path, strike)
    assert struck.code == 128 + signal.SIGTERM
    assert struck.seconds < LIMIT_S
    assert not struck.survivors
    wait_for_no_daemon(struck.run)
    assert (struck.applied, struck.committed) == (AT, AT - 1)
    assert "ends inside it, steps to be done again: 1" in struck.job.stderr
    check_resume(struck, strike)


def test_B34_all_workers_end_at_once_by_a_signal_to_their_groups(tmp_path: Path) -> None:
    """The launcher sees the last one end when it sees the first: that is the wish to stop, too, and nothing is started again."""
    with launched(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", "--nproc-per-node", "1") as job:
        assert job.wait() == 128 + signal.SIGTERM, job.stderr
        assert len(job.marks("start")) == 1
        assert "restart" not in job.stderr


STAGES = ["import", "construct", "warm-up", "evaluation", "data", "save", "last"]
AIMED = [
    Strike(stage, to, loaders=loaders, sig=sig, twice=twice, own_handler=own, lose="1 steps" if stage == "save" else "1000 steps")
    for stage in STAGES
    for num, to in enumerate(("all", "groups", "one", "launcher"))
    for own in ["before" if (stage in BEFORE_RUN) == (to in ("all", "launcher")) and stage in (*BEFORE_RUN, "warm-up") else "after"]
    for loaders, sig, twice, own in [((0, "SIGTERM", False, ""), (2, "SIGUSR1", True, ""))[num % 2], (2, "SIGTERM", num % 2 == 0, own)]
]
TWENTY = [
    Strike(
        "", to, loaders=loaders, twice=bool(num % 2), after_s=random.Random(num).uniform(0, 1.5), lose=("1000 steps", "2 steps")[num % 2]
    )
    for num in range(20)
    for to in ("groups", "all")[num % 2 :][:1]
    for loaders in (0, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize("strike", AIMED + TWENTY, ids=str)
def test_B34_campaign_signals_at_every_place(tmp_path: Path, strike: Strike) -> None:
    struck = strike_job(tmp_path, strike)
    check(struck, strike, IDLE_LIMIT_S)
    check_resume(struck, strike)


@pytest.mark.slow
def test_B34_a_signal_named_by_the_user_asks_to_stop_too(tmp_path: Path) -> None:
    for to in ("one", "launcher"):
        strike = Strike("", to, loaders=2, sig="SIGUSR2", after_s=0.1, flags=("--signals-to-handle", "SIGTERM,SIGUSR2"))
        (tmp_path / to).mkdir()
        check(strike_job(tmp_path / to, strike), strike)
