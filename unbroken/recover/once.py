"""What a run has done once: keys that the checkpoints keep, so that a restart does not do it again.

The keys are a piece of rank 0's own (`/once`), there only where there are any: state roots, which other runs are compared by, know
nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from unbroken.capture.tree import Item, flatten, rebuild
from unbroken.core.limits import MAX_ONCE_KEY_CHARS, MAX_ONCE_KEYS
from unbroken.core.ports import Buffer
from unbroken.core.records import Piece

POINTER = "/once"


class Once:
    """The keys asked for so far on the surviving lineage; kept on rank 0."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def first(self, key: str) -> bool:
        """True when this key is new. ValueError for more than MAX_ONCE_KEYS of them."""
        if key in self._keys:
            return False
        if len(self._keys) >= MAX_ONCE_KEYS:
            raise ValueError(f"run.once({key[:80]!r}): there are {MAX_ONCE_KEYS} keys already; every checkpoint keeps them all")
        self._keys[key] = None
        return True

    def pieces(self) -> list[Item]:
        """The keys as they stand, nothing where there are none."""
        return flatten("\n".join(self._keys), POINTER, kind="once", scope="rank", layer="scheduling") if self._keys else []

    def restore(self, pieces: Mapping[str, tuple[Piece, Buffer]]) -> None:
        """Go on from what a checkpoint holds of this rank."""
        self._keys = dict.fromkeys(rebuild(pieces, POINTER).split("\n")) if POINTER in pieces else {}


def check_key(key: str) -> None:
    """TypeError or ValueError unless this can be a key."""
    if not isinstance(key, str):
        raise TypeError(f"run.once() got a {type(key).__name__}: give a text, such as run.once('config')")
    if not 0 < len(key) <= MAX_ONCE_KEY_CHARS or not key.isprintable():
        raise ValueError(f"run.once({key[:80]!r}): a key has 1 to {MAX_ONCE_KEY_CHARS} printable characters")
