"""Memory that a save is copied into while its first pieces are already hashed and written."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unbroken.core.errors import SaveFailed
from unbroken.core.limits import DRAIN_TIMEOUT_S
from unbroken.store.layout import Part

if TYPE_CHECKING:
    from unbroken.capture.tree import Item


class CopyFailed(SaveFailed):
    """The state could not be copied; whoever copied it knows why."""


class Staging:
    """Memory for one save, kept, since fresh pages make the copy 5-10 times slower. `place`, then `copy`, or `give_up`.

    `copy` runs in the thread that owns the state. The parts are used in another one: each tells when it is there.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._changed = threading.Condition()
        self._num_copied = 0
        self._is_given_up = False
        self._jobs: list[tuple[Item, memoryview]] = []

    def place(self, items: Sequence[Item]) -> list[Part]:
        """A place for each item, in the order in which a save needs them; nothing is copied yet."""
        from unbroken.capture.freeze import places

        in_order = sorted(items, key=lambda item: item.piece.pointer)
        *starts, total = places([item.nbytes for item in in_order])
        if self._memory is None or len(self._memory) < total:
            self._memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))
        view = memoryview(self._memory)
        self._jobs = [(item, view[start : start + item.nbytes]) for item, start in zip(in_order, starts, strict=True)]
        self._num_copied, self._is_given_up = 0, False
        return [Part(item.piece, place, self._ready(n)) for n, (item, place) in enumerate(self._jobs)]

    def copy(self) -> None:
        """All items' bytes as they are now. Cost: one pass at memory bandwidth."""
        from unbroken.capture.tree import write_item

        jobs, self._jobs = self._jobs, []
        for item, place in jobs:
            write_item(item, place)
            with self._changed:
                self._num_copied += 1
                self._changed.notify_all()

    def give_up(self) -> None:
        """What has not been copied will not be: who waits for it gets CopyFailed."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def _ready(self, number: int) -> Callable[[], None]:
        def wait() -> None:
            if self._num_copied > number:
                return
            with self._changed:
                there = self._changed.wait_for(lambda: self._num_copied > number or self._is_given_up, DRAIN_TIMEOUT_S)
            if not there or self._num_copied <= number:
                raise CopyFailed("the state has not been copied")

        return wait
