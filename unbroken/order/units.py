"""Which samples make unit (t, u): an endless stream of samples, cut into global batches, each cut into U units.

Step t >= 1 is the update that makes state t; it reads positions [(t-1) G, t G) of the stream. With one data set position p is number
p % N of epoch p // N, so a batch may straddle epochs. With several, each position belongs to one of them (`order.mixture`), which walks
on by itself (`order.epochs`). Positions are Python integers until they are inside one epoch: no counter overflows, none is a float.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbroken.core.limits import MAX_EPOCHS_PER_STEP, MAX_GLOBAL_BATCH, MAX_UNITS
from unbroken.order.epochs import Epochs
from unbroken.order.mixture import Interleaving, Part
from unbroken.order.permutation import MAX_SAMPLES
from unbroken.order.streams import check_seed, part_seed


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


def _check_count(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most}, not {value!r}")


class _Share(NamedTuple):
    """What one data set gives to a stretch of the stream: `walk` positions, at `turns` of the stretch (None: all of it)."""

    part: int
    walk: range
    turns: NDArray[np.bool_] | None


class SampleOrder:
    """The order of a whole run, a pure function of its arguments; any unit is looked up by itself, in O(samples of the unit).

    `samples`: the number of samples of the one data set, or the parts of a mixture. Ids count through the parts in their order: those
    of part k begin where those of part k - 1 end. `epochs=None` never ends; otherwise (one data set only) the last global batch may be
    short and its units uneven, possibly empty. Cost per sample: 0.5 us, in a mixture 0.6 us, in large units.
    """

    def __init__(
        self,
        samples: int | Sequence[Part],
        global_batch: int,
        units: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        self.parts = tuple(samples) if isinstance(samples, Sequence) else (Part("", samples),)
        for part_ in self.parts:
            _check_count("num_samples", part_.num_samples, MAX_SAMPLES)
        self.num_samples = sum(part_.num_samples for part_ in self.parts)
        _check_count("num_samples", self.num_samples, MAX_SAMPLES)
        _check_count("global_batch", global_batch, MAX_GLOBAL_BATCH)
        _check_count("units", units, MAX_UNITS)
        if epochs is not None:
            _check_count("epochs", epochs, MAX_SAMPLES)
            if len(self.parts) > 1:
                raise ValueError("epochs of several data sets end at several moments: leave epochs out and give the run total_steps")
        self.global_batch = global_batch
        self.units = units
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self.epochs = epochs
        self.walks = [
            Epochs(p.num_samples, seed=part_seed(seed, p.name) if p.name else seed, shuffle=shuffle, skips=p.skips) for p in self.parts
        ]
        self._interleaving = Interleaving([p.share for p in self.parts], seed)
        self._offsets = np.cumsum([0, *(p.num_samples for p in self.parts)]).tolist()
        self._check_epochs_per_step()

    def _check_epochs_per_step(self) -> None:
        shares = sum(p.share for p in self.parts)
        for p, walk in zip(self.parts, self.walks, strict=True):
            if self.global_batch * p.share > walk.length * MAX_EPOCHS_PER_STEP * shares:
                what = f"all {walk.length} samples of {p.name!r}" if p.name else f"all {walk.length} samples"
                raise ValueError(f"global_batch={self.global_batch} would read {what} more than {MAX_EPOCHS_PER_STEP} times in one step")

    @property
    def total(self) -> int | None:
        """Samples until the data ends, or None."""
        return None if self.epochs is None else self.walks[0].length * self.epochs

    @property
    def num_steps(self) -> int | None:
        """Steps until the data ends, or None."""
        return None if self.total is None else -(-self.total // self.global_batch)

    def positions(self, step: int, unit: int) -> range:
        """The unit's stretch of the stream; empty for a unit without samples."""
        if step < 1 or not 0 <= unit < self.units:
            raise ValueError(f"steps count from 1 and units from 0 to {self.units - 1}: there is no unit ({step}, {unit})")
        first, last = (step - 1) * self.global_batch, step * self.global_batch
        if self.total is not None:
            first, last = min(first, self.total), min(last, self.total)
        inside = part(last - first, self.units, unit)
        return range(first + inside.start, first + inside.stop)

    def ids(self, positions: range) -> NDArray[np.int64]:
        """Sample ids at a stretch of the stream, in order."""
        out = np.empty(len(positions), dtype=np.int64)
        for share in self._shares(positions):
            walk = self.walks[share.part]
            found = [walk.ids(span) for span in walk.spans(share.walk)]
            out[slice(None) if share.turns is None else share.turns] = np.concatenate(found) + self._offsets[share.part]
        return out

    def keys(self, positions: range) -> list[tuple[int, int, int]]:
        """Of each sample of a stretch (seed of its walk, epoch, place): what everything random in loading it depends on."""
        out: list[tuple[int, int, int]] = [(0, 0, 0)] * len(positions)
        for share in self._shares(positions):
            walk = self.walks[share.part]
            where = range(len(out)) if share.turns is None else np.flatnonzero(share.turns).tolist()
            for at, (epoch, place) in zip(where, _places(walk, share.walk), strict=True):
                out[at] = (walk.seed, epoch, place)
        return out

    def unit_ids(self, step: int, unit: int) -> NDArray[np.int64]:
        """Sample ids of unit `unit` of step `step` (>= 1), in order; empty beyond the end of the data."""
        return self.ids(self.positions(step, unit))

    def _shares(self, positions: range) -> Iterator[_Share]:
        if not positions:
            return
        if len(self.parts) == 1:
            yield _Share(0, positions, None)
            return
        turns = self._interleaving.turns(positions)
        before = self._interleaving.counts(positions.start)
        for number in np.unique(turns).tolist():
            mine = turns == number
            yield _Share(number, range(before[number], before[number] + int(mine.sum())), mine)


def _places(walk: Epochs, positions: range) -> Iterator[tuple[int, int]]:
    for span in walk.spans(positions):
        for place in walk.places(span).tolist():
            yield span.epoch, place
