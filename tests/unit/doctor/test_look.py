"""Looking at this very host: what is measured is real, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.core.ports import SystemClock
from unbroken.doctor import look

GIB = 1 << 30


def test_versions_are_read_without_an_import() -> None:
    code = "import sys; from unbroken.doctor.examine import look; assert look.versions()['torch']; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_limits_are_those_of_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        assert look.limit(resource.RLIMIT_CORE) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_blocked_and_ignored_signals_are_seen() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        blocked, ignored = look.signal_sets()
        assert "SIGUSR2" in blocked
        assert "SIGHUP" in ignored
        assert "SIGTERM" not in blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGHUP, handler)


def test_what_a_run_does_is_tried(tmp_path: Path) -> None:
    assert look.try_memory_file() == ""
    assert look.try_loopback() == ""
    assert look.addresses("localhost")
    assert look.addresses("no-such-name.invalid") == []
    trial = look.try_writing(str(tmp_path), SystemClock(), GIB)
    assert trial.bytes_per_s > 1 << 20
    assert 0 < trial.sync_s < 10
    assert trial.link_error == ""
    assert abs(trial.ahead_s) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_trial_never_takes_more_than_a_share_of_what_is_free(tmp_path: Path) -> None:
    trial = look.try_writing(str(tmp_path), SystemClock(), 1 << 20)
    assert (trial.bytes_per_s, trial.direct) == (0, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        look.try_writing(str(tmp_path), SystemClock(), GIB)


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert look.file_system("/proc/self") == "proc"
    assert look.file_system(str(Path.cwd()))


def test_the_fork_server_is_tried_with_modules_that_spoil_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded_module.py").write_text("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    (tmp_path / "deadly_module.py").write_text("import os; os._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert look.try_fork_server(["json", "torch"]) == ({}, "")
    dropped, error = look.try_fork_server(["json", "threaded_module", "no_such_module"])
    assert "started 1 threads" in dropped["threaded_module"]
    assert error == ""
    assert "ModuleNotFoundError" in look.try_fork_server(["no_such_module"])[0]["no_such_module"]
    assert look.try_fork_server(["deadly_module"])[1].startswith("it ended with exit code 7")
