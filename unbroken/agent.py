"""Entry point of the node daemon: `python -m unbroken.agent DIR`. One per run folder and host; it outlives the trainers.

It owns the memory slots, decides where a start continues from, makes snapshots durable, and is the only writer of the run folder. It is
soft state: whatever it knows is rebuilt from the store and from who connects. One thread serves the socket and never waits; one drains.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from unbroken.core import messages as m
from unbroken.core.errors import Damaged, Fenced, Refused, UnbrokenError
from unbroken.core.limits import DRAIN_TIMEOUT_S, LINGER_S
from unbroken.core.os import is_alive, pidfd, try_lock
from unbroken.core.ports import Clock, Nonces, SystemClock, SystemNonces
from unbroken.core.records import EventRecord, StepRecord
from unbroken.recover.board import Board
from unbroken.recover.drain import Outcome
from unbroken.recover.folder import RunFolder
from unbroken.recover.verdict import Refusals
from unbroken.shm.channel import Channel, accept, address, listen

MAX_CLIENTS = 1024
MAX_OUTBOX = 1024
"""Messages waiting for a client that does not read; then it is dropped."""

MAX_NOTES = 256
"""Events kept for the next generation's journal; the oldest go first."""

MESSAGES_PER_TURN = 64
"""Of one client, before others have their turn."""

LOCK_WAIT_S = 10.0
"""A daemon that is just ending is waited for this long."""

TICK_S = 1.0
SHORT_TICK_S = 0.05
MAX_FAILURES = 16


