"""Ordered reduction: the gradient of a step is a fixed binary tree of sums over its units, whoever computed them (I14).

    g = tree_sum(w_u * g_u) / sum(w_u)

A rank sets each unit's gradient aside in one flat vector and merges tree neighbours at once, so that it holds at most log2 U + 1 of
them. One step then takes two collectives: every rank receives the others' partial sums of *its* slice of the vector, walks the rest of
the tree on it, and the finished slices are gathered. The facts of the step (losses, weights, sample digests, signals, buffers' new
integer values) ride in the first. Bytes on the wire: 2 (W-1)/W of the gradient, as in a ring.

Sums are made in float32 for half types, else in the gradient's own type. A unit without gradient for a parameter counts as +0.0; if no
unit had one, `.grad` stays None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from msgspec import Struct

from unbroken.order.tree import Node, cover, merge
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange

_ALIGN = 64


class UnitFacts(Struct, frozen=True, array_like=True):
    """What travels with a unit: sample digest, weight, float64 loss bits (hex), and a digest of its integer buffers ("" if untouched)."""

    unit: int
    digest: str
    weight: int
    loss: str
    integers: str


class Flags(Struct, frozen=True, array_like=True):
    """What each rank sends with its units: asked to stop, a snapshot at the boundary after next (rank 0), its daemon has gone."""

    stop: bool = False
    snapshot_next: bool = False
    daemon_lost: bool = False


class RankFacts(Struct, frozen=True, array_like=True):
    """What one rank tells all others in a step's payload. `integers` are raw new values of integer buffers, "" if it had no unit."""

    units: tuple[UnitFacts, ...]
    flags: Flags = Flags()
    present: bytes = b""
    integers: bytes = b""


@dataclass
class Reduced:
    """Result of a step's collective phase, the same on every rank."""

    facts: list[RankFacts]
    total_weight: int
    flats: list[torch.Tensor] = field(default_factory=list)

    def units(self) -> list[UnitFacts]:
        """All units of the step, in order."""
        return sorted((u for rank in self.facts for u in rank.units), key=lambda u: u.unit)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are summed."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


class FlatLayout:
    """Where each tensor lies in the flat vector of its sum type; the same at every world size. Sizes in elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.types: list[torch.dtype] = []
        self.places: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        for tensor in self.tensors:
            dtype = sum_type(tensor.dtype)
            if dtype.is_complex or not dtype.is_floating_point:
                raise TypeError(f"gradients of type {tensor.dtype} cannot be reduced in order; use torch.view_as_real parameters")
            if dtype not in self.types:
                self.types.append(dtype)
                self.sizes.append(0)
            group = self.types.index(dtype)
            self.places.append((group, self.sizes[group]))
            self.sizes[group] += tensor.numel()

    def padded(self, world_size: int) -> list[int]:
        """Elements of each flat vector, rounded up so that it splits into equal slices."""
        step = world_size * _ALIGN
        return [(size + step - 1) // step * step for size in self.sizes]

    def view(self, flats: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The part of `flats` that belongs to tensor number `index`, in its shape."""
        group, start = self.places[index]
        tensor = self.tensors[index]
        return flats[group][start : start + tensor.numel()].view(tensor.shape)


