"""Requests to stop: noted, passed on to the user's handlers, and given back whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.cluster.preempt import EVALUATION_S, LONG_EVALUATION_S, StopRequest, evaluation_s
from unbroken.core.ports import SystemClock, stop_signals

Installed = tuple[StopRequest, list[int]]


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that reached handlers which were there before; afterwards pytest's own are back."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    found: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda n, frame: found.append(n))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stop_signals())
def test_B34_a_request_is_noted_by_name_and_the_users_handler_is_called_too(received: list[int], number: signal.Signals) -> None:
    stop = StopRequest(SystemClock())
    signal.raise_signal(number)
    assert (stop.requested, stop.name) == (False, ""), "not before install"
    stop.install()
    signal.raise_signal(number)
    assert (stop.requested, stop.name) == (True, number.name)
    assert received == [number] * 2
    stop.remove()


def test_afterwards_the_handlers_are_those_of_before(received: list[int]) -> None:
    before = [signal.getsignal(number) for number in stop_signals()]
    stop = StopRequest(SystemClock())
    stop.install()
    assert [signal.getsignal(number) for number in stop_signals()] != before
    stop.remove()
    assert [signal.getsignal(number) for number in stop_signals()] == before
    signal.raise_signal(signal.SIGTERM)
    assert not stop.requested
    stop.remove()
    assert [signal.getsignal(number) for number in stop_signals()] == before


def test_a_handler_that_the_user_installed_meanwhile_stays(received: list[int]) -> None:
    stop = StopRequest(SystemClock())
    stop.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)


@pytest.mark.parametrize("first", [0, 1])
def test_several_runs_in_one_process_all_hear_it_and_go_in_any_order(received: list[int], first: int) -> None:
    stops = [StopRequest(SystemClock()), StopRequest(SystemClock())]
    for stop in stops:
        stop.install()
    signal.raise_signal(signal.SIGTERM)
    assert [stop.requested for stop in stops] == [True, True]
    stops[first].remove()
    for stop in stops:
        stop.requested = False
    signal.raise_signal(signal.SIGTERM)
    assert (stops[first].requested, stops[1 - first].requested) == (False, True)
    stops[1 - first].remove()
    signal.raise_signal(signal.SIGTERM)
    assert not stops[first].requested
    assert received == [signal.SIGTERM] * 3, "whoever listened before still hears all"


SWALLOWED = """
import os, signal, sys
from unbroken.cluster.preempt import StopRequest
from unbroken.core.ports import SystemClock
stops = [StopRequest(SystemClock()), StopRequest(SystemClock())]
for stop in stops:
    stop.install()
for i in map(int, sys.argv[1]):
    stops[i].remove()
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""


@pytest.mark.parametrize("order", ["01", "10"])
def test_B34_when_all_runs_have_ended_a_signal_ends_the_process_again(order: str) -> None:
    """Whatever the order in which they ended: a process that no signal ends is killed, and loses what it had not saved."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED, order], env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


def test_outside_the_main_thread_nothing_is_installed(received: list[int]) -> None:
    before = [signal.getsignal(number) for number in stop_signals()]
    stop = StopRequest(SystemClock())

    def act() -> None:
        stop.install()
        stop.remove()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(10)
    assert [signal.getsignal(number) for number in stop_signals()] == before
    signal.raise_signal(signal.SIGTERM)
    assert not stop.requested


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A script of its own, because the test's process needs its signals."""
    head = """
import contextlib, os, signal, sys, time
from unbroken.cluster.preempt import StopRequest
from unbroken.core.ports import SystemClock
stop = StopRequest(SystemClock())
def strike(sig=signal.SIGTERM):
    os.kill(os.getpid(), sig)
"""
    return subprocess.run([sys.executable, "-u", "-c", head + script, *args], capture_output=True, text=True, timeout=60, check=False)


