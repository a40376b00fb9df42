"""Reading into memory that is there already: straight from the device where a tier can do that, else by way of `Tier.read`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from unbroken.core.ports import Tier

ReadInto = Callable[[int, memoryview], int]
"""(offset, view) -> bytes read from there into the view; fewer than it holds at the end of the object. Errors as of `Tier.read`."""


def reading(tier: Tier, path: str) -> AbstractContextManager[ReadInto]:
    """One object, open for reading by one thread. A tier may have a method `reading` of its own; of others `read` is called."""
    own = getattr(tier, "reading", None)
    found: AbstractContextManager[ReadInto] = _by_read(tier, path) if own is None else own(path)
    return found


@contextmanager
def _by_read(tier: Tier, path: str) -> Iterator[ReadInto]:
    def read_into(offset: int, view: memoryview) -> int:
        data = tier.read(path, offset, len(view))
        view[: len(data)] = data
        return len(data)

    yield read_into
