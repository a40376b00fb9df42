"""The injector strikes where and when it was told, once, and its log line is there before it acts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.chaos.inject import (
    DRAIN,
    FAILPOINTS,
    Fault,
    InjectedFault,
    Injector,
    arm_from_environment,
    parse_faults,
    read_strikes,
)
from unbroken.core.ports import arm, failpoint, position


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    position[:] = [0, 0]
    for name in FAILPOINTS:
        arm(name, None)


def pass_all(step: int) -> list[str]:
    """Walk the failpoints of one step; the places that struck."""
    position[0] = step
    struck = []
    for name in FAILPOINTS:
        try:
            failpoint(name)
        except InjectedFault:
            struck.append(name)
    return struck


@pytest.mark.parametrize("place", FAILPOINTS)
def test_a_fault_strikes_at_its_place_and_step_and_only_once(place: str, tmp_path: Path) -> None:
    log = str(tmp_path / "faults.jsonl")
    Injector((Fault(at=place, step=3, rank=1, action="raise"),), log=log).arm()
    assert [pass_all(step) for step in (1, 2, 3, 4)] == [[], [], [place], []]
    (struck,) = read_strikes(log)
    assert (struck.at, struck.step, struck.rank, struck.action, struck.pid) == (place, 3, 1, "raise", os.getpid())


def test_two_faults_at_one_place_both_strike() -> None:
    Injector((Fault(at="step.reduce", step=1, rank=0, action="raise"), Fault(at="step.reduce", step=3, rank=0, action="raise"))).arm()
    assert [pass_all(step) for step in (1, 2, 3, 4)] == [["step.reduce"], [], ["step.reduce"], []]


def test_only_the_faults_of_this_rank_and_generation_are_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "UNBROKEN_FAULTS",
        '[{"at":"step.forward","step":1,"rank":1,"generation":0,"action":"raise"},{"at":"step.backward","step":1,"rank":0,"action":"raise"}]',
    )
    arm_from_environment(rank=1, generation=1)
    assert pass_all(1) == []
    arm_from_environment(rank=1, generation=0)
    assert pass_all(1) == ["step.forward"]
    arm_from_environment(rank=0, generation=7)
    assert pass_all(1) == ["step.backward"]


def test_drain_strikes_in_the_forward_after_a_ready_slot_while_the_daemon_drains() -> None:
    answers = iter(["idle", "idle", "draining"])
    Injector((Fault(at=DRAIN, step=5, rank=0, action="raise"),), phase=lambda: next(answers)).arm()
    assert pass_all(4) == []
    assert pass_all(5) == []
    assert next(iter(pass_all(6))) == "step.forward"
    with pytest.raises(StopIteration):
        next(answers)


@pytest.mark.parametrize("text", ["{}", "[{}]", '[{"at":"step.lunch","step":1,"rank":0}]', '[{"at":"drain","step":-1,"rank":0}]', "["])
def test_a_plan_that_makes_no_sense_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="UNBROKEN_FAULTS"):
        parse_faults(text)


def test_no_plan_arms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNBROKEN_FAULTS", raising=False)
    arm_from_environment(rank=0, generation=0)
    assert pass_all(1) == []


@pytest.mark.parametrize(("action", "sign"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("preempt", signal.SIGTERM)])
def test_kill_stop_and_preempt_act_on_the_process_after_the_log_line(action: str, sign: int, tmp_path: Path) -> None:
    log = tmp_path / "faults.jsonl"
    code = (
        "from unbroken.chaos.inject import arm_from_environment\n"
        "from unbroken.core.ports import failpoint, position\n"
        "arm_from_environment(2, 4)\n"
        "position[:] = [9, 4]\n"
        "failpoint('step.optimizer')\n"
    )
    plan = f'[{{"at":"step.optimizer","step":9,"rank":2,"generation":4,"action":"{action}"}}]'
    environ = os.environ | {"UNBROKEN_FAULTS": plan, "UNBROKEN_FAULT_LOG": str(log)}
    environ.pop("UNBROKEN_LAUNCHER_PID", None)
    child = subprocess.Popen([sys.executable, "-c", code], env=environ)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    assert (os.WSTOPSIG(status) if stopped else os.WTERMSIG(status)) == sign
    (struck,) = read_strikes(str(log))
    assert (struck.pid, struck.step, struck.generation, struck.action) == (child.pid, 9, 4, action)
    if stopped:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    child.returncode = 0


def test_preempt_asks_the_launcher_to_end_and_the_rank_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setenv("UNBROKEN_LAUNCHER_PID", str(launcher.pid))
    Injector((Fault(at="step.forward", step=3, rank=0, action="preempt"),)).arm()
    assert pass_all(3) == []
    assert launcher.wait(30) == -signal.SIGTERM
