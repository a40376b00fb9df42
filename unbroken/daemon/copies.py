"""The thread that keeps a run's copy in a second tier up to date, newest checkpoint first. Nobody waits for it.

It keeps no queue: what is to be copied next follows from the two logs, so a daemon that was started a moment ago does the same, and what
a newer checkpoint has overtaken is not copied any more. A tier that is slow makes copies rarer; one that is dead is asked again and
again, with pauses, and that is told in the journal and by `status`. While a checkpoint is copied retention leaves it in the folder.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from typing import Any

from unbroken.core.errors import Fenced, Refused, UnbrokenError, describe
from unbroken.core.os import yield_to_others
from unbroken.core.ports import SystemClock
from unbroken.core.records import CommitEntry, EventRecord
from unbroken.daemon.folder import RunFolder
from unbroken.store.copying import Cadence, Carrier, Passed, Thinner, next_to_copy
from unbroken.store.log import Log, key_of, newest_number, visible
from unbroken.store.repository import Repository
from unbroken.store.tiers.careful import settled
from unbroken.store.tiers.choose import is_object, tier_at
from unbroken.store.tiers.disk import DiskTier

IDLE_WAIT_S = 60.0
"""The thread looks around this often although nobody woke it: every wait has an end."""

RETRY_S = 5.0
"""Of one call, beyond what the tier's client does by itself: then the whole copy is given up, told, and tried again later."""

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
"""After a copy that failed, doubling."""

MAX_EVENTS = 64
MAX_REASON_CHARS = 1000


class _Ending(Exception):
    """The daemon ends: what is being copied is given up."""


class _Hold:
    """The two ends of the copying of one run: where from, where to, and what was read of both."""

    def __init__(self, folder: RunFolder, repository: Repository, url: str) -> None:
        self.repository = repository
        self.url = url
        self.source = Log.open(DiskTier(folder.directory), folder.lineage)
        tier = tier_at(url, RETRY_S)
        tier, self.note = settled(tier) if is_object(url) else (tier, "")
        self.there = Log.open(tier, folder.lineage)
        self.thinner = Thinner(self.there)


