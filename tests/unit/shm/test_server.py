"""Connections: last words, the deaf, the malformed, the dead, and the end."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from unbroken.core.messages import Bye, Hello, Message, Note, Status, Welcome
from unbroken.shm.channel import Channel, address, connect, listen
from unbroken.shm.server import MAX_OUTBOX, Client, Server

HELLO = Hello(role="worker", pid=1, rank=0, world_size=1)


class Rig:
    """A server that notes what it hears."""

    def __init__(self) -> None:
        self.server = Server(listen(address("run")), self.hear, self.ended)
        self.heard: list[Message] = []
        self.gone: list[Client] = []
        self.channels: list[Channel] = []
        self._pool = ThreadPoolExecutor(1)

    def hear(self, client: Client, message: Message) -> None:
        if isinstance(message, Hello):
            client.hello = message
        self.heard.append(message)

    def ended(self, client: Client) -> None:
        self.gone.append(client)

    def dial(self) -> Future[Channel]:
        return self._pool.submit(connect, "run", False)

    def join(self) -> tuple[Channel, Client]:
        """A client that has said Hello."""
        dialled = self.dial()
        self.until(dialled.done)
        channel = dialled.result()
        self.channels.append(channel)
        channel.send(HELLO)
        self.until(lambda: HELLO in self.heard)
        self.heard.clear()
        return channel, list(self.server)[-1]

    def until(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.server.turn(0.01)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.server.close()
        self._pool.shutdown()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Rig()
    yield made
    made.close()


def test_what_a_client_said_before_it_was_dropped_is_heard(rig: Rig) -> None:
    channel, client = rig.join()
    channel.send(Note(name="a", at={}))
    channel.send(Note(name="b", at={}))
    rig.server.drop(client)
    assert rig.heard == [Note(name="a", at={}), Note(name="b", at={})]
    assert rig.gone == [client]
    rig.server.drop(client)
    assert rig.gone == [client]


def test_what_a_client_said_before_it_ended_is_heard_although_it_cannot_be_answered(rig: Rig) -> None:
    channel, client = rig.join()
    channel.send(Note(name="a", at={}))
    channel.close()
    rig.server.send(client, Status())
    assert rig.heard == [Note(name="a", at={})]
    assert rig.gone == [client]


def test_bye_ends_a_connection(rig: Rig) -> None:
    channel, client = rig.join()
    channel.send(Bye())
    rig.until(lambda: rig.gone == [client])


def test_a_packet_that_is_no_message_ends_only_its_connection(rig: Rig) -> None:
    bad, _ = rig.join()
    _, good = rig.join()
    with socket.socket(fileno=os.dup(bad.fileno())) as plain:
        plain.send(b"junk")
    rig.until(lambda: len(rig.gone) == 1)
    assert list(rig.server) == [good]


def test_I11_a_client_that_does_not_read_is_dropped_without_waiting(rig: Rig) -> None:
    _, client = rig.join()
    for _ in range(10 * MAX_OUTBOX):
        rig.server.send(client, Note(name="x" * 1000, at={}))
    assert rig.gone == [client]


def test_what_a_slow_client_did_not_read_yet_comes_later_and_in_order(rig: Rig) -> None:
    channel, client = rig.join()
    for number in range(800):
        rig.server.send(client, Welcome(pid=number, directory="x" * 1000))
    assert client.outbox
    read: list[Message] = []

    def take() -> bool:
        while channel.wait(0.0):
            read.append(channel.receive(0.0)[0])
        return len(read) == 800

    rig.until(take)
    assert [message.pid for message in read if isinstance(message, Welcome)] == list(range(800))


def test_the_death_of_a_watched_process_ends_its_connection_and_frees_a_keeper(rig: Rig) -> None:
    _, client = rig.join()
    worker, keeper = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    rig.server.watch(worker.pid, client)
    rig.server.watch(keeper.pid, None)
    rig.server.watch(keeper.pid, None)
    assert rig.server.keepers == [keeper.pid]
    for process in (worker, keeper):
        process.kill()
        process.wait()
    rig.until(lambda: rig.gone == [client] and rig.server.keepers == [])


def test_a_client_that_came_just_before_the_end_keeps_the_server_at_its_address(rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
        early.connect(address("run"))
        assert not rig.server.retire()
        rig.join()
    assert rig.server.retire()
    with pytest.raises(ConnectionError, match="no daemon"):
        connect("run", start=False)
