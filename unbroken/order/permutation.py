"""A shuffled epoch without a table: a keyed permutation of range(n) that computes any entry by itself.

A Feistel network permutes the smallest power of two >= n; entries that fall outside range(n) are sent through again until they lie
inside (cycle walking, fewer than two passes on average). Any entry of an order over 10**12 samples costs 0.3-0.5 microseconds in a large
array and no memory, so a resumed run looks its position up instead of replaying a shuffle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from unbroken.order.streams import check_seed, key_bytes

MAX_SAMPLES = 2**62
"""Largest n: positions and their power-of-two domain stay inside int64."""

_ROUNDS = 8
_ROUNDS_SMALL = 32
_SMALL_BITS = 6
_SPREAD, _MULTIPLY_1, _MULTIPLY_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)

Words = NDArray[np.uint64]


def _mix(words: Words, key: np.uint64) -> Words:
    """A keyed hash of each word (SplitMix64 at state key + word * golden ratio): even one-bit words give unrelated values."""
    mixed = words * _SPREAD
    mixed += key
    mixed ^= mixed >> _SHIFT_1
    mixed *= _MULTIPLY_1
    mixed ^= mixed >> _SHIFT_2
    mixed *= _MULTIPLY_2
    mixed ^= mixed >> _SHIFT_3
    return mixed


class Permutation:
    """The order of one epoch over `n` samples: `permutation(positions) -> ids`, both int64 of one shape.

    Depends on (n, seed, epoch) only. O(1) memory; build cost about 3 microseconds.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= MAX_SAMPLES:
            raise ValueError(f"a permutation needs 1 <= n <= 2**62, not n={n}")
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not {epoch}")
        self.n = n
        bits = (n - 1).bit_length()
        right = bits // 2
        self._right_bits = np.uint64(right)
        self._masks = (np.uint64((1 << (bits - right)) - 1), np.uint64((1 << right) - 1))
        rounds = _ROUNDS if bits > _SMALL_BITS else _ROUNDS_SMALL  # with one-bit halves most rounds are affine: more of them mend it
        keys = key_bytes("permutation", check_seed(seed), epoch, length=8 * rounds)
        self._keys = tuple(np.frombuffer(keys, dtype="<u8").astype(np.uint64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at `positions`, each in [0, n); ValueError for a position outside."""
        return self._walk(positions, self._pass, "positions")

    def inverse(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions at which these sample ids stand; ValueError for an id outside [0, n)."""
        return self._walk(ids, self._pass_back, "ids")

    def _walk(self, given: NDArray[np.int64], one_pass: Callable[[Words], Words], what: str) -> NDArray[np.int64]:
        given = np.asarray(given, dtype=np.int64)
        if given.size and (int(given.min()) < 0 or int(given.max()) >= self.n):
            raise ValueError(f"{what} must lie in [0, {self.n}), not [{given.min()}, {given.max()}]")
        found = one_pass(given.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(found >= np.uint64(self.n))
        while outside.size:
            again = one_pass(found[outside])
            found[outside] = again
            outside = outside[again >= np.uint64(self.n)]
        return found.astype(np.int64).reshape(given.shape)

    def _pass(self, words: Words) -> Words:
        left_mask, right_mask = self._masks
        left, right = words >> self._right_bits, words & right_mask
        for left_key, right_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = left ^ (_mix(right, left_key) & left_mask)
            right = right ^ (_mix(left, right_key) & right_mask)
        return (left << self._right_bits) | right

    def _pass_back(self, words: Words) -> Words:
        left_mask, right_mask = self._masks
        left, right = words >> self._right_bits, words & right_mask
        for left_key, right_key in zip(self._keys[-2::-2], self._keys[-1::-2], strict=True):
            right = right ^ (_mix(left, right_key) & right_mask)
            left = left ^ (_mix(right, left_key) & left_mask)
        return (left << self._right_bits) | right
