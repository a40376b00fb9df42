"""This rank's place in its data: the units of one step after the other, each handed out once unless its step is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.data.source import Source, Unit


class Cursor:
    """Reads a bound source. At most one unit is ahead of what was handed out, and that only after the step's boundary."""

    def __init__(self, source: Source, block: range) -> None:
        self._source = source
        self.block = block
        self._units: Iterator[Unit] = iter(())
        self._ahead: Unit | None = None
        self.is_broken = False

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        """The next unit belongs to `step`; `state` is the loader's own as it was at the boundary before, {} if it needs none."""
        if state:
            self._source.load_state(state, step - 1)
            self._units, self._ahead = self._source.units(), None
        else:
            self.repeat(step)

    def repeat(self, step: int) -> None:
        """Hand out the units of `step` (again)."""
        self._source.seek(step)
        self._units, self._ahead, self.is_broken = self._source.units(), None, False

    def has_step(self) -> bool:
        """False when the data have ended. Loads the step's first unit: call it after the boundary, whose position it must not move."""
        if self._ahead is None:
            self.is_broken = True  # an error or an interrupt ends the iterator: what it had left must not be taken for the data's end
            self._ahead = next(self._units, None)
            self.is_broken = False
        return not len(self.block) or self._ahead is not None

    def take(self, step: int, number: int) -> Unit:
        """Unit `number` of `step`. RuntimeError when the data end inside a step."""
        if not self.has_step():
            raise RuntimeError(f"the data ended inside step {step}, before unit {number}: give whole steps, or use unbroken.Batches")
        unit, self._ahead = self._ahead, None
        assert unit is not None
        assert (unit.step, unit.unit) == (step, number), f"loader gave {unit.step, unit.unit}, due was {step, number}"
        return unit
