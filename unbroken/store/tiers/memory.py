"""A tier in this process's memory: deterministic, its whole state is one hashable value. Tests and the model check stand on it."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable

from unbroken.core.errors import Permanent
from unbroken.core.ports import Buffer
from unbroken.store.paths import is_inside
from unbroken.store.tiers.traits import Traits

Snapshot = tuple[tuple[str, bytes], ...]


class MemoryTier:
    """Objects in a dict. `snapshot` gives all of them, sorted by path; a tier made from it is equal."""

    def __init__(self, snapshot: Snapshot = ()) -> None:
        self.traits = Traits(conditional_put=True, atomic_replace=True, durable=False)
        self._objects = dict(snapshot)
        self._lock = threading.Lock()

    def snapshot(self) -> Snapshot:
        """The whole state."""
        with self._lock:
            return tuple(sorted(self._objects.items()))

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        self._check(path)
        data = b"".join(parts)
        with self._lock:
            if path in self._objects:
                raise FileExistsError(path)
            self._objects[path] = data
        return len(data)

    def append(self, path: str, data: Buffer) -> None:
        self._check(path)
        with self._lock:
            self._objects[path] = self._objects.get(path, b"") + bytes(data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._get(path)
        return data[offset:] if length is None else data[offset : offset + max(0, length)]

    def size(self, path: str) -> int:
        return len(self._get(path))

    def sweep(self) -> list[str]:
        return []

    def list(self, prefix: str) -> list[str]:
        if prefix:
            self._check(prefix)
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            return sorted(path for path in self._objects if path.startswith(start))

    def folders(self, prefix: str) -> builtins.list[str]:
        self._check(prefix)
        found = (path.removeprefix(f"{prefix}/") for path in self.list(prefix))
        return sorted({rest.partition("/")[0] for rest in found if "/" in rest})

    def delete(self, path: str) -> None:
        self._check(path)
        with self._lock:
            self._objects.pop(path, None)

    def _get(self, path: str) -> bytes:
        self._check(path)
        with self._lock:
            try:
                return self._objects[path]
            except KeyError:
                raise FileNotFoundError(path) from None

    @staticmethod
    def _check(path: str) -> None:
        if not is_inside(path):
            raise Permanent(f"{path[:200]!r}: not a path inside the store")
