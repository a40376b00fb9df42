"""An interrupt waits while it is held, comes where nothing is half done, and the second one comes at once."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from unbroken.cluster.interrupt import Interrupt, left_by_error


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_held_it_waits_for_the_release(capfd: pytest.CaptureFixture[str]) -> None:
    interrupt = Interrupt()
    interrupt.hold()
    interrupt.hold()
    press()
    assert "interrupt again to stop at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupt.release()
    interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_comes_at_once_and_counts_for_both() -> None:
    interrupt = Interrupt()
    interrupt.hold()
    press()
    with pytest.raises(KeyboardInterrupt):
        press()
    interrupt.release()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_not_held_nothing_is_changed() -> None:
    interrupt = Interrupt()
    interrupt.hold()
    interrupt.release()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_an_error_ends_the_waiting() -> None:
    interrupt = Interrupt()
    with pytest.raises(ZeroDivisionError), interrupt.waiting(after_success=True):
        failing()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), interrupt.waiting():
        press()
    with interrupt.waiting(after_success=True):
        press()
    with pytest.raises(KeyboardInterrupt):
        interrupt.release()


def test_where_nothing_may_be_raised_it_comes_a_moment_later() -> None:
    interrupt = Interrupt()
    interrupt.hold()
    press()
    interrupt.let_go()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5.0)


def test_a_handler_of_the_program_is_left_alone() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    interrupt = Interrupt()
    interrupt.hold()
    press()
    interrupt.release()
    assert seen == [1]


def test_a_handler_put_over_ours_and_taken_away_again_leaves_the_usual_one() -> None:
    """A debugger does that."""
    interrupt = Interrupt()
    interrupt.hold()
    ours = signal.signal(signal.SIGINT, lambda *_: None)
    interrupt.release()
    signal.signal(signal.SIGINT, ours)
    with pytest.raises(KeyboardInterrupt):
        press()
    assert signal.getsignal(signal.SIGINT) is ours
    interrupt.hold()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_outside_the_main_thread_nothing_happens() -> None:
    interrupt = Interrupt()
    thread = threading.Thread(target=lambda: (interrupt.hold(), interrupt.release(), interrupt.let_go()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def failing() -> None:
    raise ZeroDivisionError


def test_an_error_is_traced_to_the_code_it_came_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left_by_error(failing.__code__)
    try:
        failing()
    except ZeroDivisionError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert left_by_error(failing.__code__)
    assert not left_by_error(press.__code__)
    assert not left_by_error(None)
