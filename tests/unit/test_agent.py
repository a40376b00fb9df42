"""The node daemon, as a real process, against trainers without a model."""

from __future__ import annotations

import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.rigs.fake_trainer import (
    FakeJob,
    FakeRank,
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
from unbroken.core import messages as m
from unbroken.core.records import Writer
from unbroken.store.journal import read_journal


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with run_folder(tmp_path, monkeypatch) as folder:
        yield folder


# -- the way of a snapshot ------------------------------------------------------------------------------------------------------------


def test_a_fresh_run_is_opened_frozen_and_committed(directory: str) -> None:
    job = FakeJob(directory, 3)
    plan = job.start()
    assert (plan.source, plan.generation, plan.step, plan.options) == ("fresh", 0, 0, {"units": 4})
    assert "fresh" in plan.notes[0]
    first = job.save()
    job.train(5)
    second = job.save()
    assert first.state_root != second.state_root
    repository = open_run(directory)
    assert steps(directory) == [0, 5]
    assert repository.facts.run_id == plan.run_id
    manifest = repository.manifests(repository.visible()[-1])[0]
    stored = {(piece.piece.pointer, piece.rank): data for piece, data in repository.read_pieces(manifest, manifest.pieces)}
    assert stored["/w", None] == b"00000005" * 12_500
    assert stored["/rng", 2] == b"00020005" * 8
    shut(directory)
    assert repository.verify().ok


def test_the_commit_counts_the_journal_lines_up_to_its_root(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(3)
    job.save()
    repository = open_run(directory)
    commit = repository.visible()[-1]
    generation = repository.log.state.generations[0]
    lines = list(read_journal(repository.tier, "main", 0, generation.nonce))
    assert [type(line.record).__name__ for line in lines] == ["BeginRecord", "StepRecord", "StepRecord", "StepRecord", "RootRecord"]
    assert (commit.journal_head, commit.journal_lines) == (lines[4].chain, 5)


def test_a_cut_without_its_step_in_the_journal_is_not_committed_yet(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.step = 1
    job.snapshot()
    assert until(lambda: status(directory).facts["last_ready"] is None and status(directory).phase == "idle", "nothing to drain")
    job.ranks[0].journal(1, 1)
    job.committed()


def test_B38_a_poisoned_snapshot_is_neither_a_checkpoint_nor_a_source(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    job.save()
    job.train(2)
    for rank in job.ranks:
        rank.state["/model/parameters/w"] = struct.pack("<2f", 1.0, math.nan)
    job.snapshot()
    for rank in job.ranks:
        failed = rank.expect(m.Failed)
        assert (failed.step, failed.poisoned) == (2, True)
        assert "the state of step 2 is poisoned: /model/parameters/w holds NaN" in failed.text
    assert until(lambda: status(directory).facts["last_ready"] == 0, "only the sound snapshot is held")
    assert steps(directory) == [0]
    job.vanish()
    plan = FakeJob(directory, 2).start()
    assert (plan.step, plan.source) == (0, "memory")


def test_retention_keeps_the_newest_and_the_milestones(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.save(milestone=True)
    for _ in range(5):
        job.train(1)
        job.save()
    until(lambda: steps(directory) == [0, 3, 4, 5], "old checkpoints are removed")


def test_a_snapshot_taken_again_as_a_milestone_becomes_one(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    job.train(1)
    job.save()
    job.save(milestone=True)
    until(lambda: open_run(directory).visible()[-1].milestone, "the commit is a milestone")
    assert steps(directory) == [1]


# -- starting again -------------------------------------------------------------------------------------------------------------------


def test_after_the_daemons_death_a_start_comes_from_disk(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    job.train(4)
    committed = job.save()
    kill(daemon_pid(directory))
    job.vanish()
    again = FakeJob(directory, 2)
    plan = again.start(options={"units": 99})
    assert (plan.source, plan.step, plan.generation, plan.stored_world_size) == ("disk", 4, 1, 2)
    assert (plan.state_root, plan.last_step, plan.options) == (committed.state_root, 4, {"units": 4})
    assert [ref.path.startswith("manifests/") for ref in plan.manifests] == [True]
    assert any("took the run over" in note for note in plan.notes)


def test_after_the_workers_death_a_start_comes_from_memory_and_the_cut_is_drained(directory: str) -> None:
    with prepared_daemon(directory, "import threading; go = threading.Event(); arm('drain.begin', lambda: time.sleep(0.3))"):
        job = FakeJob(directory, 2)
        job.start()
        job.train(4)
        job.snapshot()
        job.train(2)
        job.vanish()
        again = FakeJob(directory, 2)
        plan = again.start()
        assert (plan.source, plan.step, plan.stored_generation, plan.generation) == ("memory", 4, 0, 1)
        assert plan.last_step == 6
        loaded = again.ranks[1].old_slots(plan)
        assert [slot.stamp[:2] for slot in loaded] == [(0, 4), (0, 4)]
        assert bytes(loaded[1].data()[:8]) == b"00000004"
        assert again.committed().generation == 0
        again.train(2)
        again.save()
        assert steps(directory) == [4, 6]
        for slot in loaded:
            slot.close()


def test_I5_a_snapshot_that_one_rank_did_not_finish_is_not_used(directory: str) -> None:
    job = FakeJob(directory, 3)
    job.start()
    job.train(2)
    job.save()
    job.train(2)
    assert job.ranks[0].ready(4)
    assert job.ranks[1].ready(4)
    interrupted = job.ranks[2]
    slot = next(s for s in interrupted.slots if not s.is_ready)
    slot.begin(interrupted.index(4)).release()
    job.vanish()
    again = FakeJob(directory, 3)
    plan = again.start()
    assert (plan.source, plan.step) == ("memory", 2)
    again.train(2)
    again.save()
    assert steps(directory)[-1] == 4


def test_a_cut_whose_ready_messages_were_never_sent_counts(directory: str) -> None:
    """The trainers were killed between the last store into their slots and the message."""
    job = FakeJob(directory, 2)
    job.start()
    job.train(7)
    for rank in job.ranks:
        assert rank.freeze(7)
    job.vanish()
    until(lambda: status(directory).facts["last_committed"] == 7, "the cut is drained")


def test_the_last_words_of_a_killed_trainer_count_although_it_had_unread_messages(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    job.snapshot()
    until(lambda: status(directory).facts["last_committed"] == 0, "an answer lies unread")
    job.train(3)
    job.snapshot()
    job.vanish()
    until(lambda: status(directory).facts["last_committed"] == 3, "the last cut is drained")


def test_another_world_size_starts_from_the_memory_of_the_old_one(directory: str) -> None:
    job = FakeJob(directory, 3)
    job.start()
    job.train(1)
    job.snapshot()
    job.vanish()
    again = FakeJob(directory, 2)
    plan = again.start()
    assert (plan.source, plan.step, plan.stored_world_size, len(plan.slots)) == ("memory", 1, 3, 3)
    again.train(1)
    again.save()
    assert steps(directory) == [1, 2]
    until(lambda: status(directory).facts["slots_bytes"] == sum(s.size_bytes for r in again.ranks for s in r.slots), "old slots are gone")


def test_I4_larger_slots_do_not_lose_the_only_cut(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(1)
    job.save()
    job.ranks[0].need_slots(4 << 20)
    assert [slot.state for slot in job.ranks[0].slots] == ["free", "free"]
    job.vanish()
    assert FakeJob(directory, 1).start().source == "memory"


def test_bad_memory_is_dropped_then_bad_disk_is_condemned(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    for _ in range(2):
        job.train(5)
        job.save()
    job.vanish()
    again = FakeJob(directory, 2)
    again.ranks = [FakeRank(directory, rank, 2) for rank in range(2)]
    for rank in again.ranks:
        rank.hello()
    plan = again.ranks[0].begin()
    assert (plan.source, plan.step) == ("memory", 10)

    def bad(plan: m.Plan, *objects: str) -> m.Bad:
        return m.Bad(step=plan.step, stored_generation=plan.stored_generation, objects=objects, reason="digest differs")

    plan = again.ranks[0].ask(bad(plan), m.Plan)
    assert (plan.source, plan.step) == ("disk", 10)
    plan = again.ranks[0].ask(bad(plan, plan.manifests[0].path), m.Plan)
    assert (plan.source, plan.step) == ("memory", 5)
    plan = again.ranks[0].ask(bad(plan), m.Plan)
    assert (plan.source, plan.step) == ("disk", 5)
    assert any("step 10" in note and "digest differs" in note for note in plan.notes)
    again.open(plan)
    again.train(1)
    again.save()
    assert steps(directory) == [5, 6]
    assert [(entry.step, entry.reason) for entry in open_run(directory).log.state.condemned] == [(10, "digest differs")]


def test_I10_when_all_checkpoints_are_bad_the_start_is_refused(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(5)
    job.save()
    kill(daemon_pid(directory))
    job.vanish()
    rank = FakeRank(directory, 0, 1)
    rank.hello()
    plan = rank.begin()
    with pytest.raises(Told) as caught:
        rank.ask(m.Bad(step=5, stored_generation=0, objects=(plan.manifests[0].path,), reason="torn"), m.Plan)
    assert (caught.value.error.kind, caught.value.error.code) == ("NoCheckpoint", 3)
    assert "torn" in caught.value.error.text


def test_I10_errors_come_back_and_a_failed_start_leaves_nothing_behind(directory: str) -> None:
    rank = FakeRank(directory, 0, 1)
    rank.hello()
    for facts, kind, code in (
        ({"resume": "must"}, "NoCheckpoint", 3),
        ({"restart_count": 1}, "NoCheckpoint", 3),
    ):
        with pytest.raises(Told) as caught:
            rank.begin(**facts)
        assert (caught.value.error.kind, caught.value.error.code) == (kind, code)
    assert not os.path.exists(directory)
    os.mkdir(directory)
    Path(directory, "thesis.tex").write_text("important")
    with pytest.raises(Told) as caught:
        rank.begin()
    assert (caught.value.error.kind, caught.value.error.code) == ("ForeignFolder", 4)
    assert os.listdir(directory) == ["thesis.tex"]


def test_a_restart_of_a_start_that_the_daemon_has_seen_may_begin_afresh(directory: str) -> None:
    rank = FakeRank(directory, 0, 1)
    rank.hello(keeper_pid=os.getpid())
    rank.begin()
    rank.vanish()
    rank.hello(keeper_pid=os.getpid())
    assert rank.begin(restart_count=1).source == "fresh"
    assert not os.path.exists(os.path.join(directory, "run.json"))


def test_never_refuses_a_run(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.vanish()
    rank = FakeRank(directory, 0, 1)
    rank.hello()
    with pytest.raises(Told, match=r"Refused: .*a run exists"):
        rank.begin(resume="never")


def test_a_run_folder_that_was_removed_is_forgotten_with_its_memory(directory: str) -> None:
    job = FakeJob(directory, 1)
    first = job.start()
    job.train(3)
    job.save()
    job.vanish()
    shutil.rmtree(directory)
    again = FakeJob(directory, 1)
    plan = again.start()
    assert (plan.source, plan.generation, plan.run_id != first.run_id) == ("fresh", 0, True)
    again.train(1)
    again.save()
    assert steps(directory) == [1]


def test_a_removed_run_folder_is_not_made_again_by_a_daemon_that_ends(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(3)
    job.save()
    job.train(3)
    pid = daemon_pid(directory)
    shutil.rmtree(directory)
    kill(pid, signal.SIGINT)
    assert not os.path.exists(directory)
    job.vanish()


# -- members --------------------------------------------------------------------------------------------------------------------------


def test_B12_a_second_live_job_is_refused_and_told_who_holds_the_run(directory: str) -> None:
    code = f"""
import os, sys, time
from unbroken.core import messages as m
from unbroken.shm.channel import connect
channel = connect({directory!r}, True)
channel.send(m.Hello(role="worker", pid=os.getpid(), rank=0, world_size=1))
channel.receive(20)
print("up", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"up\n"
    try:
        for world_size in (1, 2):
            with pytest.raises(Told) as caught:
                FakeRank(directory, world_size - 1, world_size).hello()
            assert (caught.value.error.kind, caught.value.error.code) == ("Fenced", 4)
            assert f"process {holder.pid}" in caught.value.error.text
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert FakeRank(directory, 0, 1).hello()


def test_B12_the_same_process_takes_its_own_run_over(directory: str) -> None:
    first = FakeRank(directory, 0, 1)
    first.hello()
    second = FakeRank(directory, 0, 1)
    second.hello()
    assert first.channel is not None
    with pytest.raises(ConnectionError):
        first.channel.receive(5.0)
    assert second.begin().source == "fresh"


def test_B12_a_run_held_by_another_host_is_refused(directory: str) -> None:
    os.mkdir(directory)
    writer = Writer(host="elsewhere", pid=1, boot_id="x", since="2026-01-01T00:00:00.000Z")
    Path(directory, "writer.json").write_bytes(msgspec.json.encode(writer))
    rank = FakeRank(directory, 0, 1)
    rank.hello()
    with pytest.raises(Told, match=r"Fenced: .*elsewhere"):
        rank.begin()


def test_a_zombie_of_an_older_generation_is_fenced(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(1)
    job.save()
    rank = job.ranks[0]
    rank.open(rank.begin())
    rank.generation = 0
    rank.journal(2, 2)
    with pytest.raises(Told, match="Fenced: generation 0"):
        rank.expect(m.Committed)


def test_one_daemon_serves_many_starters(directory: str) -> None:
    code = f"from unbroken.shm.channel import connect; print(connect({directory!r}, True).peer()[0])"
    starters = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    pids = {starter.communicate(timeout=30)[0] for starter in starters}
    assert len(pids) == 1
    loser = subprocess.run([sys.executable, "-m", "unbroken.agent", directory], capture_output=True, timeout=30, check=False)
    assert (loser.returncode, loser.stdout, loser.stderr) == (0, b"", b"")


# -- refused attempts -----------------------------------------------------------------------------------------------------------------


def refuse(job: FakeJob, rank: int, attempt: int = 0) -> None:
    generation = job.ranks[rank].generation
    job.ranks[rank].send(m.Refuse(generation=generation, step=job.step + 1, attempt=attempt, rank=rank, reason="peer reset"))


def test_a_step_that_all_refused_is_tried_again_in_place(directory: str) -> None:
    job = FakeJob(directory, 3)
    job.start()
    job.train(2)
    for attempt in range(2):
        for rank in range(3):
            refuse(job, rank, attempt)
        verdicts = [rank.expect(m.Verdict) for rank in job.ranks]
        assert {(v.retry, v.attempt) for v in verdicts} == {(True, attempt + 1)}
    job.save()
    assert events_of(directory, 0)["refused"].facts["reasons"] == {"0": "peer reset", "1": "peer reset", "2": "peer reset"}


def test_a_dead_member_ends_the_hope_of_a_retry(directory: str) -> None:
    job = FakeJob(directory, 3)
    job.start()
    refuse(job, 0)
    refuse(job, 1)
    job.ranks[2].vanish()
    assert [job.ranks[rank].expect(m.Verdict).retry for rank in (0, 1)] == [False, False]


def test_a_member_that_applied_the_step_ends_the_hope_of_a_retry(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    refuse(job, 1)
    job.train(1)
    assert not job.ranks[1].expect(m.Verdict).retry


@pytest.mark.parametrize("stray", ["00000005.jsonl", "note.txt"])
def test_a_stray_file_among_the_journals_does_not_end_a_start(directory: str, stray: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.save()
    job.vanish()
    shut(directory)
    Path(directory, "runs/main/journal", stray).write_bytes(b"whatever")
    plan = job.start()
    assert plan.generation == (6 if stray.startswith("0") else 1)
    job.train(1)
    job.save()
    assert steps(directory) == [0, 1]