class Client:
    """One connection and what its other end said it is."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid, _ = channel.peer()
        self.hello: m.Hello | None = None
        self.pidfd = -1
        self.outbox: deque[tuple[m.Message, tuple[int, ...]]] = deque()

    @property
    def role(self) -> str:
        """ "" before its Hello."""
        return self.hello.role if self.hello is not None else ""

    @property
    def rank(self) -> int:
        """Its rank if it is a worker, else -1."""
        return self.hello.rank if self.hello is not None and self.hello.role == "worker" else -1

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        """Send now if the client reads, else later. ConnectionError if it is gone or has not read for very long."""
        if len(self.outbox) >= MAX_OUTBOX:
            raise ConnectionAbortedError(f"process {self.pid} does not read its messages")
        self.outbox.append((message, tuple(fds)))
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        while self.outbox:
            message, fds = self.outbox[0]
            try:
                self.channel.send(message, fds, timeout_s=0.0)
            except TimeoutError:
                return
            self.outbox.popleft()


class Daemon:
    """The event loop. `run` returns when nobody needs the daemon any more."""

    def __init__(self, directory: str, listener: socket.socket, clock: Clock, nonces: Nonces) -> None:
        self._directory = directory
        self._listener = listener
        self._clock = clock
        self._folder = RunFolder(directory, clock, nonces)
        self._board = Board(self._folder, self._drained, self._tell)
        self._refusals = Refusals()
        self._clients: dict[int, Client] = {}
        self._keepers: dict[int, int] = {}
        self._notes: deque[m.Note] = deque(maxlen=MAX_NOTES)
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._outcomes: deque[Outcome] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._lonely_since: float | None = clock.monotonic()
        self._served = False
        self._ending_since: float | None = None
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
            m.Note: self._note,
        }

    def run(self) -> int:
        """Serve until the last client is gone and all READY snapshots are durable, or until SIGTERM; the exit code."""
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._board.start()
        while not self._finished():
            for key, events in self._selector.select(self._patience_s()):
                if isinstance(key.data, Client):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._collect_outcomes()
            self._pass_verdict(self._refusals.expire(self._clock.monotonic()))
        return self._close()

    # Life

    def _end(self, *_: object) -> None:
        if self._ending_since is None:
            self._ending_since = self._clock.monotonic()

    def _patience_s(self) -> float:
        hurry = self._ending_since is not None or self._lonely_since is not None or self._refusals.deadline_s is not None
        return SHORT_TICK_S if hurry else TICK_S

    def _finished(self) -> bool:
        now = self._clock.monotonic()
        if self._ending_since is None:
            if self._keepers or any(client.role in ("worker", "launcher") for client in self._clients.values()):
                self._lonely_since = None
                return False
            if self._lonely_since is None:
                self._lonely_since = now
        since = self._ending_since if self._ending_since is not None else self._lonely_since
        assert since is not None
        self._board.settle()
        if self._board.phase != "idle":
            return now - since > DRAIN_TIMEOUT_S
        if self._ending_since is None and now - since < (LINGER_S if self._served else LINGER_S + LOCK_WAIT_S):
            return False
        return self._nobody_comes()

    def _nobody_comes(self) -> bool:
        """Take the socket's name away; a client that got in before that is served, and the name is put back."""
        path = self._listener.getsockname()
        os.unlink(path)
        num_clients = len(self._clients)
        self._accept()
        if self._ending_since is not None or len(self._clients) == num_clients:
            return True
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._lonely_since = self._clock.monotonic()
        return False

    def _close(self) -> int:
        if self._notes:
            self._board.write_events([_event(note, self._board.last_applied or 0) for note in self._notes])
        stopped = self._board.stop()
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        self._folder.close()
        say("ended" if stopped else "ended, although a snapshot could not be made durable in time")
        return 0 if stopped else 1

    # Clients

    def _accept(self) -> None:
        while (channel := accept(self._listener)) is not None:
            if len(self._clients) >= MAX_CLIENTS:
                channel.close()
                continue
            client = Client(channel)
            self._clients[channel.fileno()] = client
            self._selector.register(channel, selectors.EVENT_READ, client)

    def _serve(self, client: Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ:
                self._listen_to(client)
        except (ConnectionError, OSError, Damaged) as error:
            if not isinstance(error, ConnectionError):
                say(f"process {client.pid} is dropped: {error}")
            self._drop(client)
        self._watch(client)

    def _listen_to(self, client: Client) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                message, fds = client.channel.receive(0.0)
            except TimeoutError:
                return
            for fd in fds:
                os.close(fd)
            if isinstance(message, m.Bye):
                raise ConnectionResetError("bye")
            self._answer(client, message)

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
            if not isinstance(error, (UnbrokenError, ValueError, TypeError, OSError)):
                traceback.print_exc()
            client.send(m.Error(kind=type(error).__name__, text=str(error), code=getattr(error, "exit_code", 1)))

    def _watch(self, client: Client) -> None:
        if self._clients.get(client.channel.fileno()) is client:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
            self._selector.modify(client.channel, events, client)

    def _drop(self, client: Client) -> None:
        fd = client.channel.fileno()
        if self._clients.get(fd) is not client:
            return
        del self._clients[fd]
        self._selector.unregister(client.channel)
        client.channel.close()
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
        if client.rank >= 0:
            self._pass_verdict(self._refusals.left(client.rank))
            self._board.settle()

    def _tell(self, message: m.Message) -> None:
        """To all workers."""
        if isinstance(message, m.Failed):
            self._failures.append(f"step {message.step}: {message.text}")
        for client in [client for client in self._clients.values() if client.role == "worker"]:
            self._send(client, message)

    def _send(self, client: Client, message: m.Message) -> None:
        try:
            client.send(message)
        except (ConnectionError, OSError):
            self._drop(client)
        self._watch(client)

    def _worker(self, rank: int) -> Client | None:
        return next((client for client in self._clients.values() if client.rank == rank), None)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    # Answers

    def _hello(self, client: Client, message: m.Hello) -> None:
        if self._ending_since is not None:
            raise Refused(f"the daemon of {self._directory} (process {os.getpid()}) is ending: try again in a moment")
        if client.hello is not None:
            raise UnbrokenError("Hello was said already")
        if message.role == "worker":
            self._make_room(client, message)
        if message.role != "observer" and client.pid > 0:  # a process of another container has no pid here
            client.pidfd = self._watch_process(client.pid, lambda: self._drop(client))
        self._served = True
        client.hello = message
        if message.keeper_pid > 1 and message.keeper_pid not in self._keepers:
            with contextlib.suppress(ProcessLookupError):
                keeper = message.keeper_pid
                self._keepers[keeper] = self._watch_process(keeper, lambda: self._forget_keeper(keeper))
        client.send(m.Welcome(pid=os.getpid(), directory=self._directory))

    def _make_room(self, client: Client, message: m.Hello) -> None:
        if not 0 <= message.rank < message.world_size:
            raise ValueError(f"rank {message.rank} of {message.world_size} ranks: must be at least 0 and less than {message.world_size}")
        for other in [c for c in self._clients.values() if c.rank >= 0 and c is not client]:
            assert other.hello is not None
            if other.rank != message.rank and other.hello.world_size == message.world_size:
                continue
            if other.pid != client.pid and is_alive(other.pid):
                raise Fenced(
                    f"{self._directory} is in use: process {other.pid} is rank {other.rank} of {other.hello.world_size} and lives; "
                    "end it first, or choose another folder"
                )
            self._drop(other)

    def _watch_process(self, pid: int, ended: Callable[[], None]) -> int:
        fd = pidfd(pid)
        self._selector.register(fd, selectors.EVENT_READ, ended)
        return fd

    def _forget_keeper(self, pid: int) -> None:
        fd = self._keepers.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)

    def _begin(self, client: Client, message: m.Begin) -> None:
        self._only_rank_0(client)
        if self._folder.changed():
            say("the run folder was removed or replaced: what memory holds of it is forgotten")
            self._board.forget()
        plan = self._folder.begin(message, self._board.cuts(), witnessed=self._board.witnessed, last_applied=self._board.last_applied)
        client.send(plan)

    def _bad(self, client: Client, message: m.Bad) -> None:
        self._only_rank_0(client)
        cut = self._folder.planned_cut()
        if cut is not None and (cut.step, cut.generation) == (message.step, message.stored_generation):
            self._board.drop(cut)
        client.send(self._folder.bad(message, self._board.cuts()))

    def _opened(self, client: Client, message: m.Opened) -> None:
        self._only_rank_0(client)
        chronicle = self._folder.opened(message)
        chronicle.add([_event(note, message.step) for note in self._notes])
        self._notes.clear()
        self._refusals.opened()
        self._board.open(chronicle)
        client.send(m.Opened(**{**_fields(message), "entry": chronicle.generation}))

    def _need_slots(self, client: Client, message: m.NeedSlots) -> None:
        self._only_workers(client)
        slots = self._board.table.need(client.rank, message.size_bytes, message.num)
        self._board.settle()
        say(f"rank {client.rank} has {len(slots)} slots; all slots take {self._board.table.total_bytes} bytes of memory")
        client.send(m.Slots(sizes=tuple(slot.size_bytes for slot in slots)), [slot.fd for slot in slots])

    def _old_slots(self, client: Client, message: m.OldSlots) -> None:
        self._only_workers(client)
        slots = self._board.table.find(message.slots)
        client.send(m.Slots(sizes=tuple(slot.size_bytes for slot in slots)), [slot.fd for slot in slots])

    def _ready(self, client: Client, message: m.Ready) -> None:
        self._only_workers(client)
        self._current(message.generation)
        if message.rank != client.rank:
            raise UnbrokenError(f"rank {client.rank} cannot speak for rank {message.rank}")
        self._board.announce(message)
        self._pass_verdict(self._refusals.applied(message.generation, message.step))
        self._board.settle()

    def _journal(self, client: Client, message: m.Journal) -> None:
        self._only_rank_0(client)
        self._current(message.generation)
        self._board.journal(message.records)
        for record in message.records:
            if isinstance(record, StepRecord):
                self._pass_verdict(self._refusals.applied(message.generation, record.step))
        self._board.settle()

    def _refuse(self, client: Client, message: m.Refuse) -> None:
        self._only_workers(client)
        self._current(message.generation)
        if message.rank != client.rank:
            raise UnbrokenError(f"rank {client.rank} cannot speak for rank {message.rank}")
        members = {c.rank for c in self._clients.values() if c.rank >= 0}
        self._pass_verdict(self._refusals.refuse(message, members, self._board.world_size, self._clock.monotonic()))

    def _status(self, client: Client, message: m.Status) -> None:
        members = sorted(c.rank for c in self._clients.values() if c.rank >= 0)
        facts = {"pid": os.getpid(), "directory": self._directory, "members": members, "failures": list(self._failures)}
        client.send(m.StatusReply(phase=self._board.phase, facts=facts | self._board.facts()))

    def _note(self, client: Client, message: m.Note) -> None:
        self._notes.append(message)

    def _only_workers(self, client: Client) -> None:
        if client.rank < 0:
            raise UnbrokenError("only workers may ask this")

    def _only_rank_0(self, client: Client) -> None:
        if client.rank != 0:
            raise UnbrokenError("only rank 0 may ask this")

    def _current(self, generation: int) -> None:
        if generation != self._board.generation:
            raise Fenced(f"generation {generation} is not the current one ({self._board.generation}): end this process")

    def _pass_verdict(self, verdict: tuple[m.Verdict, list[int]] | None) -> None:
        if verdict is None:
            return
        message, ranks = verdict
        reasons = {str(rank): text for rank, text in self._refusals.reasons.items()}
        facts = {"attempt": message.attempt, "retry": message.retry, "why": message.reason, "reasons": reasons}
        self._board.write_events([EventRecord(name="refused", step=self._board.last_applied or 0, facts=facts)])
        for rank in ranks:
            client = self._worker(rank)
            if client is not None:
                self._send(client, message)

    # Drain

    def _drained(self, outcome: Outcome) -> None:
        """Called in the drain thread."""
        self._outcomes.append(outcome)
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting then
            self._wake_out.send(b"\0")

    def _collect_outcomes(self) -> None:
        while self._outcomes:
            self._board.drained(self._outcomes.popleft())


