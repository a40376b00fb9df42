"""Steps made again in this very process: what is held against the record, what is kept, and which Run may open such a lineage."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import unbroken
from tests.rigs import anomalous_run
from tests.rigs.anomalous_run import Case
from tests.rigs.tiny_run import end_daemon, loss_of, open_run, train
from unbroken.archive.branching import make_branch
from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.messages import Hello
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.core.replay import REPLAY, Parted, Replay
from unbroken.materializing import materialize
from unbroken.proof.replaying import Proof, prove, recorded
from unbroken.shm.channel import connect
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

pytestmark = pytest.mark.usefixtures("runtime")


class Again:
    """Makes a step of `directory` again, as the command does in other processes."""

    def __init__(self, directory: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.step = directory, step
        self.report = directory.parent / "parted.json"
        self.source = Repository.open(DiskTier(str(directory)))
        self.base = [one.step for one in self.source.visible() if one.step < step][-1]
        make = {"clock": SystemClock(), "nonces": SystemNonces(), "replay": step}
        make_branch(self.source, DiskTier(str(directory)), self.base, "again", {}, **make)
        self._patch = monkeypatch
        self._told = Replay(directory=str(directory), source="main", lineage="again", step=step, report=str(self.report))

    def run(self, life: Callable[[], Any]) -> None:
        """One life of the script, which must end by itself."""
        self._patch.setenv(REPLAY, msgspec.json.encode(self._told).decode())
        try:
            with pytest.raises(SystemExit) as ended:
                life()
            assert ended.value.code == 0
        finally:
            self._patch.delenv(REPLAY)

    def fails(self, life: Callable[[], Any]) -> Parted:
        """One life of a script that is another; what it parted by."""
        self._patch.setenv(REPLAY, msgspec.json.encode(self._told).decode())
        try:
            with pytest.raises(Refused, match="this is not the run that was recorded, and nothing of it is kept"):
                life()
        finally:
            self._patch.delenv(REPLAY)
        return msgspec.json.decode(self.report.read_bytes(), type=Parted)

    def proof(self) -> Proof:
        replay = Repository.open(DiskTier(str(self.directory)), "again")
        return prove(self.source, replay, self.base, replay.visible()[-1])

    def kept(self) -> list[int]:
        return [one.step for one in unbroken.open(self.directory, "again").steps()]


def averaged(
    directory: Path,
    steps: int,
    *,
    change: int = 0,
    milestones: tuple[int, ...] = (2,),
    at: Callable[[int], None] = lambda step: None,
    waits: bool = True,
    saves: tuple[int, ...] = tuple(range(99)),
    **options: Any,
) -> None:
    """Steps with an average that no loss shows, which is another one from step `change` on; a milestone, and all roots recorded."""
    average = {"mean": torch.zeros(3)}
    run = open_run(directory, total_steps=steps, extras={"average": average}, keep=1, **options)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step(clip_grad_norm=1.0)
        run.log(loss=run.loss)
        at(batch.step)
        average["mean"] += 2.0 if change and batch.step >= change else 1.0
        if batch.step in saves:
            run.save(milestone=batch.step in milestones, wait=waits)
        if run.once("key"):
            with (directory.parent / "once").open("a") as file:
                file.write("once\n")


def test_the_last_step_alone_is_kept_and_nothing_else_is_told_or_done(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged(directory, 6)
    rows = (directory / "metrics.jsonl").read_bytes()
    again = Again(directory, 4, monkeypatch)
    again.run(lambda: averaged(directory, 99, milestones=(3, 4)))
    assert again.kept() == [4]
    assert (again.proof().parted, again.proof().steps, again.proof().roots, again.proof().by_root) == (None, 2, 2, True)
    assert not list(directory.glob("metrics.again*")) and (directory / "metrics.jsonl").read_bytes() == rows
    assert (directory.parent / "once").read_text() == "once\n"
    end_daemon(directory)
    averaged(directory, 7)
    assert unbroken.open(directory).steps()[-1].step == 7, "the run itself goes on from where it was"


def test_I3_what_no_loss_shows_is_found_by_the_root_and_nothing_of_it_is_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged(directory, 6)
    again = Again(directory, 5, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = again.fails(lambda: averaged(directory, 6, change=4))
    assert (found.step, found.what) == (4, "state root")
    assert again.kept() == [3]
    again.run(lambda: averaged(directory, 6))
    assert again.kept() == [5] and again.proof().parted is None


def test_I3_where_no_root_is_recorded_only_the_last_step_is_kept_and_said_to_be_proven_by_losses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script looks at its state all the time; none of what it saves on the way could be shown to be right."""
    averaged(directory, 7, saves=(2,), lose_at_most="50 steps")
    again = Again(directory, 5, monkeypatch)
    again.run(lambda: averaged(directory, 7))
    replay = Repository.open(DiskTier(str(directory)), "again")
    assert list(recorded(replay, 2, 5).roots) == [5]
    proof = again.proof()
    assert (proof.parted, proof.steps, proof.roots, proof.by_root) == (None, 3, 0, False)


