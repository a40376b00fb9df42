"""The daemon's side of its socket: who is connected, whose process lives, and what each of them says. It never waits for anybody."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from unbroken.core.errors import Damaged
from unbroken.core.messages import Bye, Hello, Message
from unbroken.core.os import pidfd
from unbroken.shm.channel import Channel, accept, encode, listen

MAX_CLIENTS = 1024
MAX_OUTBOX = 1024
"""Messages waiting for a client that does not read; then it is dropped."""

MESSAGES_PER_TURN = 64
"""Of one client, before others have their turn."""

MAX_LAST_WORDS = 4096
"""Messages heard from a client that has ended."""


class Client:
    """One connection, and who its other end said it is."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid, _ = channel.peer()
        self.hello: Hello | None = None
        self.outbox: deque[tuple[Message, tuple[int, ...]]] = deque()

    @property
    def role(self) -> str:
        """What its Hello said; "" before."""
        return self.hello.role if self.hello is not None else ""

    @property
    def rank(self) -> int:
        """Its rank if it is a worker, else -1."""
        return self.hello.rank if self.hello is not None and self.hello.role == "worker" else -1

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now if the client reads, else later. ConnectionError if it is gone or has not read for long, ValueError if too large."""
        encode(message)
        if len(self.outbox) >= MAX_OUTBOX:
            raise ConnectionAbortedError(f"process {self.pid} does not read its messages")
        self.outbox.append((message, tuple(fds)))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the client reads."""
        with contextlib.suppress(TimeoutError):
            while self.outbox:
                message, fds = self.outbox[0]
                self.channel.send(message, fds, timeout_s=0.0)
                self.outbox.popleft()


class Server:
    """All connections. `hear` gets each message, `gone` each client that has ended, both within `turn`."""

    def __init__(self, listener: socket.socket, hear: Callable[[Client, Message], None], gone: Callable[[Client], None]) -> None:
        self._listener = listener
        self._name = _identity(listener.getsockname())
        self._hear = hear
        self._gone = gone
        self._clients: dict[int, Client] = {}
        self._processes: dict[int, tuple[int, Client | None]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)

    def __iter__(self) -> Iterator[Client]:
        """Clients that have said Hello."""
        return iter([client for client in self._clients.values() if client.hello is not None])

    @property
    def keepers(self) -> list[int]:
        """Watched processes without a connection that still live."""
        return [pid for pid, client in self._processes.values() if client is None]

    @property
    def wake_fd(self) -> int:
        """Whatever is written here ends the wait of `turn`; for signals."""
        return self._wake_out.fileno()

    def wake(self) -> None:
        """End the wait of `turn`; from any thread."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting then
            self._wake_out.send(b"\0")

    def turn(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and deal with it."""
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, Client):
                self._serve(key.data, events)
            else:
                key.data()

    def watch(self, pid: int, client: Client | None) -> None:
        """Notice the death of a process: of a client, whose connection a forked child may keep open, or of a keeper (None)."""
        if client is None and pid in self.keepers:
            return
        fd = pidfd(pid)
        self._processes[fd] = pid, client
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._ended(fd))

    def worker(self, rank: int) -> Client | None:
        """The connection of a rank."""
        return next((client for client in self._clients.values() if client.rank == rank), None)

    def send(self, client: Client, message: Message, fds: Sequence[int] = ()) -> None:
        """Send to a client that may be gone by now."""
        try:
            client.send(message, fds)
        except OSError:
            self.drop(client)
        self._adjust(client)

    def drop(self, client: Client) -> None:
        """End a connection. What its process said before counts: it may be the step or the snapshot to go on from."""
        fd = client.channel.fileno()
        if self._clients.get(fd) is not client:
            return
        del self._clients[fd]
        self._selector.unregister(client.channel)
        for watched in [watched for watched, (_, owner) in self._processes.items() if owner is client]:
            self._unwatch(watched)
        for message in self._messages(client, MAX_LAST_WORDS):
            if client.hello is not None and not isinstance(message, (Hello, Bye)):
                with contextlib.suppress(OSError):
                    self._hear(client, message)
        client.channel.close()
        if client.hello is not None:
            self._gone(client)

    def retire(self) -> bool:
        """Take the socket's name away so that nobody new comes. False if somebody came just before: the name is put back then."""
        path = self._listener.getsockname()
        if self.is_at(path):
            os.unlink(path)
        before = len(self._clients)
        self._accept()
        if len(self._clients) == before:
            return True
        self.listen_at(path)
        return False

    def is_at(self, path: str) -> bool:
        """True while whoever looks for us at `path` finds us: a cleaner may remove the socket, another daemon replace it. One stat."""
        return path == self._listener.getsockname() and _identity(path) == self._name is not None

    def listen_at(self, path: str) -> None:
        """Be found at `path` from now on; whoever has connected by now is served. Hold the lock of that place."""
        listener = listen(path)
        self._accept()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._name = listener, _identity(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """End all connections."""
        for client in list(self._clients.values()):
            self.drop(client)
        for fd in list(self._processes):
            self._unwatch(fd)
        self._selector.close()
        for end in (self._listener, self._wake_in, self._wake_out):
            end.close()

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
                for message in self._messages(client, MESSAGES_PER_TURN, is_alive=True):
                    self._hear(client, message)
        except (OSError, Damaged):
            self.drop(client)
        self._adjust(client)

    def _messages(self, client: Client, at_most: int, *, is_alive: bool = False) -> Iterator[Message]:
        """What a client has said. The end of a client that `is_alive` is a ConnectionError; its Bye is one, too."""
        for _ in range(at_most):
            try:
                message, fds = client.channel.receive(0.0)
            except TimeoutError:
                return
            except (OSError, Damaged):
                if is_alive:
                    raise
                return
            for fd in fds:
                os.close(fd)
            if isinstance(message, Bye) and is_alive:
                raise ConnectionResetError("bye")
            yield message

    def _adjust(self, client: Client) -> None:
        if self._clients.get(client.channel.fileno()) is client:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
            self._selector.modify(client.channel, events, client)

    def _ended(self, fd: int) -> None:
        if fd in self._processes:
            _, client = self._processes[fd]
            if client is not None:
                self.drop(client)
            else:
                self._unwatch(fd)

    def _unwatch(self, fd: int) -> None:
        del self._processes[fd]
        self._selector.unregister(fd)
        os.close(fd)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass


def _identity(path: str) -> tuple[int, int] | None:
    """(device, inode) of what lies at a path, None for nothing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
