"""What the launcher knows of the run it starts again and again: its folder, and from the daemon how far it has come.

The launcher learns the folder from its workers, which append `{"directory": ..., "lineage": ...}` to the file named by
UNBROKEN_LAUNCH_FILE. Everything here is best effort with short timeouts: a run without a daemon is restarted as well, only without the
rules that need its progress.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from unbroken.core.errors import UnbrokenError
from unbroken.core.messages import Bye, Error, Hello, Message, Note, Status, StatusReply, Welcome
from unbroken.core.records import MAIN_LINEAGE
from unbroken.shm.channel import Channel, connect
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

MAX_LAUNCH_FILE_BYTES = 1 << 20
"""The workers write one line per Run; a longer file is not ours."""

ANSWER_TIMEOUT_S = 1.0
"""Of one answer. It delays a restart, so it is short; without an answer only the restart budget decides."""

MAX_UNASKED = 64
"""Messages looked at in one go, so that a talkative daemon cannot hold the launcher."""

Kind = TypeVar("Kind")

WORLDS_FAULT = (OSError, EOFError, TimeoutError, UnbrokenError, msgspec.MsgspecError)


class Progress(Struct, frozen=True, kw_only=True):
    """Generation in progress, newest applied and newest committed step; None where not known.

    `hang` is what the watchdog said before it ended the workers of this generation, "" if it did not; `hanging` the rank it blames.
    """

    generation: int | None = None
    applied: int | None = None
    committed: int | None = None
    hang: str = ""
    hanging: int = -1


class Witness:
    """An observer's connection to the daemon of the workers' run, made when there is one, made again when it broke."""

    def __init__(self, launch_file: str) -> None:
        self._launch_file = launch_file
        self._channel: Channel | None = None

    @property
    def directory(self) -> str | None:
        """The folder the workers named last."""
        told = last_told(self._launch_file)
        return told[0] if told is not None else None

    def look(self) -> None:
        """Connect if the workers have named a folder by now, and throw away what the daemon told us unasked. Does not wait."""
        try:
            channel = self._channel or self._connect()
            if channel is not None:
                for _ in range(MAX_UNASKED):
                    _receive(channel, 0.0)
        except TimeoutError:
            pass
        except WORLDS_FAULT:
            self.close()

    def progress(self) -> Progress:
        """How far the run has come."""
        try:
            channel = self._channel or self._connect()
            if channel is None:
                return Progress()
            channel.send(Status())
            return _progress(_answer(channel, StatusReply).facts)
        except WORLDS_FAULT:
            self.close()
            return Progress()

    def committed(self) -> int | None:
        """The newest committed step as the daemon says, or, when it has gone, the folder; None where neither does."""
        committed, directory = self.progress().committed, self.directory
        if committed is not None or directory is None:
            return committed
        try:
            return max((commit.step for commit in Repository.open(DiskTier(directory)).visible()), default=None)
        except WORLDS_FAULT:
            return None

    def note(self, name: str, at: dict[str, float], facts: dict[str, Any]) -> None:
        """Leave an event with the daemon, which journals it with the next generation."""
        try:
            channel = self._channel or self._connect()
            if channel is not None:
                channel.send(Note(name=name, at=at, facts=facts))
        except WORLDS_FAULT:
            self.close()

    def close(self) -> None:
        """Let the daemon go; a later call connects anew."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        with contextlib.suppress(*WORLDS_FAULT):
            channel.send(Bye())
        channel.close()

    def _connect(self) -> Channel | None:
        told = last_told(self._launch_file)
        if told is None:
            return None
        self._channel = connect(told[0], False, told[1])
        self._channel.send(Hello(role="launcher", pid=os.getpid()))
        _answer(self._channel, Welcome)
        return self._channel


def last_told(path: str) -> tuple[str, str] | None:
    """The folder and the lineage in the last whole line of a launch file."""
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_LAUNCH_FILE_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            told = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        directory, lineage = told.get("directory"), told.get("lineage", MAIN_LINEAGE)
        if isinstance(directory, str) and directory and isinstance(lineage, str):
            return directory, lineage
    return None


def _answer(channel: Channel, kind: type[Kind]) -> Kind:
    """The next message of this kind; what else the daemon says is passed over."""
    for _ in range(MAX_UNASKED):
        message = _receive(channel, ANSWER_TIMEOUT_S)
        if isinstance(message, kind):
            return message
        if isinstance(message, Error):
            raise ConnectionError(f"the daemon refused: {message.kind}: {message.text}")
    raise ConnectionError(f"no {kind.__name__} among {MAX_UNASKED} messages of the daemon")


def _receive(channel: Channel, timeout_s: float) -> Message:
    """One message; descriptors that came with it are none of our business."""
    message, fds = channel.receive(timeout_s)
    for fd in fds:
        os.close(fd)
    return message


def _progress(facts: dict[str, Any]) -> Progress:
    def number(name: str) -> int | None:
        value = facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    hang = facts.get("hang")
    hang = hang if isinstance(hang, dict) and hang.get("generation") == facts.get("generation") else {}
    return Progress(
        generation=number("generation"),
        applied=number("last_applied"),
        committed=number("last_committed"),
        hang=str(hang.get("text", "")),
        hanging=hang["rank"] if isinstance(hang.get("rank"), int) else -1,
    )