class OrderedReduction:
    """Collects the units' gradients (and float buffers) of one step and reduces them in unit order.

    Memory: at most log2 U + 1 flat vectors per aligned block, reused from step to step.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_units: int, exchange: Exchange, integer_bytes: int = 0) -> None:
        self.layout = FlatLayout(tensors)
        self.num_units = num_units
        self._exchange = exchange
        self._blocks = blocks(num_units, exchange.world_size)
        self._padded = self.layout.padded(exchange.world_size)
        self._nodes: dict[Node, _Partial] = {}
        self._free: list[_Partial] = []
        self._present = bytearray(len(self.layout.tensors))
        self._integer_bytes = integer_bytes

    @property
    def buffers_bytes(self) -> int:
        """Most bytes that the partial sums of a rank can take."""
        size = sum(n * t.itemsize for n, t in zip(self._padded, self.layout.types, strict=True))
        most = max(len(cover(b, self.num_units)) for b in self._blocks if len(b))
        return size * (most + self.num_units.bit_length())

    @property
    def present(self) -> bytes:
        """One byte per tensor: 1 if any of this rank's units had a value for it."""
        return bytes(self._present)

    def reset(self) -> None:
        """Forget the units of an attempt."""
        self._free.extend(self._nodes.values())
        self._nodes.clear()
        self._present = bytearray(len(self.layout.tensors))

    @torch.no_grad()
    def add(self, unit: int, weight: int, values: Sequence[torch.Tensor | None], present: Sequence[bool]) -> None:
        """Set one unit's values aside, multiplied by its weight, and merge finished neighbours; None counts as +0.0.

        `present` says which of them the unit really produced. Cost: one pass over the values.
        """
        partial = self._take()
        targets, sources = [], []
        for index, (value, is_present) in enumerate(zip(values, present, strict=True)):
            self._present[index] |= is_present
            if value is None:
                partial.views[index].zero_()
            else:
                targets.append(partial.views[index])
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)
        if weight != 1:
            torch._foreach_mul_(partial.flats, float(weight))
        self._nodes[Node(0, unit)] = partial
        self._nodes = merge(self._nodes, self._merge_partials, self.num_units)

    def reduce(self, facts: RankFacts) -> Reduced:
        """One collective phase: sums in unit order, divided once by the total weight. Raises ExchangeFailed; nothing is changed then.

        Cost: an all-to-all and an all-gather of the gradient, log2 W additions of a slice.
        """
        exchange = self._exchange
        device = exchange.device
        mine = [self._nodes[node].flats for node in cover(self._blocks[exchange.rank], self.num_units)]
        head = _frame(facts, self._head_bytes(), device)
        slices = [size // exchange.world_size for size in self._padded]
        slice_bytes = sum(n * t.itemsize for n, t in zip(slices, self.layout.types, strict=True))
        frames = _pack(head, mine, slices, exchange.world_size)
        counts = [len(cover(b, self.num_units)) if len(b) else 0 for b in self._blocks]
        sent = [head.numel() + len(mine) * slice_bytes] * exchange.world_size
        received = [head.numel() + count * slice_bytes for count in counts]
        arrived = torch.split(exchange.scatter(frames, sent, received), received)
        told = [_unframe(part[: head.numel()]) for part in arrived]
        nodes: dict[Node, list[torch.Tensor]] = {}
        for block, part in zip(self._blocks, arrived, strict=True):
            offset = head.numel()
            for node in cover(block, self.num_units) if len(block) else ():
                nodes[node] = []
                for count, dtype in zip(slices, self.layout.types, strict=True):
                    size = count * dtype.itemsize
                    nodes[node].append(part[offset : offset + size].view(dtype))
                    offset += size
        done = merge(nodes, _add, self.num_units)
        assert len(done) == 1, f"the tree did not close: {sorted(done)}"
        total = sum(unit.weight for rank in told for unit in rank.units)
        part_sums = next(iter(done.values()))
        for flat in part_sums:
            flat.div_(max(total, 1))
        flats = [exchange.gather(flat) for flat in part_sums]
        return Reduced(facts=told, total_weight=total, flats=flats)

    def _head_bytes(self) -> int:
        """Room for one rank's facts, the same on every rank: what the largest block can need."""
        most = max(len(b) for b in self._blocks)
        size = 256 + 160 * most + len(self.layout.tensors) + self._integer_bytes
        return (size + _ALIGN - 1) // _ALIGN * _ALIGN

    def _take(self) -> _Partial:
        if self._free:
            return self._free.pop()
        device = self._exchange.device
        # zeros: the padding behind the last tensor is summed and sent too
        flats = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in zip(self._padded, self.layout.types, strict=True)]
        return _Partial(flats, [self.layout.view(flats, index) for index in range(len(self.layout.tensors))])

    def _merge_partials(self, left: _Partial, right: _Partial) -> _Partial:
        _add(left.flats, right.flats)
        self._free.append(right)
        return left


@dataclass(frozen=True)
class _Partial:
    """A sum over some units: one flat vector per sum type, and each tensor's view into it."""

    flats: list[torch.Tensor]
    views: list[torch.Tensor]


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    for a, b in zip(left, right, strict=True):
        a.add_(b)
    return left


def _frame(facts: RankFacts, size_bytes: int, device: torch.device) -> torch.Tensor:
    data = msgspec.msgpack.encode(facts)
    assert len(data) + 4 <= size_bytes, f"step facts of {len(data)} bytes do not fit {size_bytes}"
    frame = bytearray(size_bytes)
    frame[:4] = len(data).to_bytes(4, "little")
    frame[4 : 4 + len(data)] = data
    return torch.frombuffer(frame, dtype=torch.uint8).to(device)


def _unframe(frame: torch.Tensor) -> RankFacts:
    raw = bytes(frame.cpu().numpy())
    return msgspec.msgpack.decode(raw[4 : 4 + int.from_bytes(raw[:4], "little")], type=RankFacts)


def _pack(head: torch.Tensor, nodes: list[list[torch.Tensor]], slices: list[int], world_size: int) -> torch.Tensor:
    """Frames for all destinations, one after the other: the facts, then each partial sum's slice for that destination."""
    parts: list[torch.Tensor] = []
    for destination in range(world_size):
        parts.append(head)
        for flats in nodes:
            for flat, count in zip(flats, slices, strict=True):
                parts.append(flat[destination * count : (destination + 1) * count].view(torch.uint8))
    return torch.cat(parts)
