"""What a sink is: the seam between a run's rows and whatever shows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from unbroken.codec.digest import text_digest
from unbroken.core.ports import Clock
from unbroken.core.records import MAIN_LINEAGE
from unbroken.loggers.rows import Row


@dataclass(frozen=True)
class RunInfo:
    """The run that a sink is to show. `run_id` (32 hex digits) is the same in all its restarts; `directory` is absolute.

    `step` is the newest step that counts now: what a sink holds beyond it was lost with a checkpoint and is computed again. A branch of a
    run (`lineage`) is a run of its own for trackers, and shows the steps since it parted.
    """

    run_id: str
    directory: str
    step: int
    lineage: str = MAIN_LINEAGE

    @property
    def tracker_id(self) -> str:
        """What a tracker knows the run, or the branch, by: 32 hex digits."""
        return self.run_id if self.lineage == MAIN_LINEAGE else text_digest(f"{self.run_id}/{self.lineage}")[:32]

    @property
    def title(self) -> str:
        """What people know it by."""
        name = os.path.basename(self.directory)
        return name if self.lineage == MAIN_LINEAGE else f"{name}, {self.lineage}"

    @property
    def file(self) -> str:
        """The default sink's file."""
        name = "metrics.jsonl" if self.lineage == MAIN_LINEAGE else f"metrics.{self.lineage}.jsonl"
        return os.path.join(self.directory, name)


class Sink(Protocol):
    """One place that shows metrics. Called from one thread of its own, on rank 0. Whatever a call raises is told to the user once;
    the sink is closed then, and opened again at the next commit."""

    def open(self, run: RunInfo) -> int:
        """Get ready to write; the newest step held as a whole, 0 for none. Drop what is torn, and steps beyond `run.step` if you can."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows in: ascending steps without a gap, beyond the one `open` returned. What a crash then takes away comes again."""

    def close(self) -> None:
        """Flush, let go. Also called after a failed `open` or `write`."""


def wall_s(clock: Clock) -> float:
    """Now, in seconds since 1970."""
    return datetime.fromisoformat(clock.utc()).timestamp()
