"""What a run tells about itself: metrics to the journal at boundaries, and a nod to the sinks when steps have been committed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from unbroken.core.errors import SaveWarning
from unbroken.core.limits import LOG_CLOSE_S
from unbroken.core.messages import Committed, Plan
from unbroken.loggers.feed import Feed
from unbroken.loggers.sink import RunInfo
from unbroken.opening import Opening
from unbroken.recover.journal_client import JournalClient
from unbroken.step.metrics import Metrics


class Reporting:
    """Rank 0's metrics count; other ranks only check what they are given. Sinks run in threads that training does not wait for."""

    def __init__(self, opening: Opening, plan: Plan, rank: int) -> None:
        self._rank = rank
        self._clock = opening.clock
        self._metrics = Metrics()
        wanted = opening.config.log_to if rank == 0 else ()
        self._feeds = [Feed(target, RunInfo(plan.run_id, opening.directory, plan.step, opening.config.lineage)) for target in wanted]
        self._told: set[str] = set()
        self._newest = -1 if plan.source != "fresh" else 0  # after a restart the sinks may lack what was committed before
        self._has_ended = False

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of the step just completed."""
        self._metrics.add(step, metrics)

    def send(self, journal: JournalClient, step: int, *, wait: bool) -> None:
        """At the boundary of `step`: to the journal with what is here; with `wait`, because a snapshot comes, with all."""
        for known, values in self._metrics.take(step, wait=wait):
            if self._rank == 0:
                journal.metrics(known, values)

    def committed(self, news: Committed | None) -> None:
        """Wake the sinks where there is something new for them; warn once of each that lags behind."""
        step = news.step if news is not None else 0
        if step > self._newest:
            self._newest = step
            for feed in self._feeds:
                feed.wake()
        for feed in self._feeds:
            if feed.failure and feed.name not in self._told:
                self._told.add(feed.name)
                text = f"metrics do not reach {feed.name}, training goes on, it is tried again after each commit: {feed.failure}"
                warnings.warn(text, SaveWarning, stacklevel=5)

    def end(self, *, complete: bool = True) -> None:
        """Have every sink flush and let go, within LOG_CLOSE_S in all, and say which of them lacks what. Idempotent.

        complete: also begin with sinks that nothing has woken yet: an earlier process may have been killed before they had all.
        """
        if self._has_ended:
            return
        self._has_ended = True
        feeds = [feed for feed in self._feeds if complete or feed.is_awake]
        for feed in feeds:
            feed.finish()
        end_s = self._clock.monotonic() + LOG_CLOSE_S
        for feed in feeds:
            lacks = feed.join(max(0.0, end_s - self._clock.monotonic()))
            if lacks:
                print(f"unbroken: metrics: {lacks}; the next start completes it, and so does `unbroken logs`", file=sys.stderr)
