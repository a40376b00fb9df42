"""Which samples make unit (t, u): the endless stream of shuffled epochs, cut into global batches, each cut into U units.

Step t >= 1 is the update that makes state t; it reads positions [(t-1) G, t G) of the stream. Position p is place p % N of epoch p // N,
so a batch may straddle epochs. Positions are Python integers until they are inside one epoch: no counter overflows, none is a float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbroken.core.limits import MAX_EPOCHS_PER_STEP, MAX_GLOBAL_BATCH, MAX_UNITS
from unbroken.order.permutation import MAX_SAMPLES, Permutation
from unbroken.order.streams import check_seed

_AHEAD = 1024
"""Places looked up at once: a call costs 0.2 ms however few they are, so small units share one."""


def part(total: int, num_parts: int, index: int) -> range:
    """Part `index` of range(total) cut into contiguous parts whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(total, num_parts)
    start = index * size + min(index, larger)
    return range(start, start + size + (index < larger))


def blocks(num_units: int, world_size: int) -> list[range]:
    """Units of each rank: contiguous, sizes differ by at most one; ranks beyond the number of units hold none."""
    if num_units < 1 or world_size < 1:
        raise ValueError(f"units={num_units} and world_size={world_size} must both be at least 1")
    return [part(num_units, world_size, rank) for rank in range(world_size)]


def default_units(world_size: int, global_batch: int) -> int:
    """The smallest power of two >= `world_size` that divides `global_batch`; ValueError that says what to change."""
    units = 1 << (world_size - 1).bit_length()
    if global_batch % units:
        above = -(-global_batch // units) * units
        raise ValueError(
            f"global_batch={global_batch} cannot be cut into {units} equal units for {world_size} ranks: "
            f"make it a multiple of {units} (the next is {above}), or choose the number of units yourself with units="
        )
    return units


class Span(NamedTuple):
    """Places [start, stop) of one epoch's order."""

    epoch: int
    start: int
    stop: int


def _check_count(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most}, not {value!r}")


class SampleOrder:
    """The order of a whole run, a pure function of its arguments; any unit is looked up by itself, in O(samples of the unit).

    `epochs=None` never ends; otherwise the last global batch may be short and its units uneven, possibly empty.
    """

    def __init__(
        self, num_samples: int, global_batch: int, units: int, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        _check_count("num_samples", num_samples, MAX_SAMPLES)
        _check_count("global_batch", global_batch, MAX_GLOBAL_BATCH)
        _check_count("units", units, MAX_UNITS)
        if epochs is not None:
            _check_count("epochs", epochs, MAX_SAMPLES)
        if global_batch > num_samples * MAX_EPOCHS_PER_STEP:
            raise ValueError(
                f"global_batch={global_batch} would read all {num_samples} samples more than {MAX_EPOCHS_PER_STEP} times in one step"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.units = units
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self.epochs = epochs
        self._ahead: tuple[int, int, NDArray[np.int64]] = (0, 0, np.empty(0, dtype=np.int64))

    @property
    def num_steps(self) -> int | None:
        """Steps until the data ends, or None."""
        return None if self.epochs is None else -(-self.num_samples * self.epochs // self.global_batch)

    def locate(self, consumed: int) -> tuple[int, int]:
        """(epoch, place in it) of the sample that comes after `consumed` samples of the stream."""
        return divmod(consumed, self.num_samples)

    def spans(self, step: int, unit: int) -> list[Span]:
        """The unit's samples as places in epochs, in order; [] for a unit without samples."""
        positions = self._positions(step, unit)
        found: list[Span] = []
        at = positions.start
        while at < positions.stop:
            epoch, start = self.locate(at)
            stop = min(self.num_samples, start + positions.stop - at)
            found.append(Span(epoch, start, stop))
            at += stop - start
        return found

    def ids(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Sample ids at these places, in order."""
        parts = [self._ids_in_epoch(*span) for span in spans]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def unit_ids(self, step: int, unit: int) -> NDArray[np.int64]:
        """Sample ids of unit `unit` of step `step` (>= 1), in order; empty beyond the end of the data."""
        return self.ids(self.spans(step, unit))

    def _positions(self, step: int, unit: int) -> range:
        if step < 1 or not 0 <= unit < self.units:
            raise ValueError(f"steps count from 1 and units from 0 to {self.units - 1}: there is no unit ({step}, {unit})")
        first, last = (step - 1) * self.global_batch, step * self.global_batch
        if self.epochs is not None:
            total = self.num_samples * self.epochs
            first, last = min(first, total), min(last, total)
        inside = part(last - first, self.units, unit)
        return range(first + inside.start, first + inside.stop)

    def _ids_in_epoch(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        epoch_ahead, first, ids = self._ahead
        if epoch != epoch_ahead or start < first or stop > first + len(ids):
            first, last = start, min(self.num_samples, max(stop, start + _AHEAD))
            ids = Permutation(self.num_samples, self.seed, epoch)(np.arange(first, last, dtype=np.int64))
            self._ahead = (epoch, first, ids)
        return ids[start - first : stop - first].copy()
