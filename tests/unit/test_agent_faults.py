"""The node daemon when things go wrong: failed saves, its own death, its end, and clients that misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.fake_trainer import (
    FakeJob,
    FakeRank,
    Told,
    daemon_pid,
    events_of,
    journal_of,
    lives,
    open_run,
    prepared_daemon,
    run_folder,
    shut,
    status,
    steps,
    until,
)
from unbroken.core import messages as m
from unbroken.core.limits import LINGER_S
from unbroken.core.records import EventRecord
from unbroken.shm.channel import address, connect, log_path

pytestmark = pytest.mark.alone


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with run_folder(tmp_path, monkeypatch) as folder:
        yield folder


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


def test_failures_of_any_length_fit_into_the_answer_to_status(directory: str) -> None:
    prepare = """
def strike():
    raise OSError(chr(0) * 1_000_000)
arm("drain.written", strike)
"""
    with prepared_daemon(directory, prepare):
        job = FakeJob(directory, 1)
        job.start()
        for _ in range(20):
            job.train(1)
            job.snapshot()
            job.ranks[0].expect(m.Failed)
        assert len(status(directory).facts["failures"]) == 16


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


SLOW_MEMORY = """
import unbroken.daemon.memory as memory
real, memory.PIECE_BYTES = memory.fill_memory, 1 << 20
def slow(*place):
    time.sleep(0.1)
    real(*place)
memory.fill_memory = slow
"""


def test_others_are_answered_while_large_slots_are_made(directory: str) -> None:
    """20 pieces of 0.1 s each."""
    with prepared_daemon(directory, SLOW_MEMORY):
        job = FakeJob(directory, 2)
        job.start()
        began = time.monotonic()
        job.ranks[1].send(m.NeedSlots(size_bytes=10 << 20, num=2))
        slowest = 0.0
        for _ in range(5):
            asked = time.monotonic()
            assert status(directory).facts["members"] == [0, 1]
            slowest = max(slowest, time.monotonic() - asked)
        answer, fds = job.ranks[1].expect_with_fds(m.Slots)
        assert time.monotonic() - began > 1.9, "it did take its time"
        assert slowest < 1.0
        assert (answer.sizes, len(fds)) == ((10 << 20, 10 << 20), 2)
        for fd in fds:
            os.close(fd)


def test_memory_that_is_being_made_for_a_worker_that_is_gone_is_given_back(directory: str) -> None:
    with prepared_daemon(directory, SLOW_MEMORY) as pid:
        job = FakeJob(directory, 2)
        job.start()
        before = len(memory_files(pid))
        job.ranks[1].send(m.NeedSlots(size_bytes=100 << 20, num=2))
        until(lambda: len(memory_files(pid)) > before, "it is being made")
        job.ranks[1].vanish()
        until(lambda: len(memory_files(pid)) <= before, "it is given back", 2.0)
        job.ranks[0].need_slots()


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
    before = len(memory_files(os.getpid()))  # other tests of this process may have left runs open
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
    assert len(memory_files(os.getpid())) <= before
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


def test_B34_a_signal_to_the_whole_job_ends_the_daemon_only_after_its_trainers(directory: str) -> None:
    with prepared_daemon(directory, "") as pid:
        job = FakeJob(directory, 1)
        job.start()
        for sig in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, sig)
        time.sleep(0.5)
        job.train(2)
        job.save()
        assert steps(directory)[-1] == 2
        assert lives(pid)
        job.vanish()
        until(lambda: not lives(pid), "the daemon ends")


def test_an_interrupt_drains_first(directory: str) -> None:
    with prepared_daemon(directory, "arm('drain.begin', lambda: time.sleep(0.5))") as pid:
        job = FakeJob(directory, 1)
        job.start()
        job.snapshot()
        os.kill(pid, signal.SIGINT)
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


def test_only_the_drain_yields_to_training(directory: str) -> None:
    connect(directory, start=True).close()
    pid = daemon_pid(directory)
    nice = {int(tid): os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
    assert nice.pop(pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert list(nice.values()) == [19]


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
    early: tuple[tuple[m.Message, str], ...] = (
        (m.Status(), "say Hello first"),
        (m.Hello(role="worker", pid=1, rank=5, world_size=2), "rank 5 of 2"),
        (m.Hello(role="worker", pid=1, rank=0, world_size=0), "rank 0 of 0"),
    )
    for message, text in early:
        with pytest.raises(Told, match=text):
            rank.ask(message, m.Welcome)
    job.start()
    root = "0" * 64
    late: tuple[tuple[int, m.Message, str], ...] = (
        (1, m.Begin(world_size=2, resume="auto"), "only rank 0"),
        (0, m.Opened(generation=5, step=0, loaded_root=""), "begin first"),
        (0, m.Bad(step=0, stored_generation=0, objects=(), reason=""), "begin first"),
        (0, m.Ready(generation=0, step=0, rank=1, slot=0), "cannot speak for rank 1"),
        (0, m.OldSlots(slots=(m.SlotSource(rank=0, slot=999),)), "does not exist"),
        (0, m.Committed(step=0, generation=0, state_root=root, seconds=0.0), "Committed is not for the daemon"),
        (0, m.Hello(role="worker", pid=1), "Hello was said already"),
        (0, m.NeedSlots(size_bytes=1, num=-1), "ask for"),
        (0, m.Begin(world_size=0, resume="auto"), "world_size 0"),
    )
    for number, message, text in late:
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


# -- ranks that leave in mid-save ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says_why", [True, False])
def test_B37_a_nobody_waits_for_a_snapshot_whose_rank_is_gone(directory: str, says_why: bool) -> None:
    job = FakeJob(directory, 3)
    job.start()
    job.save()
    job.train(1)
    for rank in (job.ranks[0], job.ranks[2]):
        assert rank.ready(1)
    if says_why:
        job.ranks[1].send(m.Leaving(text="OSError: the disk is wet"))
    else:
        job.ranks[1].vanish()
    for rank in (job.ranks[0], job.ranks[2]):
        failed = rank.expect(m.Failed)
        assert (failed.step, failed.superseded) == (1, False)
        assert "rank 1 is gone before its part was whole" in failed.text
        assert ("OSError: the disk is wet" in failed.text) is says_why
    assert steps(directory) == [0]


def test_B37_a_rank_whose_part_is_whole_may_go(directory: str) -> None:
    with prepared_daemon(directory, "arm('drain.begin', lambda: time.sleep(0.3))"):
        job = FakeJob(directory, 3)
        job.start()
        job.save()
        job.train(1)
        job.snapshot()
        job.ranks[1].vanish()
        assert job.ranks[0].expect(m.Committed).step == 1
        assert steps(directory) == [0, 1]
