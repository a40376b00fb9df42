"""Samples that a run never sees, as a sorted list of ids: what makes it up, how it is stored, and how it is known again."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from unbroken.core.limits import MAX_SKIPPED
from unbroken.order.permutation import MAX_SAMPLES

_DIGEST_BYTES = 16


class Skips:
    """Sample ids of one data set, ascending and distinct. Memory: 8 bytes per id."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        if len(ids) > MAX_SKIPPED:
            raise ValueError(f"{len(ids)} ids are skipped, at most {MAX_SKIPPED} can be: leave them out of the data set (torch's Subset)")
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= MAX_SAMPLES or bool((np.diff(ids) <= 0).any())):
            raise ValueError("skipped ids must be ascending, distinct and not negative")
        self.ids = np.ascontiguousarray(ids, dtype="<i8")
        self.digest = blake3(self.ids.tobytes()).hexdigest(length=_DIGEST_BYTES)

    def __len__(self) -> int:
        return len(self.ids)

    def facts(self) -> dict[str, int | str]:
        """How many, and 32 hex digits: BLAKE3-128 over the ids as little-endian int64."""
        return {"num": len(self), "digest": self.digest}

    def gaps(self) -> NDArray[np.unsignedinteger]:
        """From each id to the next, the first from -1, in the narrowest type that holds them: 2 MB for 10^6 of 10^9 samples."""
        gaps = np.diff(self.ids, prepend=-1).astype(np.uint64)
        return gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))

    @classmethod
    def from_gaps(cls, gaps: NDArray[np.unsignedinteger]) -> Skips:
        """What `gaps` was made from; ValueError where no list of ids gives these."""
        wide = gaps.astype(np.uint64)
        if len(wide) > MAX_SKIPPED or float(wide.astype(np.float64).sum()) > MAX_SAMPLES:
            raise ValueError("gaps lead beyond the largest id")
        return cls(np.cumsum(wide.astype(np.int64)) - 1)


NO_SKIPS = Skips(np.empty(0, dtype=np.int64))
