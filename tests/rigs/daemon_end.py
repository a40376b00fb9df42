"""The daemon's end of a trainer's line, in this process: it hears everything and says what the test wants, slots included."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from unbroken.core.messages import Message, NeedSlots, OldSlots, Slots
from unbroken.core.ports import Clock, SystemClock
from unbroken.daemon.memory import SlotTable
from unbroken.recover.link import Link
from unbroken.shm.channel import Channel

M = TypeVar("M")
Said = Message | tuple[Message, list[int]]
Answer = Callable[[Message], Iterable[Said]]
WAIT_S = 10.0


def line(clock: Clock | None = None) -> tuple[Link, Channel]:
    """A link and the other end of it, which the test itself holds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(Channel(theirs), clock or SystemClock()), Channel(ours)


def heard_on(peer: Channel) -> list[Message]:
    """All that has been sent to this end so far."""
    found: list[Message] = []
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            found.append(peer.receive(0.0)[0])
    return found


class DaemonEnd:
    """Answers by `answer`, in a thread, until closed. `table` holds the memory slots that `with_slots` hands out."""

    def __init__(self, answer: Answer = lambda _: (), clock: Clock | None = None) -> None:
        self.link, self._channel = line(clock)
        self.heard: list[Message] = []
        self.table = SlotTable()
        self._answer = answer
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def tell(self, *messages: Message) -> None:
        """News that nobody asked for."""
        with self._lock:
            for message in messages:
                self._channel.send(message)

    def wait_for(self, kind: type[M], num: int = 1) -> list[M]:
        """Messages of this type, once there are `num` of them."""
        deadline = time.monotonic() + WAIT_S
        found: list[Any]
        while len(found := [message for message in self.heard if isinstance(message, kind)]) < num:
            assert time.monotonic() < deadline, f"{len(found)} of {num} {kind.__name__} came"
            time.sleep(0.002)
        return found

    def hang_up(self) -> None:
        """End like a daemon that is killed; its slots are gone."""
        self._closed.set()
        self._thread.join(WAIT_S)
        self._channel.close()
        self.table.close()

    def close(self) -> None:
        """Both ends."""
        self.hang_up()
        self.link.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if not self._channel.wait(0.02):
                continue
            with self._lock:
                try:
                    message = self._channel.receive(0.0)[0]
                except ConnectionError:
                    return
                for said in (*self._slots(message), *self._answer(message)):
                    self._channel.send(*said) if isinstance(said, tuple) else self._channel.send(said)
            self.heard.append(message)

    def _slots(self, message: Message) -> Iterable[Said]:
        if isinstance(message, NeedSlots | OldSlots):
            found = self.table.find(message.slots) if isinstance(message, OldSlots) else self.table.need(0, message.size_bytes, message.num)
            yield Slots(sizes=tuple(slot.size_bytes for slot in found)), [slot.fd for slot in found]


class HandClock:
    """A clock that the test moves; sleeping moves it, too."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def utc(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def sleep(self, seconds: float) -> None:
        self.now += seconds
