"""The launcher's view of the run, against a daemon's end of the socket that says what the test wants, or nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from unbroken.cluster.witness import ANSWER_TIMEOUT_S, MAX_LAUNCH_FILE_BYTES, Progress, Witness, _progress, last_told
from unbroken.core.messages import Committed, Error, Hello, Message, Note, Status, StatusReply, Welcome
from unbroken.core.os import wait_any
from unbroken.shm.channel import Channel, accept, address, listen

pytestmark = pytest.mark.alone

COMMITTED = Committed(step=5, generation=0, state_root="00", seconds=0.1)


def answers(message: Message) -> list[Message]:
    """What a well-behaved daemon says."""
    if isinstance(message, Hello):
        return [Welcome(pid=os.getpid(), directory="here")]
    if isinstance(message, Status):
        return [COMMITTED, StatusReply(phase="idle", facts={"generation": 2, "last_applied": 17, "last_committed": 15})]
    return []


class Daemon:
    """The other end: hears everything, answers by `say`, in a thread until closed."""

    def __init__(self, directory: str, say: Callable[[Message], list[Message]]) -> None:
        self.heard: list[Message] = []
        self.channels: list[Channel] = []
        self._say = say
        self._path = address(directory)
        self._listener = listen(self._path)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            wait_any([self._listener.fileno(), *(c.fileno() for c in self.channels)], 0.05)
            if (channel := accept(self._listener)) is not None:
                self.channels.append(channel)
            for channel in list(self.channels):
                self._hear(channel)

    def _hear(self, channel: Channel) -> None:
        if not channel.wait(0.0):
            return
        try:
            message, _ = channel.receive(1.0)
        except ConnectionError:
            self.channels.remove(channel)
            channel.close()
            return
        self.heard.append(message)
        with contextlib.suppress(ConnectionError):
            for answer in self._say(message):
                channel.send(answer)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10)
        for channel in self.channels:
            channel.close()
        self._listener.close()
        os.unlink(self._path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Callable[[Message], list[Message]]], Daemon]]:
    daemons: list[Daemon] = []

    def start(say: Callable[[Message], list[Message]]) -> Daemon:
        daemons.append(Daemon(str(tmp_path), say))
        return daemons[-1]

    yield start
    for daemon in daemons:
        if not daemon._closed.is_set():
            daemon.close()


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    (tmp_path / "launch.jsonl").write_bytes(msgspec.json.encode({"directory": str(tmp_path)}) + b"\n")
    made = Witness(str(tmp_path / "launch.jsonl"))
    yield made
    made.close()


Serve = Callable[[Callable[[Message], list[Message]]], Daemon]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_progress_and_notes_reach_the_daemon(serve: Serve, witness: Witness) -> None:
    daemon = serve(answers)
    assert witness.progress() == Progress(generation=2, applied=17, committed=15)
    witness.note("recovery", {"detect": 1.0, "respawn": 1.5}, {"rank": 1})
    wait_for(lambda: len(daemon.heard) == 3)
    assert daemon.heard[0] == Hello(role="launcher", pid=os.getpid())
    assert daemon.heard[2] == Note(name="recovery", at={"detect": 1.0, "respawn": 1.5}, facts={"rank": 1})


def test_looking_connects_once_and_empties_the_line(serve: Serve, witness: Witness) -> None:
    daemon = serve(answers)
    witness.look()
    wait_for(lambda: daemon.channels)
    for _ in range(40):
        daemon.channels[0].send(COMMITTED)
    witness.look()
    for _ in range(40):
        daemon.channels[0].send(COMMITTED, timeout_s=1.0)
    assert witness.progress().committed == 15
    assert len(daemon.channels) == 1


def test_without_a_run_nothing_is_known_and_nothing_is_waited_for(tmp_path: Path, witness: Witness) -> None:
    began = time.monotonic()
    for one in (witness, Witness(str(tmp_path / "none.jsonl"))):
        one.look()
        one.note("recovery", {}, {})
        assert one.progress() == Progress()
    assert time.monotonic() - began < 1


def test_I11_a_daemon_that_says_nothing_delays_a_restart_by_one_timeout(serve: Serve, witness: Witness) -> None:
    serve(lambda message: [])
    began = time.monotonic()
    assert witness.progress() == Progress()
    assert time.monotonic() - began < 3 * ANSWER_TIMEOUT_S


@pytest.mark.parametrize(
    "say",
    [
        lambda message: [Error(kind="Fenced", text="no", code=4)],
        lambda message: [COMMITTED] * 100,
        lambda message: answers(message) if isinstance(message, Hello) else [Error(kind="X", text="no", code=1)],
    ],
)
def test_a_daemon_that_refuses_or_babbles_is_no_obstacle(serve: Serve, witness: Witness, say: Callable[[Message], list[Message]]) -> None:
    serve(say)
    assert witness.progress() == Progress()


def test_a_daemon_that_died_is_met_again_when_it_is_back(serve: Serve, witness: Witness) -> None:
    serve(answers).close()
    daemon = serve(answers)
    assert witness.progress().applied == 17
    daemon.close()
    assert witness.progress() == Progress()
    serve(answers)
    assert witness.progress().applied == 17


@pytest.mark.parametrize("facts", [{}, {"generation": None, "last_applied": "17", "last_committed": True}])
def test_facts_that_are_missing_or_strange_are_not_known(serve: Serve, witness: Witness, facts: dict[str, object]) -> None:
    serve(lambda message: answers(message) if isinstance(message, Hello) else [StatusReply(phase="idle", facts=facts)])
    assert witness.progress() == Progress()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", None),
        (b'{"directory": "/a"}\n{"directory": "/b"}\n', "/b"),
        (b'{"directory": "/a"}\n{"direc', "/a"),
        (b'{"directory": "/a"}\n[1]\n{"directory": 3}\n{"directory": ""}\n\xff\n', "/a"),
        (b"x" * (MAX_LAUNCH_FILE_BYTES + 1), None),
    ],
)
def test_B39_the_launch_file_may_be_torn_or_foreign(tmp_path: Path, content: bytes, found: str | None) -> None:
    path = tmp_path / "launch.jsonl"
    path.write_bytes(content)
    assert last_told(str(path)) == (None if found is None else (found, "main"))


@pytest.mark.parametrize(
    ("hang", "text", "rank"),
    [
        ({"generation": 2, "rank": 1, "text": "hang: rank 1"}, "hang: rank 1", 1),
        ({"generation": 1, "rank": 1, "text": "of an earlier life"}, "", -1),
        ({}, "", -1),
        (None, "", -1),
        ({"generation": 2, "rank": "x"}, "", -1),
    ],
)
def test_B37_what_the_watchdog_said_of_this_generation_is_known(hang: object, text: str, rank: int) -> None:
    progress = _progress({"generation": 2, "hang": hang})
    assert (progress.hang, progress.hanging) == (text, rank)
