"""What a tier promises beyond the protocol: read by whoever must decide between two ways, never guessed from a URL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """Facts about one tier. `bytes_per_s` is a limit that is known, None when there is none."""

    conditional_put: bool
    """Of any number of `create` calls of one name, exactly one succeeds."""

    atomic_replace: bool
    """A reader of an object that is being written sees nothing of it or all of it."""

    durable: bool
    """What a call has returned from survives a power loss."""

    bytes_per_s: float | None = None


NOTHING_PROMISED = Traits(conditional_put=False, atomic_replace=False, durable=False)


def traits_of(tier: object) -> Traits:
    """The `traits` that a tier states; one that states none promises nothing."""
    found = getattr(tier, "traits", None)
    return found if isinstance(found, Traits) else NOTHING_PROMISED
