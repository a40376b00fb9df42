"""Several data sets in one stream: which of them each position belongs to, spread as evenly as it can be and known without a table.

Data sets are split in halves, and these again, down to single ones. In a split with weights a : b, of the first n positions
floor((n a + phase) / (a + b)) go to the left: a Sturmian sequence, so that in *any* n consecutive positions the left gets its exact
share to within one sample. Down d splits the error stays below d, d being the logarithm to base 2 of the number of data sets, rounded
up: in any stretch of the stream, wherever it begins, each data set has its share to within that many samples. The phases come from
the seed. A drawn mixture would be off by the square root of the stretch.

Everything is integer arithmetic: the weights are whole numbers, the positions Python's, so that no stream is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unbroken.core.limits import MAX_DATASETS, MAX_SHARES
from unbroken.order.skips import NO_SKIPS, Skips
from unbroken.order.streams import key_bytes


@dataclass(frozen=True)
class Part:
    """One data set of a stream: its name ("" where it is the only one), samples, whole-numbered weight, and what is skipped of it."""

    name: str
    num_samples: int
    share: int = 1
    skips: Skips = NO_SKIPS


class Interleaving:
    """Whose turn it is at each position, a pure function of (shares, seed). O(1) memory in the length of the stream."""

    def __init__(self, shares: Sequence[int], seed: int) -> None:
        if not 1 <= len(shares) <= MAX_DATASETS:
            raise ValueError(f"{len(shares)} data sets: at least one, at most {MAX_DATASETS} can be mixed")
        if not all(share >= 1 for share in shares) or sum(shares) > MAX_SHARES:
            raise ValueError(f"shares must be at least 1 each and at most {MAX_SHARES} together, not {list(shares)!r:.100}")
        self._below = [0]
        for share in shares:
            self._below.append(self._below[-1] + share)
        self._seed = seed
        self._phases: dict[tuple[int, int], int] = {}

    def counts(self, position: int) -> list[int]:
        """How many of the first `position` positions belong to each data set."""
        return self._counts(0, len(self._below) - 1, position)

    def turns(self, positions: range) -> NDArray[np.int16]:
        """Number of the data set of each position. Some 10 ns per position and split."""
        return self._turns(0, len(self._below) - 1, positions.start, len(positions))

    def _split(self, low: int, high: int) -> tuple[int, int, int, int]:
        """Data sets [low, high) are split at `middle`: (middle, weight of the left, of both, phase)."""
        middle = (low + high) // 2
        left, both = self._below[middle] - self._below[low], self._below[high] - self._below[low]
        if (low, high) not in self._phases:
            self._phases[low, high] = int.from_bytes(key_bytes("mixture", self._seed, low, high), "little") % both
        return middle, left, both, self._phases[low, high]

    def _counts(self, low: int, high: int, n: int) -> list[int]:
        if high - low == 1:
            return [n]
        middle, left, both, phase = self._split(low, high)
        num_left = (n * left + phase) // both
        return self._counts(low, middle, num_left) + self._counts(middle, high, n - num_left)

    def _turns(self, low: int, high: int, start: int, num: int) -> NDArray[np.int16]:
        if high - low == 1:
            return np.full(num, low, dtype=np.int16)
        middle, left, both, phase = self._split(low, high)
        num_before, rest = divmod(start * left + phase, both)
        after = (rest + np.arange(num + 1, dtype=np.int64) * left) // both
        goes_left = after[1:] > after[:-1]
        num_left = int(after[-1]) if num else 0
        turns = np.empty(num, dtype=np.int16)
        turns[goes_left] = self._turns(low, middle, num_before, num_left)
        turns[~goes_left] = self._turns(middle, high, start - num_before, num - num_left)
        return turns
