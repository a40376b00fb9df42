"""Branches of real runs: a Run goes on with one, two train at the same time in one folder, and certificates tell them apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs.tiny_run import Tiny, open_run, train
from unbroken.core.errors import Fenced, LayoutMismatch, NoCheckpoint, Refused
from unbroken.core.messages import Hello
from unbroken.shm.channel import connect
from unbroken.store.lease import WriterLease

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps, of which 2, 3 and 4 are kept."""
    folder = tmp_path / "run"
    train(folder, 4)
    return folder


def scheduled(folder: Path, steps: int, lineage: str = "main") -> tuple[list[float], float]:
    """A life with a schedule; its losses, and the rate at its end."""
    torch.manual_seed(3)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    losses = train(folder, steps, model=model, optimizer=optimizer, scheduler=scheduler, lineage=lineage)
    return losses, optimizer.param_groups[0]["lr"]


def test_I13_an_unchanged_branch_ends_in_the_bits_of_its_parent(run: Path) -> None:
    unbroken.open(run).branch(3, "same")
    ours, theirs = train(run, 7, lineage="same"), train(run, 7)
    assert ours[1:] == theirs
    certificate = unbroken.open(run, "same").certify(run)
    assert (certificate.grade, certificate.problems, certificate.steps) == ("exact", [], 7)
    assert [(b.parent, b.step, b.changes) for b in certificate.branches] == [("main", 3, [])]
    assert unbroken.open(run).certify().branches == []


def test_a_changed_rate_is_trained_with_and_shown_in_the_certificate(tmp_path: Path) -> None:
    scheduled(tmp_path, 4)
    made = unbroken.open(tmp_path).branch(3, "hot", set={"lr": 1e-4})
    assert [(c.pointer, c.after) for c in made.changes if c.pointer.endswith("/lr")] == [("/optimizer/groups/0/lr", "0.0001")]
    hot, rate = scheduled(tmp_path, 6, "hot")
    main, _ = scheduled(tmp_path, 6)
    assert (hot[0], hot[1] != main[0]) == (hot[0], True)
    assert rate == pytest.approx(1e-4, rel=0.05)
    certificate = unbroken.open(tmp_path, "hot").certify()
    assert certificate.certified, certificate.problems
    (branched,) = certificate.branches
    assert branched.changes == made.changes
    assert not unbroken.open(tmp_path, "hot").certify(tmp_path).certified


def test_a_lineage_that_is_not_there_starts_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="no lineage 'hto' here; there are main: `unbroken branch` makes one"):
        train(run, 5, lineage="hto")
    assert not (run / "runs" / "hto").exists()
    with pytest.raises(NoCheckpoint, match="no run here, so no lineage 'hot'"):
        train(tmp_path / "nothing", 5, lineage="hot")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match=r"lineage '\.\./x'"):
        train(run, 5, lineage="../x")


def test_I10_a_branch_is_never_begun_afresh(run: Path) -> None:
    unbroken.open(run).branch(3, "hot")
    for manifest in (run / "manifests").glob("000000000003-0-*"):
        manifest.unlink()
    (own,) = (run / "runs/hot/log").glob("00000002.json")
    assert own.exists()
    with pytest.raises(NoCheckpoint, match="none is usable"):
        train(run, 5, lineage="hot")


def test_birth_facts_are_those_of_the_folder(run: Path) -> None:
    unbroken.open(run).branch(3, "hot")
    with pytest.raises(LayoutMismatch, match="units: born with 2, now 4"):
        train(run, 5, lineage="hot", units=4)


def test_two_runs_of_one_process_train_two_lineages_in_turns(run: Path) -> None:
    unbroken.open(run).branch(3, "hot")
    runs = [open_run(run, total_steps=7), open_run(run, total_steps=7, lineage="hot")]
    for run_ in runs:
        for batch in run_:
            for micro in batch:
                micro.backward(run_.model(micro.x).square().mean())
            run_.step()
    assert [unbroken.open(run, name).steps()[-1].step for name in ("main", "hot")] == [7, 7]


def test_B12_a_second_writer_of_a_branch_is_refused(run: Path) -> None:
    unbroken.open(run).branch(3, "hot")
    first = open_run(run, total_steps=7, lineage="hot")
    code = f"from tests.rigs.tiny_run import *; train(Path({str(run)!r}), 5, lineage='hot')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 4, done.stderr
    assert f"is in use: process {os.getpid()} on" in done.stderr
    first.close()


def test_a_stores_folder_can_be_branched_too(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.full((1000,), float(step))})
    unbroken.open(tmp_path).branch(2, "other")
    with unbroken.Store(tmp_path, lineage="other") as other:
        assert other.latest() == 2
        state = other.load()
        assert torch.equal(state["w"], torch.full((1000,), 2.0))
        other.save(3, {"w": torch.full((1000,), -3.0)})
    assert unbroken.Store(tmp_path).load(3)["w"][0] == 3
    assert unbroken.Store(tmp_path, lineage="other").load(3)["w"][0] == -3
    with pytest.raises(ValueError, match="no such setting"):
        unbroken.open(tmp_path).branch(2, "third", set={"lr": 1})
    with pytest.raises(NoCheckpoint, match="no lineage 'third' here; there are main, other"):
        unbroken.Store(tmp_path, lineage="third").load()


