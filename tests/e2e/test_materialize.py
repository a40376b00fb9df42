"""A checkpoint that is not stored is made again by the command, by the run's own script, and proven; whatever is killed or changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import unbroken
from tests.rigs.launched import wait_until
from tests.rigs.ranks import run_ranks

RIG = str(Path(__file__).parents[1] / "rigs" / "replay_run.py")
CHECKOUT = str(Path(__file__).parents[2])
STEPS, MADE = 12, 8


def command(*args: str | Path, **env: str) -> subprocess.Popen[str]:
    more = {"PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"} | env
    return subprocess.Popen(
        [sys.executable, "-m", "unbroken", *map(str, args)],
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def told(process: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
    """What the command says, once it has ended with `code`."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == code, out + err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def materialize(run: Path, step: int, *flags: str, code: int = 0, **env: str) -> dict[str, Any]:
    return told(command("materialize", run, step, *flags, "--json", "--", RIG, run, STEPS, **env), code)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps on two ranks, one of which was killed at step 7. Stored are 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("materialize") / "run"
    process = command("run", "--json", "--nproc-per-node", "2", RIG, folder, str(STEPS), REPLAY_KILL="7:1")
    assert told(process)["restarts"] == 1
    assert [one.step for one in unbroken.open(folder).steps()] == [5, 10, 12]
    return folder


@pytest.fixture(scope="module")
def calm(run: Path) -> str:
    """The state root of step 8 of a run that nobody disturbed, on one rank."""
    folder = run.parent / "calm" / "run"
    folder.parent.mkdir()
    run_ranks([RIG, str(folder), str(MADE)], 1)
    newest = unbroken.open(folder).steps()[-1]
    assert newest.step == MADE
    return newest.root


def test_I13_a_step_between_two_checkpoints_is_made_again_in_the_bits_of_a_run_that_nobody_disturbed(run: Path, calm: str) -> None:
    """A worker is killed meanwhile. What the user's run has told and written stays as it is."""
    before = {path: path.read_bytes() for path in [*run.parent.glob("*"), *(run / "runs/main").rglob("*")] if path.is_file()}
    between, _ = unbroken.open(run).replayable()
    assert (between.base, between.first, between.last, between.problem) == (5, 6, 9, "")
    made = materialize(run, MADE, REPLAY_KILL="7:1")
    assert (made["outcome"], made["lineage"], made["base"], made["root"]) == ("made", "replay-8", 5, calm)
    assert (made["proof"]["steps"], made["proof"]["by_root"], made["proof"]["parted"]) == (3, True, None)
    for path, raw in before.items():
        assert path.read_bytes() == raw, path
    assert not list(run.glob("metrics*")), "no sink is told"
    (only,) = unbroken.open(run, "replay-8").steps()
    assert (only.step, only.kind, only.milestone, only.root) == (MADE, "replay", True, calm)
    assert unbroken.open(run, "replay-8").verify().ok
    assert unbroken.open(run, "replay-8").certify().certified
    again = materialize(run, MADE)
    assert (again["outcome"], again["root"], again["proof"]) == ("there", calm, made["proof"])
    assert [one.step for one in unbroken.open(run).steps()] == [5, 10, 12]


def test_a_changed_script_is_found_at_its_step_and_nothing_of_it_is_kept_and_the_right_one_goes_on(run: Path, calm: str) -> None:
    found = materialize(run, MADE, "--as", "other", "--nproc-per-node", "1", code=1, REPLAY_CHANGED="7:loss", PYTHONHASHSEED="5")
    assert (found["outcome"], found["parted"]["step"], found["parted"]["what"]) == ("parted", 7, "loss")
    assert any("PYTHONHASHSEED" in text for text in found["differences"])
    assert max(one.step for one in unbroken.open(run, "other").steps()) < 7
    made = materialize(run, MADE, "--as", "other", "--nproc-per-node", "1")
    assert (made["outcome"], made["root"]) == ("made", calm)


def test_a_job_that_is_killed_as_a_whole_goes_on(run: Path) -> None:
    job = command("materialize", run, 9, "--nproc-per-node", "1", "--json", "--", RIG, run, STEPS, REPLAY_SLEEP="2")
    try:
        wait_until((run / "runs/replay-9/journal/00000001.jsonl").exists, "the commit of a step made again")
    finally:
        family = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGKILL)
        for process in family:
            if process.is_running():
                process.kill()
        job.communicate(timeout=30)
    made = materialize(run, 9, "--nproc-per-node", "1")
    assert (made["outcome"], made["proof"]["steps"]) == ("made", 4)
