"""The endless walk over one data set: epoch after epoch, each in an order of its own, without the samples that are skipped.

Skipping takes samples out and moves nothing else: the rest come in the order, and with the places, that they have in a walk without
skips. So the skipped ids are looked up in each epoch's order (the permutation's inverse, 0.03 us each) and sorted; the number of a sample
among those that are left then gives its place by a binary search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbroken.order.permutation import Permutation
from unbroken.order.skips import NO_SKIPS, Skips

_AHEAD = 1024
"""Numbers looked up at once: a call costs 0.2 ms however few they are, so small units share one."""

_CHUNK = 1 << 16
"""Skipped ids looked up at once: bounds the memory beside the result."""


class Span(NamedTuple):
    """Numbers [start, stop) of one epoch, counted over the samples that are not skipped."""

    epoch: int
    start: int
    stop: int


class Epochs:
    """A pure function of (num_samples, seed, shuffle, skips); `length` samples make an epoch. Used by one thread.

    Memory: nothing for the samples, 8 bytes per skipped id and for the epoch in use 8 more.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool = True, skips: Skips = NO_SKIPS) -> None:
        if len(skips) and int(skips.ids[-1]) >= num_samples:
            raise ValueError(f"sample {int(skips.ids[-1])} cannot be skipped: the data set has {num_samples}, ids count from 0")
        if len(skips) >= num_samples:
            raise ValueError(f"all {num_samples} samples are skipped: there is nothing to train on")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.length = num_samples - len(skips)
        self._skips = skips
        self._before: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
        self._ahead = (-1, 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def locate(self, consumed: int) -> tuple[int, int]:
        """(epoch, number in it) of the sample that comes after `consumed` samples of the walk."""
        return divmod(consumed, self.length)

    def spans(self, positions: range) -> list[Span]:
        """Positions of the walk as numbers in epochs, in order."""
        found: list[Span] = []
        at = positions.start
        while at < positions.stop:
            epoch, start = self.locate(at)
            stop = min(self.length, start + positions.stop - at)
            found.append(Span(epoch, start, stop))
            at += stop - start
        return found

    def ids(self, span: Span) -> NDArray[np.int64]:
        """Sample ids, in order."""
        return self._look_up(span)[0]

    def places(self, span: Span) -> NDArray[np.int64]:
        """Where the samples stand in the epoch's order over all samples, skipped ones included."""
        return self._look_up(span)[1]

    def _look_up(self, span: Span) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        epoch, first, ids, places = self._ahead
        if span.epoch != epoch or span.start < first or span.stop > first + len(ids):
            epoch, first = span.epoch, span.start
            numbers = np.arange(first, min(self.length, max(span.stop, first + _AHEAD)), dtype=np.int64)
            places = numbers + np.searchsorted(self._kept_before(epoch), numbers, side="right") if len(self._skips) else numbers
            ids = Permutation(self.num_samples, self.seed, epoch)(places) if self.shuffle else places
            self._ahead = (epoch, first, ids, places)
        inside = slice(span.start - first, span.stop - first)
        return ids[inside].copy(), places[inside].copy()

    def _kept_before(self, epoch: int) -> NDArray[np.int64]:
        """For each skipped sample, in the order of the epoch, how many kept ones come before it."""
        if self._before[0] != epoch:
            places = self._skips.ids.astype(np.int64)
            if self.shuffle:
                order = Permutation(self.num_samples, self.seed, epoch)
                for start in range(0, len(places), _CHUNK):
                    places[start : start + _CHUNK] = order.inverse(places[start : start + _CHUNK])
                places.sort()
            places -= np.arange(len(places))
            self._before = (epoch, places)
        return self._before[1]
