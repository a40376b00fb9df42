"""The node daemon, as a real process, against trainers without a model."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.rigs.fake_trainer import FakeJob, FakeRank, Told, hang_up, kill, lives, prepared_daemon, status, until
from unbroken.core import messages as m
from unbroken.core.limits import LINGER_S
from unbroken.core.records import EventRecord, Record, Writer
from unbroken.shm.channel import address, connect, log_path
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run folder that does not exist yet; whatever daemon serves it is gone afterwards."""
    runtime = tempfile.mkdtemp(prefix="ub", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    folder = str(tmp_path / "run")
    yield folder
    hang_up()
    with contextlib.suppress(ConnectionError):
        kill(status(folder).facts["pid"])
    shutil.rmtree(runtime)


def daemon_pid(directory: str) -> int:
    pid = status(directory).facts["pid"]
    assert isinstance(pid, int)
    return pid


def open_run(directory: str) -> Repository:
    return Repository.open(DiskTier(directory))


def steps(directory: str) -> list[int]:
    return [commit.step for commit in open_run(directory).visible()]


def journal_of(directory: str, generation: int) -> list[Record]:
    repository = open_run(directory)
    nonce = next(g.nonce for g in repository.log.state.generations if g.number == generation)
    return [line.record for line in read_journal(repository.tier, "main", generation, nonce)]


def events_of(directory: str, generation: int) -> dict[str, EventRecord]:
    return {record.name: record for record in journal_of(directory, generation) if isinstance(record, EventRecord)}


def shut(directory: str) -> None:
    """End the daemon in order, so that everything is on disk."""
    kill(daemon_pid(directory), signal.SIGTERM)


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
    stored = {(piece.piece.pointer, piece.rank): repository.read_piece(manifest, piece) for piece in manifest.pieces}
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
        ({"step": 7}, "NoCheckpoint", 3),
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


def test_never_refuses_a_run_and_a_step_is_taken_exactly(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    for _ in range(2):
        job.train(10)
        job.save()
    job.vanish()
    rank = FakeRank(directory, 0, 1)
    rank.hello()
    with pytest.raises(Told, match=r"Refused: .*a run exists"):
        rank.begin(resume="never")
    with pytest.raises(Told, match=r"NoCheckpoint: .*\[10, 20\]"):
        rank.begin(step=15)
    plan = rank.begin(step=10)
    assert (plan.source, plan.step) == ("disk", 10)
    rank.open(plan)
    rank.generation = plan.generation
    assert steps(directory) == [10]
    assert status(directory).facts["last_ready"] == 10


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
    kill(pid, signal.SIGTERM)
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


# -- failed saves ---------------------------------------------------------------------------------------------------------------------


def test_replicas_that_differ_are_named_and_not_committed(directory: str) -> None:
    job = FakeJob(directory, 3)
    job.start()
    job.save()
    job.train(1)
    job.ranks[2].state["/w"] = b"x" * 100_000
    job.snapshot()
    failed = [rank.expect(m.Failed) for rank in job.ranks]
    assert failed[0].step == 1
    assert "/w (ranks 2)" in failed[0].text
    assert steps(directory) == [0]
    assert "/w" in events_of(directory, 0)["save_failed"].facts["reason"]
    job.train(1)
    job.save()
    assert steps(directory) == [0, 2]
    assert any("diverged" in text for text in status(directory).facts["failures"])


def test_I9_a_failed_save_is_told_with_type_and_words_and_the_next_one_works(directory: str) -> None:
    prepare = """
def strike():
    arm("drain.written", None)
    raise OSError(28, "No space left on device")
arm("drain.written", strike)
"""
    with prepared_daemon(directory, prepare):
        job = FakeJob(directory, 2)
        job.start()
        job.snapshot()
        failed = [rank.expect(m.Failed) for rank in job.ranks]
        assert "OSError: [Errno 28] No space left on device" in failed[1].text
        job.train(1)
        job.save()
        assert steps(directory) == [1]
        assert "No space left" in events_of(directory, 0)["save_failed"].facts["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_B03_a_full_disk_is_reported_and_older_checkpoints_stay(directory: str) -> None:
    os.mkdir(directory)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mount is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        job = FakeJob(directory, 1)
        job.start()
        job.save()
        before = open_run(directory).verify()
        job.train(1)
        job.ranks[0].state["/w"] = os.urandom(12 << 20)
        job.ranks[0].need_slots()
        job.snapshot()
        failed = job.ranks[0].expect(m.Failed)
        assert "No space left on device" in failed.text
        assert steps(directory) == [0]
        assert open_run(directory).verify() == before
        job.ranks[0].state["/w"] = b"small again"
        job.train(1)
        job.ranks[0].state["/w"] = b"small again"
        job.save()
        assert steps(directory) == [0, 2]
        job.vanish()
        shut(directory)
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_snapshot_that_was_overtaken_is_reported_as_memory_only(directory: str) -> None:
    with prepared_daemon(directory, "arm('drain.begin', lambda: time.sleep(0.5))"):
        job = FakeJob(directory, 1)
        job.start()
        job.ranks[0].need_slots(num=4)
        for _ in range(3):
            job.train(1)
            job.snapshot()
        assert "superseded by step 3" in job.ranks[0].expect(m.Failed, lambda f: f.step == 2).text
        job.committed()
        assert steps(directory) == [1, 3]
        shut(directory)
        assert events_of(directory, 0)["memory_only"].step == 2


def test_memory_that_cannot_be_had_is_an_error_with_a_remedy(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    with pytest.raises(Told, match=r"needs 2 memory slots of 1125899906842624 bytes.*fewer ranks"):
        job.ranks[0].need_slots(1 << 50)
    job.save()


# -- crash of the daemon --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["drain.begin", "drain.written", "drain.before_commit", "drain.committed", "drain.collected"])
def test_I1_a_daemon_killed_at_any_point_of_a_drain_leaves_a_whole_run(directory: str, place: str) -> None:
    prepare = f"""
count = 0
def strike():
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
arm({place!r}, strike)
"""
    with prepared_daemon(directory, prepare) as pid:
        job = FakeJob(directory, 2)
        job.start()
        job.train(1)
        job.save()
        job.train(1)
        job.snapshot()
        until(lambda: not lives(pid), "the daemon is killed")
    job.vanish()
    again = FakeJob(directory, 2)
    plan = again.start()
    assert (plan.source, plan.step) == ("disk", 1 if place in ("drain.begin", "drain.written", "drain.before_commit") else 2)
    again.train(1)
    again.save()
    shut(directory)
    assert open_run(directory).verify().ok


# -- life -----------------------------------------------------------------------------------------------------------------------------


def memory_files(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [path for path in found if "memfd:unbroken" in path]


def test_the_daemon_ends_after_its_clients_with_everything_durable_and_nothing_left(directory: str) -> None:
    job = FakeJob(directory, 2)
    job.start()
    job.train(3)
    pid = daemon_pid(directory)
    assert memory_files(pid)
    job.snapshot()
    job.vanish()
    began = time.monotonic()
    until(lambda: not lives(pid), "the daemon ends", 5.0)
    assert time.monotonic() - began > LINGER_S / 2
    assert steps(directory) == [3]
    assert memory_files(os.getpid()) == []
    assert not os.path.exists(address(directory))
    assert Path(directory, "writer.json").read_bytes() == b""


def test_a_keeper_keeps_the_daemon_over_a_restart(directory: str) -> None:
    keeper = subprocess.Popen(["sleep", "60"])
    job = FakeJob(directory, 1)
    job.start(keeper_pid=keeper.pid)
    job.vanish()
    pid = daemon_pid(directory)
    end = time.monotonic() + LINGER_S + 0.5
    while time.monotonic() < end:
        assert lives(pid)
        time.sleep(0.05)
    keeper.kill()
    keeper.wait()
    until(lambda: not lives(pid), "the daemon ends after its keeper", 5.0)


def test_sigterm_drains_first(directory: str) -> None:
    with prepared_daemon(directory, "arm('drain.begin', lambda: time.sleep(0.5))") as pid:
        job = FakeJob(directory, 1)
        job.start()
        job.snapshot()
        os.kill(pid, signal.SIGTERM)
        late = FakeRank(directory, 0, 1)
        with pytest.raises((Told, ConnectionError), match=r"ending|gone"):
            late.hello()
        job.committed()
        until(lambda: not lives(pid), "the daemon ends")
    assert steps(directory) == [0]


def test_the_daemon_answers_soon_after_its_start_and_loads_no_torch(directory: str) -> None:
    began = time.monotonic()
    channel = connect(directory, start=True)
    assert time.monotonic() - began < 5.0
    channel.close()
    maps = Path(f"/proc/{daemon_pid(directory)}/maps").read_text()
    assert "libtorch" not in maps


def test_a_dead_worker_is_noticed_although_its_child_holds_the_socket(directory: str) -> None:
    code = f"""
import os, time
from unbroken.core import messages as m
from unbroken.shm.channel import connect
channel = connect({directory!r}, True)
channel.send(m.Hello(role="worker", pid=os.getpid(), rank=0, world_size=1))
channel.receive(20)
if os.fork() == 0:
    time.sleep(60)
print("up", flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"up\n"
    assert status(directory).facts["members"] == [0]
    worker.kill()
    worker.wait()
    until(lambda: status(directory).facts["members"] == [], "the death is noticed", 2.0)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.stdout.close()


# -- clients that misbehave -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"junk", b'{"type":"ready"}', b'{"type":"plan"}', b"\xff" * 1000])
def test_a_malformed_message_ends_only_its_client(directory: str, raw: bytes) -> None:
    job = FakeJob(directory, 1)
    job.start()
    bad = connect(directory, start=False)
    with socket.socket(fileno=os.dup(bad.fileno())) as plain:
        plain.send(raw)
    with pytest.raises(ConnectionError):
        bad.receive(5.0)
    bad.close()
    job.save()


def test_messages_out_of_place_are_answered_with_errors(directory: str) -> None:
    job = FakeJob(directory, 2)
    rank = FakeRank(directory, 0, 2)
    rank.dial()
    for message, text in (
        (m.Status(), "say Hello first"),
        (m.Hello(role="worker", pid=1, rank=5, world_size=2), "rank 5 of 2"),
        (m.Hello(role="worker", pid=1, rank=0, world_size=0), "rank 0 of 0"),
    ):
        with pytest.raises(Told, match=text):
            rank.ask(message, m.Welcome)
    job.start()
    root = "0" * 64
    for number, message, text in (
        (1, m.Begin(world_size=2, resume="auto"), "only rank 0"),
        (0, m.Opened(generation=5, step=0, loaded_root=""), "begin first"),
        (0, m.Bad(step=0, stored_generation=0, objects=(), reason=""), "begin first"),
        (0, m.Ready(generation=0, step=0, rank=1, slot=0), "cannot speak for rank 1"),
        (0, m.OldSlots(slots=(m.SlotSource(rank=0, slot=999),)), "does not exist"),
        (0, m.Committed(step=0, generation=0, state_root=root, seconds=0.0), "Committed is not for the daemon"),
        (0, m.Hello(role="worker", pid=1), "Hello was said already"),
        (0, m.NeedSlots(size_bytes=1, num=-1), "ask for"),
        (0, m.Begin(world_size=0, resume="auto"), "world_size 0"),
    ):
        with pytest.raises(Told, match=text):
            job.ranks[number].ask(message, m.Plan)
    job.save()


def test_I11_a_client_that_never_reads_is_dropped(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    deaf = connect(directory, start=False)
    deaf.send(m.Hello(role="observer", pid=os.getpid()))
    with pytest.raises((ConnectionError, TimeoutError)):
        for _ in range(20_000):
            deaf.send(m.Status(), timeout_s=10.0)
    deaf.close()
    job.save()


def test_notes_become_the_first_events_of_the_next_generation(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.train(1)
    job.snapshot()
    launcher = connect(directory, start=False)
    launcher.send(m.Hello(role="launcher", pid=os.getpid()))
    job.vanish()
    launcher.send(m.Note(name="worker_died", at={"detect": 1.5}, facts={"rank": 0}))
    assert status(directory)
    job.start()
    launcher.send(m.Note(name="last", at={"end": 2.5}))
    launcher.send(m.Bye())
    launcher.close()
    job.vanish()
    shut(directory)
    records = journal_of(directory, 1)
    assert records[1] == EventRecord(name="worker_died", step=1, at={"detect": 1.5}, facts={"rank": 0})
    assert events_of(directory, 1)["last"].at == {"end": 2.5}


def test_the_log_of_the_daemon_is_for_people(directory: str) -> None:
    FakeJob(directory, 1).start()
    assert f"serves {os.path.realpath(directory)}" in Path(log_path(directory)).read_text()