def test_B34_before_the_first_batch_there_is_nothing_to_finish_so_it_ends_at_once() -> None:
    done = run("stop.install(); strike(); print('still here')")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    done = run("stop.install(); stop.underway(); strike(); print(stop.requested)")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_B34_a_handler_of_the_scripts_is_called_and_the_request_is_kept() -> None:
    for when in ("before", "after"):
        script = """
heard = []
own = lambda number, frame: heard.append(number)
before = sys.argv[1] == "before"
if before:
    signal.signal(signal.SIGTERM, own)
stop.install()
if not before:
    signal.signal(signal.SIGTERM, own)
stop.underway()
strike()
print(heard, stop.requested)
stop.remove()
print(signal.getsignal(signal.SIGTERM) is own)
"""
        assert run(script, when).stdout == "[15] True\nTrue\n", when


def test_B34_handlers_that_call_each_other_are_called_once_each() -> None:
    script = """
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append("first"))
stop.install()
ours = signal.getsignal(signal.SIGTERM)
def wrapper(number, frame):
    heard.append("second")
    ours(number, frame)
signal.signal(signal.SIGTERM, wrapper)
stop.underway()
strike()
print(heard, stop.requested)
stop.remove()
strike()
print(heard[2:])
"""
    assert run(script).stdout == "['second', 'first'] True\n['second', 'first']\n"


def test_B34_once_obeyed_a_second_signal_changes_nothing_even_while_the_interpreter_ends() -> None:
    script = """
stop.install(); stop.underway(); strike(); stop.obeyed(); strike(); strike(signal.SIGUSR1); stop.remove(); strike()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)  # as it ends the interpreter puts defaults back, but for ignored signals
"""
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize(("unsaved", "patience_s"), [(0, EVALUATION_S), (1, EVALUATION_S), (2, LONG_EVALUATION_S)])
def test_B34_an_evaluation_may_go_on_for_longer_where_ending_it_costs_more(unsaved: int, patience_s: float) -> None:
    assert evaluation_s(unsaved) == patience_s


def test_B34_an_evaluation_ends_in_time_whatever_the_main_thread_does() -> None:
    """Nothing of the interpreter's runs any more, and what was printed is not lost."""
    script = """
import ctypes
stop.install(); stop.underway()
began = time.monotonic()
with contextlib.suppress(BaseException), stop.evaluating(lambda: 1):
    print("evaluating", end="")
    strike()
    ctypes.CDLL(None).usleep(50_000_000)  # a library that hears no signal
print("not here")
"""
    began_s = time.monotonic()
    done = run(script)
    assert time.monotonic() - began_s < EVALUATION_S + 20
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "evaluating")
    assert "the evaluation is not over: ends inside it, steps to be done again: 1" in done.stderr


def test_B34_a_short_evaluation_ends_by_itself_and_later_ones_begin_anew() -> None:
    script = f"""
stop.install(); stop.underway()
with stop.evaluating(lambda: 1):
    strike()
time.sleep({EVALUATION_S + 0.3})
with stop.evaluating(lambda: 1), stop.evaluating(lambda: 1):
    time.sleep(0.3)
stop.remove()
print("over")
"""
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_B34_what_the_launcher_was_told_before_there_was_a_run_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_STOP_FILE", str(tmp_path / "stop"))
    script = "signal.signal(signal.SIGTERM, lambda *_: None); stop.install(); print(stop.requested, stop.name)"
    assert run(script).stdout == "False \n"
    late = (
        "stop.install(); open(os.environ['UNBROKEN_STOP_FILE'], 'w').close(); print(stop.requested); stop.underway(); print(stop.requested)"
    )
    assert run(late).stdout == "False\nTrue\n"
    assert run(script).stdout == "True SIGTERM\n"


def test_B34_signals_that_the_launcher_names_are_heeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_STOP_SIGNALS", "SIGUSR2,SIGTERM,NONSENSE")
    assert stop_signals() == (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    assert run("stop.install(); stop.underway(); strike(signal.SIGUSR2); print(stop.name)").stdout == "SIGUSR2\n"
