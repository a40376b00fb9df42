"""The lease: one live writer, taken over from the dead, never by waiting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.rigs.store_child import in_child, suicide
from unbroken.core.errors import Fenced, Refused
from unbroken.core.os import boot_id, hostname
from unbroken.core.records import Writer
from unbroken.store.lease import WriterLease


def me(**changes: object) -> Writer:
    writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="2026-01-01T00:00:00.000Z")
    return msgspec.structs.replace(writer, **changes)


def try_in_child(root: str) -> list[str]:
    def act(say: Callable[[str], None]) -> None:
        try:
            say(f"got {WriterLease.acquire(root, me(pid=os.getpid())).took_over}")
        except Fenced as e:
            say(f"fenced {e}")

    return in_child(act)[0]


def test_B12_a_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    lease = WriterLease.acquire(str(tmp_path), me())
    (said,) = try_in_child(str(tmp_path))
    assert re.search(rf"fenced .*process {os.getpid()} on {re.escape(hostname())} \(since 2026-01-01", said)
    lease.release()
    assert try_in_child(str(tmp_path)) == ["got None"]


def test_B12_d_the_lease_of_a_dead_process_is_taken_over_and_said_so(tmp_path: Path) -> None:
    def die_holding(say: Callable[[str], None]) -> None:
        WriterLease.acquire(str(tmp_path), me(pid=os.getpid()))
        say(str(os.getpid()))
        suicide()

    (pid,), status = in_child(die_holding)
    assert os.WTERMSIG(status) == signal.SIGKILL
    lease = WriterLease.acquire(str(tmp_path), me())
    assert lease.took_over is not None
    assert f"process {pid} " in lease.took_over
    lease.release()


def test_B12_d_what_another_boot_of_this_host_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "writer.json").write_bytes(msgspec.json.encode(me(pid=1, boot_id="an earlier boot")))
    lease = WriterLease.acquire(str(tmp_path), me())
    assert lease.took_over is not None
    lease.release()


def test_B12_d_another_hosts_lease_is_refused_with_the_way_to_clear_it(tmp_path: Path) -> None:
    path = tmp_path / "writer.json"
    path.write_bytes(msgspec.json.encode(me(host="elsewhere", pid=42)))
    with pytest.raises(Fenced, match=rf"process 42 on elsewhere \(since .*delete {re.escape(str(path))}"):
        WriterLease.acquire(str(tmp_path), me())
    path.unlink()
    WriterLease.acquire(str(tmp_path), me()).release()


def test_a_process_takes_over_its_own_lease(tmp_path: Path) -> None:
    first = WriterLease.acquire(str(tmp_path), me())
    second = WriterLease.acquire(str(tmp_path), me())
    assert (first.is_held, second.is_held) == (False, True)
    assert second.took_over == "an earlier lease of this process"
    first.release()
    assert try_in_child(str(tmp_path))[0].startswith("fenced")
    second.release()
    second.release()


def test_a_torn_lease_file_does_not_stop_anybody(tmp_path: Path) -> None:
    (tmp_path / "writer.json").write_bytes(b'{"host":"els')
    lease = WriterLease.acquire(str(tmp_path), me())
    assert lease.took_over is None
    lease.release()


def test_the_folder_is_made_and_the_file_stays_after_release(tmp_path: Path) -> None:
    lease = WriterLease.acquire(str(tmp_path / "new" / "run"), me())
    lease.release()
    assert (tmp_path / "new/run/writer.json").read_bytes() == b""


def test_removing_the_file_of_a_living_writer_gives_the_next_one_a_file_of_its_own(tmp_path: Path) -> None:
    lease = WriterLease.acquire(str(tmp_path), me())
    (tmp_path / "writer.json").unlink()
    assert try_in_child(str(tmp_path)) == ["got None"]
    lease.release()


def test_a_child_that_inherited_the_lock_does_not_release_its_parents(tmp_path: Path) -> None:
    lease = WriterLease.acquire(str(tmp_path), me())
    in_child(lambda say: None)
    assert try_in_child(str(tmp_path))[0].startswith("fenced")
    lease.release()


def test_a_forked_child_does_not_keep_a_released_lease(tmp_path: Path) -> None:
    """A DataLoader worker has copies of our descriptors; what we release must be free all the same."""
    first = WriterLease.acquire(str(tmp_path), me())
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        first.release()
        done = subprocess.run([sys.executable, "-c", _ACQUIRE, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *go):
            os.close(fd)


_ACQUIRE = """
import sys, os
from unbroken.core.records import Writer
from unbroken.core.os import hostname, boot_id
from unbroken.store.lease import WriterLease
WriterLease.acquire(sys.argv[1], Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now")).release()
"""


def a_link(path: Path) -> None:
    path.symlink_to("../precious.txt")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("../nothing.txt")


@pytest.mark.parametrize("make", [a_link, a_link_to_nothing, Path.mkdir, os.mkfifo])
def test_B12_a_lock_file_that_is_no_file_is_refused_and_nothing_is_written_through_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "precious.txt").write_text("my thesis")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "writer.json"
    make(path)
    with pytest.raises(Refused, match=rf"{re.escape(str(path))}: not a regular file .* remove it"):
        WriterLease.acquire(str(tmp_path / "run"), me())
    assert (tmp_path / "precious.txt").read_text() == "my thesis"
    assert not (tmp_path / "nothing.txt").exists()


def test_I9_a_disk_that_fails_while_a_lease_is_let_go_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    lease = WriterLease.acquire(str(tmp_path), me())
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        lease.release()
    assert not lease.is_held
    assert try_in_child(str(tmp_path)) == [f"got process {os.getpid()} on {hostname()} (since 2026-01-01T00:00:00.000Z)"]
