"""Calls that fail for a while are made again, for a bounded time. What may have been done although it failed is looked at first."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from unbroken.core.errors import Permanent, Transient
from unbroken.core.ports import Buffer, Clock, Nonces, SystemClock, SystemNonces, Tier
from unbroken.store.tiers.traits import traits_of

T = TypeVar("T")

_COMPARED_BYTES = 8 << 20


class RetryTier:
    """`tier`, with Transient errors tried again until `total_s` have passed, after pauses that double from `first_s` to `max_s`.

    Each pause is drawn between half of itself and itself, so that writers who failed together do not come back together. Other errors
    are raised at once. A `create` of parts that can be given only once (an iterator) is not made again. One that is made again and finds
    its own bytes there has succeeded: two writers must never have equal objects for one name, and ours name their writer. An `append`
    that failed is made again only if nothing of it is there; Permanent when half of it is. Cost: one `size` per `append`.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        total_s: float = 60.0,
        first_s: float = 0.1,
        max_s: float = 5.0,
        clock: Clock | None = None,
        nonces: Nonces | None = None,
    ) -> None:
        if not 0 < first_s <= max_s or total_s < 0:
            raise ValueError(f"pauses from {first_s} s to {max_s} s within {total_s} s: use 0 < first_s <= max_s and total_s >= 0")
        self.traits = traits_of(tier)
        self.url = getattr(tier, "url", None)
        self._tier = tier
        self._appending = threading.Lock()  # else another thread's append would be taken for half of one that failed
        self._total_s = total_s
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock or SystemClock()
        self._nonces = nonces or SystemNonces()

    def __repr__(self) -> str:
        return f"RetryTier({self._tier!r})"

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        if isinstance(parts, Iterator):
            return self._tier.create(path, parts)
        is_unsure = False

        def act() -> int:
            nonlocal is_unsure
            try:
                return self._tier.create(path, parts)
            except Transient:
                is_unsure = True
                raise
            except FileExistsError:
                size = self._size_if_same(path, parts) if is_unsure else None
                if size is None:
                    raise
                return size

        return self._again(act)

    def append(self, path: str, data: Buffer) -> None:
        before: int | None = None
        is_unsure = False

        def act() -> None:
            nonlocal before, is_unsure
            if before is None:
                before = self._size_or_none(path)
            elif is_unsure and self._has_been_added(path, before, data):
                return
            try:
                self._tier.append(path, data)
            except Transient:
                is_unsure = True
                raise

        with self._appending:
            self._again(act)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._again(lambda: self._tier.read(path, offset, length))

    def size(self, path: str) -> int:
        return self._again(lambda: self._tier.size(path))

    def sweep(self) -> list[str]:
        return self._again(self._tier.sweep)

    def list(self, prefix: str) -> list[str]:
        return self._again(lambda: self._tier.list(prefix))

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._again(lambda: self._tier.folders(prefix))

    def delete(self, path: str) -> None:
        self._again(lambda: self._tier.delete(path))

    def _again(self, act: Callable[[], T]) -> T:
        deadline = self._clock.monotonic() + self._total_s
        pause_s = self._first_s
        while True:
            try:
                return act()
            except Transient:
                drawn_s = pause_s * (0.5 + int(self._nonces.nonce()[:8], 16) / (1 << 33))
                if self._clock.monotonic() + drawn_s > deadline:
                    raise
            self._clock.sleep(drawn_s)
            pause_s = min(2 * pause_s, self._max_s)

    def _size_or_none(self, path: str) -> int:
        """Bytes there; -1 for no object."""
        try:
            return self._tier.size(path)
        except FileNotFoundError:
            return -1

    def _has_been_added(self, path: str, before: int, data: Buffer) -> bool:
        """Did an append that failed add its data all the same? Permanent when neither: to add it again would tear what is there."""
        now = self._size_or_none(path)
        start = max(0, before)
        if now == start + len(memoryview(data).cast("B")) and self._tier.read(path, start) == bytes(data):
            return True
        if now in (before, start):
            return False
        raise Permanent(f"{path}: {now} bytes after an append to {start} that failed: neither nothing of it nor all of it")

    def _size_if_same(self, path: str, parts: Iterable[Buffer]) -> int | None:
        """The object's size when its bytes are those of `parts`."""
        offset = 0
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _COMPARED_BYTES):
                block = view[start : start + _COMPARED_BYTES]
                if self._tier.read(path, offset, len(block)) != block:
                    return None
                offset += len(block)
        return offset if self._tier.size(path) == offset else None
