"""How much memory an act needs at its worst."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Fails when the Python allocations of the block ever exceed `size_bytes`."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size_bytes, f"{peak} bytes at the worst moment; at most {size_bytes}"
