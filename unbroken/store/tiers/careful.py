"""A tier whose store cannot put if absent: each `create` looks first. Two writers within one moment may then overwrite one another.

So this is the lower level: whoever uses it must see to it that only one process writes at a time. All else holds: what is there is never
replaced by a writer that comes later, and objects appear whole.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from dataclasses import replace

from unbroken.core.errors import Permanent
from unbroken.core.ports import Buffer, Nonces, Tier
from unbroken.store.tiers.probe import probe
from unbroken.store.tiers.traits import traits_of

LOWER_LEVEL = "this store does not put if absent, so that two writers at one moment are not kept apart: see to it that only one writes"


class CarefulTier:
    """`tier`, where `create` of a name that is there is refused although the store would replace it. Cost: one `size` per `create`."""

    def __init__(self, tier: Tier) -> None:
        self.traits = replace(traits_of(tier), conditional_put=False)
        self.url = getattr(tier, "url", None)
        self._tier = tier

    def __repr__(self) -> str:
        return f"CarefulTier({self._tier!r})"

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        try:
            self._tier.size(path)
        except FileNotFoundError:
            return self._tier.create(path, parts)
        raise FileExistsError(path)

    def append(self, path: str, data: Buffer) -> None:
        self._tier.append(path, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._tier.read(path, offset, length)

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


def settled(tier: Tier, nonces: Nonces | None = None) -> tuple[Tier, str]:
    """How a tier may be written to, found out by trying, and what has to be said of that ("": nothing).

    Permanent for a store that no run may be kept in; StoreError where it cannot be used at all. Cost: about 25 requests.
    """
    found = probe(tier, nonces)
    if not found.faults:
        return tier, ""
    if found.conditional_put:
        raise Permanent(f"no run may be kept there: {'; '.join(found.faults)}")
    careful = CarefulTier(tier)
    others = [fault for fault in probe(careful, nonces).faults if "put-if-absent" not in fault]
    if others:
        raise Permanent(f"no run may be kept there: {'; '.join(others)}")
    return careful, LOWER_LEVEL