SCRIPT = """
import sys, time
from tests.rigs.tiny_run import *
folder, lineage, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
run = open_run(folder, total_steps=steps, lineage=lineage, keep=2, lose_at_most="2 steps")
for batch in run:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
    run.step(clip_grad_norm=1.0)
    print(run.completed, flush=True)
    time.sleep(0.05)
"""
STEPS = 30


def trainer(folder: Path, lineage: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), lineage, str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=CHECKOUT)


def daemon_of(folder: Path, lineage: str) -> int:
    channel = connect(str(folder), False, lineage)
    channel.send(Hello(role="observer", pid=os.getpid()))
    pid = channel.peer()[0]
    channel.close()
    return pid


def test_I2_I6_I13_two_jobs_train_two_lineages_of_one_folder_and_are_killed_and_both_are_exact(tmp_path: Path) -> None:
    """Daemons, then workers are killed while both write; both end in the bits of a run that nobody disturbed."""
    folder, calm = tmp_path / "run", tmp_path / "calm"
    train(folder, 4)
    unbroken.open(folder).branch(3, "same")
    for is_killed in (True, False):
        jobs = {lineage: trainer(folder, lineage, STEPS) for lineage in ("main", "same")}
        try:
            if is_killed:
                assert all(said(job, 3) for job in jobs.values())
                for lineage in jobs:
                    os.kill(daemon_of(folder, lineage), signal.SIGKILL)
                for job in jobs.values():
                    assert said(job, 4)
                    job.kill()
        finally:
            ended = {lineage: (*job.communicate(timeout=90), job.returncode) for lineage, job in jobs.items()}
        assert {code for *_, code in ended.values()} == {-signal.SIGKILL if is_killed else 0}, ended
    train(calm, STEPS)
    for lineage in ("main", "same"):
        certificate = unbroken.open(folder, lineage).certify(calm)
        assert certificate.grade == "exact", certificate.problems
        assert (certificate.final_step, certificate.steps) == (STEPS, STEPS)


def said(job: subprocess.Popen[str], num: int) -> bool:
    """Has the job done so many more steps?"""
    assert job.stdout is not None
    steps = (line for line in job.stdout if line.strip().isdigit())  # not what a start tells
    return all(next(steps, "") for _ in range(num))


def cli(*args: str | Path, code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", *map(str, args), "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_command_branches_lists_and_shows(run: Path) -> None:
    made = cli("branch", run, 3, "hot", "--set", "lr=1e-4", "--set", "betas=0.8,0.9")
    assert (made["lineage"], made["parent"], made["step"]) == ("hot", "main", 3)
    assert sorted(change["pointer"] for change in made["changes"]) == [
        "/optimizer/groups/0/betas/0",
        "/optimizer/groups/0/betas/1",
        "/optimizer/groups/0/lr",
    ]
    assert [(one["lineage"], one["step"]) for one in cli("ls", run)] == [("main", 2), ("main", 3), ("main", 4), ("hot", 3)]
    assert [one["step"] for one in cli("ls", run, "--lineage", "hot")] == [3]
    assert cli("show", run, "--lineage", "hot")["newest"]["root"] == made["root"]
    assert cli("verify", run, "--lineage", "hot")["num_checkpoints"] == 1
    certificate = cli("certify", run, "--lineage", "hot")
    assert certificate["branches"][0]["changes"] == made["changes"]
    (rate,) = [v for v in cli("show", run, "--variables", "--lineage", "hot")["variables"] if v["name"] == "/optimizer/groups/0/lr"]
    assert rate["hash"] != next(v["hash"] for v in cli("show", run, "--variables", "--step", 3)["variables"] if v["name"] == rate["name"])


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["3", "hot", "--set", "lrr=1"], 2, "'lrr': no such setting in the checkpoint; options are"),
        (["3", "hot", "--set", "lr"], 2, "give KEY=VALUE"),
        (["3", "hot", "--set", "lr=1", "--set", "lr=2"], 2, "each key once"),
        (["3", "main"], 2, "every run has it already"),
        (["9", "hot"], 3, "no checkpoint of step 9; there are 2, 3, 4"),
        (["3", "hot", "--lineage", "x"], 3, "no lineage 'x' here"),
    ],
)
def test_what_the_command_refuses(run: Path, args: list[str], code: int, words: str) -> None:
    error = cli("branch", run, *args, code=code)["error"]
    assert words in error["text"]
    assert [one["lineage"] for one in cli("ls", run)] == ["main"] * 3


def test_a_branch_that_is_there_is_exit_4_and_one_in_the_making_names_its_maker(run: Path) -> None:
    cli("branch", run, 3, "hot")
    assert "lineage 'hot' exists" in cli("branch", run, 3, "hot", code=4)["error"]["text"]
    from unbroken.core.ports import SystemClock, SystemNonces
    from unbroken.daemon.folder import RunFolder

    me = RunFolder(str(run), SystemClock(), SystemNonces()).writer
    lease = WriterLease.acquire(str(run), me, "cold")
    assert f"process {os.getpid()} on" in cli("branch", run, 3, "cold", code=4)["error"]["text"]
    lease.release()
    with pytest.raises(Refused):
        unbroken.open(run).branch(2, "hot")
    assert Fenced.exit_code == 4
