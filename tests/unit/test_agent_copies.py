"""The daemon and the copy of a run: copied in the background, brought back, repaired, fenced; and places that are dead or another's."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fake_trainer import (
    FakeJob,
    Told,
    daemon_pid,
    events_of,
    kill,
    open_run,
    prepared_daemon,
    run_folder,
    shut,
    status,
    steps,
    until,
)
from tests.rigs.tiny_run import flip
from unbroken.core import messages as m
from unbroken.core.records import GenerationEntry, LogEntry
from unbroken.store.log import Log
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with run_folder(tmp_path, monkeypatch) as folder:
        yield folder


@pytest.fixture
def copy(tmp_path: Path) -> str:
    return str(tmp_path / "other disk" / "copy")


def rules(copy: str, **more: Any) -> dict[str, Any]:
    return {"rules": m.Rules(copy_to=f"file://{copy.replace(' ', '%20')}", **more), "from_copy": True}


def steps_in(copy: str) -> list[int]:
    return steps(copy) if Path(copy, "run.json").exists() else []


def gone(directory: str) -> None:
    """The daemon and the folder are lost at once."""
    kill(daemon_pid(directory))
    shutil.rmtree(directory)


def trained(directory: str, copy: str, num_saves: int = 3, **more: Any) -> FakeJob:
    """A job of two ranks whose newest checkpoint is in the copy."""
    job = FakeJob(directory, 2)
    job.start(**rules(copy, **more))
    for _ in range(num_saves):
        job.train(1)
        job.save()
    until(lambda: steps_in(copy)[-1:] == [job.step], "the newest checkpoint is copied")
    return job


def test_checkpoints_are_copied_and_the_journal_and_status_say_so(directory: str, copy: str) -> None:
    job = trained(directory, copy)
    until(lambda: status(directory).facts["copy"]["copying"] is None, "the copy is done")
    facts = status(directory).facts["copy"]
    assert (facts["last_step"], facts["error"], facts["to"]) == (job.step, "", f"file://{copy.replace(' ', '%20')}")
    until(lambda: "copied" in _events(directory, job), "the journal says it")
    report = Repository.open(DiskTier(copy)).verify()
    assert report.ok, report.bad
    assert {path.name for path in Path(copy).iterdir()} == {"run.json", "runs", "manifests", "packs"}


def _events(directory: str, job: FakeJob) -> dict[str, Any]:
    job.train(1)
    job.save()  # a commit makes the journal durable
    return events_of(directory, job.ranks[0].generation)


def test_retention_of_the_copy_is_its_own(directory: str, copy: str) -> None:
    job = trained(directory, copy, 2, copy_keep=1)
    job.train(1)
    job.save(milestone=True)
    until(lambda: job.step in steps_in(copy), "the milestone is copied")
    for _ in range(2):
        job.train(1)
        job.save()
        until(lambda: steps_in(copy)[-1:] == [job.step], "copied")
    until(lambda: steps_in(copy) == [3, 5], "thinned out")
    assert steps(directory) == [3, 4, 5] or steps(directory) == [2, 3, 4, 5]


def test_a_folder_that_is_gone_comes_back_from_the_copy(directory: str, copy: str) -> None:
    trained(directory, copy)
    run_id = open_run(directory).facts.run_id
    gone(directory)
    again = FakeJob(directory, 2)
    plan = again.start(**rules(copy), resume="must", restart_count=1)
    assert (plan.source, plan.step, plan.generation, plan.run_id) == ("disk", 3, 1, run_id)
    assert any(note.startswith(f"step 3 from file://{copy.replace(' ', '%20')}: brought back") for note in plan.notes)
    again.train(1)
    again.save()
    until(lambda: steps_in(copy)[-1:] == [4], "the copy goes on")
    shut(directory)
    for place in (directory, copy):
        report = Repository.open(DiskTier(place)).verify()
        assert report.ok, report.bad


@pytest.mark.parametrize("lost", ["packs", "run.json"])
def test_a_folder_that_has_lost_a_part_comes_back_too(directory: str, copy: str, lost: str) -> None:
    trained(directory, copy)
    kill(daemon_pid(directory))
    path = Path(directory, lost)
    path.unlink() if path.is_file() else shutil.rmtree(path)
    plan = FakeJob(directory, 2).start(**rules(copy))
    assert (plan.source, plan.step, plan.generation) == ("disk", 3, 1)


def test_a_good_folder_wins_over_an_older_copy(directory: str, copy: str, tmp_path: Path) -> None:
    job = trained(directory, copy)
    shutil.copytree(copy, tmp_path / "old")
    job.train(1)
    job.save()
    kill(daemon_pid(directory))
    plan = FakeJob(directory, 2).start(**rules(str(tmp_path / "old")))
    assert (plan.source, plan.step) == ("disk", 4)
    assert not any("brought back" in note for note in plan.notes)


def test_a_newer_copy_of_the_same_run_wins_over_an_older_folder(directory: str, copy: str, tmp_path: Path) -> None:
    job = trained(directory, copy)
    kill(daemon_pid(directory))
    shutil.copytree(directory, tmp_path / "old")
    again = FakeJob(directory, 2)
    again.start(**rules(copy))
    again.train(2)
    again.save()
    until(lambda: steps_in(copy)[-1:] == [job.step + 2], "copied")
    gone(directory)
    shutil.copytree(tmp_path / "old", directory)
    plan = FakeJob(directory, 2).start(**rules(copy))
    assert (plan.source, plan.step, plan.generation) == ("disk", job.step + 2, 2)
    shut(directory)
    assert open_run(directory).verify().ok


def test_another_run_in_the_copys_place_is_refused_by_name(directory: str, copy: str, tmp_path: Path) -> None:
    trained(directory, copy)
    mine = open_run(directory).facts.run_id
    kill(daemon_pid(directory))
    other = str(tmp_path / "second")
    FakeJob(other, 1).start(resume="auto")
    theirs = open_run(other).facts.run_id
    with pytest.raises(Told, match=f"holds the run {mine}, and this is the run {theirs}"):
        kill(daemon_pid(other))
        FakeJob(other, 1).start(**rules(copy))
    kill(daemon_pid(other))


def test_I10_must_without_a_checkpoint_names_both_places(directory: str, copy: str) -> None:
    with pytest.raises(Told, match="no checkpoint was ever made here") as told:
        FakeJob(directory, 1).start(**rules(copy), resume="must")
    assert directory in str(told.value)
    assert f"its copy in file://{copy.replace(' ', '%20')} holds no run either" in str(told.value)
    assert not os.path.exists(directory)


def test_I10_a_copy_that_cannot_be_read_is_no_reason_for_a_fresh_start(directory: str, copy: str) -> None:
    trained(directory, copy)
    gone(directory)
    for log in Path(copy, "runs/main/log").iterdir():
        flip(log, 150)
    with pytest.raises(Told, match="no usable checkpoint"):
        FakeJob(directory, 1).start(**rules(copy))
    assert not Path(directory, "run.json").exists()


def test_a_checkpoint_that_is_damaged_in_the_copy_is_passed_over_there(directory: str, copy: str) -> None:
    trained(directory, copy)
    gone(directory)
    found = Repository.open(DiskTier(copy))
    newest, before = found.visible()[-1], found.visible()[-2]
    own = {c.pack for c in found.manifests(newest)[0].chunks} - {c.pack for c in found.manifests(before)[0].chunks}
    flip(Path(copy, own.pop()), 5000)
    plan = FakeJob(directory, 2).start(**rules(copy))
    assert (plan.source, plan.step) == ("disk", before.step)
    assert any(f"step {newest.step} in file://" in note and "was passed over" in note for note in plan.notes)


def test_I3_a_damaged_checkpoint_is_repaired_before_it_is_condemned(directory: str, copy: str) -> None:
    job = trained(directory, copy)
    kill(daemon_pid(directory))
    found = open_run(directory)
    newest = found.visible()[-1]
    pack = found.manifests(newest)[0].chunks[0].pack
    flip(Path(directory, pack), 5000)
    again = FakeJob(directory, 2)
    with pytest.raises(Told, match="nothing has been planned"):  # not opened yet: FakeJob would open at once
        first = _planned(again, copy)
        assert (first.source, first.step) == ("disk", job.step)
        bad = m.Bad(step=first.step, stored_generation=first.stored_generation, objects=(pack,), reason=f"{pack}: bad")
        plan = again.ranks[0].ask(bad, m.Plan)
        assert (plan.source, plan.step) == ("disk", job.step)
        assert any(f"step {job.step} was damaged and has been repaired from" in note and pack in note for note in plan.notes)
        assert open_run(directory).log.state.condemned == ()
        flip(Path(directory, pack), 5000)
        second = again.ranks[0].ask(bad, m.Plan)  # once is enough: then it is condemned as ever
        assert second.step < job.step
        assert open_run(directory).log.state.condemned
        again.open(second)
        again.ranks[0].ask(bad, m.Plan)


def _planned(job: FakeJob, copy: str) -> m.Plan:
    from tests.rigs.fake_trainer import FakeRank

    job.ranks = [FakeRank(job.directory, rank, job.world_size) for rank in range(job.world_size)]
    for rank in job.ranks:
        rank.hello()
    return job.ranks[0].begin(**rules(copy))


@pytest.mark.parametrize("point", ["copying.objects", "copying.before_commit"])
def test_B01_a_start_killed_while_it_brings_back_is_repeated_by_the_next(directory: str, copy: str, point: str) -> None:
    trained(directory, copy)
    gone(directory)
    with prepared_daemon(directory, f"arm({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL))") as pid:
        with contextlib.suppress(ConnectionError):
            _planned(FakeJob(directory, 2), copy)
        until(lambda: not os.path.exists(f"/proc/{pid}") or b"Z" in Path(f"/proc/{pid}/stat").read_bytes()[-400:], "it is dead")
    assert not Path(directory, "run.json").exists()
    job = FakeJob(directory, 2)
    plan = job.start(**rules(copy))
    assert (plan.source, plan.step, plan.generation) == ("disk", 3, 1)
    shut(directory)
    assert open_run(directory).verify().ok


def test_I9_a_place_that_cannot_be_written_harms_nothing_and_is_told(directory: str, copy: str) -> None:
    Path(copy).parent.mkdir()
    Path(copy).write_text("a file where the folder should be")
    job = FakeJob(directory, 2)
    with pytest.raises(Told, match="is a file"):
        job.start(**rules(copy))


def test_I9_a_place_that_fails_in_mid_run_is_told_once_and_copied_to_again_later(directory: str, copy: str) -> None:
    with prepared_daemon(directory, "import unbroken.daemon.copies as c; c.FIRST_PAUSE_S = c.MAX_PAUSE_S = 0.2"):
        job = trained(directory, copy, 1)
        os.rename(copy, f"{copy}.away")
        Path(copy).write_text("in the way")
        for _ in range(3):
            job.train(1)
            job.save()
        until(lambda: status(directory).facts["copy"]["error"], "it is told")
        assert steps(directory)[-1] == job.step
        os.unlink(copy)
        os.rename(f"{copy}.away", copy)
        until(lambda: steps_in(copy)[-1:] == [job.step], "it goes on")
        until(lambda: not status(directory).facts["copy"]["error"], "the error is over")
        job.train(1)
        job.save()
        records = events_of(directory, 0)
        assert "copy_failed" in records
        until(lambda: steps_in(copy)[-1:] == [job.step], "it goes on")
        shut(directory)


def test_I6_a_start_that_was_left_behind_stops_copying_and_trains_on(directory: str, copy: str, tmp_path: Path) -> None:
    job = trained(directory, copy)
    other = str(tmp_path / "elsewhere")
    second = FakeJob(other, 2)
    assert second.start(**rules(copy)).step == 3
    second.train(1)
    second.save()
    until(lambda: steps_in(copy)[-1:] == [4], "the newer start copies")
    job.train(5)
    job.save()
    until(lambda: "generation 1 was opened there by another start" in status(directory).facts["copy"]["error"], "refused")
    job.train(1)
    job.save()
    assert steps_in(copy)[-1] == 4
    lines: list[LogEntry] = []
    Log.open(DiskTier(copy)).audit(lines.append)
    opened = next(line.n for line in lines if isinstance(line.entry, GenerationEntry) and line.entry.generation.number == 1)
    assert {line.writer.pid for line in lines if line.n >= opened} == {daemon_pid(other)}
    kill(daemon_pid(other))


def test_the_last_checkpoint_is_copied_after_the_trainers_have_gone_whatever_the_cadence(directory: str, copy: str) -> None:
    job = trained(directory, copy, 1, copy_steps=1000)
    job.train(1)
    job.save()
    assert steps_in(copy) == [1] or steps_in(copy) == [0, 1] or steps_in(copy)[-1] == 1
    pid = daemon_pid(directory)
    job.vanish()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the daemon ends by itself")
    assert steps_in(copy)[-1] == 2
