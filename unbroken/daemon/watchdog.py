"""The watchdog: looks at the page of every watched rank, and when one hangs takes down all stacks, tells, and ends the group.

It lives in the daemon, because that hears from all ranks of the host, needs nothing of theirs in order to look, and outlives them. It
never waits: an alarm is a generator that the event loop resumes. Cost per look and rank: a copy of 4 KiB and one file of /proc, 60 us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.core.errors import UnbrokenError, describe
from unbroken.core.limits import DUMP_WAIT_S, END_WAIT_S, HANG_PATIENCE, HEARTBEAT_S, LOOK_GAP, MAX_DESCRIPTION_CHARS, MIN_HANG_TIMEOUT_S
from unbroken.core.messages import Watch
from unbroken.core.messages import Watched as Answer
from unbroken.core.os import HANG_EXIT_CODE, ask_for_stacks, descendants, process_facts, say_for
from unbroken.core.ports import Clock
from unbroken.core.records import EventRecord
from unbroken.daemon.board import Board
from unbroken.daemon.folder import RunFolder
from unbroken.daemon.hang import Idle, Patience, View, advance, blamed, doing, is_typing, judge
from unbroken.shm.pulse import Phase, PulsePage
from unbroken.shm.server import Client

MAX_LOADERS = 8
"""Of a rank's child processes, whose stacks are taken down when it waits for data."""

WAKE_S = 0.01
"""A rank that was stopped is woken up to write its stacks; when it has written nothing more for so long, it is done."""

MAX_SAID_BYTES = 3000
"""Of stacks on a rank's own standard error: less than a pipe takes at once."""


@dataclass
class Watched:
    """One rank."""

    pid: int
    world_size: int
    page: PulsePage
    timeout_s: float | None
    aloud: bool


