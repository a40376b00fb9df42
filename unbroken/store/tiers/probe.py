"""What a tier really does, found out by trying: some servers take a condition and ignore it, and then two writers both believe they won."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass

from unbroken.core.errors import StoreError
from unbroken.core.ports import Nonces, SystemNonces, Tier

_RACERS = 4
_WAIT_S = 120.0


@dataclass(frozen=True)
class Probe:
    """What was found. `faults` says in words what does not hold; empty when a run may be kept here."""

    conditional_put: bool
    faults: tuple[str, ...]


def probe(tier: Tier, nonces: Nonces | None = None) -> Probe:
    """Create, create again, race, read, list, append and delete under a name of its own, which is removed again.

    Raises StoreError when the store cannot be used at all. Cost: about 25 requests.
    """
    folder = f".probe-{(nonces or SystemNonces()).nonce()}"
    try:
        faults = [*_again(tier, f"{folder}/again"), *_race(tier, f"{folder}/race")]
        is_conditional = not faults
        faults += _reading(tier, f"{folder}/again") + _listing(tier, folder) + _appending(tier, f"{folder}/appended")
    finally:
        with suppress(StoreError):  # what cannot be removed is small, and the error that came first matters more
            for path in tier.list(folder):
                tier.delete(path)
    return Probe(is_conditional, tuple(faults))


def _again(tier: Tier, path: str) -> list[str]:
    tier.create(path, [b"first"])
    try:
        tier.create(path, [b"later"])
    except FileExistsError:
        return [] if tier.read(path) == b"first" else ["put-if-absent says that an object is there, and replaces it all the same"]
    return ["put-if-absent does not hold: a second create of one name succeeds, so two writers would overwrite each other"]


def _race(tier: Tier, path: str) -> list[str]:
    won: list[int] = []
    errors: list[StoreError] = []
    gate = threading.Barrier(_RACERS)

    def put(i: int) -> None:
        gate.wait(_WAIT_S)
        try:
            tier.create(path, [b"%d" % i])
            won.append(i)
        except FileExistsError:
            pass
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(i,), daemon=True) for i in range(_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    if errors:
        raise errors[0]
    if len(won) != 1 or tier.read(path) != b"%d" % won[0]:
        return [f"put-if-absent does not hold: of {_RACERS} creates of one name at once {len(won)} succeeded"]
    return []


def _reading(tier: Tier, path: str) -> list[str]:
    content = tier.read(path)
    is_right = tier.read(path, 1, 3) == content[1:4] and tier.read(path, 99, 1) == b"" and tier.size(path) == len(content)
    return [] if is_right else ["parts of an object cannot be read"]


def _listing(tier: Tier, folder: str) -> list[str]:
    return [] if tier.list(folder) == [f"{folder}/again", f"{folder}/race"] else ["an object just made is not listed: listings lag"]


def _appending(tier: Tier, path: str) -> list[str]:
    tier.append(path, b"one")
    tier.append(path, b"two")
    if tier.read(path) != b"onetwo":
        return ["what is appended is not read back"]
    tier.delete(path)
    return (
        []
        if tier.list(path.rpartition("/")[0]) == [path.replace("appended", "again"), path.replace("appended", "race")]
        else ["delete leaves objects"]
    )
