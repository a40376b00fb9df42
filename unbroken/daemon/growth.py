"""Memory that ranks wait for: made piece by piece between the daemon's turns, because tens of GB take seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from unbroken.core import messages as m
from unbroken.core.errors import UnbrokenError
from unbroken.daemon.board import Board
from unbroken.shm.server import MAX_CLIENTS, Client, Server
from unbroken.shm.slots import Slot

Waiting = tuple[Client, m.NeedSlots, Generator[None, None, list[Slot]]]


class Growth:
    """Who asked for slots, oldest first. `refusal` makes an answer of an error, `say` writes one line of the daemon's log."""

    def __init__(
        self, server: Server, board: Board, refusal: Callable[[Client, m.Message, Exception], m.Error], say: Callable[[str], None]
    ) -> None:
        self._server = server
        self._board = board
        self._refusal = refusal
        self._say = say
        self._waiting: deque[Waiting] = deque()

    @property
    def is_wanted(self) -> bool:
        """Is there somebody who waits?"""
        return bool(self._waiting)

    def ask(self, client: Client, message: m.NeedSlots) -> None:
        """A rank wants slots; it is answered when they are made."""
        if len(self._waiting) >= MAX_CLIENTS:
            raise UnbrokenError("too many ranks wait for memory: ask again later")
        self._waiting.append((client, message, self._board.table.grow(client.rank, message.size_bytes, message.num)))

    def turn(self) -> None:
        """Make one piece; in between others want to be answered."""
        if not self._waiting:
            return
        client, message, growing = self._waiting[0]
        if self._server.worker(client.rank) is not client:  # it is gone
            growing.close()
            self._waiting.popleft()
            return
        try:
            next(growing)
            return
        except StopIteration as done:
            slots: list[Slot] = done.value
        except Exception as error:  # noqa: BLE001  whatever it was, the rank is told, and the daemon serves on
            self._waiting.popleft()
            self._server.send(client, self._refusal(client, message, error))
            return
        self._waiting.popleft()
        self._board.settle()
        self._say(f"rank {client.rank} has {len(slots)} slots; all slots take {self._board.table.total_bytes} bytes of memory")
        self._server.send(client, m.Slots(sizes=tuple(slot.size_bytes for slot in slots)), [slot.fd for slot in slots])
