"""Tensors that travel together: this rank's partial sums of them, and the memory in which they cross the wire.

Buckets only say what is sent when. A sum is made element by element along the tree over units, so that no bit depends on them (I14).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from unbroken.order.tree import Node, cover, merge
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange
from unbroken.step.flat import FlatLayout, Sums

BUCKET_BYTES = 25 << 20
"""A bucket is closed at this size: large enough that a collective's latency does not matter, small enough to leave during backward."""


class Arrived(NamedTuple):
    """What a bucket's exchange gave: every rank's head, in rank order, and the sum of each tensor over all units."""

    heads: list[torch.Tensor]
    sums: Sums


class Shares:
    """Who computes what: the blocks of all ranks, and the tree nodes that cover each block."""

    def __init__(self, num_units: int, world_size: int) -> None:
        self.num_units = num_units
        self.blocks = blocks(num_units, world_size)
        self.covers = [cover(block, num_units) if len(block) else [] for block in self.blocks]


class Bucket:
    """`indices` tell where its tensors stand among all; `head_bytes`: room for what each rank tells the others besides.

    Memory: the partial sums; with several ranks three wire buffers, kept from step to step, because fresh pages are several times
    slower to write than used ones.
    """

    def __init__(
        self, indices: Sequence[int], tensors: Sequence[torch.Tensor], shares: Shares, exchange: Exchange, head_bytes: int
    ) -> None:
        self.indices = list(indices)
        self.layout = FlatLayout([tensors[i] for i in indices])
        self.nodes: dict[Node, Sums] = {}
        self._shares = shares
        self._exchange = exchange
        self._head_bytes = head_bytes
        self._slices = [size // exchange.world_size for size in self.layout.padded(exchange.world_size)]
        self._wire: dict[str, torch.Tensor] = {}

    @property
    def wire_bytes(self) -> int:
        """Bytes of the wire buffers on the rank with the most."""
        world_size, covers = self._exchange.world_size, self._shares.covers
        if world_size == 1:
            return 0
        most = max(map(len, covers))
        return self._slice_bytes * (most * world_size + sum(map(len, covers)) + world_size) + 2 * world_size * self._head_bytes

    def add(self, unit: int, values: Sums) -> None:
        """Take one unit's values over and add finished neighbours. They are ours from here on and are written."""
        self.nodes[Node(0, unit)] = [None if v is None else v.to(self.layout.types[self.layout.places[i][0]]) for i, v in enumerate(values)]
        self.nodes = merge(self.nodes, _add, self._shares.num_units)

    def complete(self) -> list[Sums]:
        """The sums that stand for all of this rank's units, in unit order; at world size 1 one, over all units."""
        return [self.nodes[node] for node in self._shares.covers[self._exchange.rank]]

    @torch.no_grad()
    def exchange(self, over: Exchange, mine: Sequence[Sums], head: torch.Tensor | None = None) -> Arrived:
        """Send these partial sums, walk the rest of the tree on this rank's slice, gather the finished slices.

        Raises ExchangeFailed; the partial sums are not changed. Cost: one copy into the frames, an all-to-all and an all-gather of
        the bucket, log2 W additions of a slice.
        """
        frames, sent = self._pack(mine, head)
        received = [self._head_bytes + len(nodes) * self._slice_bytes for nodes in self._shares.covers]
        arrived = torch.split(over.scatter(frames, sent, received, self._buffer("arrived", sum(received))), received)
        return Arrived([part[: self._head_bytes] for part in arrived], self._gather(over, arrived))

    @property
    def _slice_bytes(self) -> int:
        return sum(n * t.itemsize for n, t in zip(self._slices, self.layout.types, strict=True))

    def _buffer(self, name: str, size_bytes: int) -> torch.Tensor:
        if name not in self._wire:
            self._wire[name] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._exchange.device)
        assert self._wire[name].numel() == size_bytes
        return self._wire[name]

    def _pack(self, sums: Sequence[Sums], head: torch.Tensor | None) -> tuple[torch.Tensor, list[int]]:
        """Frames for all destinations, one after the other: the head, then each partial sum's slice for that destination; their sizes."""
        world_size = self._exchange.world_size
        mine = [self.layout.flat(values) for values in sums]
        size = self._head_bytes + len(mine) * self._slice_bytes
        frames = self._buffer("frames", size * world_size)
        for destination, frame in enumerate(torch.split(frames, size) if size else ()):
            if head is not None:
                frame[: self._head_bytes].copy_(head)
            offset = self._head_bytes
            for flats in mine:
                for group, count in enumerate(self._slices):
                    end = offset + count * self.layout.types[group].itemsize
                    flats[group].write(frame[offset:end].view(self.layout.types[group]), destination * count)
                    offset = end
        return frames, [size] * world_size

    def _gather(self, over: Exchange, arrived: Sequence[torch.Tensor]) -> Sums:
        """The rest of the tree on this rank's slice of everybody's partial sums, then all finished slices."""
        nodes: dict[Node, Sums] = {}
        for cover_nodes, part in zip(self._shares.covers, arrived, strict=True):
            offset = self._head_bytes
            for node in cover_nodes:
                slices: Sums = []
                for count, dtype in zip(self._slices, self.layout.types, strict=True):
                    slices.append(part[offset : offset + count * dtype.itemsize].view(dtype))
                    offset += count * dtype.itemsize
                nodes[node] = slices
        done = merge(nodes, _add, self._shares.num_units)
        assert len(done) == 1, f"the tree did not close: {sorted(done)}"
        world_size, flats = self._exchange.world_size, []
        for group, part_sum in enumerate(next(iter(done.values()))):
            assert part_sum is not None
            out = self._buffer(f"sums {group}", part_sum.nbytes * world_size).view(part_sum.dtype)
            flats.append(over.gather(part_sum, out))
        return [self.layout.view(flats, index) for index in range(len(self.layout.tensors))]


def _add(left: Sums, right: Sums) -> Sums:
    """left + right, in the memory of either; None counts as +0.0, so that who has no value does not matter."""
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    alone: list[torch.Tensor] = []
    for a, b in zip(left, right, strict=True):
        if a is not None and b is not None:
            ours.append(a)
            theirs.append(b)
        elif a is not None or b is not None:
            alone.append(a if a is not None else b)  # type: ignore[arg-type]
    if ours:
        torch._foreach_add_(ours, theirs)
    if alone:
        torch._foreach_add_(alone, 0.0)  # -0.0 becomes +0.0, as in the sum with a zero
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def same_bits(left: Sequence[Sums], right: Sequence[Sums]) -> bool:
    """Are these the same sums, NaN and -0.0 included?"""
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return all(a is b or (a is not None and b is not None and torch.equal(_bytes(a), _bytes(b))) for a, b in pairs)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def split(tensors: Sequence[torch.Tensor], limit_bytes: int) -> list[list[int]]:
    """Indices of the tensors of each bucket, from the last tensor to the first: the order in which backward finishes gradients."""
    found: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(tensors))):
        size = tensors[index].numel() * tensors[index].element_size()
        if found[-1] and filled + size > limit_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found
