"""What the watchdog asks of the operating system, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.torture_runs import wait_until
from unbroken.core.os import DUMP_SIGNAL, HANG_EXIT_CODE, process_facts, say_for

SCRIPT = """
import ctypes, os, sys, time
from unbroken.core.os import heed_watchdog, ignore_watchdog
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
def stuck_in_c():
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    print("ready", flush=True)
    while True:
        libc.pthread_mutex_lock(mutex)
heed_watchdog(fd)
if sys.argv[2] == "ignore":
    ignore_watchdog(fd + 1)
    heed_watchdog(fd)
    ignore_watchdog(fd)
    print("ready", flush=True)
    time.sleep(1000)
stuck_in_c()
"""


@contextmanager
def process(tmp_path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "stacks"), how]
    with open(tmp_path / "err", "w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        try:
            yield one
        finally:
            one.kill()


def test_B37_stacks_are_written_and_the_process_ends_although_it_never_gives_the_interpreters_lock_back(tmp_path: Path) -> None:
    with process(tmp_path, "stuck") as one:
        assert process_facts(one.pid).catches(DUMP_SIGNAL)
        os.kill(one.pid, DUMP_SIGNAL)
        wait_until(lambda: "in stuck_in_c" in (tmp_path / "stacks").read_text(), 10, "the stack")
        assert one.poll() is None
        say_for([one.pid, one.pid], "some words\n")
        os.kill(one.pid, HANG_EXIT_CODE)
        assert one.wait(10) == HANG_EXIT_CODE
    assert (tmp_path / "err").read_text() == "some words\n"


def test_a_process_that_is_stopped_is_seen_and_handles_what_is_pending_first_when_it_goes_on(tmp_path: Path) -> None:
    with process(tmp_path, "stuck") as one:
        os.kill(one.pid, signal.SIGSTOP)
        wait_until(lambda: process_facts(one.pid).state == "T", 10, "it is stopped")
        os.kill(one.pid, HANG_EXIT_CODE)
        assert one.poll() is None
        os.kill(one.pid, signal.SIGCONT)
        assert one.wait(10) == HANG_EXIT_CODE


def test_who_is_watched_no_more_is_not_ended_by_what_comes_late(tmp_path: Path) -> None:
    with process(tmp_path, "ignore") as one:
        assert not process_facts(one.pid).catches(DUMP_SIGNAL)
        for sig in (DUMP_SIGNAL, HANG_EXIT_CODE):
            os.kill(one.pid, sig)
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.3)
        assert (tmp_path / "stacks").read_text() == ""


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    assert process_facts(gone.pid).state == ""
    assert not process_facts(gone.pid).catches(DUMP_SIGNAL)
    say_for([gone.pid], "nobody hears this")
