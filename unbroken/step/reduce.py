"""Ordered reduction: the gradient of a step is a fixed binary tree of sums over its units, whoever computed them (I14).

    g = tree_sum(2^s_u g_u) / (sum(w_u) / N)    g_u: gradient of (w_u / N / 2^s_u) * loss_u,  N: samples of a full step

The shift s_u is 0 where a unit weighs as much as it has samples. Where it weighs its tokens, the power of two in that stays out of the
loss (half types would overflow, and a GradScaler's scale with them): sums carry their shift, and the one of the smaller is scaled down
when two are added, which is exact.

A rank keeps each unit's gradients as backward made them and adds tree neighbours at once, so that it holds at most log2 U + 1 sums; in
a full step the division is by one and left out. At world size 1 nothing is copied. Else one step takes two collectives: every rank
receives the others' partial sums of *its* slice of all tensors, walks the rest of the tree on it, and the finished slices are gathered.
The facts of the step (losses, weights, sample digests, signals, buffers' new integer values) ride in the first. Bytes on the wire:
2 (W-1)/W of the gradient, as in a ring.

Sums are made in float32 for half types, else in the gradient's own type. A unit without gradient for a parameter counts as +0.0; if no
unit had one, `.grad` stays None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from unbroken.order.tree import Node, cover, merge, span
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange

_ALIGN = 64

Sums = list[torch.Tensor | None]
"""A sum over some units, per tensor; None where none of them had a value."""

NO_SHIFT = -(1 << 12)
"""Of a unit that weighs nothing: any other shift is larger, and 2 to its power is 0."""


class Partial(NamedTuple):
    """2^shift times `sums` is what some units give to the step."""

    shift: int
    sums: Sums


def shift_of(weight: int, samples: int) -> int:
    """The power of two that stays out of a unit's loss: the largest that is at most weight / samples."""
    if weight < 1:
        return NO_SHIFT
    samples = max(samples, 1)
    shift = weight.bit_length() - samples.bit_length()
    return shift if weight << max(-shift, 0) >= samples << max(shift, 0) else shift - 1


