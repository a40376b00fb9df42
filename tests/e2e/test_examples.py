"""examples/train_minimal.py ends in one state root: whoever launches it, whenever it is killed and started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unbroken.core.os import descendants, is_alive
from unbroken.recover.certify import certify
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "train_minimal.py")
LAUNCHERS = {
    "python": [sys.executable, SCRIPT],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT],
    "unbroken run": [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", "3", SCRIPT],
}
STEPS = 60
LIMIT_S = 180.0


def start(launcher: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the example on a folder; what it prints goes to a file beside it."""
    with open(folder.with_suffix(".out"), "ab") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*LAUNCHERS[launcher], str(folder)], stdout=output, stderr=output, env=environment, start_new_session=True)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the launcher and everything below it; the daemon has a life of its own."""
    pids = [process.pid, *descendants(process.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers survived"
        time.sleep(0.01)


def finish(launcher: str, folder: Path) -> float:
    """Run to the end; how long it took in seconds."""
    began = time.monotonic()
    process = start(launcher, folder)
    try:
        code = process.wait(LIMIT_S)
    except BaseException:
        kill_all(process)
        raise
    assert code == 0, folder.with_suffix(".out").read_text()[-4000:]
    return time.monotonic() - began


def kill_after(launcher: str, folder: Path, seconds: float) -> None:
    """Start, and kill after so many seconds unless it has ended by then."""
    process = start(launcher, folder)
    with contextlib.suppress(subprocess.TimeoutExpired):
        assert process.wait(seconds) == 0, folder.with_suffix(".out").read_text()[-4000:]
    kill_all(process)


def final_root(folder: Path) -> str:
    """State root at the last step, after the run has proven itself."""
    certificate = certify(DiskTier(str(folder)))
    assert certificate.problems == []
    newest = Repository.open(DiskTier(str(folder))).visible()[-1]
    assert newest.step == certificate.final_step == STEPS
    return newest.state_root


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reference") / "run"
    finish("python", folder)
    return final_root(folder)


def test_the_example_is_short() -> None:
    assert len(Path(SCRIPT).read_text().splitlines()) <= 60


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_I13_one_state_root_however_it_is_launched_and_killed(launcher: str, reference: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    duration_s = finish(launcher, whole)
    assert final_root(whole) == reference
    killed = tmp_path / "killed"
    chance = random.Random(launcher)
    for first, last in ((0.05, 0.4), (0.4, 0.8), (0.8, 1.0)):
        kill_after(launcher, killed, duration_s * chance.uniform(first, last))
    finish(launcher, killed)
    assert final_root(killed) == reference


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_campaign_twenty_seeded_kills_from_import_to_exit(launcher: str, reference: str, tmp_path: Path) -> None:
    duration_s = finish(launcher, tmp_path / "whole")
    chance = random.Random(f"campaign {launcher}")
    for i in range(20):
        folder = tmp_path / f"killed-{i}"
        kill_after(launcher, folder, duration_s * (i + chance.random()) / 20)
        finish(launcher, folder)
        assert final_root(folder) == reference, f"kill {i}"
