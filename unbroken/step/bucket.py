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
from unbroken.step.flat import ALIGN, FlatLayout, Sums
from unbroken.step.partial import Partial, add

BUCKET_BYTES = 25 << 20
"""A bucket is closed at this size: large enough that a collective's latency does not matter, small enough to leave during backward."""


class Arrived(NamedTuple):
    """What a bucket's exchange gave: every rank's head, in rank order, and the sum of each tensor over all units."""

    heads: list[torch.Tensor]
    whole: Partial


class Shares:
    """Who computes what: the blocks of all ranks, and the tree nodes that cover each block."""

    def __init__(self, num_units: int, world_size: int) -> None:
        self.num_units = num_units
        self.blocks = blocks(num_units, world_size)
        self.covers = [cover(block, num_units) if len(block) else [] for block in self.blocks]
        self.most_nodes = max(map(len, self.covers))


class Bucket:
    """`indices` tell where its tensors stand among all; `head_bytes`: room for what each rank tells the others besides.

    A frame is the head, the shifts of the rank's sums (int64, room for as many as any rank has), then each sum's slice. Memory: the
    partial sums until they are packed; with several ranks the frames of the others, an own one, what arrives and the results, kept from
    step to step, because fresh pages are several times slower to write than used ones.
    """

    def __init__(
        self, indices: Sequence[int], tensors: Sequence[torch.Tensor], shares: Shares, exchange: Exchange, head_bytes: int
    ) -> None:
        self.indices = list(indices)
        self.layout = FlatLayout([tensors[i] for i in indices])
        self.nodes: dict[Node, Partial] = {}
        self._shares = shares
        self._exchange = exchange
        self._head_bytes = head_bytes
        self._slices = [size // exchange.world_size for size in self.layout.padded(exchange.world_size)]
        self._slice_bytes = sum(n * t.itemsize for n, t in zip(self._slices, self.layout.types, strict=True))
        self._slices_begin = head_bytes + (8 * shares.most_nodes + ALIGN - 1) // ALIGN * ALIGN
        self._frame_bytes = [self._slices_begin + len(nodes) * self._slice_bytes for nodes in shares.covers]
        self._packed: set[tuple[int, int]] = set()
        self.renew()

    @property
    def wire_bytes(self) -> int:
        """Bytes of the wire buffers on the rank with the most."""
        world_size = self._exchange.world_size
        if world_size == 1:
            return 0
        return max(self._frame_bytes) * world_size + sum(self._frame_bytes) + self._slice_bytes * world_size

    def renew(self) -> None:
        """Use other memory from here on: a collective that failed may still write to the old one."""
        self._wire: dict[str, torch.Tensor] = {}
        self._regions: dict[tuple[int, int], list[tuple[torch.Tensor, int, int]]] = {}

    def reset(self) -> None:
        """Forget the units of an attempt."""
        self.nodes.clear()
        self._packed.clear()

    def add(self, unit: int, values: Sums, shift: int) -> None:
        """Take one unit's values over and add finished neighbours. They are ours from here on and are written."""
        places = self.layout.places
        sums: Sums = [None if v is None else v.to(self.layout.types[places[i][0]]) for i, v in enumerate(values)]
        self.nodes[Node(0, unit)] = Partial(shift, sums)
        self.nodes = merge(self.nodes, add, self._shares.num_units)

    def whole(self) -> Partial:
        """At world size 1: the sums over all units."""
        (whole,) = self.nodes.values()
        return whole

    def put(self, position: int, node: int, value: torch.Tensor | None) -> None:
        """Write one tensor's sum over the rank's cover node number `node` into the frames; None is +0.0. Cost: one copy of it."""
        self._packed.add((position, node))
        flat = None if value is None else value.reshape(-1)
        for target, start, stop in self._targets(position, node):
            if flat is None:
                target.zero_()
            else:
                target.copy_(flat[start:stop])

    def pack(self) -> None:
        """Write all that is not in the frames yet, and let the sums go."""
        mine = [self.nodes[node] for node in self._shares.covers[self._exchange.rank]]
        for number, (_, sums) in enumerate(mine):
            for position, value in enumerate(sums):
                if (position, number) not in self._packed:
                    self.put(position, number, value)
        shifts = torch.tensor([shift for shift, _ in mine], dtype=torch.int64)
        for destination in range(self._exchange.world_size):
            self._shifts(self._frame(destination), len(mine)).copy_(shifts)
        self.nodes.clear()

    @torch.no_grad()
    def exchange(self, over: Exchange, head: torch.Tensor | None = None) -> Arrived:
        """Send the frames, walk the rest of the tree on this rank's slice, gather the finished slices. Raises ExchangeFailed.

        Cost: an all-to-all and an all-gather of the bucket, log2 W additions of a slice; between the two the device is waited for.
        """
        rank, sizes = over.rank, self._frame_bytes
        if head is not None:
            for destination in range(over.world_size):
                self._frame(destination)[: self._head_bytes].copy_(head)
        sent = [sizes[rank] * (destination != rank) for destination in range(over.world_size)]
        received = [size * (source != rank) for source, size in enumerate(sizes)]
        frames, arrived = self._buffer("frames", sum(sent)), self._buffer("arrived", sum(received))
        parts = list(torch.split(over.scatter(frames, sent, received, arrived), received))
        parts[rank] = self._frame(rank)
        return Arrived([part[: self._head_bytes] for part in parts], self._gather(over, parts))

    def _shifts(self, frame: torch.Tensor, num: int) -> torch.Tensor:
        return frame[self._head_bytes : self._head_bytes + 8 * num].view(torch.int64)

    def _buffer(self, name: str, size_bytes: int) -> torch.Tensor:
        if name not in self._wire:
            self._wire[name] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._exchange.device)
        assert self._wire[name].numel() == size_bytes
        return self._wire[name]

    def _frame(self, destination: int) -> torch.Tensor:
        """What goes to this rank; our own part stays where it is."""
        rank, world_size = self._exchange.rank, self._exchange.world_size
        size = self._frame_bytes[rank]
        if destination == rank:
            return self._buffer("own", size)
        start = (destination - (destination > rank)) * size
        return self._buffer("frames", size * (world_size - 1))[start : start + size]

    def _targets(self, position: int, node: int) -> list[tuple[torch.Tensor, int, int]]:
        """Where in the frames a tensor's elements [start, stop) lie."""
        key = (position, node)
        if key not in self._regions:
            group = self.layout.places[position][0]
            dtype = self.layout.types[group]
            before = sum(n * t.itemsize for n, t in zip(self._slices[:group], self.layout.types, strict=False))
            base = self._slices_begin + node * self._slice_bytes + before
            found = []
            for destination, offset, start, stop in self.layout.regions(position, self._slices):
                first = base + offset * dtype.itemsize
                target = self._frame(destination)[first : first + (stop - start) * dtype.itemsize].view(dtype)
                found.append((target, start, stop))
            self._regions[key] = found
        return self._regions[key]

    def _gather(self, over: Exchange, arrived: Sequence[torch.Tensor]) -> Partial:
        """The rest of the tree on this rank's slice of everybody's partial sums, then all finished slices."""
        nodes: dict[Node, Partial] = {}
        for cover_nodes, part in zip(self._shares.covers, arrived, strict=True):
            offset = self._slices_begin
            for node, shift in zip(cover_nodes, self._shifts(part, len(cover_nodes)).tolist(), strict=True):
                slices: Sums = []
                for count, dtype in zip(self._slices, self.layout.types, strict=True):
                    slices.append(part[offset : offset + count * dtype.itemsize].view(dtype))
                    offset += count * dtype.itemsize
                nodes[node] = Partial(shift, slices)
        done = merge(nodes, add, self._shares.num_units)
        assert len(done) == 1, f"the tree did not close: {sorted(done)}"
        ((shift, sums),) = done.values()
        flats = []
        for group, part_sum in enumerate(sums):
            assert part_sum is not None
            out = self._buffer(f"sums {group}", part_sum.nbytes * over.world_size).view(part_sum.dtype)
            flats.append(over.gather(part_sum, out))
        return Partial(shift, [self.layout.view(flats, index) for index in range(len(self.layout.tensors))])


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
