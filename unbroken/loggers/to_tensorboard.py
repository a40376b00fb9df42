"""TensorBoard: event files in one folder, one event per step that holds all its scalars.

Each start writes a file of its own, named after the first step in it, so that their order by name is the order of steps and nothing that
another process reads is ever changed; only what a lost checkpoint took back is cut off. The run, or branch, stands in the name, too: nobody
takes back what another one wrote. Scalars are float32 there, texts are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from unbroken.codec.digest import text_digest
from unbroken.core.errors import Refused
from unbroken.core.os import try_lock
from unbroken.core.ports import Clock, SystemClock
from unbroken.loggers.recordio import tf_records
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo, wall_s

_NAME = "events.out.tfevents.{owner}.{step:012d}.unbroken"
_OURS = re.compile(r"events\.out\.tfevents\.(?:([0-9a-f]{16})\.)?(\d{12,18})\.unbroken")  # names without an owner: of older versions


class TensorBoard:
    """A folder; other files in it, event files of other writers included, are left alone."""

    def __init__(self, folder: str, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._lock = -1
        self._owner = ""
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def open(self, run: RunInfo) -> int:
        os.makedirs(self._folder, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not try_lock(self._lock):
            raise Refused(f"{self._folder}: another process writes event files here: end that one first, or choose another folder")
        self._owner = text_digest(run.tracker_id)[:16]
        with os.scandir(self._folder) as entries:
            named = [(entry.path, _OURS.fullmatch(entry.name)) for entry in entries if entry.is_file(follow_symlinks=False)]
        owners = {path: match[1] for path, match in named if match}
        if set(owners.values()) - {None, self._owner}:
            raise Refused(f"{self._folder}: holds steps of another run or branch: choose another folder, or move those files away")
        for path in sorted(owners, reverse=True):
            held = _cut(path, run.step)
            if held:
                return held
        return 0

    def write(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            path = os.path.join(self._folder, _NAME.format(owner=self._owner, step=rows[0].step))
            self._file = open(path, "xb")  # noqa: SIM115  held until `close`
            self._writer = RecordWriter(self._file)
            self._put(Event(wall_time=wall_s(self._clock), file_version="brain.Event:2"))
        now_s = wall_s(self._clock)
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items() if not isinstance(value, str)]
            self._put(Event(step=row.step, wall_time=now_s, summary=Summary(value=values)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._file, self._lock = None, -1

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _cut(path: str, newest: int) -> int:
    """Cut off a torn end and steps beyond `newest`; the last step in the file then. Without a step it is removed."""
    end = held = 0
    for data, behind in tf_records(path, masked_crc32c):
        step = int(Event.FromString(data).step)
        if step > newest:
            break
        end, held = behind, step
    if not held:
        os.unlink(path)
    elif end != os.path.getsize(path):
        os.truncate(path, end)
    return held