def test_I8_other_samples_are_found_where_they_begin(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Birth facts are compared at the start; this loader says the same and gives others."""
    averaged(directory, 5)
    again = Again(directory, 4, monkeypatch)
    from unbroken.order import ledger

    real = ledger.unit_digest
    monkeypatch.setattr("unbroken.stepping.unit_digest", lambda ids: real(ids)[::-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = again.fails(lambda: averaged(directory, 5))
    assert (found.step, found.what) == (3, "samples")


RULE: dict[str, Any] = {"threshold": 100.0, "window": 6, "warmup": 4, "back": 1, "ahead": 0}


@pytest.mark.parametrize(
    "fields",
    [
        {"bad": {13: "loss"}},
        {"bad": {13: "gradient"}},
        {"bad": {13: "huge"}, "adam": True},
        {"bad": {13: "spike"}, "spike": RULE | {"action": "rollback"}},
    ],
    ids=["skipped", "gone back", "overflow", "window"],
)
def test_B38_steps_that_were_skipped_are_skipped_again(directory: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    case = Case(**{"saves": (10, 14), **fields})

    def life() -> None:
        extras: dict[str, Any] = {}
        anomalous_run.train(anomalous_run.open_run(directory, case, extras, keep=1, milestone_every="10 steps"), case, extras)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life()
        assert 13 in {one.step for one in unbroken.open(directory).certify().skipped}
        again = Again(directory, 14, monkeypatch)
        assert again.base == 10
        again.run(life)
    assert (again.proof().parted, again.kept()[-1]) == (None, 14)


def test_I10_a_lineage_of_a_step_made_again_is_not_trained_further(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged(directory, 5)
    again = Again(directory, 4, monkeypatch)
    with pytest.raises(Refused, match="lineage 'again' holds step 4 made again and goes no further"):
        averaged(directory, 6, lineage="again")
    again.run(lambda: averaged(directory, 5))
    unbroken.open(directory, "again").branch(4, "on")
    averaged(directory, 7, lineage="on")
    averaged(directory, 7)
    certificate = unbroken.open(directory, "on").certify(directory)
    assert (certificate.grade, [one.lineage for one in certificate.branches]) == ("exact", ["again", "on"]), certificate.problems
    lineages = {one.name: one.replay for one in unbroken.open(directory).lineages()}
    assert lineages == {"main": None, "again": 4, "on": None}


def test_I10_a_run_in_another_folder_is_not_trained(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    averaged(directory, 5)
    again = Again(directory, 4, monkeypatch)
    with pytest.raises(Refused, match=r"again, but opens a Run in .*other, which it would train on"):
        again.run(lambda: train(tmp_path / "other", 3))
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv(REPLAY, "hello")
    with pytest.raises(ValueError, match="UNBROKEN_REPLAY is 'hello', which `unbroken materialize` has not written"):
        train(tmp_path / "other", 3)


def test_what_cannot_be_made_again_is_said_before_anything_is_done(directory: Path, tmp_path: Path) -> None:
    averaged(directory, 6, milestones=(2, 4))
    unbroken.open(directory).branch(4, "replay-3")
    before = sorted(path for path in directory.rglob("*"))

    def asked(step: int, folder: Path = directory, **more: Any) -> Any:
        return materialize(folder, step, [__file__], lambda line: None, **more)

    assert asked(4).outcome == "stored"
    with pytest.raises(NoCheckpoint, match="step 1 cannot be made again: no checkpoint before it is stored, the oldest is of step 2"):
        asked(1)
    with pytest.raises(NoCheckpoint, match="step 9 cannot be made again: it lies beyond step 6, the newest checkpoint"):
        asked(9)
    with pytest.raises(NoCheckpoint, match="the oldest is of step 4; before step 4 it is lineage main"):
        asked(3, lineage="replay-3", name="x")
    with pytest.raises(Refused, match="lineage 'replay-3' is there and is not step 3 of main made again: choose another name with --as"):
        asked(3)
    with pytest.raises(ValueError, match="give the training script of the run after --"):
        materialize(directory, 5, [], lambda line: None)
    with pytest.raises(ValueError, match=r"no such script: nowhere\.py"):
        materialize(directory, 5, ["nowhere.py"], lambda line: None)
    with pytest.raises(ValueError, match="digits alone are a step"):
        asked(3, name="7")
    with unbroken.Store(tmp_path / "store") as store:
        store.save(1, {"a": 1})
        store.save(3, {"a": 1})
    with pytest.raises(Refused, match="holds checkpoints of a Store"):
        asked(2, folder=tmp_path / "store")
    assert unbroken.open(tmp_path / "store").replayable() == []
    assert sorted(path for path in directory.rglob("*")) == before


def test_ls_tells_what_can_be_made_again(directory: Path) -> None:
    from typer.testing import CliRunner

    from unbroken.cli.app import app

    averaged(directory, 6)
    (found,) = unbroken.open(directory).replayable()
    assert (found.base, found.first, found.last, found.roots) == (2, 3, 5, [3, 4, 5])
    told = CliRunner().invoke(app, ["ls", str(directory), "--replayable"]).output
    assert "steps 3-5 can be made again from 2; the state roots of 3 of them are recorded" in told
    rows = json.loads(CliRunner().invoke(app, ["ls", str(directory), "--replayable", "--json"]).output)
    assert [row["kind"] for row in rows] == ["full", "full", "replayable"]


def test_I9_a_daemon_that_dies_meanwhile_is_replaced_and_the_step_is_made(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged(directory, 7)
    again = Again(directory, 6, monkeypatch)
    killed = []

    def at(step: int) -> None:
        if step == 4:
            kill_daemon(directory)
            killed.append(step)

    def life() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            averaged(directory, 7, at=at, waits=False)

    again.run(life)
    assert killed == [4]
    assert (again.proof().parted, again.proof().steps, again.kept()) == (None, 4, [6])
    assert len(unbroken.open(directory, "again").certify().world_sizes) > len(unbroken.open(directory).certify().world_sizes) + 1


def kill_daemon(directory: Path) -> None:
    """That of the lineage `again`, like a power switch."""
    channel = connect(str(directory), False, "again")
    channel.send(Hello(role="observer", pid=os.getpid()))
    os.kill(channel.peer()[0], signal.SIGKILL)
    channel.close()
