"""What left its worker's session is found by the environment it was started with, and only that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.launched import is_running
from unbroken.cluster.strays import end_strays
from unbroken.core.ports import SystemClock
from unbroken.shm.channel import daemon_environment

MARK = "UNBROKEN_LAUNCH_FILE"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate(timeout=30)


def start(started: list[subprocess.Popen[bytes]], environment: dict[str, str]) -> int:
    """A process that ignores SIGTERM, in a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE, start_new_session=True)
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def test_B36_d_what_this_launch_started_is_killed_and_nothing_else(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = f"{MARK}={tmp_path}/a", f"{tmp_path}/ab"
    monkeypatch.setenv(MARK, f"{tmp_path}/a")
    strays = [start(started, dict(os.environ)) for _ in range(2)]
    spared = start(started, dict(os.environ))
    longer = start(started, dict(os.environ) | {MARK: other})
    daemon = start(started, daemon_environment())
    assert end_strays(mine, [spared], SystemClock()) == []
    assert [is_running(pid) for pid in (*strays, spared, longer, daemon)] == [False, False, True, True, True]
    assert end_strays(mine, [spared], SystemClock()) == []
    for process in started[:2]:
        assert process.wait(5) == -signal.SIGKILL
