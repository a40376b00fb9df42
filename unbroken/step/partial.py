"""Sums that lack a power of two, so that units may weigh their tokens: added exactly, in the order of the tree.

The power of two in a unit's weight stays out of its loss (half types would overflow, and a GradScaler's scale with them). A sum carries
it as its shift; where two of different shifts are added, the one of the smaller is scaled down first, which is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from unbroken.step.flat import Sums

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


def add(left: Partial, right: Partial) -> Partial:
    """left + right, in the memory of either. Cost: one addition, and a pass over one of them where the shifts differ."""
    if left.shift < right.shift:
        left, right = right, left
    if left.shift > right.shift:
        lower = [value for value in right.sums if value is not None]
        if lower:
            torch._foreach_mul_(lower, math.ldexp(1.0, right.shift - left.shift))
    return Partial(left.shift, _add(left.sums, right.sums))


def _add(left: Sums, right: Sums) -> Sums:
    """None counts as +0.0, so that who has no value does not matter."""
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
