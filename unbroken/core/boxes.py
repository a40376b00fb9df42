"""Boxes: parts of a tensor, each where it begins and how long it is in every dimension. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Numbers = tuple[int, ...]


class Box(NamedTuple):
    """A box inside a tensor; one without dimensions holds the one element of a scalar."""

    offsets: Numbers
    shape: Numbers

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ends(self) -> Numbers:
        return tuple(start + length for start, length in zip(self.offsets, self.shape, strict=True))

    def common(self, other: Box) -> Box | None:
        """What lies in both; None where nothing does."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """Where this box lies in an array of `inside`, which holds it."""
        return tuple(
            slice(at - base, at - base + length) for at, base, length in zip(self.offsets, inside.offsets, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def misfit(region: Box, boxes: Iterable[Box]) -> str:
    """Why these boxes are not, each element once, the region: "" if they are. Empty boxes count for nothing.

    Cost: n log n, and for each box as many comparisons as others reach as far along the longest dimension.
    """
    found = [box for box in boxes if box.volume]
    dims = len(region.shape)
    for box in found:
        if len(box.offsets) != dims or len(box.shape) != dims:
            return f"a shard has {len(box.shape)} dimensions where {dims} belong"
        if box.common(region) != box:
            return f"a shard at {list(box.offsets)} of {list(box.shape)} leads outside {list(region.shape)}"
    volume = sum(box.volume for box in found)
    if volume > region.volume:
        return f"its shards overlap: they hold {volume} elements where {region.volume} belong"
    if dims:
        along = max(range(dims), key=lambda d: region.shape[d])
        found.sort(key=lambda box: box.offsets[along])
        open_boxes: list[Box] = []
        for box in found:
            open_boxes = [other for other in open_boxes if other.ends[along] > box.offsets[along]]
            if clash := next((other for other in open_boxes if other.common(box)), None):
                return f"its shards at {list(clash.offsets)} and {list(box.offsets)} overlap"
            open_boxes.append(box)
    if volume < region.volume:
        return f"shards of it are missing: {volume} of {region.volume} elements are there"
    return ""
