"""Entry point of the node daemon: `python -m unbroken.agent DIR [LINEAGE]`. One per lineage of a run folder and host; it outlives trainers.

It owns the memory slots, decides where a start continues from, makes snapshots durable, and is the only writer of the run folder. It is
soft state: whatever it knows is rebuilt from the store and from who connects. One thread serves the socket: it waits for no client, only
for short work on the disk (a start's log entry, the file that a collection is just removing). Another one drains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from unbroken.core import messages as m
from unbroken.core.errors import Fenced, Refused, UnbrokenError
from unbroken.core.limits import COPY_TIMEOUT_S, DRAIN_TIMEOUT_S, LINGER_S
from unbroken.core.os import hostname, is_alive
from unbroken.core.ports import Clock, Nonces, SystemClock, SystemNonces
from unbroken.core.records import MAIN_LINEAGE, EventRecord, StepRecord
from unbroken.daemon.board import Board
from unbroken.daemon.copies import Copier
from unbroken.daemon.drain import Outcome
from unbroken.daemon.errands import Errands
from unbroken.daemon.folder import RunFolder
from unbroken.daemon.growth import Growth
from unbroken.daemon.scrub import Scrub
from unbroken.daemon.starts import Starts
from unbroken.daemon.verdict import Decision, Refusals
from unbroken.daemon.watchdog import Watchdog
from unbroken.shm.channel import address, listen
from unbroken.shm.place import PlaceLock
from unbroken.shm.server import Client, Server
from unbroken.store.paths import check_lineage

MAX_NOTES = 256
"""Events kept for the next generation's journal; the oldest go first."""

MAX_TEXT_CHARS = 8000
"""Of an error told to a client: a message has a limit, and people have one, too."""

LOCK_WAIT_S = 10.0
"""How long to wait for a daemon that is shutting down."""

SERVE_AFTER_SIGNAL_S = 60.0
"""A signal to all processes of a job reaches the daemon, too, and its trainers want their last step committed: most have 30 s for it."""

TICK_S = 1.0
SHORT_TICK_S = 0.05
MAX_FAILURES = 16
MAX_FAILURE_CHARS = 1000