class Copier:
    """One run's copying. `go_on` whenever there may be something to do; everything else happens in its own thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._turn = threading.Condition()
        self._woken = self._ending = self._at_once = False
        self._is_settled = self._is_refused = False
        self._hold: _Hold | None = None
        self._events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._last: CommitEntry | None = None
        self._warned: set[str] = set()
        self._copying: int | None = None
        self._error = ""
        self._failing_since_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._clock = SystemClock()

    @property
    def is_wanted(self) -> bool:
        """Is there still something to copy, and a tier that takes it?"""
        return bool(self._folder.rules.copy_to) and self._thread.is_alive() and not (self._is_settled or self._is_refused or self._error)

    def begin(self) -> None:
        """A generation has been opened: what stopped the copying before may have been mended."""
        self._is_refused = self._at_once = False
        self.go_on()

    def go_on(self) -> None:
        """A checkpoint has been committed, or something else has changed."""
        if not self._folder.rules.copy_to:
            return
        if self._thread.ident is None:
            self._thread.start()
        with self._turn:
            self._woken, self._is_settled = True, False
            self._turn.notify()

    def finish(self) -> None:
        """Nobody trains any more: the newest checkpoint is due now, whatever the cadence says."""
        if not self._at_once:
            self._at_once = True
            self.go_on()

    def stop(self, timeout_s: float) -> None:
        """Give up what is being copied; a request in progress ends with the process."""
        with self._turn:
            self._ending = True
            self._turn.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def take_events(self) -> list[EventRecord]:
        """What has to stand in the journal, once."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def facts(self) -> dict[str, Any]:
        """For people and tests."""
        failing_s = round(self._clock.monotonic() - self._failing_since_s, 1) if self._error else 0.0
        last = self._last.step if self._last is not None else None
        return {
            "to": self._folder.rules.copy_to,
            "is_wanted": self.is_wanted,
            "last_step": last,
            "copying": self._copying,
            "error": self._error,
            "failing_s": failing_s,
        }

    def _work(self) -> None:
        yield_to_others()
        while True:
            with self._turn:
                if self._error:  # a dead tier is left alone for a while, however many checkpoints come meanwhile
                    self._turn.wait_for(lambda: self._ending, self._pause_s)
                else:
                    self._turn.wait_for(lambda: self._woken or self._ending, IDLE_WAIT_S)
                if self._ending:
                    return
                self._woken = False
            if self._is_refused:
                continue
            try:
                while self._copy_next():
                    self._error, self._pause_s = "", FIRST_PAUSE_S
                self._error = ""
                with self._turn:
                    self._is_settled = not self._woken
            except _Ending:
                return
            except Exception as error:  # noqa: BLE001  a copy that fails must not harm the run or end the daemon (I9); it is reported
                self._failed(error)
            finally:
                self._copying = None

    def _copy_next(self) -> bool:
        """Copy the checkpoint that is due; False when none is."""
        if not self._folder.is_open or not self._folder.rules.copy_to:  # the run was removed, or is not to be copied any more
            return False
        rules, hold = self._folder.rules, self._reach()
        hold.source.refresh()
        hold.there.refresh()
        carrier = Carrier(source=hold.source, there=hold.there, writer=self._folder.writer, clock=self._folder.clock, pause=self._look_up)
        if newest_number(hold.there.state) != newest_number(hold.source.state):
            carrier.put_facts()
        carrier.follow()
        cadence = Cadence(rules.copy_steps, rules.copy_s)
        commit = next_to_copy(hold.source.state, hold.there.state, cadence, at_once=self._at_once)
        if commit is None:
            self._last = next(reversed(visible(hold.there.state)), None)
            return False
        began_s, self._copying = self._clock.monotonic(), commit.step
        with hold.repository.holds.keeping(key_of(commit)):
            hold.source.refresh()
            if all(key_of(known) != key_of(commit) for known in hold.source.state.commits):
                return True  # withdrawn before it was held: choose anew
            try:
                carrier.carry(commit)
            except Passed:
                return True
        self._copied(hold, commit, carrier.sent_bytes, self._clock.monotonic() - began_s)
        return True

    def _reach(self) -> _Hold:
        repository, url = self._folder.repository, self._folder.rules.copy_to
        if self._hold is None or self._hold.repository is not repository or self._hold.url != url:
            self._hold = _Hold(self._folder, repository, url)
            if self._hold.note and url not in self._warned:
                self._warned.add(url)
                self._tell("copy_lower_level", self._hold.note)
        return self._hold

    def _copied(self, hold: _Hold, commit: CommitEntry, sent_bytes: int, seconds: float) -> None:
        facts: dict[str, Any] = {"to": hold.url, "bytes": sent_bytes, "seconds": round(seconds, 3)}
        if self._error:
            facts["failed_for_s"] = round(self._clock.monotonic() - self._failing_since_s, 1)
        self._last = commit
        self._events.append(EventRecord(name="copied", step=commit.step, facts=facts))
        try:
            opened = newest_number(hold.source.state)
            hold.thinner.run(self._folder.rules.copy_keep, opened, writer=self._folder.writer, clock=self._folder.clock)
        except Fenced:
            raise
        except (OSError, UnbrokenError) as error:
            # Safe: what could not be removed is removed by a later collection; the copy itself is committed.
            self._tell("copy_collect_failed", describe(error))

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (OSError, UnbrokenError)):
            traceback.print_exc()
        text = describe(error)[:MAX_REASON_CHARS]
        self._hold = None  # what was read there may be what is wrong
        if isinstance(error, Refused):
            self._is_refused, self._error = True, text
            self._tell("copy_refused", text)
            return
        if not self._error:
            self._failing_since_s = self._clock.monotonic()
            self._tell("copy_failed", text)
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._error = text

    def _tell(self, name: str, reason: str) -> None:
        step, url = self._copying or 0, self._folder.rules.copy_to
        print(f"{self._folder.clock.utc()} {name} to {url}: {reason}", flush=True)
        self._events.append(EventRecord(name=name, step=step, facts={"to": url, "reason": reason}))

    def _look_up(self) -> None:
        if self._ending:
            raise _Ending
