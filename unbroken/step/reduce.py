"""Ordered reduction: the gradient of a step is a fixed binary tree of sums over its units, whoever computed them (I14).

    g = tree_sum(2^s_u g_u) / (sum(w_u) / N)    g_u: gradient of (w_u / N / 2^s_u) * loss_u,  N: samples of a full step

The shift s_u is 0 where a unit weighs as much as it has samples; where it weighs its tokens, see `step.partial`.

A rank keeps each unit's gradients as backward made them and adds tree neighbours at once, so that it holds at most log2 U + 1 sums; in
a full step the division is by one and left out. At world size 1 nothing is copied. Else the tensors travel in buckets, each with two
collectives: every rank receives the others' partial sums of *its* slice, walks the rest of the tree on it, and the finished slices are
gathered. On CPU a bucket leaves while backward of the rank's last unit still computes the next one; the facts of the step (losses,
weights, sample digests, signals, buffers' new integer values) ride in the last. Bytes on the wire: 2 (W-1)/W of the gradient, as in a
ring.

Sums are made in float32 for half types, else in the gradient's own type. A unit without gradient for a parameter counts as +0.0; if no
unit had one, `.grad` stays None.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import torch
from msgspec import Struct, structs

from unbroken.core.limits import COLLECTIVE_TIMEOUT_S
from unbroken.order.tree import Node, merge
from unbroken.step.bucket import BUCKET_BYTES, Arrived, Bucket, Shares, split
from unbroken.step.exchange import Exchange, ExchangeFailed
from unbroken.step.flat import ALIGN, FlatLayout, Sums
from unbroken.step.lane import Lane


class UnitFacts(Struct, frozen=True, array_like=True):
    """What travels with a unit: sample digest, weight, float64 loss bits (hex), a digest of its integer buffers ("" if untouched), and
    the number of its samples.

    `loss` is "" where the script did not tell it.
    """

    unit: int
    digest: str
    weight: int
    loss: str
    integers: str
    samples: int = 0


class Flags(Struct, frozen=True, array_like=True):
    """What each rank sends with its units: asked to stop, a snapshot at the boundary after next (rank 0), its daemon has gone.

    `poisoned`: a step whose state it has learned to be non-finite, 0 for none; `bad_norm`: so was the clip norm of the step before.
    """

    stop: bool = False
    snapshot_next: bool = False
    daemon_lost: bool = False
    poisoned: int = 0
    bad_norm: bool = False


class RankFacts(Struct, frozen=True, array_like=True):
    """What one rank tells all others in a step's payload. `integers` are raw new values of integer buffers, "" if it had no unit.

    `late`: a gradient was added to after its bucket had left, so that nobody may use this attempt.
    """

    units: tuple[UnitFacts, ...]
    flags: Flags = Flags()
    present: bytes = b""
    integers: bytes = b""
    late: bool = False


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

    @cached_property
    def loss(self) -> float | None:
        """The weighted mean over the units in unit order; None where the script did not tell it for all, or none weighs anything."""
        units = self.units()
        if not self.total_weight or any(u.weight and u.loss == "" for u in units):
            return None
        losses = {Node(0, u.unit): u.weight * from_bits(u.loss) if u.weight else 0.0 for u in units}
        (total,) = merge(losses, float.__add__, len(units)).values()
        return total / self.total_weight


def bits(value: float) -> str:
    """The 64 bits of a float as 16 hex digits, most significant first."""
    return struct.pack(">d", value).hex()


def from_bits(text: str) -> float:
    """The float that `bits` wrote."""
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


class OrderedReduction:
    """Collects the units' gradients (and float buffers) of one step and adds them in unit order.

    tensors: what is reduced, of which the first `num_early` are parameters; their buckets may leave before `reduce` (`start`). Memory: at
    most log2 U + 1 sums per aligned block, and with several ranks the buckets' wire buffers.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        num_units: int,
        exchange: Exchange,
        integer_bytes: int = 0,
        *,
        num_early: int | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.tensors = list(tensors)
        self.num_units = num_units
        self._exchange = exchange
        shares = Shares(num_units, exchange.world_size)
        self._most_nodes = shares.most_nodes
        head_bytes = _head_bytes(max(map(len, shares.blocks)), len(self.tensors), integer_bytes)
        FlatLayout(self.tensors)  # refuses what cannot be summed
        groups = [list(range(len(self.tensors)))]
        if exchange.world_size > 1 and exchange.device.type == "cpu":  # an accelerator would be waited for once per bucket
            groups = _groups(self.tensors, len(self.tensors) if num_early is None else num_early, bucket_bytes or BUCKET_BYTES)
        self.buckets = [Bucket(group, self.tensors, shares, exchange, head_bytes * (group is groups[-1])) for group in groups]
        self._head_bytes = head_bytes
        self._present = bytearray(len(self.tensors))
        self._lane: Lane | None = None
        self._started = 0
        self._is_stale = False
        self._leaving: list[Future[Arrived]] = []

    @property
    def buffers_bytes(self) -> int:
        """Most bytes that the partial sums of a rank and its wire buffers can take."""
        sums = sum(bucket.layout.size_bytes for bucket in self.buckets) * (self._most_nodes + self.num_units.bit_length())
        return sums + sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def present(self) -> bytes:
        """One byte per tensor: 1 if any of this rank's units had a value for it."""
        return bytes(self._present)

    @property
    def num_started(self) -> int:
        """So many buckets of this attempt are complete and on their way."""
        return self._started

    def reset(self) -> None:
        """Forget the units of an attempt. What has left cannot be called back: then nobody may use the next attempt either."""
        for bucket in self.buckets:
            bucket.reset()
        self._present = bytearray(len(self.tensors))
        self._started, self._is_stale = 0, bool(self._leaving)

    def close(self) -> None:
        """Let the thread of the collectives go. Idempotent."""
        self._forget()

    @torch.no_grad()
    def add(self, unit: int, values: Sequence[torch.Tensor | None], shift: int = 0) -> None:
        """Take one unit's values over, None for a tensor that it has none of, and add finished neighbours; 2^shift times them counts.

        Values of buckets that have left are not looked at. Cost: nothing for a unit that waits for its neighbour, else one addition.
        """
        for bucket in self.buckets[self._started :]:
            self._add(bucket, unit, [values[index] for index in bucket.indices], shift)

    @torch.no_grad()
    def put(self, bucket: int, position: int, value: torch.Tensor) -> None:
        """The gradient of a rank that has one unit only needs no sum: it goes into the frames at once. Cost: one copy of it."""
        self._present[self.buckets[bucket].indices[position]] = 1
        if bucket >= len(self._leaving):
            self.buckets[bucket].put(position, 0, value)

    @torch.no_grad()
    def start(self, unit: int, values: Sequence[torch.Tensor | None], shift: int = 0) -> None:
        """The next bucket's values of this rank's last unit, None for what was `put`: it is complete and leaves."""
        bucket = self.buckets[self._started]
        assert bucket is not self.buckets[-1], "the last bucket carries the step's facts"
        self._add(bucket, unit, values, shift)
        self._send(bucket)

    @torch.no_grad()
    def reduce(self, facts: RankFacts) -> Reduced:
        """One collective phase: sums in unit order. Raises ExchangeFailed; the attempt must be made again from its units then.

        Cost: per bucket one copy into the frames, an all-to-all and an all-gather of it, log2 W additions of a slice; at world size 1
        nothing.
        """
        for bucket in self.buckets[self._started : -1]:
            self._send(bucket)
        facts = structs.replace(facts, late=facts.late or self._is_stale)
        head = _frame(facts, self._head_bytes, self._exchange.device)
        if self._exchange.world_size == 1:
            told, (bucket,) = self._exchange.scatter(head, [self._head_bytes], [self._head_bytes]), self.buckets
            return self._result([told], [Arrived([], bucket.whole())])
        self._send(self.buckets[-1], head)
        try:
            arrived = [_outcome(future) for future in self._leaving]
        except ExchangeFailed:
            self._forget()
            raise
        self._leaving.clear()
        self._started = 0
        reduced = self._result(arrived[-1].heads, arrived)
        if any(rank.late for rank in reduced.facts):
            raise ExchangeFailed("gradients had been sent that are not this attempt's")
        return reduced

    def _add(self, bucket: Bucket, unit: int, values: Sequence[torch.Tensor | None], shift: int) -> None:
        for index, value in zip(bucket.indices, values, strict=True):
            self._present[index] |= value is not None
        bucket.add(unit, list(values), shift)

    def _send(self, bucket: Bucket, head: torch.Tensor | None = None) -> None:
        self._started += 1
        if self._started <= len(self._leaving):  # it left in an attempt that was given up
            return
        bucket.pack()
        work = partial(bucket.exchange, self._exchange.as_connected(), head)
        if self._exchange.device.type == "cpu":
            self._lane = self._lane or Lane()
            self._leaving.append(self._lane.submit(work))
        else:  # the streams of an accelerator keep the order by themselves
            done: Future[Arrived] = Future()
            done.set_result(work())
            self._leaving.append(done)

    def _forget(self) -> None:
        """What is under way belongs to nobody any more: its thread ends when its collective does, the next attempt gets another."""
        if self._lane is not None:
            self._lane.abandon()
            self._lane = None
        for bucket in self.buckets:
            bucket.renew()
        self._leaving.clear()
        self._started = 0

    def _result(self, heads: Sequence[torch.Tensor], arrived: Sequence[Arrived]) -> Reduced:
        told = [_unframe(part) for part in heads]
        sums: Sums = [None] * len(self.tensors)
        for bucket, (_, whole) in zip(self.buckets, arrived, strict=True):
            for index, value in zip(bucket.indices, whole.sums, strict=True):
                sums[index] = value if any(rank.present[index] for rank in told) else None
        total = sum(unit.weight for rank in told for unit in rank.units)
        return Reduced(facts=told, total_weight=total, shift=arrived[-1].whole.shift, sums=sums)


def _groups(tensors: Sequence[torch.Tensor], num_early: int, bucket_bytes: int) -> list[list[int]]:
    """Which tensors travel together; what cannot leave early goes with the last."""
    groups = split(tensors[:num_early], bucket_bytes)
    groups[-1] += range(num_early, len(tensors))
    return groups


def _outcome(future: Future[Arrived]) -> Arrived:
    """Wait for a bucket; its two collectives have timeouts of their own, which come first."""
    return future.result(timeout=3 * COLLECTIVE_TIMEOUT_S)


def _head_bytes(most_units: int, num_tensors: int, integer_bytes: int) -> int:
    """Room for one rank's facts, the same on every rank: what the largest block can need."""
    size = 256 + 160 * most_units + num_tensors + integer_bytes
    return (size + ALIGN - 1) // ALIGN * ALIGN


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