class Daemon:
    """Answers trainers and launcher. `run` returns when nobody needs the daemon any more."""

    def __init__(
        self, directory: str, place: PlaceLock, listener: socket.socket, clock: Clock, nonces: Nonces, *, lineage: str = MAIN_LINEAGE
    ) -> None:
        self._directory = directory
        self._lineage = lineage
        self._place = place
        self._is_lost = False
        self._clock = clock
        self._server = Server(listener, self._answer, self._gone)
        self._folder = RunFolder(directory, clock, nonces, lineage)
        self._board = Board(self._folder, self._drained, self._tell)
        self._refusals = Refusals()
        self._watchdog = Watchdog(self._board, self._folder, clock)
        self._notes: deque[m.Note] = deque(maxlen=MAX_NOTES)
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._outcomes: deque[Outcome] = deque()
        self._scrub = Scrub(clock, nonces, self._server.wake)
        self._growth = Growth(self._server, self._board, self._refusal, say)
        self._errands = Errands(self._server, clock, self._refusal)
        self._starts = Starts(self._folder, self._board, self._errands, say)
        self._copier = Copier(self._folder)
        self._lonely_since: float | None = clock.monotonic()
        self._ending_since: float | None = None
        self._serve_until_s = 0.0
        self._answers: dict[type[Struct], Callable[[Client, Any], None]] = {
            m.Begin: self._begin,
            m.Bad: self._bad,
            m.Opened: self._opened,
            m.NeedSlots: self._need_slots,
            m.OldSlots: self._old_slots,
            m.Ready: self._ready,
            m.Journal: self._journal,
            m.Refuse: self._refuse,
            m.Status: self._status,
            m.Note: lambda client, note: self._notes.append(note),
            m.Watch: self._watchdog.answer,
            m.Leaving: self._leaving,
        }

    def run(self) -> int:
        """Serve until the last client is gone and all READY snapshots are durable, or a signal has come; the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._end(SERVE_AFTER_SIGNAL_S))
        signal.signal(signal.SIGINT, lambda *_: self._end())  # though trainers are connected
        for sig in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # meant for the trainers, if all processes of a job are signalled
            signal.signal(sig, signal.SIG_IGN)
        signal.set_wakeup_fd(self._server.wake_fd, warn_on_full_buffer=False)
        self._board.drainer.start()
        while not self._is_over():
            self._server.turn(self._patience_s())
            self._keep_place()
            self._watchdog.look()
            self._growth.turn()
            self._errands.turn()
            while self._outcomes:
                self._board.drained(self._outcomes.popleft())
                self._copier.go_on()
            self._board.write_events(self._copier.take_events())
            for found in self._scrub.take():
                self._board.write_events([found.event(self._board.last_applied or 0)])
                self._tell(m.DamageFound(text=str(found)[:MAX_FAILURE_CHARS]))
            self._pass_verdict(self._refusals.expire(self._clock.monotonic()))
        return self._close()

    # Life

    def _end(self, serve_s: float = 0.0) -> None:
        if self._ending_since is None:
            self._ending_since = self._clock.monotonic()
            self._serve_until_s = self._ending_since + serve_s

    def _keep_place(self) -> None:
        """Be where everybody looks for us, although somebody empties the socket's folder (a cleaner of /tmp, the end of a login).

        Who does not find us starts another daemon, which this one's lease would refuse. One that has taken the place is given way to.
        """
        if self._ending_since is not None:
            return
        try:
            path = address(self._directory, self._lineage)
            if self._server.is_at(path):
                return
            if self._place.take(path, self._clock):
                self._server.listen_at(path)
                say("the socket was gone: listens again")
            else:
                say("the socket was gone, and another daemon has taken its place: ends when everything is durable")
                self._end()
            self._is_lost = False
        except (OSError, Refused) as error:
            # Safe: those who are connected are served, and it is tried again at every turn.
            if not self._is_lost:
                say(f"the socket is gone and cannot be made anew: {error}")
            self._is_lost = True

    def _patience_s(self) -> float:
        if self._growth.is_wanted:
            return 0.0
        hurry = (
            self._errands.is_under_way
            or self._ending_since is not None
            or self._lonely_since is not None
            or self._refusals.deadline_s is not None
        )
        return SHORT_TICK_S if hurry else min(TICK_S, self._watchdog.patience_s)

    def _is_over(self) -> bool:
        now = self._clock.monotonic()
        needed = bool(self._server.keepers) or any(client.role in ("worker", "launcher") for client in self._server)
        if needed:
            self._lonely_since = None
        elif self._lonely_since is None:
            self._lonely_since = now
        since = self._lonely_since if self._ending_since is None else self._ending_since
        if since is None or (now < self._serve_until_s and any(client.role == "worker" for client in self._server)):
            return False
        self._board.settle()
        if self._board.phase != "idle":
            return now - since > DRAIN_TIMEOUT_S
        if self._ending_since is None and now - since < LINGER_S:
            return False
        self._copier.finish()
        if self._copier.is_wanted and now < (self._serve_until_s if self._ending_since is not None else since + COPY_TIMEOUT_S):
            return False
        if self._server.retire() or self._ending_since is not None:
            return True
        self._lonely_since = now
        return False

    def _close(self) -> int:
        self._copier.stop(SHORT_TICK_S)
        self._board.write_events([_event(note, self._board.last_applied or 0) for note in self._notes])
        self._scrub.stop()
        is_durable = self._board.stop()
        self._server.close()
        self._folder.close()
        say("ended" if is_durable else "ended, although a snapshot could not be made durable in time")
        return 0 if is_durable else 1

    def _drained(self, outcome: Outcome) -> None:
        """Called in the drain thread."""
        self._outcomes.append(outcome)
        self._server.wake()

    # Clients

    def _answer(self, client: Client, message: m.Message) -> None:
        try:
            if isinstance(message, m.Hello):
                self._hello(client, message)
            elif client.hello is None:
                raise UnbrokenError("say Hello first")
            elif type(message) not in self._answers:
                raise UnbrokenError(f"{type(message).__name__} is not for the daemon")
            else:
                self._answers[type(message)](client, message)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  the client is told and may end; the daemon must outlive any request (I9)
            client.send(self._refusal(client, message, error))

    def _refusal(self, client: Client, message: m.Message, error: Exception) -> m.Error:
        if not isinstance(error, (UnbrokenError, ValueError, TypeError, OSError)):
            traceback.print_exc()
        say(f"{type(message).__name__} of process {client.pid} refused: {type(error).__name__}: {error}")
        return m.Error(kind=type(error).__name__, text=str(error)[:MAX_TEXT_CHARS], code=getattr(error, "exit_code", 1))

    def _gone(self, client: Client) -> None:
        if client.rank >= 0:
            self._watchdog.left(client.rank)
            self._leaving(client, None)

    def _tell(self, message: m.Message) -> None:
        """To all workers."""
        if isinstance(message, m.Failed):
            self._failures.append(f"step {message.step}: {message.text[:MAX_FAILURE_CHARS]}")
            say(f"checkpoint of step {message.step} failed: {message.text}")
        elif isinstance(message, m.DamageFound):
            say(f"damage found: {message.text}")
        for client in self._server:
            if client.rank >= 0:
                self._server.send(client, message)

    def _hello(self, client: Client, message: m.Hello) -> None:
        if self._ending_since is not None:
            raise Refused(f"the daemon of {self._directory} (process {os.getpid()}) is ending: try again in a moment")
        if client.hello is not None:
            raise UnbrokenError("Hello was said already")
        if message.role == "worker":
            self._make_room(client, message)
        if message.role != "observer" and client.pid > 0:  # a process of another container has no pid here
            self._server.watch(client.pid, client)
        client.hello = message
        if message.keeper_pid > 1:
            with contextlib.suppress(ProcessLookupError):
                self._server.watch(message.keeper_pid, None)
        client.send(m.Welcome(pid=os.getpid(), directory=self._directory))

    def _make_room(self, client: Client, message: m.Hello) -> None:
        if not 0 <= message.rank < message.world_size:
            raise ValueError(f"rank {message.rank} of {message.world_size} ranks: must be at least 0 and less than {message.world_size}")
        for other in self._server:
            if other.hello is None or other.rank < 0:
                continue
            if other.rank != message.rank and other.hello.world_size == message.world_size:
                continue
            if other.pid != client.pid and is_alive(other.pid):
                holder = f"process {other.pid} on {hostname()} lives, rank {other.rank} of {other.hello.world_size}"
                raise Fenced(f"{self._directory} is in use: {holder}; end it first, or choose another folder")
            self._server.drop(other)

    # Answers

    def _begin(self, client: Client, message: m.Begin) -> None:
        only_rank_0(client)
        self._starts.begin(client, message)

    def _bad(self, client: Client, message: m.Bad) -> None:
        only_rank_0(client)
        self._starts.bad(client, message)

    def _opened(self, client: Client, message: m.Opened) -> None:
        only_rank_0(client)
        journal = self._folder.opened(message)
        journal.add([_event(note, message.step) for note in self._notes])
        self._notes.clear()
        self._refusals.opened()
        self._board.open(journal)
        self._scrub.begin(self._folder.repository, self._directory, self._folder.rules.scrub_s)
        self._copier.begin()
        client.send(m.Opened(**{**_fields(message), "entry": journal.generation}))

    def _need_slots(self, client: Client, message: m.NeedSlots) -> None:
        only_workers(client)
        self._growth.ask(client, message)

    def _old_slots(self, client: Client, message: m.OldSlots) -> None:
        only_workers(client)
        slots = self._board.table.find(message.slots)
        client.send(m.Slots(sizes=tuple(slot.size_bytes for slot in slots)), [slot.fd for slot in slots])

    def _ready(self, client: Client, message: m.Ready) -> None:
        only_workers(client)
        self._current(message.generation)
        if message.rank != client.rank:
            raise UnbrokenError(f"rank {client.rank} cannot speak for rank {message.rank}")
        self._board.announce(message)
        self._pass_verdict(self._refusals.applied(message.generation, message.step))
        self._board.settle()

    def _journal(self, client: Client, message: m.Journal) -> None:
        only_rank_0(client)
        self._current(message.generation)
        self._board.journal(message.records)
        for record in message.records:
            if isinstance(record, StepRecord):
                self._pass_verdict(self._refusals.applied(message.generation, record.step))
        self._board.settle()

    def _refuse(self, client: Client, message: m.Refuse) -> None:
        only_workers(client)
        self._current(message.generation)
        if message.rank != client.rank:
            raise UnbrokenError(f"rank {client.rank} cannot speak for rank {message.rank}")
        members = {c.rank for c in self._server if c.rank >= 0}
        self._pass_verdict(self._refusals.refuse(message, members, self._board.world_size, self._clock.monotonic()))

    def _leaving(self, client: Client, message: m.Leaving | None) -> None:
        """An error ends a rank, or it has gone already (None)."""
        if client.rank >= 0:
            why = message.text if message is not None else ""
            self._pass_verdict(self._refusals.left(client.rank, why))
            self._board.settle(gone=(client.rank, why))

    def _status(self, client: Client, message: m.Status) -> None:
        if message.ends and client.rank >= 0 and self._board.phase == "idle":
            self._copier.finish()
        facts = {"pid": os.getpid(), "directory": self._directory, "failures": list(self._failures)}
        facts["members"] = sorted(c.rank for c in self._server if c.rank >= 0)
        client.send(
            m.StatusReply(
                phase=self._board.phase, facts=facts | {"hang": self._watchdog.facts, "copy": self._copier.facts()} | self._board.facts()
            )
        )

    def _current(self, generation: int) -> None:
        if generation != self._board.generation:
            raise Fenced(f"generation {generation} is not the current one ({self._board.generation}): end this process")

    def _pass_verdict(self, decision: Decision | None) -> None:
        if decision is None:
            return
        verdict = decision.verdict
        facts = {"attempt": decision.attempt, "retry": verdict.retry, "why": verdict.reason, "reasons": decision.reasons}
        self._board.write_events([EventRecord(name="refused", step=decision.step, facts=facts)])
        for rank in decision.ranks:
            if (client := self._server.worker(rank)) is not None:
                self._server.send(client, verdict)


def only_workers(client: Client) -> None:
    """UnbrokenError for anybody else."""
    if client.rank < 0:
        raise UnbrokenError("only workers may ask this")


def only_rank_0(client: Client) -> None:
    """UnbrokenError for anybody else."""
    if client.rank != 0:
        raise UnbrokenError("only rank 0 may ask this")


def say(text: str) -> None:
    """One line of the daemon's log."""
    print(f"{SystemClock().utc()} {text}", flush=True)


def _event(note: m.Note, step: int) -> EventRecord:
    return EventRecord(name=note.name, step=step, at=note.at, facts=note.facts)


def _fields(message: Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one run folder until nobody needs it; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) not in (1, 2):
        print("usage: python -m unbroken.agent DIR [LINEAGE]", file=sys.stderr)
        return 2
    directory, lineage, clock = os.path.realpath(args[0]), check_lineage(args[1] if len(args) > 1 else MAIN_LINEAGE), SystemClock()
    path, place = address(directory, lineage), PlaceLock()
    if not place.take(path, clock, LOCK_WAIT_S):
        return 0
    listener = listen(path)
    os.chdir("/")
    say(f"process {os.getpid()} serves {directory}, lineage {lineage}")
    return Daemon(directory, place, listener, clock, SystemNonces(), lineage=lineage).run()


if __name__ == "__main__":
    sys.exit(main())
