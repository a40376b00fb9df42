"""The metrics of a step as facts of a journal event, and back: JSON has no NaN and no infinities, a loss may be one.

    {"lr":0.001,"seen":12,"is_warm":true,"phase":"warm-up","grad_norm":{"float":"inf"}}

Names are such that every sink takes them, so that what one sink shows under a name all others do.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from unbroken.core.limits import MAX_METRIC_NAME_CHARS, MAX_METRIC_TEXT_CHARS, MAX_METRICS_BYTES

EVENT = "metrics"
"""Name of the journal event that holds them."""

Value = float | int | bool | str

NUMBERS = ("loss", "samples")
"""Metrics that every row has, and that stay numbers when the loop gives others."""

_NAME = re.compile(r"[^\W_]([\w./ -]*[\w-])?")
_INT64 = range(-(1 << 63), 1 << 63)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@lru_cache(maxsize=4096)
def check_name(name: str) -> None:
    """ValueError unless every sink takes this name."""
    if name == "step":
        raise ValueError("metric 'step': every row has the number of its step under this name, choose another one")
    if len(name) > MAX_METRIC_NAME_CHARS or not _NAME.fullmatch(name) or posixpath.normpath(name) != name:
        raise ValueError(
            f"metric {name[:80]!r}: a name begins with a letter or digit, then come letters, digits, '_' and '-', between them also '.', "
            f"' ' and single '/', at most {MAX_METRIC_NAME_CHARS} characters"
        )


def check_value(name: str, value: Any) -> Value:
    """The value itself; TypeError naming the metric unless it is a float, a bool, an int of 64 bits or a short text."""
    if isinstance(value, float) or (isinstance(value, int) and value in _INT64):
        return value
    if isinstance(value, int):
        raise TypeError(f"metric {name!r}: {value.bit_length()} bits are more than the 64 of an integer: log it as a float")
    if isinstance(value, str) and name not in NUMBERS:
        if len(value) > MAX_METRIC_TEXT_CHARS or not value.isprintable():
            raise TypeError(f"metric {name!r}: a text has at most {MAX_METRIC_TEXT_CHARS} printable characters, this one has {len(value)}")
        return value
    raise TypeError(f"metric {name!r}: got a {type(value).__name__}; log a number, a bool, a 0-dim tensor or a short text")


def checked(values: Mapping[str, Any]) -> dict[str, Value]:
    """Metrics as a user gives them, 0-dim arrays and tensors too; ValueError or TypeError naming the first that cannot be kept."""
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"metric {name!r}: its name must be a text")
        check_name(name)
    found = {name: check_value(name, value.item() if getattr(value, "ndim", None) == 0 else value) for name, value in values.items()}
    if (size := sum(num_bytes(name, value) for name, value in found.items())) > MAX_METRICS_BYTES:
        raise ValueError(f"{len(found)} metrics of one step take {size} bytes in the journal, at most {MAX_METRICS_BYTES}: give fewer")
    return found


def num_bytes(name: str, value: Value) -> int:
    """What one metric takes in the journal, or a little more."""
    return 2 * len(name.encode()) + (2 * len(value.encode()) if isinstance(value, str) else 28)


def encode(values: Mapping[str, Value]) -> dict[str, Any]:
    """Metrics as facts."""
    return {name: {"float": str(v)} if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def decode(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Facts as metrics; what a later version may have put there is passed over."""
    values: dict[str, Value] = {}
    for name, fact in facts.items():
        value = _WORDS.get(str(fact.get("float"))) if isinstance(fact, dict) else fact
        if isinstance(value, float | int | str):
            values[name] = value
    return values