def say(text: str) -> None:
    """One line of the daemon's log."""
    print(f"{SystemClock().utc()} {text}", flush=True)


def _event(note: m.Note, step: int) -> EventRecord:
    return EventRecord(name=note.name, step=step, at=note.at, facts=note.facts)


def _fields(message: Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def _lock(path: str, clock: Clock) -> bool:
    """Be the only daemon of this folder; False if another one serves it. One that is just ending is waited for."""
    fd = os.open(path.removesuffix(".sock") + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline_s = clock.monotonic() + LOCK_WAIT_S
    while not try_lock(fd):  # kept open, and so locked, until the process ends
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            answers = probe.connect_ex(path) == 0
        if answers or clock.monotonic() > deadline_s:
            os.close(fd)
            return False
        clock.sleep(SHORT_TICK_S)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one run folder until nobody needs it; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1:
        print("usage: python -m unbroken.agent DIR", file=sys.stderr)
        return 2
    directory, clock = os.path.realpath(args[0]), SystemClock()
    path = address(directory)
    if not _lock(path, clock):
        return 0
    listener = listen(path)
    os.chdir("/")
    say(f"process {os.getpid()} serves {directory}")
    return Daemon(directory, listener, clock, SystemNonces()).run()


if __name__ == "__main__":
    sys.exit(main())
