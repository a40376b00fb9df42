"""The daemon's place: its socket's folder is emptied while it lives, and it is found again, or gives way to whoever is there now."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.fake_trainer import FakeJob, daemon_pid, lives, prepared_daemon, run_folder, status, steps, until
from unbroken.core.limits import LINGER_S
from unbroken.shm.channel import address, connect, listen


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with run_folder(tmp_path, monkeypatch) as folder:
        yield folder


def is_found(directory: str) -> bool:
    with contextlib.suppress(ConnectionError, FileNotFoundError):
        connect(directory, start=False).close()
        return True
    return False


@pytest.mark.parametrize("what", ["socket", "folder", "replaced"])
def test_a_socket_that_is_removed_comes_back_and_the_next_worker_finds_the_same_daemon(directory: str, what: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    job.save()
    pid = daemon_pid(directory)
    if what == "folder":
        place = os.path.dirname(address(directory))
        os.rename(place, f"{place}.gone")  # at once: the daemon makes it anew while it is being emptied
        shutil.rmtree(f"{place}.gone")
    elif what == "socket":
        os.unlink(address(directory))
    else:
        Path(address(directory) + ".new").write_text("not a socket")
        os.replace(address(directory) + ".new", address(directory))
    until(lambda: is_found(directory), "the daemon is found again", 5.0)
    assert daemon_pid(directory) == pid
    job.train(2)
    job.snapshot()
    job.vanish()
    assert (job.start().source, job.step, daemon_pid(directory)) == ("memory", 2, pid)
    job.save()
    job.vanish()
    until(lambda: not lives(pid), "the daemon ends like any other", LINGER_S + 5.0)
    assert not os.path.exists(address(directory))


def test_a_daemon_listens_where_clients_look_for_it_after_the_login_has_ended(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_RUNTIME_DIR goes with the last login: clients then look in /tmp; it comes back with the next login."""
    with prepared_daemon(directory, "") as pid:
        job = FakeJob(directory, 1)
        job.start()
        runtime = os.environ["XDG_RUNTIME_DIR"]
        os.rename(runtime, f"{runtime}.gone")
        shutil.rmtree(f"{runtime}.gone")
        assert not address(directory).startswith(runtime)
        until(lambda: is_found(directory), "the daemon is found elsewhere", 5.0)
        assert daemon_pid(directory) == pid
        os.mkdir(runtime, 0o700)
        assert address(directory).startswith(runtime)
        until(lambda: is_found(directory), "the daemon is found where it was", 5.0)
        assert daemon_pid(directory) == pid


def test_I6_a_daemon_whose_place_another_one_has_taken_makes_all_durable_and_ends(directory: str) -> None:
    with prepared_daemon(directory, "arm('drain.begin', lambda: time.sleep(0.3))") as pid:
        job = FakeJob(directory, 1)
        job.start()
        os.kill(pid, signal.SIGSTOP)
        shutil.rmtree(os.path.dirname(address(directory)))
        path = address(directory)
        other = os.open(path.removesuffix(".sock") + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(other, fcntl.LOCK_EX)
        with listen(path):
            job.snapshot()
            os.kill(pid, signal.SIGCONT)
            job.committed()
            until(lambda: not lives(pid), "the daemon ends", 5.0)
            assert os.path.exists(path), "the other one's socket is left alone"
        os.close(other)
        assert steps(directory) == [0]


def put_in_the_way(folder: str) -> bool:
    """Replace the folder by a file; False where the daemon was quicker and has made it anew."""
    with contextlib.suppress(OSError):  # the daemon may be putting its socket there just now: the next try does it
        shutil.rmtree(folder)
    try:
        Path(folder).write_text("a file in the way")
    except IsADirectoryError:
        return False
    return True


def test_a_place_that_cannot_be_made_anew_harms_nobody_who_is_connected(directory: str) -> None:
    job = FakeJob(directory, 1)
    job.start()
    pid, folder = daemon_pid(directory), os.path.dirname(address(directory))
    until(lambda: put_in_the_way(folder), "a file lies in the folder's place", 5.0)
    time.sleep(1.2)
    job.save()
    os.unlink(folder)
    until(lambda: is_found(directory), "the daemon is found again", 5.0)
    assert status(directory).facts["pid"] == pid
