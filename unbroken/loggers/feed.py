"""Feeds one sink from the journals, in a thread of its own: training never waits for it, and its failure is told, never raised.

Each sink goes at its own speed and from what it holds itself: after a crash of anything, it gets what it lacks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace

from unbroken.core.errors import Refused, SaveFailed, describe
from unbroken.core.ports import failpoint
from unbroken.core.records import MAIN_LINEAGE
from unbroken.loggers.choose import JSON_LINES, Target, make
from unbroken.loggers.rows import Rows
from unbroken.loggers.sink import RunInfo, Sink
from unbroken.store.lease import holder
from unbroken.store.repository import naming
from unbroken.store.tiers.disk import DiskTier

_BATCH_ROWS = 1000
"""Rows read and written together: some 300 KiB, and a sink that fails has not taken in more than these."""


def catch_up(sink: Sink, rows: Rows, held: int) -> int:
    """Write what is committed beyond step `held`; the newest step held then."""
    committed = rows.committed()
    held = max(held, rows.base)
    missing = rows.after(held, committed) if committed > held else iter(())
    while batch := list(itertools.islice(missing, _BATCH_ROWS)):
        sink.write(batch)
        held = batch[-1].step
        failpoint("log.written")
    return held


def complete(target: Target, directory: str, lineage: str = MAIN_LINEAGE) -> tuple[int, int]:
    """Bring a sink up to date from a run's folder, outside training: the steps it held, and those it holds now.

    Refused while the run lives, but for files, which have a lock of their own.
    """
    with naming(directory):
        rows = Rows(DiskTier(directory), lineage)
    alive = holder(directory, lineage) if target.kind not in (JSON_LINES, "tensorboard") else None
    if alive is not None:
        raise Refused(f"{directory}: process {alive.pid} keeps this run alive, which feeds its sinks itself: wait until it has ended")
    sink = make(target)
    try:
        held = sink.open(RunInfo(rows.run_id, os.path.abspath(directory), rows.committed(), lineage))
        now = catch_up(sink, rows, held)
    except BaseException:  # raised again: whatever it was, the sink must let go
        with contextlib.suppress(Exception):  # safe: the error before it is the one that matters
            sink.close()
        raise
    sink.close()
    return held, now


class Feed:
    """One sink. All calls come from the training thread; only `join` waits.

    `start`: the run and the step that this start continues from. `failure` is why the sink lags behind, "" while it does not.
    """

    def __init__(self, target: Target, start: RunInfo, made: Callable[[Target], Sink] = make) -> None:
        self.name = str(target)
        self.failure = ""
        self._target, self._make = target, made
        self._start = start
        self._sink: Sink | None = None
        self._rows: Rows | None = None
        self._held = 0
        self._turn = threading.Condition()
        self._is_wanted = self._is_ending = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Something has been committed. Cost: a notification."""
        with self._turn:
            self._is_wanted = True
            self._turn.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"log {self.name}", daemon=True)
            self._thread.start()

    @property
    def is_awake(self) -> bool:
        """Has it ever been woken?"""
        return self._thread is not None

    def finish(self) -> None:
        """Ask it to catch up once more, flush and end."""
        with self._turn:
            self._is_ending = True
        self.wake()

    def join(self, timeout_s: float) -> str:
        """Wait for that; what the sink lacks then, in words, "" for nothing. A later start completes it."""
        assert self._thread is not None, "finish first"
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return f"{self.name} was not done in time and holds steps up to {self._held}"
        return f"{self.name} holds steps up to {self._held}: {self.failure}" if self.failure else ""

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._is_wanted or self._is_ending)
                self._is_wanted, ending = False, self._is_ending
            try:
                self._feed()
                if ending:
                    self._close()
                self.failure = ""
            except Exception as error:  # noqa: BLE001  any library's error; training goes on, and it is told to the user
                self.failure = describe(error)
                self._rows = None
                with contextlib.suppress(Exception):  # safe: the error before it is the one that matters
                    self._close()
            if ending:
                return

    def _feed(self) -> None:
        if self._rows is None:
            rows = Rows(DiskTier(self._start.directory), self._start.lineage)
            if rows.run_id != self._start.run_id:
                raise SaveFailed("the run folder has been replaced by another run's")
            self._rows = rows
        if self._sink is None:
            self._sink = self._make(self._target)
            newest = max(self._start.step, self._rows.committed())
            self._held = self._sink.open(replace(self._start, step=newest))
        self._held = catch_up(self._sink, self._rows, self._held)

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()
