"""The socket: packets, descriptors, bounds, addresses, and who may be at the other end."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unbroken.core.errors import Damaged, Refused
from unbroken.core.limits import MAX_MESSAGE_BYTES
from unbroken.core.messages import Note, Slots, Status, Welcome
from unbroken.core.os import memory_file, wait_any
from unbroken.shm.channel import Channel, accept, address, connect, daemon_environment, listen, runtime_directory


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = Channel(a), Channel(b)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: those that pytest's workers get are too long for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="ub") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base) / "unbroken"


def test_messages_keep_their_borders_and_order(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(Status())
    pair[0].send(Welcome(pid=1, directory="/x"))
    assert pair[1].receive(1.0) == (Status(), [])
    assert pair[1].receive(1.0) == (Welcome(pid=1, directory="/x"), [])


def test_descriptors_travel_and_are_not_inherited(pair: tuple[Channel, Channel]) -> None:
    fd = memory_file("test", 4096)
    os.pwrite(fd, b"hello", 0)
    pair[0].send(Slots(sizes=(4096,)), [fd, fd])
    message, fds = pair[1].receive(1.0)
    assert message == Slots(sizes=(4096,))
    assert [os.pread(got, 5, 0) for got in fds] == [b"hello"] * 2
    assert all(fcntl.fcntl(got, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for got in fds)
    for got in (fd, *fds):
        os.close(got)


def test_a_message_that_is_too_large_is_an_error_of_its_sender(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(ValueError, match=r"Note of .* larger than 131072"):
        pair[0].send(Note(name="x" * MAX_MESSAGE_BYTES, at={}))
    pair[0].send(Status())
    assert pair[1].receive(1.0)[0] == Status()


def test_the_largest_message_passes(pair: tuple[Channel, Channel]) -> None:
    import msgspec

    empty = len(msgspec.json.encode(Note(name="", at={})))
    note = Note(name="x" * (MAX_MESSAGE_BYTES - empty), at={})
    pair[0].send(note)
    assert pair[1].receive(1.0)[0] == note


def test_I11_receive_and_send_end_in_time(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].receive(0.0)
    with pytest.raises(TimeoutError):
        pair[0].receive(0.05)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            pair[0].send(Note(name="x" * 100_000, at={}), timeout_s=0.0)


def test_a_peer_that_is_gone_is_a_connection_error(pair: tuple[Channel, Channel]) -> None:
    pair[1].close()
    with pytest.raises(ConnectionError):
        pair[0].receive(1.0)
    with pytest.raises(ConnectionError):
        pair[0].send(Status())


def test_the_last_words_of_a_peer_that_ended_with_unread_messages_are_heard(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(Status())
    for directory in ("/a", "/b"):
        pair[1].send(Welcome(pid=1, directory=directory))
    pair[1].close()
    assert [pair[0].receive(0.0)[0] for _ in range(2)] == [Welcome(pid=1, directory="/a"), Welcome(pid=1, directory="/b")]
    with pytest.raises(ConnectionError):
        pair[0].receive(0.0)


def test_a_peer_that_closes_is_seen_although_its_forked_child_lives(pair: tuple[Channel, Channel]) -> None:
    copy = os.dup(pair[1].fileno())
    pair[1].close()
    with pytest.raises(ConnectionError):
        pair[0].receive(1.0)
    os.close(copy)


@pytest.mark.parametrize("raw", [b"{}", b"\xff\xfe", b'{"type":"nobody"}', b'{"type":"hello"}', b"[1]", b"x" * (MAX_MESSAGE_BYTES + 1)])
def test_a_packet_that_is_no_message_is_damage(pair: tuple[Channel, Channel], raw: bytes) -> None:
    with socket.socket(fileno=os.dup(pair[0].fileno())) as plain:
        plain.send(raw)
    with pytest.raises(Damaged, match="channel"):
        pair[1].receive(1.0)


def test_descriptors_beside_a_packet_that_is_no_message_are_closed(pair: tuple[Channel, Channel]) -> None:
    fd = memory_file("test", 4096)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(fileno=os.dup(pair[0].fileno())) as plain:
        socket.send_fds(plain, [b"junk"], [fd] * 5)
    with pytest.raises(Damaged):
        pair[1].receive(1.0)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_the_address_is_that_of_the_real_folder(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    assert address(str(tmp_path / "link")) == address(str(tmp_path / "run"))
    assert address(str(tmp_path / "other")) != address(str(tmp_path / "run"))
    assert Path(address(str(tmp_path / "run"))).parent == runtime
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700


def test_a_runtime_directory_too_long_for_a_socket_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert runtime_directory() == f"/tmp/unbroken-{os.geteuid()}"


def test_a_runtime_directory_that_is_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime.symlink_to("elsewhere")
    with pytest.raises(Refused, match="not a directory"):
        address("run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_runtime_directory_of_somebody_else_is_refused(runtime: Path) -> None:
    runtime.mkdir()
    os.chown(runtime, 12345, 12345)
    with pytest.raises(Refused, match="belongs to user 12345"):
        address("run")


def test_a_runtime_directory_open_to_others_is_closed_to_them(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    address("run")
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700


def test_listen_replaces_what_a_dead_daemon_left(runtime: Path) -> None:
    path = address("run")
    listen(path).close()
    listener = listen(path)
    assert accept(listener) is None
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(connect, "run", False)
        deadline = time.monotonic() + 10
        while (served := accept(listener)) is None:
            assert time.monotonic() < deadline
    assert served.peer() == dialled.result().peer() == (os.getpid(), os.geteuid())
    for end in (dialled.result(), served):
        end.close()
    listener.close()


def test_a_daemon_that_dies_before_it_greets_is_none(runtime: Path) -> None:
    listener = listen(address("run"))
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(connect, "run", False)
        wait_any([listener.fileno()], 10.0)
        listener.close()
        with pytest.raises(ConnectionError, match="no daemon"):
            dialled.result()


def test_without_a_daemon_connect_says_so_at_once(runtime: Path) -> None:
    with pytest.raises(ConnectionError, match="no daemon"):
        connect("run", start=False)


def test_a_daemon_that_cannot_start_is_explained_by_its_log(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.shm.channel.DAEMON_MODULE", "unbroken.no_such_module")
    with pytest.raises(ConnectionError, match=r"(?s)3 starts.*\.log:.*No module named unbroken.no_such_module"):
        connect("run", start=True)


def test_the_daemon_gets_our_package_and_nothing_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("UNBROKEN_X", "kept")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = daemon_environment()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & env.keys()
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "1", "no threads that do not yield to training"
    assert env["UNBROKEN_X"] == "kept"
    assert env["PYTHONPATH"].endswith(":/somewhere")
