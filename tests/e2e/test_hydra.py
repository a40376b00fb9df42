"""Hydra changes the working directory for each start: a relative run folder never starts afresh in silence (I10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import unbroken
from tests.rigs.launched import MARK
from tests.rigs.tiny_run import end_daemon, train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
CHDIR = "hydra.job.chdir=true"

SCRIPT = (
    MARK
    + f"""
import hydra
sys.path.insert(0, {str(ROOT)!r})
from tests.rigs.tiny_run import loss_of, open_run

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    if ATTEMPT == 0 and RANK == 1:
        time.sleep(cfg.get("late", 0))
    run = open_run("run", total_steps={STEPS}, lose_at_most="1 steps", init_seed=cfg.get("init", 3))
    mark("opened", done=run.completed, directory=os.path.abspath("run"), init=cfg.get("init", 3))
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        if ATTEMPT == 0 and RANK == 0 and run.completed == 3 and cfg.get("init", 3) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(clip_grad_norm=1.0)

main()
"""
)


class Job:
    """One launch of the script, whose first attempt is killed at step 4; waited for."""

    def __init__(self, folder: Path, *overrides: str, ranks: int = 1) -> None:
        (folder / "toy.py").write_text(SCRIPT)
        (folder / "marks.jsonl").touch()
        flags = ["--json", "--preload", "", "--nproc-per-node", str(ranks)]
        self.done = subprocess.run(
            [sys.executable, "-m", "unbroken", "run", *flags, "toy.py", *overrides],
            capture_output=True, text=True, timeout=150, check=False, cwd=folder, env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        marks = [json.loads(line) for line in (folder / "marks.jsonl").read_text().splitlines()]
        self.opened: list[dict[str, Any]] = [mark for mark in marks if mark["name"] == "opened"]
        for mark in self.opened:
            end_daemon(Path(mark["directory"]))


def test_I10_a_relative_folder_under_a_new_working_directory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    job = Job(tmp_path, CHDIR, "hydra.run.dir=outputs/${now:%H-%M-%S-%f}")
    assert job.done.returncode == 3, job.done.stderr
    (first,) = job.opened
    assert f"unbroken: {first['directory']}: a fresh start" in job.done.stdout, "the absolute path is shown at the start"
    said = next(line for line in job.done.stderr.splitlines() if "NoCheckpoint: " in line)
    assert "this is restart 1 of a job, but no run is here" in said
    assert f"the attempt before trained in {first['directory']}" in said
    assert "give an absolute path" in said
    assert json.loads(job.done.stdout.splitlines()[-1])["exit_code"] == 3


def test_I10_a_sweep_goes_on_in_the_job_that_was_killed_and_then_begins_the_next(tmp_path: Path) -> None:
    """Two ranks; three jobs in one process, the second one killed. The third is new at the restart, and may be."""
    job = Job(tmp_path, "--multirun", CHDIR, "hydra.sweep.dir=sweep", "+init=1,3,2", ranks=2)
    assert job.done.returncode == 0, job.done.stderr
    seen = [(m["attempt"], m["init"], m["done"]) for m in job.opened if m["rank"] == 0]
    assert [(attempt, init) for attempt, init, _ in seen] == [(0, 1), (0, 3), (1, 1), (1, 3), (1, 2)]
    done = [step for _, _, step in seen]
    assert done[:3] == [0, 0, STEPS]
    assert done[3] in (2, 3), "the other rank may have been killed on its way to the boundary of step 3"
    assert done[4] == 0
    train(tmp_path / "whole", STEPS)
    assert unbroken.open(tmp_path / "sweep" / "1" / "run").certify(tmp_path / "whole").grade == "exact"
    end_daemon(tmp_path / "whole")


def test_ranks_whose_working_directories_differ_are_told(tmp_path: Path) -> None:
    """Each rank makes its own folder where the name holds the time."""
    job = Job(tmp_path, CHDIR, "hydra.run.dir=outputs/${now:%H-%M-%S-%f}", "+late=0.1", ranks=2)
    assert job.done.returncode == 1, job.done.stderr
    assert job.opened == []
    assert "the ranks name 2 run folders" in job.done.stderr
    assert "give an absolute path" in job.done.stderr
