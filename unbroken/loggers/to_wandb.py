"""Weights & Biases: one run whatever happens, its id the run's. Offline (WANDB_MODE) each start adds a file that `wandb sync` joins.

wandb's own process buffers what it is given and loses it when we are killed, so what is held is read from its files, or asked of its
server, never remembered. Files lie in the run folder unless WANDB_DIR says otherwise: a program may change its folder, a run does not.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from unbroken.core.os import orphans
from unbroken.core.ports import Clock, SystemClock, environment
from unbroken.loggers.recordio import leveldb_records
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo

_ORPHAN_S = 10.0
"""A killed trainer's wandb process notices within 2 s, and may write until then."""


class Wandb:
    """A project; entity, host and key come from wandb's own settings."""

    def __init__(self, project: str, clock: Clock | None = None) -> None:
        self._project = project
        self._clock = clock or SystemClock()
        self._run: Any = None

    def open(self, run: RunInfo) -> int:
        end_s = self._clock.monotonic() + _ORPHAN_S
        while orphans("wandb-core") and self._clock.monotonic() < end_s:
            self._clock.sleep(0.05)
        self._run = wandb.init(
            project=self._project,
            id=run.tracker_id,
            resume="allow",
            name=run.title,
            dir=environment("WANDB_DIR") or run.directory,
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        if self._run.settings._offline:
            return _held(os.path.join(os.path.dirname(self._run.settings.sync_dir), f"offline-run-*-{run.tracker_id}", "run-*.wandb"))
        return max(0, int(self._run.starting_step) - 1)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step, commit=True)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _held(pattern: str) -> int:
    """The newest step of all files of this run."""
    held = 0
    for path in glob.glob(pattern):
        for data in leveldb_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                held = max(held, int(record.history.step.num))
    return held