@dataclass(frozen=True)
class Alarm:
    """What happened. `ranks` are those that the others wait for, none when all wait for each other; `stacks` by what they are of."""

    ranks: tuple[int, ...]
    step: int
    reason: str
    stacks: Mapping[str, str]
    own: Mapping[int, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The first of `ranks`, -1 when all wait for each other."""
        return self.ranks[0] if self.ranks else -1

    def text(self) -> str:
        """All of it, for people."""
        return "\n\n".join([self.reason, *(f"== {name} ==\n{text}" for name, text in self.stacks.items())]) + "\n"


class Watchdog:
    """Used by the event loop alone. An alarm is in the journal, in a file and in `facts` before anything is ended."""

    def __init__(self, board: Board, folder: RunFolder, clock: Clock) -> None:
        self.facts: dict[str, Any] = {}
        self._board = board
        self._folder = folder
        self._clock = clock
        self._watched: dict[int, Watched] = {}
        self._idle: dict[int, Idle] = {}
        self._looked_s = 0.0
        self._sounding: Generator[float, None, None] | None = None
        self._resume_s = 0.0
        self._typing: dict[int, int] = {}
        self._slow = (-1, 0)  # the step of the last alarm, and how many there were at it in a row
        self._times: dict[int, tuple[int, tuple[float, ...]]] = {}

    @property
    def patience_s(self) -> float:
        """How long the event loop may wait before the next look."""
        if not self._watched:
            return HEARTBEAT_S
        shortest = min((w.timeout_s for w in self._watched.values() if w.timeout_s is not None), default=HEARTBEAT_S * 4)
        return min(HEARTBEAT_S, shortest / 4, WAKE_S if self._sounding is not None else HEARTBEAT_S)

    def answer(self, client: Client, message: Watch) -> None:
        """Watch a rank from now on, and give it its page. What it learned in an earlier life in a world of this size still holds."""
        rank, hello = client.rank, client.hello
        if hello is None or rank < 0 or client.pid <= 0:
            raise UnbrokenError("only workers whose process this host knows can be watched")
        if message.timeout_s is not None and not message.timeout_s >= MIN_HANG_TIMEOUT_S:
            raise ValueError(f"a hang timeout of {message.timeout_s} s: at least {MIN_HANG_TIMEOUT_S:g} s")
        self.left(rank)
        size, times = self._times.get(rank, (0, ()))
        page = PulsePage(rank, times if size == hello.world_size else ())
        self._watched[rank] = Watched(client.pid, hello.world_size, page, message.timeout_s, message.aloud)
        self.facts = {}
        client.send(Answer(), [page.fd])

    def left(self, rank: int) -> None:
        """A rank has gone."""
        gone = self._watched.pop(rank, None)
        self._idle.pop(rank, None)
        if gone is not None:
            self._times[rank] = gone.world_size, gone.page.read().times
            gone.page.close()

    def look(self) -> None:
        """Look at all ranks if it is time to; go on with an alarm that has been raised."""
        try:
            self._look()
        except Exception:  # noqa: BLE001  saves must outlive their watchdog (I9)
            traceback.print_exc()
            self._sounding = None

    def _look(self) -> None:
        now_s = self._clock.monotonic()
        if self._sounding is not None:
            if now_s >= self._resume_s:
                self._resume_s = now_s + next(self._sounding, -1.0)
                self._sounding = None if self._resume_s < now_s else self._sounding
            return
        interval_s = self.patience_s
        since_s = now_s - self._looked_s
        if not self._watched or since_s < interval_s * 0.9:
            return
        self._looked_s = now_s
        views = [self._view(rank) for rank in sorted(self._watched)]
        self._idle = advance(self._idle, views, min(since_s, LOOK_GAP * interval_s))
        patience = self._patience(min(view.reading.step for view in views))
        judgement = judge(views, self._idle, patience)
        if judgement.decision == "alarm":
            self._sounding, self._resume_s = self._sound(judgement.reason, judgement.ranks, views), now_s

    def _view(self, rank: int) -> View:
        watched = self._watched[rank]
        reading, process = watched.page.read(), process_facts(watched.pid)
        if self._typing.get(rank) == reading.marks:
            reading = reading._replace(traced=True)
        return View(rank, reading, process.state, process.tracer)

    def _patience(self, step: int) -> Patience:
        given = [w.timeout_s for w in self._watched.values() if w.timeout_s is not None]
        return Patience(max(given, default=None), HANG_PATIENCE ** self._slow[1] if step == self._slow[0] else 1.0)

    def _sound(self, reason: str, ranks: Sequence[int], views: Sequence[View]) -> Generator[float, None, None]:
        """Take down stacks, report, end the group; yields how long to wait for others in between."""
        pages = {view.rank: self._watched[view.rank] for view in views}
        for watched in pages.values():
            watched.page.ask()
            ask_for_stacks(watched.pid)
        yield DUMP_WAIT_S
        stopped = [view.rank for view in views if view.is_stopped]
        if stopped:  # what is pending is handled first when they wake up; stopping them once more could be for good, if they end now
            _send(signal.SIGCONT, *(pages[rank].pid for rank in stopped))
            yield from self._until_written(stopped)
        own = {rank: watched.page.stacks() for rank, watched in pages.items() if rank in self._watched}
        typing = [rank for rank in ranks if is_typing(own.get(rank, ""))]
        by_rank = {view.rank: view for view in views}
        if typing:  # somebody sits at a prompt in there: until the rank goes on, nobody is judged
            self._typing = {rank: by_rank[rank].reading.marks for rank in typing}
            return
        if any(rank not in self._watched for rank in pages) or self._went_on(ranks, by_rank):
            return
        stacks = {
            f"rank {rank} (process {pages[rank].pid}): it {doing(by_rank[rank])}": text or _silent(pages[rank].pid)
            for rank, text in own.items()
        }
        for rank in ranks:
            if by_rank[rank].reading.phase == Phase.DATA:
                for child in descendants(pages[rank].pid)[:MAX_LOADERS]:
                    pages[rank].page.ask()
                    ask_for_stacks(child)
                    yield DUMP_WAIT_S / 2
                    if rank in self._watched:
                        stacks[f"process {child}, started by rank {rank}"] = pages[rank].page.stacks() or _silent(child)
        guilty = blamed(ranks, own)
        step = min(view.reading.step for view in views)
        self._slow = step, self._slow[1] + 1 if step == self._slow[0] else 1
        alarm = Alarm(guilty, step, reason, stacks, own)
        yield from self._end(alarm, self._report(alarm))

    def _until_written(self, ranks: Sequence[int]) -> Generator[float, None, None]:
        """Until these have written their stacks, as far as they do in DUMP_WAIT_S: on a busy host a process is not woken at once."""
        before = [""]
        for _ in range(round(DUMP_WAIT_S / WAKE_S)):
            yield WAKE_S
            now = [self._watched[rank].page.stacks() for rank in ranks if rank in self._watched]
            if all(now) and now == before:
                return
            before = now

    def _report(self, alarm: Alarm) -> str:
        """Where the stacks are, in words."""
        generation = self._board.generation
        try:
            where = f"stacks of all ranks: {self._folder.keep_stacks(alarm.step, generation, alarm.text())}"
        except (OSError, UnbrokenError) as error:  # safe: they are in our log, and the reason says so
            where = f"stacks of all ranks are in the log of the daemon only: {describe(error)}"
        text = f"hang: {alarm.reason}; {where}"
        self.facts = {"rank": alarm.rank, "text": text, "generation": generation}
        at = {"alarm": self._clock.monotonic()}
        facts = {"rank": alarm.rank, "ranks": list(alarm.ranks), "reason": text[:MAX_DESCRIPTION_CHARS]}
        self._board.write_events([EventRecord(name="hang", step=alarm.step, at=at, facts=facts)])
        print(f"{self._clock.utc()} {text}\n{alarm.text()}", flush=True)
        return where

    def _went_on(self, ranks: Sequence[int], before: Mapping[int, View]) -> bool:
        """Has every rank that was called hanging made a mark meanwhile? One that was stopped was woken up by us."""
        moved = [self._watched[rank].page.read().marks != before[rank].reading.marks and not before[rank].is_stopped for rank in ranks]
        return bool(moved) and all(moved)

    def _end(self, alarm: Alarm, where: str) -> Generator[float, None, None]:
        stacks = "".join(alarm.own.get(rank, "") for rank in alarm.ranks)
        aloud = [watched.pid for watched in self._watched.values() if watched.aloud]
        say_for(aloud, f"unbroken: hang: {alarm.reason}; {where}\n{stacks[:MAX_SAID_BYTES]}")
        doomed = list(self._watched.values())
        for watched in doomed:
            _send(HANG_EXIT_CODE if process_facts(watched.pid).catches(HANG_EXIT_CODE) else signal.SIGKILL, watched.pid)
            _send(signal.SIGCONT, watched.pid)
        yield END_WAIT_S
        living = list(map(id, self._watched.values()))  # by now others may have come in their place
        _send(signal.SIGKILL, *(watched.pid for watched in doomed if id(watched) in living))


def _send(sig: int, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def _silent(pid: int) -> str:
    return f"(no stacks: the process does not handle the signal; its state is {process_facts(pid).state or 'gone'!r})"
