"""B37 (c), (d), (e): a hang is found, named and ended; what is only slow is left alone. Real ranks under `unbroken run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import unbroken
from tests.rigs.torture_runs import ROOT, finish, journal, processes_of, wait_until

pytestmark = pytest.mark.alone

SCRIPT = "tests/rigs/hanging.py"
STEPS = 8
LAUNCHER = ["-m", "unbroken", "run", "--json", "--nproc-per-node", "3"]


def start(directory: Path, *launcher: str, steps: int = STEPS, env: dict[str, str] | None = None, **asked: Any) -> subprocess.Popen[str]:
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HANG": json.dumps(asked)} | (env or {})
    command = [sys.executable, *launcher, str(ROOT / SCRIPT), str(directory), str(steps)]
    return subprocess.Popen(
        command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an undisturbed run on one rank ends in."""
    code, out, err = finish(start(tmp_path_factory.mktemp("reference") / "run"))
    assert code == 0, err
    return str(json.loads(out.splitlines()[-1])["root"])


def struck_s(directory: Path, rank: int) -> float:
    return float(Path(f"{directory}.struck.{rank}.unit").read_text())


@pytest.mark.parametrize(
    ("how", "rank", "frame"),
    [("sleep", 1, "in sleep_with_a_heartbeat"), ("lock", 2, "in hold_the_lock"), ("stop", 0, "in <lambda>")],
)
def test_B37_e_a_hang_is_found_named_and_ended_and_the_run_goes_on(tmp_path: Path, root: str, how: str, rank: int, frame: str) -> None:
    directory = tmp_path / "run"
    code, out, err = finish(start(directory, *LAUNCHER, how=how, rank=rank, places={"unit": 4}, timeout="2s"))
    assert code == 0, err
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert said[0] == {"root": root, "completed": STEPS}
    outcome = said[1]
    assert outcome["restarts"] == 1, outcome
    failure = outcome["failures"][0]
    (file,) = (directory / "hangs").iterdir()
    assert failure["rank"] == rank
    assert failure["error"].startswith(f"exit code 43: hang: rank {rank} has made no progress for ")
    assert "of step 4" in failure["error"]
    assert str(file) in failure["error"]
    assert f"unbroken: rank {rank} ended with {failure['error']}" in err, "the launcher's line says it all"
    assert failure["at_s"] - struck_s(directory, rank) < 4.0, "within twice the timeout"
    parts = file.read_text().split("\n== ")
    assert [part.split(" (process")[0] for part in parts[1:]] == ["rank 0", "rank 1", "rank 2"]
    assert frame in parts[1 + rank]
    assert all("in _wait" in part for number, part in enumerate(parts[1:]) if number != rank), "the others wait in the collective"
    (event,) = [r for r in journal(directory) if r.get("name") == "hang"]
    assert (event["step"], event["facts"]["rank"]) == (4, rank)
    assert unbroken.open(str(directory)).certify().certified
    assert unbroken.open(str(directory)).verify().ok


def test_B37_e_a_loader_that_hangs_is_named_with_the_stacks_of_its_processes(tmp_path: Path, root: str) -> None:
    directory = tmp_path / "run"
    process = start(directory, *LAUNCHER, places={"data": 0}, rank=1, timeout="2s", env={"WORKERS": "2"})
    code, out, err = finish(process)
    assert code == 0, err
    outcome = json.loads(out.splitlines()[-1])
    assert outcome["restarts"] == 1, outcome
    assert "it waits for its data, unit 2 of step" in outcome["failures"][0]["error"]
    (file,) = (directory / "hangs").iterdir()
    loaders = file.read_text().split("started by rank 1 ==")[1:]
    assert len(loaders) == 2
    assert any("in __getitem__" in loader for loader in loaders)
    assert json.loads(out.splitlines()[-2])["root"] == root


def test_B37_c_d_a_slow_first_step_save_or_evaluation_is_no_hang(tmp_path: Path, root: str) -> None:
    directory = tmp_path / "run"
    places = {"unit": 1, "save": 3, "eval": 5}
    code, out, err = finish(start(directory, *LAUNCHER, how="slow", seconds=2.5, rank=0, places=places, timeout="1s"))
    assert code == 0, err
    assert all(Path(f"{directory}.struck.0.{place}").exists() for place in places), "it was slow there"
    assert json.loads(out.splitlines()[-1])["restarts"] == 0, err
    assert json.loads(out.splitlines()[-2])["root"] == root
    assert not (directory / "hangs").exists()


def test_B37_under_plain_python_the_process_ends_itself_and_says_why(tmp_path: Path, root: str) -> None:
    directory = tmp_path / "run"
    code, _, err = finish(start(directory, how="lock", rank=0, places={"unit": 4}, timeout="1s"))
    assert code == 43
    (file,) = (directory / "hangs").iterdir()
    assert "unbroken: hang: rank 0 has made no progress for " in err
    assert str(file) in err
    assert "in hold_the_lock" in err
    code, out, err = finish(start(directory, how="lock", rank=0, places={"unit": 4}, timeout="1s"))
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["root"] == root, "whoever supervises it starts it again"


def test_B37_somebody_at_a_debuggers_prompt_is_no_hang(tmp_path: Path, root: str) -> None:
    directory = tmp_path / "run"
    process = start(directory, how="pdb", rank=0, places={"unit": 4}, timeout="1s")
    wait_until(lambda: Path(f"{directory}.struck.0.unit").exists(), 60, "the prompt")
    time.sleep(4)  # an alarm would come after 1 s: that nothing comes has no condition to wait for
    assert process.poll() is None
    code, out, err = finish_with(process, "c\n")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1].removeprefix("(Pdb) "))["root"] == root
    assert not (directory / "hangs").exists()


def finish_with(process: subprocess.Popen[str], text: str) -> tuple[int, str, str]:
    out, err = process.communicate(text, timeout=60)
    return process.returncode, out, err


def test_B37_a_job_that_was_stopped_as_a_whole_goes_on_when_it_is_continued(tmp_path: Path, root: str) -> None:
    directory = tmp_path / "run"
    process = start(directory, *LAUNCHER, how="slow", seconds=0.9, rank=1, places={"unit": 4}, timeout="2s")
    wait_until(lambda: Path(f"{directory}.struck.1.unit").exists(), 60, "the slow step")
    ranks = [int(line.split()[0]) for line in processes_of(directory) if SCRIPT in line and "unbroken run" not in line]
    assert len(ranks) == 3
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)  # as above, with 2 s
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["restarts"] == 0, err
    assert json.loads(out.splitlines()[-2])["root"] == root
