"""The ledger of consumed samples: the facts that fix a run's order, and the digests each step must therefore show.

Facts come back from files that may be damaged or hostile; everything is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from unbroken.core.errors import Damaged, LayoutMismatch, NewerFormat
from unbroken.order.units import SampleOrder

ORDER_VERSION = 1
"""Number of the rules in this room; frozen by golden values. Another order gets another number."""

RECOMPUTABLE = ("batches", "sampler")
"""Kinds of data whose order these rules know. Any other kind ("foreign") keeps its order to itself."""

_DIGEST_BYTES = 16
_WHERE = "run.json"


def unit_digest(ids: NDArray[np.int64]) -> str:
    """32 hex digits: BLAKE3-128 over the unit's sample ids as little-endian int64, in the order they came out of the loader."""
    return blake3(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest(length=_DIGEST_BYTES)


def describe(kind: str, order: SampleOrder) -> dict[str, Any]:
    """Birth facts of an order, JSON-able; `units` are stored beside them, not in them."""
    return {
        "kind": kind,
        "num_samples": order.num_samples,
        "global_batch": order.global_batch,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "epochs": order.epochs,
        "order": ORDER_VERSION,
    }


def parse(options: Mapping[str, Any]) -> SampleOrder | None:
    """The order that stored options describe, None when it cannot be recomputed (foreign loader, no data at all).

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
        return SampleOrder(
            num_samples=_integer(data, "data.num_samples"),
            global_batch=_integer(data, "data.global_batch"),
            units=_integer(options, "units"),
            seed=_integer(data, "data.seed"),
            shuffle=shuffle,
            epochs=None if data.get("epochs") is None else _integer(data, "data.epochs"),
        )
    except ValueError as error:
        raise Damaged(_WHERE, f"options.data: {error}") from error


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
    names = sorted(stored.keys() | live.keys())
    changed = [name for name in names if stored.get(name) != live.get(name)]
    if not changed:
        return
    lines = [f"{name}: the run was born with {stored.get(name)!r:.100}, now it is {live.get(name)!r:.100}" for name in changed]
    if changed == ["world_size"]:
        remedy = (
            f"this kind of data continues only at world size {stored.get('world_size')!r:.100}: start that many ranks, "
            "or begin a new run with unbroken.Batches or unbroken.Sampler, which continue at any world size"
        )
    else:
        remedy = "give the data its old settings, or start a new run in another folder"
    raise LayoutMismatch("the data is not what this run was born with:\n  " + "\n  ".join(lines) + f"\n{remedy}", mismatched=tuple(changed))
