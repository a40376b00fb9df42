"""Which chunks a new checkpoint is made smaller against: those of the same place of the same piece in the newest visible one before it.

Costs a read of that checkpoint (with its chains) and what `codec.planes` costs; memory: three chunks more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.planes import NEEDS_BASE, encode
from unbroken.core.errors import Damaged, StoreError
from unbroken.core.limits import CHUNK_BYTES
from unbroken.core.ports import Buffer, Tier
from unbroken.core.records import CommitEntry, Manifest, Piece
from unbroken.store.chains import Located, locate
from unbroken.store.loading import Chunks
from unbroken.store.log import Key
from unbroken.store.manifests import is_cut_at_leaves
from unbroken.store.packs import Chunk, Place

MAX_DEPTH = 8
"""Differences one after another, unless said otherwise: reading the last costs the reading of all."""


def is_full_due(commits: Sequence[CommitEntry], step: int, now: str, every_steps: int | None, every_s: float | None) -> bool:
    """Has a multiple of `every_steps` passed since the newest checkpoint that stands alone, or `every_s` before `now` (UTC)?

    True where there is none. Decided from the log, so that restarts do not matter.
    """
    last = next((commit for commit in reversed(commits) if commit.kind == "full"), None)
    if last is None:
        return True
    if every_steps is not None and step // every_steps > last.step // every_steps:
        return True
    try:
        age_s = (datetime.fromisoformat(now) - datetime.fromisoformat(last.time)).total_seconds()
    except ValueError:  # an older writer told no time
        return every_s is not None
    return every_s is not None and age_s >= every_s


@dataclass(frozen=True)
class Encoding:
    """How chunks are made smaller. `max_depth`: of differences one after another; 0: every checkpoint stands alone. `level`: of zstd."""

    max_depth: int = MAX_DEPTH
    level: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth <= 32 or not 1 <= self.level <= 19:
            raise ValueError(f"Encoding(max_depth={self.max_depth}, level={self.level}): 0 to 32, and 1 to 19")


@dataclass(frozen=True)
class FullEvery:
    """A checkpoint stands alone at least every so many steps or seconds. Neither: all are stored as they are."""

    steps: int | None = None
    seconds: float | None = None

    def encoding(self, commits: Sequence[CommitEntry], step: int, now: str, *, milestone: bool) -> Encoding | None:
        """How the one of this step is to be stored after these; milestones stand alone, too. None: as it is."""
        if self.steps is None and self.seconds is None:
            return None
        is_full = milestone or is_full_due(commits, step, now, self.steps, self.seconds)
        return Encoding(max_depth=0 if is_full else MAX_DEPTH)


class Encoder:
    """Encodes the chunks of one write against the checkpoint `key`, whose manifests are `bases`. What cannot be read is done without."""

    def __init__(self, encoding: Encoding, tier: Tier, key: Key, bases: Sequence[Manifest]) -> None:
        self.key = key
        self._encoding = encoding
        self._olds: dict[tuple[int | None, str], tuple[Piece, list[int], Chunks, tuple[Located, ...]]] = {}
        for manifest in bases if encoding.max_depth else ():
            chunks, located = Chunks(tier, manifest), locate(manifest.chunks)
            for stored in manifest.pieces:
                numbers = [extent.chunk for extent in stored.extents]
                if stored.size_bytes > CHUNK_BYTES // 64 and is_cut_at_leaves(stored, manifest.chunks):
                    self._olds[stored.rank, stored.piece.pointer] = stored.piece, numbers, chunks, located

    def __call__(self, chunk: Chunk) -> tuple[Chunk, Located | None]:
        """The chunk as it is to be stored, and what it is a difference from."""
        place = chunk.place
        width = 1 if place is None else min(8, ITEM_BYTES.get(place.piece.dtype, 1))
        width = width // 2 if place is not None and place.piece.dtype.startswith("complex") else width
        base, data = self._base(place)
        encoded = encode(chunk.data, width, data, level=self._encoding.level)
        if not encoded.codec:
            return chunk, None
        return chunk._replace(codec=encoded.codec, stored=encoded.data), base if encoded.codec in NEEDS_BASE else None

    def _base(self, place: Place | None) -> tuple[Located | None, Buffer | None]:
        old = None if place is None else self._olds.get((place.rank, place.piece.pointer))
        if place is None or old is None:
            return None, None
        piece, numbers, chunks, located = old
        if (piece.dtype, piece.shape) != (place.piece.dtype, place.piece.shape) or place.nth >= len(numbers):
            return None, None
        base = located[numbers[place.nth]]
        if base.depth >= self._encoding.max_depth:
            return None, None
        try:
            return base, chunks.get(numbers[place.nth]).data
        except (Damaged, StoreError, FileNotFoundError):  # safe: it is stored whole; who reads the old one is told
            return None, None
