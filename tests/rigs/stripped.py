"""A store that takes the condition of a put and ignores it, as some servers do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unbroken.core.ports import Buffer, Tier


class Stripped:
    """`tier`, where a later `create` of one name replaces what an earlier one made."""

    def __init__(self, tier: Tier) -> None:
        self.url = getattr(tier, "url", None)
        self._tier = tier

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        data = [b"".join(bytes(part) for part in parts)]
        self._tier.delete(path)
        try:
            return self._tier.create(path, data)
        except FileExistsError:  # another put came in between: the last one would win, or the first; neither learns of it
            return len(data[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)