class UnitFacts(Struct, frozen=True, array_like=True):
    """What travels with a unit: sample digest, weight, float64 loss bits (hex), a digest of its integer buffers ("" if untouched), the
    number of its samples, and the shift of its gradients."""

    unit: int
    digest: str
    weight: int
    loss: str
    integers: str
    samples: int = 0
    shift: int = 0


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
    """Result of a step's collective phase, the same on every rank: the sum of each tensor over all units, None where no unit had one.

    The sums' memory is used again by the next step. They lack a factor of 2^shift.
    """

    facts: list[RankFacts]
    total_weight: int
    shift: int = 0
    sums: list[torch.Tensor | None] = field(default_factory=list)

    def units(self) -> list[UnitFacts]:
        """All units of the step, in order."""
        return sorted((u for rank in self.facts for u in rank.units), key=lambda u: u.unit)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are summed."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class _Flat:
    """One sum type's part of a list of tensors, seen as one vector; a missing tensor is zeros."""

    def __init__(self, starts: list[int], values: list[torch.Tensor | None], ends: list[int]) -> None:
        self._parts = list(zip(starts, ends, values, strict=True))

    def write(self, out: torch.Tensor, start: int) -> None:
        """Copy elements [start, start + len(out)); what lies beyond the last tensor is zero."""
        stop, filled = start + out.numel(), start
        targets, sources = [], []
        for first, last, value in self._parts:
            a, b = max(first, start), min(last, stop)
            if a >= b:
                continue
            filled = b
            if value is None:
                out[a - start : b - start].zero_()
            else:
                targets.append(out[a - start : b - start])
                sources.append(value.reshape(-1)[a - first : b - first])
        if targets:
            torch._foreach_copy_(targets, sources)
        out[max(filled, start) - start :].zero_()


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

    def flat(self, values: Sums) -> list[_Flat]:
        """For each sum type the values of its tensors as one vector."""
        found = []
        for group in range(len(self.types)):
            members = [i for i, (g, _) in enumerate(self.places) if g == group]
            starts = [self.places[i][1] for i in members]
            ends = [start + self.tensors[i].numel() for start, i in zip(starts, members, strict=True)]
            found.append(_Flat(starts, [values[i] for i in members], ends))
        return found

    def view(self, flats: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The part of `flats` that belongs to tensor number `index`, in its shape."""
        group, start = self.places[index]
        tensor = self.tensors[index]
        return flats[group][start : start + tensor.numel()].view(tensor.shape)


class OrderedReduction:
    """Collects the units' gradients (and float buffers) of one step and adds them in unit order.

    Memory: at most log2 U + 1 sums per aligned block; with several ranks also three wire buffers, kept from step to step, because
    fresh pages are several times slower to write than used ones.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_units: int, exchange: Exchange, integer_bytes: int = 0) -> None:
        self.layout = FlatLayout(tensors)
        self.num_units = num_units
        self._exchange = exchange
        self._blocks = blocks(num_units, exchange.world_size)
        self._covers = [cover(b, num_units) if len(b) else [] for b in self._blocks]
        self._slices = [size // exchange.world_size for size in self.layout.padded(exchange.world_size)]
        self._nodes: dict[Node, Partial] = {}
        self._present = bytearray(len(self.layout.tensors))
        self._head_bytes = _head_bytes(max(map(len, self._blocks)), len(self.layout.tensors), integer_bytes)
        self._wire: dict[str, torch.Tensor] = {}

    @property
    def buffers_bytes(self) -> int:
        """Most bytes that the partial sums of a rank and its wire buffers can take."""
        size = sum(n * t.itemsize for n, t in zip(self.layout.sizes, self.layout.types, strict=True))
        most = max(map(len, self._covers))
        sums = size * (most + self.num_units.bit_length())
        if self._exchange.world_size == 1:
            return sums
        world_size = self._exchange.world_size
        wire = self._slice_bytes * (most * world_size + sum(map(len, self._covers)) + world_size) + 2 * world_size * self._head_bytes
        return sums + wire

    @property
    def present(self) -> bytes:
        """One byte per tensor: 1 if any of this rank's units had a value for it."""
        return bytes(self._present)

    def reset(self) -> None:
        """Forget the units of an attempt."""
        self._nodes.clear()
        self._present = bytearray(len(self.layout.tensors))

    @torch.no_grad()
    def add(self, unit: int, values: Sequence[torch.Tensor | None], shift: int = 0) -> None:
        """Take one unit's values over, None for a tensor that it has none of, and add finished neighbours; 2^shift times them counts.

        The tensors are ours from here on and are written. Cost: nothing for a unit that waits for its neighbour, else one addition.
        """
        for index, value in enumerate(values):
            self._present[index] |= value is not None
        self._nodes[Node(0, unit)] = Partial(shift, [None if v is None else v.to(sum_type(v.dtype)) for v in values])
        self._nodes = merge(self._nodes, _add, self.num_units)

    @torch.no_grad()
    def reduce(self, facts: RankFacts) -> Reduced:
        """One collective phase: sums in unit order. Raises ExchangeFailed; the sums collected here are not changed then.

        Cost: one copy into the frames, an all-to-all and an all-gather of the gradient, log2 W additions of a slice; at world size 1
        nothing.
        """
        exchange = self._exchange
        frames, sent = self._pack(facts)
        received = [self._head_bytes + len(nodes) * self._slice_bytes for nodes in self._covers]
        if exchange.world_size == 1:
            told = [_unframe(exchange.scatter(frames, sent, sent)[: self._head_bytes])]
            (done,) = self._nodes.values()
        else:
            arrived = torch.split(exchange.scatter(frames, sent, received, self._buffer("arrived", sum(received))), received)
            told = [_unframe(part[: self._head_bytes]) for part in arrived]
            done = self._gather(arrived, told)
        present = [any(rank.present[i] for rank in told) for i in range(len(self.layout.tensors))]
        return Reduced(
            facts=told,
            total_weight=sum(unit.weight for rank in told for unit in rank.units),
            shift=done.shift,
            sums=[value if is_present else None for value, is_present in zip(done.sums, present, strict=True)],
        )

    @property
    def _slice_bytes(self) -> int:
        return sum(n * t.itemsize for n, t in zip(self._slices, self.layout.types, strict=True))

    def _buffer(self, name: str, size_bytes: int) -> torch.Tensor:
        if name not in self._wire:
            self._wire[name] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._exchange.device)
        assert self._wire[name].numel() == size_bytes
        return self._wire[name]

    def _pack(self, facts: RankFacts) -> tuple[torch.Tensor, list[int]]:
        """Frames for all destinations, one after the other: the facts, then each partial sum's slice for that destination; their sizes."""
        head, world_size = _frame(facts, self._head_bytes, self._exchange.device), self._exchange.world_size
        if world_size == 1:
            return head, [self._head_bytes]
        mine = [self.layout.flat(self._nodes[node].sums) for node in self._covers[self._exchange.rank]]
        size = self._head_bytes + len(mine) * self._slice_bytes
        frames = self._buffer("frames", size * world_size)
        for destination, frame in enumerate(torch.split(frames, size)):
            frame[: self._head_bytes].copy_(head)
            offset = self._head_bytes
            for flats in mine:
                for group, count in enumerate(self._slices):
                    end = offset + count * self.layout.types[group].itemsize
                    flats[group].write(frame[offset:end].view(self.layout.types[group]), destination * count)
                    offset = end
        return frames, [size] * world_size

    def _gather(self, arrived: Sequence[torch.Tensor], told: Sequence[RankFacts]) -> Partial:
        """The rest of the tree on this rank's slice of everybody's partial sums, then all finished slices."""
        shifts = {unit.unit: unit.shift for rank in told for unit in rank.units}
        nodes: dict[Node, Partial] = {}
        for cover_nodes, part in zip(self._covers, arrived, strict=True):
            offset = self._head_bytes
            for node in cover_nodes:
                slices: Sums = []
                for count, dtype in zip(self._slices, self.layout.types, strict=True):
                    slices.append(part[offset : offset + count * dtype.itemsize].view(dtype))
                    offset += count * dtype.itemsize
                nodes[node] = Partial(max(shifts[unit] for unit in span(node, self.num_units)), slices)
        done = merge(nodes, _add, self.num_units)
        assert len(done) == 1, f"the tree did not close: {sorted(done)}"
        world_size, flats = self._exchange.world_size, []
        (whole,) = done.values()
        for group, part_sum in enumerate(whole.sums):
            assert part_sum is not None
            out = self._buffer(f"sums {group}", part_sum.nbytes * world_size).view(part_sum.dtype)
            flats.append(self._exchange.gather(part_sum, out))
        return Partial(whole.shift, [self.layout.view(flats, index) for index in range(len(self.layout.tensors))])


def _add(left: Partial, right: Partial) -> Partial:
    """left + right, in the memory of either; the one of the smaller shift is scaled down first."""
    if left.shift < right.shift:
        left, right = right, left
    if left.shift > right.shift:
        lower = [value for value in right.sums if value is not None]
        if lower:
            torch._foreach_mul_(lower, math.ldexp(1.0, right.shift - left.shift))
    return Partial(left.shift, _add_sums(left.sums, right.sums))


def _add_sums(left: Sums, right: Sums) -> Sums:
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


def _head_bytes(most_units: int, num_tensors: int, integer_bytes: int) -> int:
    """Room for one rank's facts, the same on every rank: what the largest block can need."""
    size = 256 + 160 * most_units + num_tensors + integer_bytes
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


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
