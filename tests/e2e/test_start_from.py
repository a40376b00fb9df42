"""`Run(start_from=)`: a run that is not there yet begins with somebody else's state, one that is there goes on; certificates name it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs.hostile import Strike
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import Tiny, bits_of, commits, end_daemon, loss_of, open_run, train
from unbroken.core.errors import LayoutMismatch, Refused

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Weights, AdamW state and a schedule after two steps of a plain loop."""
    torch.manual_seed(1)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": 1, "args": {}}
    torch.save(parts, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def finish(run: unbroken.Run) -> None:
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step(clip_grad_norm=1.0)


def events(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in sorted(directory.glob("runs/main/journal/*")) for line in path.read_text().splitlines()[1:]]
    return [line["record"] for line in lines if line["record"].get("name") == "started_from"]


def test_a_fresh_run_begins_with_it_and_a_resume_says_that_it_does_not(
    directory: Path, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = torch.load(source, weights_only=True)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = open_run(directory, model=model, optimizer=optimizer, scheduler=scheduler, total_steps=2, start_from=source)
    assert all(torch.equal(value, saved["model"][name]) for name, value in model.state_dict().items())
    for number, parameter in enumerate(model.parameters()):
        for name, value in saved["optimizer"]["state"].get(number, {}).items():
            assert torch.equal(optimizer.state[parameter][name], value)
    assert (scheduler.last_epoch, run.completed) == (2, 0)
    told = capfd.readouterr().err
    assert f"started from {source} (torch): weights (10 tensors), optimizer state (6 of 7), scheduler" in told
    assert "left over in the source: args" in told and "epoch 1; this run counts its own steps from 0" in told
    finish(run)
    end_daemon(directory)

    again = Tiny()
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    gone = {"source": source.parent / "gone.pt"}
    train(directory, 3, model=again, optimizer=optimizer, scheduler=scheduler, start_from=gone)
    assert f"start_from={source.parent / 'gone.pt'} is not used: this run is there already" in capfd.readouterr().err
    archive = unbroken.open(directory)
    born = archive.facts.options["started_from"]
    assert (born["format"], born["source"].endswith("/a.pt"), born["source"].startswith("/")) == ("torch", True, False)
    proof = archive.certify()
    assert proof.certified and [text for text in proof.differences if "born from" in text and "a.pt (torch)" in text]
    assert [(event["step"], event["facts"]["format"]) for event in events(directory)] == [(0, "torch")]


def test_the_same_source_gives_the_same_run(directory: Path, source: Path, tmp_path: Path) -> None:
    train(directory, 2, start_from=source, init_seed=3)
    train(tmp_path / "other", 2, start_from=source, init_seed=4)
    end_daemon(tmp_path / "other")
    assert commits(directory)[-1].state_root == commits(tmp_path / "other")[-1].state_root
    assert unbroken.open(directory).certify(against=tmp_path / "other").grade == "exact"


def test_a_run_without_a_scheduler_takes_no_note_of_the_sources_and_resumes(directory: Path, source: Path) -> None:
    train(directory, 1, start_from=source)
    end_daemon(directory)
    train(directory, 2)
    assert [commit.step for commit in commits(directory)][-1] == 2


def test_a_source_that_does_not_fit_leaves_no_run_behind(directory: Path, source: Path) -> None:
    model = Tiny(width=5)
    before = bits_of(model)
    with pytest.raises(LayoutMismatch, match=r"body\.0\.weight: float32\[3, 4\] in the source, float32\[5, 4\] live"):
        open_run(directory, model=model, start_from=source)
    assert bits_of(model) == before and not (directory / "run.json").exists()
    train(directory, 1, start_from={"source": source, "take": ["model"]})
    assert unbroken.open(directory).facts.options["started_from"]["taken"] == ["weights (10 tensors)"]


def test_B39_a_hostile_source_is_refused_and_not_run(directory: Path, tmp_path: Path) -> None:
    torch.save({"model": Tiny().state_dict(), "args": Strike(tmp_path / "marker")}, tmp_path / "bad.pt")
    with pytest.raises(Refused, match=r"(?s)posix\.system.*'args'.*torch\.save"):
        open_run(directory, start_from=tmp_path / "bad.pt")
    assert not (tmp_path / "marker").exists() and not (directory / "run.json").exists()


def test_from_a_checkpoint_of_another_run_with_its_extras(directory: Path, tmp_path: Path) -> None:
    ema = torch.zeros(3)
    run = open_run(tmp_path / "first", total_steps=3, extras={"ema": ema, "best": 0.5}, lose_at_most="1 steps")
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        ema += 1
        run.save(wait=True)
    end_daemon(tmp_path / "first")
    mine = torch.zeros(3)
    extras = {"ema": mine, "best": 0.0}
    second = open_run(directory, extras=extras, init_seed=8, start_from=f"{tmp_path}/first@2", total_steps=1)
    assert mine.tolist() == [2, 2, 2] and extras["best"] == 0.5
    stored = unbroken.open(tmp_path / "first").load(2, ["/model/parameters"])["/model/parameters"]
    assert all(torch.equal(value, stored[name]) for name, value in second.model.named_parameters())
    finish(second)
    born = unbroken.open(directory).facts.options["started_from"]
    root = next(commit.state_root for commit in commits(tmp_path / "first") if commit.step == 2)
    assert (born["format"], born["step"], born["root"]) == ("unbroken", 2, root)


def test_two_ranks_that_were_drawn_otherwise_begin_with_one_state(directory: Path, source: Path) -> None:
    first, second = run_ranks(["-m", "tests.rigs.start_ranks", str(directory), str(source)], 2, {"PYTHONPATH": str(ROOT)})
    assert [line for line in first.splitlines() if line.startswith("sum ")] == [
        line for line in second.splitlines() if line.startswith("sum ")
    ]
    assert unbroken.open(directory).certify().certified


@pytest.mark.slow
def test_ranks_whose_sources_differ_are_refused_by_the_name_of_the_piece(directory: Path, source: Path) -> None:
    state = torch.load(source, weights_only=True)
    for rank in (0, 1):
        state["model"]["body.3.bias"] = torch.full((2,), float(rank))
        torch.save(state, source.parent / f"rank{rank}.pt")
    with pytest.raises(AssertionError, match=r"the ranks do not start from one state(.|\n)*body\.3\.bias"):
        run_ranks(["-m", "tests.rigs.start_ranks", str(directory), str(source.parent / "rankRANK.pt")], 2, {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(("kind", "package"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_real_checkpoints_of_other_trainers(tmp_path: Path, kind: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed")
    line = [sys.executable, "-W", "ignore", "-m", "tests.rigs.real_trainers", kind, str(tmp_path)]
    done = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    end_daemon(tmp_path / "run")
    assert found["live"] == found["saved"] and found["epoch"] == {"huggingface": 4, "lightning": 1}[kind]
    assert (found["born"]["format"], found["born"]["step"]) == (kind, 4)
    assert found["born"]["taken"][1] == {"huggingface": "optimizer state (16 of 16)", "lightning": "optimizer state (4 of 4)"}[kind]
    assert "scheduler" in found["born"]["taken"] and ("random state" in found["born"]["taken"]) == (kind == "huggingface")
