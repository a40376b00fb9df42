"""The samples that each unit must have computed, for a whole run in step order.

One unit at a time costs 50 microseconds, nearly all of it calls; a block of steps at once brings a step of 4 units to 6 microseconds,
so that a million steps are checked in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from unbroken.core.errors import Damaged
from unbroken.core.ports import Buffer
from unbroken.core.records import StoredPiece
from unbroken.order.ledger import SKIPS, digests, parse, unit_digest
from unbroken.order.skips import Skips
from unbroken.order.units import SampleOrder, part
from unbroken.store.repository import Repository

_BLOCK_SAMPLES = 1 << 18


class ExpectedUnits:
    """Digests of the units of a step, as `order.ledger.digests` gives them; fast when steps are asked for in ascending order."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._parts = [part(order.global_batch, order.units, unit) for unit in range(order.units)]
        self._most_steps = max(1, _BLOCK_SAMPLES // order.global_batch)
        self._block_steps = min(16, self._most_steps)
        self._first = 0
        self._block: list[tuple[str, ...]] = []

    def __call__(self, step: int) -> tuple[str, ...]:
        if not self._first <= step < self._first + len(self._block):
            last = step + self._block_steps - 1
            if self._order.total is not None:
                last = min(last, self._order.total // self._order.global_batch)
            if last < step:
                return digests(self._order, step)
            self._first, self._block = step, self._compute(step, last)
            self._block_steps = min(2 * self._block_steps, self._most_steps)
        return self._block[step - self._first]

    def _compute(self, first: int, last: int) -> list[tuple[str, ...]]:
        """Steps first..last, every one of them a full global batch."""
        size = self._order.global_batch
        ids = self._order.ids(range((first - 1) * size, last * size))
        return [
            tuple(unit_digest(ids[start + p.start : start + p.stop]) for p in self._parts)
            for start in range(0, (last - first + 1) * size, size)
        ]


def expected_units(options: Mapping[str, Any], skips: Mapping[str, Skips]) -> ExpectedUnits | None:
    """The rule of a run's birth facts; None where the order is a loader's own secret. Damaged or NewerFormat as `order.ledger.parse`."""
    order = parse(options, skips)
    return None if order is None else ExpectedUnits(order)


def stored_skips(repository: Repository) -> dict[str, Skips]:
    """The lists of skipped samples that the newest checkpoint holds, by digest; {} where none can be read."""
    for commit in repository.visible()[-1:]:
        try:
            manifest = repository.manifests(commit)[0]
            wanted = [stored for stored in manifest.pieces if stored.piece.pointer.startswith(f"{SKIPS}/")]
            return {found.digest: found for stored, data in repository.read_pieces(manifest, wanted) for found in _list(stored, data)}
        except Damaged:  # named by `verify`, which reads every byte
            return {}
    return {}


def _list(stored: StoredPiece, data: Buffer) -> Iterator[Skips]:
    name = stored.piece.dtype.removeprefix("np.array:")
    if name in ("uint8", "uint16", "uint32", "uint64"):
        with suppress(ValueError):  # no list of ids: its digest is not one that the birth facts name
            yield Skips.from_gaps(np.frombuffer(data, dtype=np.dtype(name).newbyteorder("<")))
