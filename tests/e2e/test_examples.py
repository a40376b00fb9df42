"""examples/train_minimal.py ends in one state root: whoever launches it, whenever it is killed and started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.core.os import descendants, is_alive
from unbroken.proof.certify import certify
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
TWENTY = {"import": 5, "train": 11, "exit": 4}
"""Kills in each stage: up to the birth of the run, from the first step through all saves, and after the last commit."""
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


def finish(launcher: str, folder: Path) -> None:
    """Run to the end."""
    process = start(launcher, folder)
    try:
        code = process.wait(LIMIT_S)
    except BaseException:
        kill_all(process)
        raise
    assert code == 0, folder.with_suffix(".out").read_text()[-4000:]


def num_entries(folder: Path) -> int:
    return len(list(folder.glob("runs/main/log/*.json")))


def has_last_commit(folder: Path) -> bool:
    return num_entries(folder) > 0 and any(commit.step == STEPS for commit in Repository.open(DiskTier(str(folder))).visible())


def wait_for(launcher_process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    """Until something has happened, or the launcher has ended."""
    deadline = time.monotonic() + LIMIT_S
    while launcher_process.poll() is None and not done():
        assert time.monotonic() < deadline, "neither ended nor went on"
        time.sleep(0.005)


def stages(launcher: str, folder: Path) -> dict[str, float]:
    """A whole run in a new folder; how many seconds it imports, trains, and ends."""
    began = time.monotonic()
    process = start(launcher, folder)
    wait_for(process, lambda: num_entries(folder) > 0)
    born = time.monotonic()
    wait_for(process, lambda: has_last_commit(folder))
    trained = time.monotonic()
    try:
        assert process.wait(LIMIT_S) == 0, folder.with_suffix(".out").read_text()[-4000:]
    finally:
        kill_all(process)
    return {"import": born - began, "train": trained - born, "exit": time.monotonic() - trained}


def kill_in(stage: str, seconds: float, launcher: str, folder: Path) -> None:
    """Start, and kill so many seconds after this stage has begun, unless all has ended by then."""
    before = num_entries(folder)
    process = start(launcher, folder)
    try:
        if stage == "train":
            wait_for(process, lambda: num_entries(folder) > before)
        elif stage == "exit":
            wait_for(process, lambda: num_entries(folder) > before and has_last_commit(folder))
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(seconds) == 0, folder.with_suffix(".out").read_text()[-4000:]
    finally:
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
    seconds = stages(launcher, whole)
    assert final_root(whole) == reference
    killed = tmp_path / "killed"
    chance = random.Random(launcher)
    for stage in ("import", "train", "exit"):
        kill_in(stage, seconds[stage] * chance.random(), launcher, killed)
    finish(launcher, killed)
    assert final_root(killed) == reference


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_campaign_twenty_seeded_kills_from_import_to_exit(launcher: str, reference: str, tmp_path: Path) -> None:
    seconds = stages(launcher, tmp_path / "whole")
    chance = random.Random(f"campaign {launcher}")
    moments = [(stage, seconds[stage] * (i + chance.random()) / n) for stage, n in TWENTY.items() for i in range(n)]
    for number, (stage, after_s) in enumerate(moments):
        folder = tmp_path / f"killed-{number}"
        kill_in(stage, after_s, launcher, folder)
        finish(launcher, folder)
        assert final_root(folder) == reference, f"kill {number}: {after_s:.3f} s into {stage}"
