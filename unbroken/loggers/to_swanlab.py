"""SwanLab: one run, its id the run's. Offline and local (SWANLAB_MODE) each start adds a folder that `swanlab sync` joins.

SwanLab buffers what it is given, and a kill loses that: what is held is read from its files, or asked of its server. A step's values are
records of their own there, so half of a step may be held: these are not written twice. Files lie in the run folder unless
SWANLAB_LOG_DIR says otherwise.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import swanlab
from swanlab.proto.swanlab.record.v1.record_pb2 import Record

from unbroken.core.ports import environment
from unbroken.loggers.recordio import leveldb_records
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo

_LAST = "samples"


class SwanLab:
    """A project; workspace, host and key come from SwanLab's own settings."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._there: set[tuple[str, int]] = set()

    def open(self, run: RunInfo) -> int:
        folder = environment("SWANLAB_LOG_DIR") or os.path.join(run.directory, "swanlog")
        settings = swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none"))
        held = self._look(os.path.join(folder, f"run-*-{run.tracker_id}", "*.swanlab")) if settings.mode != "online" else 0
        self._run = swanlab.init(
            project=self._project,
            id=run.tracker_id,
            resume="allow",
            name=run.title,
            log_dir=folder,
            settings=settings,
        )
        return held  # online SwanLab asks its server what is there, and passes over that itself

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            numbers = {k: v for k, v in row.values.items() if not isinstance(v, str) and (k, row.step) not in self._there}
            self._run.log(numbers, step=row.step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _look(self, pattern: str) -> int:
        """The newest step that the run's files hold as a whole; what is there of later ones is noted."""
        found: set[tuple[str, int]] = set()
        held = 0
        for path in sorted(glob.glob(pattern)):
            for data in leveldb_records(path):
                record = Record.FromString(data)
                if record.HasField("scalar"):
                    key, step = str(record.scalar.key), int(record.scalar.step)
                    held = max(held, step) if key == _LAST else held
                    found.add((key, step))
        self._there = {(key, step) for key, step in found if step > held}
        return held
