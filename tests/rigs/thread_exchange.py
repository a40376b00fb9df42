"""Ranks as threads of this process: an Exchange whose collectives hand tensors over at a barrier, and a way to run all ranks at once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from unbroken.step.exchange import Exchange, ExchangeFailed

T = TypeVar("T")
WAIT_S = 20.0


class Meeting:
    """One group: whoever waits here fails as soon as a member goes, or when somebody does not come in time."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=WAIT_S)
        self.boxes: list[Any] = [None] * world_size

    def break_up(self) -> None:
        """Fail those who wait or will; not those who have met and are just leaving, whom Barrier.abort would fail, too."""
        with self.barrier._cond:  # type: ignore[attr-defined]
            self.barrier._cond.wait_for(lambda: self.barrier._state != 1, WAIT_S)  # type: ignore[attr-defined]
        self.barrier.abort()


class Hub:
    """All meetings of a job, by name."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._meetings: defaultdict[str, Meeting] = defaultdict(lambda: Meeting(world_size))

    def meeting(self, name: str) -> Meeting:
        """The meeting called `name`, the same for all ranks."""
        with self._lock:
            return self._meetings[name]


class ThreadExchange(Exchange):
    """What Exchange promises, over a barrier; `share` is the real one."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size = rank, hub.world_size
        self._hub = hub
        self._meeting: Meeting | None = None
        self.connect("first")

    def connect(self, name: str) -> None:
        self._meeting = self._hub.meeting(name)

    def abandon(self) -> None:
        if self._meeting is not None:
            self._meeting.break_up()
        self._meeting = None

    def scatter(self, frames: torch.Tensor, sent: list[int], received: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        assert frames.dtype == torch.uint8 and frames.numel() == sum(sent), "what is sent is what was announced"
        arrived = self._swap(torch.split(frames, sent), lambda theirs: theirs[self.rank].clone())
        assert [part.numel() for part in arrived] == received, "what arrives is what was expected"
        return torch.cat(arrived) if out is None else torch.cat(arrived, out=out)

    def gather(self, part: torch.Tensor, out: torch.Tensor | None = None, *, aside: bool = False) -> torch.Tensor:
        parts = self._swap(part, torch.Tensor.clone)
        assert len({(p.dtype, p.numel()) for p in parts}) == 1, "all parts are equally long"
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    def _swap(self, mine: Any, take: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        """What `take` makes of everybody's; nobody goes on, and writes to what it gave, before all have taken."""
        if self._meeting is None:
            raise ExchangeFailed("the ranks are not connected")
        try:
            self._meeting.boxes[self.rank] = mine
            self._meeting.barrier.wait()
            found = [take(box) for box in self._meeting.boxes]
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeFailed("a rank has gone, or did not come") from error
        return found


def all_ranks(world_size: int, act: Callable[[Exchange], T]) -> list[T]:
    """Run `act` on every rank at once; the results in rank order. The first failure that is no consequence of another's is raised."""
    hub = Hub(world_size)

    def one(rank: int) -> T:
        exchange = ThreadExchange(hub, rank)
        try:
            return act(exchange)
        except BaseException:
            exchange.abandon()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, ExchangeFailed)):
        raise error
    return [future.result() for future in futures]


def bits_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The bytes of each tensor."""
    return [tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]
