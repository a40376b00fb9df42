"""A tier that takes no more than its share of the network: bytes per second over reads and writes together."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from unbroken.core.ports import Buffer, Clock, SystemClock, Tier
from unbroken.store.tiers.traits import traits_of

_SLICE_BYTES = 1 << 20


class LimitTier:
    """`tier` at `bytes_per_s` on average; what was not used in the last second may come at once. Calls of all threads share it.

    A write waits before its bytes go out, a read after they came: of a read only the store knows how long it will be. Around a RetryTier
    this takes away the second try of a `create`, whose parts then come only once: put the RetryTier outside.
    """

    def __init__(self, tier: Tier, bytes_per_s: float, *, clock: Clock | None = None) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a limit of {bytes_per_s} bytes/s: it must be positive; for no limit use the tier itself")
        self.traits = replace(traits_of(tier), bytes_per_s=bytes_per_s)
        self._tier = tier
        self._rate = bytes_per_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._tokens = bytes_per_s
        self._at = self._clock.monotonic()

    def __repr__(self) -> str:
        return f"LimitTier({self._tier!r}, {self._rate:g})"

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        return self._tier.create(path, self._paid(parts))

    def append(self, path: str, data: Buffer) -> None:
        self._pay(len(memoryview(data).cast("B")))
        self._tier.append(path, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._tier.read(path, offset, length)
        self._pay(len(data))
        return data

    def size(self, path: str) -> int:
        return self._tier.size(path)

    def sweep(self) -> list[str]:
        return self._tier.sweep()

    def list(self, prefix: str) -> list[str]:
        return self._tier.list(prefix)

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._tier.folders(prefix)

    def delete(self, path: str) -> None:
        self._tier.delete(path)

    def _paid(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _SLICE_BYTES):
                block = view[start : start + _SLICE_BYTES]
                self._pay(len(block))
                yield block

    def _pay(self, num_bytes: int) -> None:
        """Take tokens, into debt if need be, and wait until the debt is worked off: so waiting is first come, first served."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate) - num_bytes
            self._at = now
            debt = -self._tokens
        if debt > 0:
            self._clock.sleep(debt / self._rate)
