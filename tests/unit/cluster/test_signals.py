"""The inbox of signals, in a process of its own: it takes them over."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from unbroken.cluster.signals import named

SCRIPT = """
import os, signal, threading, time
from unbroken.cluster.signals import SignalInbox
from unbroken.core.os import wait_any
inbox = SignalInbox({signal.SIGTERM, signal.SIGUSR1})
inbox.install()
print(inbox.take(), wait_any([inbox.fd], 0.0))
os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR1)
print(wait_any([inbox.fd], 5.0) == [inbox.fd], [s.name for s in inbox.take()], inbox.take(), wait_any([inbox.fd], 0.0))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
began = time.monotonic()
print(wait_any([inbox.fd], 30.0) == [inbox.fd], time.monotonic() - began < 10)
"""


def test_signals_wake_a_wait_and_are_taken_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[] []", "True ['SIGTERM', 'SIGUSR1'] [] []", "True True"]


def test_names() -> None:
    assert named("SIGTERM, SIGUSR2,") == {signal.SIGTERM, signal.SIGUSR2}
    with pytest.raises(ValueError, match="no signal is called 'SIGNONE'"):
        named("SIGTERM,SIGNONE")
    with pytest.raises(ValueError, match="no process can handle SIGKILL"):
        named("SIGKILL")
