"""Elements of stored arrays as numbers, without torch: how far two of them are apart, and where they first differ.

Elements are compared by their bits: -0.0 differs from 0.0, a NaN equals only itself, payload included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from unbroken.codec.items import ITEM_BYTES
from unbroken.core.ports import Buffer

Array = np.ndarray[Any, Any]

_FLOAT8 = {  # bits of exponent and mantissa, bias, and which patterns are special
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float8_e8m0fnu": (8, 0, 127, "e8m0"),
}
_NUMPY = "np.array:"


def item_bytes(dtype: str) -> int:
    """Size of one element; 0 for what has no elements (scalars, containers): such a piece is one value."""
    if dtype.startswith(_NUMPY):
        return np.dtype(dtype.removeprefix(_NUMPY)).itemsize
    return ITEM_BYTES.get(dtype, 0)


class Apart:
    """How two arrays of one dtype differ, fed with blocks of whole elements: `num` elements, the `first` of them, and `max_abs`.

    `max_abs` is the largest distance between two numbers, None where no pair of numbers differs (text, or a NaN on one side).
    """

    def __init__(self, dtype: str) -> None:
        self.num = 0
        self.first: int | None = None
        self.max_abs: float | int | None = None
        self._dtype = dtype
        self._size = item_bytes(dtype)

    def add(self, offset: int, a: Buffer, b: Buffer) -> None:
        """Compare the elements that begin at byte `offset`."""
        mask = self._differs(a, b)
        num = int(mask.sum())
        if not num:
            return
        if self.first is None:
            self.first = offset // self._size + int(mask.argmax())
        self.num += num
        x, y = numbers(self._dtype, a), numbers(self._dtype, b)
        if x is None or y is None:
            return
        far = _farthest(x[mask], y[mask])
        if far is not None and (self.max_abs is None or far > self.max_abs):
            self.max_abs = far

    def place(self, shape: Sequence[int]) -> list[int] | None:
        """Index of the first differing element in an array of this shape."""
        return None if self.first is None else [int(i) for i in np.unravel_index(self.first, tuple(shape))] if shape else []

    def _differs(self, a: Buffer, b: Buffer) -> Array:
        x, y = (np.frombuffer(raw, np.uint8).reshape(-1, self._size) for raw in (a, b))
        found: Array = (x != y).any(axis=1)
        return found


def numbers(dtype: str, data: Buffer) -> Array | None:
    """The elements as float64, complex128 or integers; None where they are no numbers."""
    if dtype == "bfloat16":
        return _widened((np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32), np.float64)
    if dtype in _FLOAT8:
        return _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    raw = np.frombuffer(data, np.dtype(dtype.removeprefix(_NUMPY)))
    match raw.dtype.kind:
        case "f":
            return _widened(raw, np.float64)
        case "c":
            return _widened(raw, np.complex128)
        case "b":
            return raw.astype(np.uint8)
        case "i" | "u":
            return raw
    return None


def _widened(values: Array, kind: type) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN says so when it is converted
        return values.astype(kind)


def _farthest(x: Array, y: Array) -> float | int | None:
    if x.dtype.kind in "iu":
        high, low = np.maximum(x, y), np.minimum(x, y)
        return int((high.astype(np.uint64) - low.astype(np.uint64)).max())  # wraps as it must: the true distance fits 64 bits
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    apart = apart[~np.isnan(apart)]
    return float(apart.max()) if apart.size else None


@lru_cache
def _float8_values(dtype: str) -> Array:
    return np.array([_float8(code, *_FLOAT8[dtype]) for code in range(256)])


def _float8(code: int, exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> float:
    """The number behind a byte. "fn": only all ones is NaN; "fnuz": only 0x80 is; "ieee": infinities too; "e8m0": an exponent, no sign."""
    if special == "e8m0":
        return math.nan if code == 0xFF else math.ldexp(1.0, code - bias)
    if special == "fnuz" and code == 0x80:
        return math.nan
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if special == "ieee" and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if special == "fn" and code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
