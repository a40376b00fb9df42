"""The wire between ranks: two collectives on byte buffers, torn down and rebuilt without leaving the process.

A process group of our own beside the user's: a failed attempt can drop it, which closes its connections, so that peers see the
failure at once instead of waiting for a timeout, and all can build the next one under a new name in the same store.
"""

from __future__ import annotations

import copy
import datetime
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from unbroken.core.limits import COLLECTIVE_TIMEOUT_S
from unbroken.core.ports import environment, failpoint

_times_named: Counter[str] = Counter()
"""How often this process has connected under a name: a second Run of one script must not meet the addresses of the first."""


class ExchangeFailed(RuntimeError):
    """A collective did not complete on this rank. It proves nothing about what others saw."""


class _Connection:
    """A process group until somebody drops it, for all who hold this."""

    def __init__(self, group: Any = None) -> None:
        self.group = group


class Exchange:
    """Collectives among all ranks of the run; at world size 1 they are copies.

    Cost per call: one collective, no device synchronisation of its own beyond what the backend's wait does.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = device
        self._connection = _Connection()

    def as_connected(self) -> Exchange:
        """The same, but bound to the group of this moment: what was begun over one group must not go on over the next."""
        return copy.copy(self)

    def connect(self, name: str) -> None:
        """Build the group called `name`; every rank must use the same names in the same order."""
        if self.world_size == 1:
            return
        store = c10d.PrefixStore(f"unbroken/{name}/{_times_named[name]}", c10d._get_default_store())
        _times_named[name] += 1
        timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._connection = _Connection(dist.ProcessGroupNCCL(store, self.rank, self.world_size, options))
            else:
                self._connection = _Connection(dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout))
        except RuntimeError as error:
            raise ExchangeFailed(f"could not connect {self.world_size} ranks: {error}") from error

    def abandon(self) -> None:
        """Drop the group. Peers that wait in a collective with us fail at once."""
        if self._connection.group is not None and self.device.type == "cuda":
            self._connection.group.abort()
        self._connection.group = None

    def scatter(self, frames: torch.Tensor, sent: list[int], received: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """All-to-all of uint8: `sent[d]` bytes go to rank d, `received[s]` come from rank s, in rank order, into `out` if given."""
        if self.world_size == 1:
            return frames
        out = torch.empty(sum(received), dtype=torch.uint8, device=frames.device) if out is None else out
        self._wait("exchange.scatter", lambda group: [group.alltoall_base(out, frames, received, sent)])
        return out

    def gather(self, part: torch.Tensor, out: torch.Tensor | None = None, *, aside: bool = False) -> torch.Tensor:
        """All-gather of equally long parts into one flat tensor, `out` if given, in rank order.

        aside: this one may run beside one that is not, in another thread, and must not take in what belongs to it.
        """
        if self.world_size == 1:
            return part
        out = torch.empty(part.numel() * self.world_size, dtype=part.dtype, device=part.device) if out is None else out
        self._wait("exchange.gather", lambda group: self._start_gather(group, part, out, aside))
        return out

    def _start_gather(self, group: Any, part: torch.Tensor, out: torch.Tensor, aside: bool) -> list[Any]:
        """On Gloo from rank to rank: its own all-gather goes through two more copies of everything (5 times the processor time)."""
        if self.device.type == "cuda":
            return [group._allgather_base(out, part)]
        parts = list(torch.chunk(out, self.world_size)) if part.numel() else []
        works = []
        for distance in range(1, len(parts)):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            tag = distance + aside * self.world_size
            works += [group.recv([parts[source]], source, tag), group.send([part], to, tag)]
        if parts:
            parts[self.rank].copy_(part)
        return works

    def share(self, value: Any, as_type: Any) -> list[Any]:
        """Every rank's JSON-able `value`, in rank order. For start and recovery, not for the step path.

        Gradients of a step that the loop has left may still be on their way meanwhile.
        """
        data = msgspec.json.encode(value)
        if self.world_size == 1:
            return [msgspec.json.decode(data, type=as_type)]
        sizes = self.gather(torch.tensor([len(data)], dtype=torch.int64, device=self.device), aside=True).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.gather(padded.to(self.device), aside=True).cpu().view(self.world_size, -1)
        return [msgspec.json.decode(bytes(parts[r, : sizes[r]].numpy()), type=as_type) for r in range(self.world_size)]

    def _wait(self, name: str, start: Callable[[Any], list[Any]]) -> None:
        if self._connection.group is None:
            raise ExchangeFailed("the ranks are not connected")
        try:
            failpoint(name)
            for work in start(self._connection.group):
                work.wait()
        except RuntimeError as error:
            raise ExchangeFailed(str(error)) from error


def join_world(device: torch.device) -> bool:
    """Initialise torch.distributed when the launcher says that there are several ranks and nobody has yet; True if we did.

    Raises ExchangeFailed when the members cannot find each other in time.
    """
    if int(environment("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)))
        # torchrun may keep one store over restarts: without a name of its own an attempt meets the addresses of dead processes
        store = c10d.PrefixStore(f"unbroken/{environment('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )
    except (RuntimeError, ValueError) as error:
        raise ExchangeFailed(f"torch.distributed could not start from the launcher's environment: {error}") from error
    return True
