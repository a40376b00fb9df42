"""Leaves without torch: Python's scalars and NumPy's scalars and arrays, as (dtype name, shape, little-endian bytes) and back.

Only exact types are taken: a subclass (Enum, IntEnum, numpy.matrix, ...) would come back as something else, so it is refused.
Both directions raise ValueError or TypeError with the reason only; the caller knows the path.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

assert sys.byteorder == "little", "stored bytes are little-endian; a big-endian host would have to swap"

Leaf = tuple[str, tuple[int, ...], bytes]

_ARRAY = "np.array:"
_SCALAR = "np:"
_WIDTHS = {"bool": ("",), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_NAMES = frozenset(f"{kind}{width}" for kind, widths in _WIDTHS.items() for width in widths)
_SIZED = re.compile(r"<[Mm]8(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?|<U[1-9][0-9]{0,7}|\|S[1-9][0-9]{0,7}")
_MAX_CODE_POINT = 0x10FFFF
_MAX_DIMS = 32


def _int_bytes(value: int) -> bytes:
    # never below 8 bytes, so that a counter that grows does not change the layout of a snapshot
    return value.to_bytes(max(8, value.bit_length() // 8 + 1), "little", signed=True)


_ENCODE: dict[type, tuple[str, Callable[[Any], bytes]]] = {
    type(None): ("py:none", lambda value: b""),
    bool: ("py:bool", lambda value: b"\1" if value else b"\0"),
    int: ("py:int", _int_bytes),
    float: ("py:float", lambda value: struct.pack("<d", value)),
    complex: ("py:complex", lambda value: struct.pack("<dd", value.real, value.imag)),
    str: ("py:str", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: ("py:bytes", bytes),
    bytearray: ("py:bytearray", bytes),
}


def _need(data: memoryview, size: int) -> memoryview:
    if len(data) != size:
        raise ValueError(f"holds {len(data)} bytes where {size} belong")
    return data


def _bool(data: memoryview) -> bool:
    value = _need(data, 1)[0]
    if value > 1:
        raise ValueError(f"holds {value} where 0 or 1 belongs")
    return value == 1


def _none(data: memoryview) -> None:
    _need(data, 0)


_DECODE: dict[str, Callable[[memoryview], Any]] = {
    "py:none": _none,
    "py:bool": _bool,
    "py:int": lambda data: int.from_bytes(data, "little", signed=True),
    "py:float": lambda data: struct.unpack("<d", _need(data, 8))[0],
    "py:complex": lambda data: complex(*struct.unpack("<dd", _need(data, 16))),
    "py:str": lambda data: bytes(data).decode("utf-8", "surrogatepass"),
    "py:bytes": bytes,
    "py:bytearray": bytearray,
}


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.isnative and dtype.name in _NAMES:
        return dtype.name
    if _SIZED.fullmatch(dtype.str):
        return dtype.str
    if not dtype.isnative:
        raise TypeError(f"a NumPy array of foreign byte order ({dtype.str}); store array.astype(array.dtype.newbyteorder('='))")
    raise TypeError(f"a NumPy array of dtype {dtype}; store arrays of numbers, dates or fixed-width text")


def _dtype(name: str) -> np.dtype[Any]:
    if name not in _NAMES and not _SIZED.fullmatch(name):
        raise ValueError(f"has an unknown NumPy dtype {name[:40]!r}")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ValueError(f"has an unknown NumPy dtype {name[:40]!r}") from error


def encode(value: Any) -> Leaf | None:
    """A scalar or array as (dtype, shape, bytes); None if it is neither. Arrays of any strides, in logical (C) order, copied.

    TypeError for arrays whose elements have no portable bytes (objects, records, long doubles, foreign byte order).
    """
    found = _ENCODE.get(type(value))
    if found is not None:
        return found[0], (), found[1](value)
    if type(value) is np.ndarray:
        if value.dtype.kind == "b":  # any byte but 0 is true; stored are only 0 and 1
            value = value.view(np.uint8) != 0
        return _ARRAY + _dtype_name(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return _SCALAR + _dtype_name(value.dtype), (), value.tobytes()
    return None


def is_scalar(dtype: str) -> bool:
    """True for the dtype names that `decode` reads."""
    return dtype in _DECODE or dtype.startswith((_ARRAY, _SCALAR))


def is_array(dtype: str) -> bool:
    """True for the dtype name of a NumPy array: the one kind of leaf here that can be filled in place."""
    return dtype.startswith(_ARRAY)


def _checked_size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    if len(shape) > _MAX_DIMS or any(n > sys.maxsize // 2 for n in shape):
        raise ValueError(f"claims a shape no array can have ({len(shape)} dimensions)")
    return math.prod(shape) * dtype.itemsize


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], data: memoryview) -> np.ndarray[Any, Any]:
    _need(data, _checked_size(dtype, shape))
    raw = np.frombuffer(data, np.uint8)
    if dtype.kind == "b" and raw.size and raw.max() > 1:
        raise ValueError("holds bytes other than 0 and 1 where booleans belong")
    if dtype.kind == "U" and raw.size and np.frombuffer(data, "<u4").max() > _MAX_CODE_POINT:
        raise ValueError("holds code points beyond Unicode")
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8).data[:] = data
    return out


def decode(dtype: str, shape: tuple[int, ...], data: memoryview) -> Any:
    """The value `encode` was given, owning its memory. ValueError with the reason, before allocating, if the bytes do not fit."""
    if dtype.startswith(_ARRAY):
        return _array(_dtype(dtype.removeprefix(_ARRAY)), shape, data)
    if shape:
        raise ValueError(f"is a scalar ({dtype[:40]}) with a shape of {len(shape)} dimensions")
    if dtype.startswith(_SCALAR):
        return _array(_dtype(dtype.removeprefix(_SCALAR)), (), data)[()]
    return _DECODE[dtype](data)
