"""Requests to stop: noted, passed on to the user's handlers, and given back whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from unbroken.cluster.preempt import StopRequest
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
