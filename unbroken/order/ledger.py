"""The ledger of consumed samples: the facts that fix a run's order, and the digests each step must therefore show.

Facts come back from files that may be damaged or hostile; everything is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from unbroken.core.errors import Damaged, LayoutMismatch, NewerFormat
from unbroken.order.mixture import Part
from unbroken.order.skips import NO_SKIPS, Skips
from unbroken.order.units import SampleOrder

ORDER_VERSION = 2
"""Newest number of the rules in this room; frozen by golden values. 1: one data set, nothing skipped. 2: mixtures and skips, too."""

RECOMPUTABLE = ("batches", "sampler")
"""Kinds of data whose order these rules know. Any other kind ("foreign") keeps its order to itself."""

SKIPS = "/skips"
"""Under it the lists of skipped ids are stored, each by its digest: too long for birth facts, and needed to check the order."""

MAX_NAMED = 16
"""Differing facts that one refusal names."""

_DIGEST_BYTES = 16
_WHERE = "run.json"


def unit_digest(ids: NDArray[np.int64]) -> str:
    """32 hex digits: BLAKE3-128 over the unit's sample ids as little-endian int64, in the order they came out of the loader."""
    return blake3(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest(length=_DIGEST_BYTES)


def describe(kind: str, order: SampleOrder) -> dict[str, Any]:
    """Birth facts of an order, JSON-able; `units` are stored beside them, not in them. Skipped ids are in them by digest."""
    facts: dict[str, Any] = {"kind": kind, "global_batch": order.global_batch, "seed": order.seed, "shuffle": order.shuffle}
    facts["epochs"] = order.epochs
    if not order.parts[0].name:
        (only,) = order.parts
        facts |= {"num_samples": only.num_samples} | _skip_facts(only)
    else:
        facts["datasets"] = {p.name: {"num_samples": p.num_samples, "share": p.share} | _skip_facts(p) for p in order.parts}
    is_plain = "num_samples" in facts and "skip" not in facts
    return facts | {"order": 1 if is_plain else ORDER_VERSION}


def _skip_facts(part: Part) -> dict[str, Any]:
    return {"skip": part.skips.facts()} if len(part.skips) else {}


def lists(order: SampleOrder) -> dict[str, Skips]:
    """The lists of skipped ids that an order needs, by digest."""
    return {part.skips.digest: part.skips for part in order.parts if len(part.skips)}


def parse(options: Mapping[str, Any], skips: Mapping[str, Skips] = MappingProxyType({})) -> SampleOrder | None:
    """The order that stored options describe, None when it cannot be recomputed (foreign loader, no data at all, a list not in `skips`).

    Raises Damaged naming the field, NewerFormat when a newer version made the order.
    """
    data = options.get("data")
    if data is None:
        return None
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise Damaged(_WHERE, "options.data is not a record with a kind")
    if data["kind"] not in RECOMPUTABLE:
        return None
    version = _integer(data, "data.order")
    if version > ORDER_VERSION:
        raise NewerFormat(f"{_WHERE}: its sample order has version {version}, this reads <= {ORDER_VERSION}: upgrade unbroken")
    shuffle = data.get("shuffle")
    if version < 1 or not isinstance(shuffle, bool):
        raise Damaged(_WHERE, f"options.data.order={version}, options.data.shuffle={shuffle!r}: not facts of an order")
    try:
        parts = _parts(data, skips)
        if parts is None:
            return None
        return SampleOrder(
            parts,
            global_batch=_integer(data, "data.global_batch"),
            units=_integer(options, "units"),
            seed=_integer(data, "data.seed"),
            shuffle=shuffle,
            epochs=None if data.get("epochs") is None else _integer(data, "data.epochs"),
        )
    except ValueError as error:
        raise Damaged(_WHERE, f"options.data: {error}") from error


def _parts(data: Mapping[str, Any], skips: Mapping[str, Skips]) -> list[Part] | None:
    datasets = data.get("datasets")
    if datasets is None:
        records = {"": data}
    elif isinstance(datasets, Mapping) and datasets and all(isinstance(record, Mapping) for record in datasets.values()) and all(datasets):
        records = dict(datasets)
    else:
        raise Damaged(_WHERE, "options.data.datasets is no record of records")
    parts = []
    for name, record in sorted(records.items()):
        listed = _listed(record, f"data.datasets.{name}" if name else "data", skips)
        if listed is None:
            return None
        share = _integer(record, f"data.datasets.{name}.share") if name else 1
        where = f"data.datasets.{name}.num_samples" if name else "data.num_samples"
        parts.append(Part(name, _integer(record, where), share, listed))
    return parts


def _listed(record: Mapping[str, Any], where: str, skips: Mapping[str, Skips]) -> Skips | None:
    """The skipped ids that a record names, None where the list itself is not at hand."""
    facts = record.get("skip")
    if facts is None:
        return NO_SKIPS
    if not isinstance(facts, Mapping) or not isinstance(facts.get("digest"), str):
        raise Damaged(_WHERE, f"options.{where}.skip is not a record with a digest")
    found = skips.get(facts["digest"])
    if found is not None and found.facts() != dict(facts):
        raise Damaged(_WHERE, f"options.{where}.skip does not fit the list of skipped samples")
    return found


def _integer(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name.rsplit(".", 1)[-1])
    if isinstance(value, bool) or not isinstance(value, int):
        raise Damaged(_WHERE, f"options.{name} is {value!r}, not an integer")
    return value


def expected(options: Mapping[str, Any], step: int) -> tuple[str, ...] | None:
    """Digests of all units of `step` (>= 1) for a run born with these options.

    None: the order cannot be recomputed. (): the data ended before this step, so nobody may have computed it.
    Errors as in `parse`. Cost: O(global batch), 0.5 microseconds per sample.
    """
    order = parse(options)
    return None if order is None else digests(order, step)


def digests(order: SampleOrder, step: int) -> tuple[str, ...]:
    """As `expected`, for an order that is parsed once and asked for many steps."""
    if order.num_steps is not None and step > order.num_steps:
        return ()
    return tuple(unit_digest(order.unit_ids(step, unit)) for unit in range(order.units))


def check_same(stored: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other data: LayoutMismatch that names each differing fact with both values."""
    if not isinstance(stored, Mapping):
        raise Damaged(_WHERE, "options.data is not a record")
    before, now = dict(_flat(stored)), dict(_flat(live))
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if not changed:
        return
    lines = [f"{name}: the run was born with {before.get(name)!r:.100}, now it is {now.get(name)!r:.100}" for name in changed]
    if changed == ["world_size"]:
        remedy = (
            f"this kind of data continues only at world size {stored.get('world_size')!r:.100}: start that many ranks, "
            "or begin a new run with unbroken.Batches or unbroken.Sampler, which continue at any world size"
        )
    else:
        remedy = "give the data its old settings, or start a new run in another folder"
    if len(lines) > MAX_NAMED:
        lines[MAX_NAMED:] = [f"and {len(lines) - MAX_NAMED} more"]
    raise LayoutMismatch("the data is not what this run was born with:\n  " + "\n  ".join(lines) + f"\n{remedy}", mismatched=tuple(changed))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
