"""What the fuzz tests share: how long they run, broken copies of valid bytes, hostile values, and what a parser may do with them."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("UNBROKEN_FUZZ", "1"))
"""How many times the examples of a short run; `make fuzz` sets it."""

MAX_BYTES = 50 << 20
"""No parser may hold more for a file of some kilobytes that lies about its sizes."""

DEEP = '{"a":' * 3000 + "1" + "}" * 3000


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of one test: the same examples each time in a short run, others each time in a long one."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=timedelta(seconds=10),
        print_blob=True,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
            HealthCheck.filter_too_much,
        ],
    )


@contextmanager
def bounded(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Fails when the block ever holds more memory than that; errors pass through. Within another such block it is part of that."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < max_bytes, f"{peak} bytes at the worst moment"


def outcome(act: Callable[[], Any], *allowed: type[BaseException]) -> Any:
    """What `act` gives, or the error if it is one of these. Any other error goes on: it is the fault looked for."""
    try:
        with bounded():
            return act()
    except allowed as error:
        return error


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """Some valid bytes with one to four faults: bits flipped, ends cut, ranges lost, doubled, swapped or overwritten, numbers made huge."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(1, min(64, len(data) - at)))
        match draw(st.sampled_from(("flip", "set", "cut", "lose", "double", "swap", "number", "insert"))):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at : at + size] = bytes([draw(st.sampled_from((0, 0xFF, 0x7F, 0x80)))]) * size
            case "cut":
                del data[at:]
            case "lose":
                del data[at : at + size]
            case "double":
                data[at:at] = data[at : at + size]
            case "swap":
                other = draw(st.integers(0, len(data) - size))
                block = bytes(data[other : other + size])
                data[other : other + size] = data[at : at + size]
                data[at : at + size] = block
            case "number":
                data[at : at + 8] = draw(st.sampled_from((1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))).to_bytes(8, "little")
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=32))
    return bytes(data)


HOSTILE_NUMBERS = (-1, 0, 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64, 10**18, 10**30, 10**4000, 1.5, -0.0, 1e308)
HOSTILE_WORDS = (
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "packs/../../x", "a\x00b", "x" * 5000, "\udc80", "\u202e",
    "packs/00/" + "0" * 32 + ".pack",
    "manifests/000000000001-0-" + "0" * 32 + "-0.json", "run.json", "runs/main/log/00000000.json", "0" * 64, "g" * 64, "NaN",
)  # fmt: skip

scalars = st.one_of(
    st.sampled_from(HOSTILE_NUMBERS), st.sampled_from(HOSTILE_WORDS), st.none(), st.booleans(), st.integers(), st.text(max_size=40)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)
"""Anything that JSON can say, hostile things first."""


def _sites(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _sites(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 8)):
            yield from _sites(value[i], (*path, i))


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three of its fields replaced, lost, doubled, or exchanged with another's."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        sites = list(_sites(value))
        if not sites:
            break
        path = draw(st.sampled_from(sites))
        holder = _at(value, path[:-1])
        match draw(st.sampled_from(("replace", "replace", "near", "lose", "double", "exchange"))):
            case "replace":
                holder[path[-1]] = draw(values)
            case "near":
                old = holder[path[-1]]
                holder[path[-1]] = old + draw(st.sampled_from((-1, 1, 4096, 2**32))) if type(old) is int else draw(scalars)
            case "lose":
                del holder[path[-1]]
            case "double":
                if isinstance(holder, list):
                    holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
            case "exchange":
                other = draw(st.sampled_from(sites))
                theirs = _at(value, other[:-1])
                if path[: len(other)] != other and other[: len(path)] != path:
                    holder[path[-1]], theirs[other[-1]] = theirs[other[-1]], holder[path[-1]]
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def dumped(value: Any) -> bytes:
    """Compact JSON, also of what no writer of ours would write."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
