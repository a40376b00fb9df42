"""Tensors of floats made much smaller with a bounded error: blocks of small numbers and a scale for each, the error measured and stored.

    scheme u8, domain u8, width of a scale u8, zero u8, elements u64, exact elements u64, bound f64,
    then scales, codes, places of exact elements, exact elements, each: codec u8, bytes u64, as `codec.planes` makes it

Each block of 128 numbers is divided by a scale of its own, so that its largest takes up the range of the code, and rounded: to FP8
(e4m3), to 8 or to 4 bits. What is rounded depends on the tensor. Of a weight it is the *difference* from the checkpoint restored before:
the next difference contains the error of this one, so errors do not add up. Of a second moment it is the *square root*: zero stays zero,
what is not zero does not become it (an optimizer divides by it), and nothing becomes negative. Of all else it is the number itself.

An element that this cannot express is kept as it is: NaN and infinities with their bits, negative numbers under a root, what would
overflow. `bound` is the largest error of any element, measured on what `restore` gives; a negative zero may come back as zero. Only
operations that IEEE 754 rounds correctly are used, so that the same tensor gives the same bytes everywhere. Pure functions; memory: the
result, and some twenty times a slab of 2^20 elements.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from unbroken.codec import planes
from unbroken.codec.items import ITEM_BYTES
from unbroken.core.ports import Buffer
from unbroken.core.records import Piece

Scheme = Literal["fp8", "int8", "int4"]
Domain = Literal["plain", "difference", "root"]

BLOCK = 128
"""Numbers that share a scale: 4 bytes for 128 are a quarter of a bit each."""

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
"""What can be quantised; anything else is stored exactly by other codecs."""

SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})
"""Names of optimizer states, as torch's optimizers give them, by which an update is divided."""

_SCHEMES: dict[str, int] = {"exact": 0, "fp8": 1, "int8": 2, "int4": 3}
_DOMAINS: dict[str, int] = {"plain": 0, "difference": 1, "root": 2}
_HEAD = struct.Struct("<BBBBQQd")
_SECTION = struct.Struct("<BQ")
_SLAB = 1 << 20
_SIGNED = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_SINGLE = np.finfo(np.float32)
_UNSIGNED = {"int8": 255.0, "int4": 15.0, "fp8": 448.0}

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]


class _Way(NamedTuple):
    dtype: str
    scheme: str
    domain: str

    @property
    def limit(self) -> float:
        """The largest code."""
        return (_UNSIGNED if self.domain == "root" else _SIGNED)[self.scheme]


class Quantised(NamedTuple):
    """A tensor as it is stored. `bound`: no element is restored with a larger error; `num_exact` have none."""

    data: bytes
    bound: float
    num_exact: int


def domain_of(piece: Piece) -> Domain:
    """What of a tensor is rounded, by its name and kind."""
    if piece.pointer.rpartition("/")[2] in SECOND_MOMENTS:
        return "root"
    return "difference" if piece.kind == "parameter" else "plain"


def quantise(data: Buffer, dtype: str, scheme: Scheme, domain: Domain = "plain", base: Buffer | None = None) -> Quantised:
    """Encode little-endian elements. `base`: as the checkpoint before is restored, of the same size; without one a difference is plain.

    Where that would save nothing the elements are kept as they are, with bound 0. ValueError for a dtype that is not in DTYPES. Cost: some
    15 s of processor time per GB of float32.
    """
    width = _width(dtype, len(data))
    if domain == "difference" and (base is None or len(base) != len(data)):
        domain = "plain"
    count = len(data) // width
    raw = np.frombuffer(data, f"<u{width}", count)
    old = np.frombuffer(base, f"<u{width}", count) if domain == "difference" and base is not None else None
    way = _Way(dtype, scheme, domain)
    scale_type = _scale_type(raw, old, way)
    parts, bound = [], 0.0
    for start in range(0, count, _SLAB):
        before = None if old is None else old[start : start + _SLAB]
        part = _encode(raw[start : start + _SLAB], before, way, scale_type)
        bound = max(bound, part.bound)
        parts.append(part)
    exact = np.concatenate([part.exact + i * _SLAB for i, part in enumerate(parts)]) if parts else np.empty(0, np.int64)
    steps = np.diff(exact, prepend=0).astype("<u8")
    sections = [
        (b"".join(part.scales.tobytes() for part in parts), scale_type.itemsize),
        (b"".join(_packed(part.codes, scheme).tobytes() for part in parts), 1),
        (steps.tobytes(), 8),
        (raw[exact].tobytes(), width),
    ]
    head = _HEAD.pack(_SCHEMES[scheme], _DOMAINS[domain], scale_type.itemsize, 0, count, len(exact), bound)
    stored = b"".join((head, *(_section(part, wide) for part, wide in sections)))
    if len(stored) < len(data):
        return Quantised(stored, bound, len(exact))
    return Quantised(_HEAD.pack(0, 0, 0, 0, count, count, 0.0) + _section(bytes(data), width), 0.0, count)


def restore(stored: Buffer, dtype: str, size_bytes: int, base: Buffer | None = None) -> bytes:
    """The elements, each within the bound. ValueError unless `stored` is what `quantise` makes of `size_bytes` such bytes with that base.

    Nothing larger than the result is allocated for what `stored` claims. Cost: some 4 s of processor time per GB of float32.
    """
    width = _width(dtype, size_bytes)
    scheme, domain, scale_bytes, count, num_exact, _ = _head(stored)
    if count != size_bytes // width or num_exact > count:
        raise ValueError(f"{count} elements, {num_exact} of them exact, where {size_bytes // width} belong")
    view, at = memoryview(stored).cast("B"), _HEAD.size
    if scheme == "exact":
        data, at = _read_section(view, at, size_bytes)
        _require_end(view, at)
        return bytes(data)
    if domain == "difference" and (base is None or len(base) != size_bytes):
        raise ValueError(f"differences from a tensor of {size_bytes} bytes, but that has {0 if base is None else len(base)}")
    way = _Way(dtype, scheme, domain)
    slabs = [min(_SLAB, count - start) for start in range(0, count, _SLAB)]
    num_codes = sum(-(-slab // 2) if scheme == "int4" else slab for slab in slabs)
    scales_raw, at = _read_section(view, at, sum(-(-slab // BLOCK) for slab in slabs) * scale_bytes)
    codes, at = _read_section(view, at, num_codes)
    steps, at = _read_section(view, at, num_exact * 8)
    exact, at = _read_section(view, at, num_exact * width)
    _require_end(view, at)
    scales = np.frombuffer(scales_raw, f"<f{scale_bytes}").astype(np.float64)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise ValueError("a scale that is none")
    out = np.empty(count, f"<u{width}")
    old = np.frombuffer(base, f"<u{width}", count) if domain == "difference" and base is not None else None
    code_at = 0
    for number, slab in enumerate(slabs):
        start, length = number * _SLAB, -(-slab // 2) if scheme == "int4" else slab
        some = _unpacked(np.frombuffer(codes, np.uint8, length, code_at), scheme, slab)
        blocks = scales[number * (_SLAB // BLOCK) :][: -(-slab // BLOCK)]
        out[start : start + slab] = _decode(some, blocks, None if old is None else old[start : start + slab], way)
        code_at += length
    places = np.cumsum(np.frombuffer(steps, "<u8"))
    if num_exact and ((places >= count).any() or (places[1:] <= places[:-1]).any()):
        raise ValueError("places of exact elements that do not ascend within the tensor")
    out[places.astype(np.int64)] = np.frombuffer(exact, f"<u{width}")
    return out.tobytes()


def bound_of(stored: Buffer) -> float:
    """The largest error of any element, as it was measured when they were encoded. ValueError for what is not ours."""
    return _head(stored)[-1]


class _Part(NamedTuple):
    scales: npt.NDArray[np.floating]
    codes: Codes
    exact: npt.NDArray[np.int64]
    bound: float


def _width(dtype: str, size_bytes: int) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is not quantised: {', '.join(sorted(DTYPES))} are")
    if size_bytes % ITEM_BYTES[dtype]:
        raise ValueError(f"{size_bytes} bytes are no whole number of {dtype}")
    return ITEM_BYTES[dtype]


def _encode(raw: planes.Numbers, old: planes.Numbers | None, way: _Way, scale_type: np.dtype[np.floating]) -> _Part:
    values = _floats(raw, way.dtype)
    rounded, usable = _rounded(values, None if old is None else _floats(old, way.dtype), way)
    scales = _scales(rounded, way).astype(scale_type)
    codes = _codes(rounded, scales.astype(np.float64), way)
    restored = _floats(_decode(codes, scales.astype(np.float64), old, way), way.dtype)
    with np.errstate(all="ignore"):
        error = np.abs(restored - values)
    usable &= np.isfinite(error)
    if way.domain == "root":
        usable &= (restored == 0) == (values == 0)
    error = np.where(usable, error, 0.0)
    worst = float(error.max(initial=0.0))
    return _Part(scales, codes, np.flatnonzero(~usable), float(np.nextafter(worst, np.inf)) if worst else 0.0)


def _rounded(values: Floats, old: Floats | None, way: _Way) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """What is rounded, zero where nothing can be; and where it can."""
    with np.errstate(all="ignore"):
        found = np.sqrt(values) if way.domain == "root" else values if old is None else values - old
    usable = np.isfinite(found)
    return np.where(usable, found, 0.0), usable


def _scale_type(raw: planes.Numbers, old: planes.Numbers | None, way: _Way) -> np.dtype[np.floating]:
    """float32, unless a block's scale would be lost or overflow in it."""
    for start in range(0, len(raw), _SLAB):
        before = None if old is None else _floats(old[start : start + _SLAB], way.dtype)
        scales = _scales(_rounded(_floats(raw[start : start + _SLAB], way.dtype), before, way)[0], way)
        used = scales[scales > 0]
        if len(used) and not (_SINGLE.tiny <= used.min() and used.max() <= _SINGLE.max):
            return np.dtype("<f8")
    return np.dtype("<f4")


def _scales(rounded: Floats, way: _Way) -> Floats:
    """Of each block: its largest number over the largest code. Never zero where the block is not, and a float32 of it is not smaller."""
    blocks = np.pad(np.abs(rounded), (0, -len(rounded) % BLOCK)).reshape(-1, BLOCK)
    most = blocks.max(axis=1)
    scales = most / way.limit * (1 + 2.0**-22)
    return np.where(most > 0, np.maximum(scales, 5e-324), 0.0)


def _codes(rounded: Floats, scales: Floats, way: _Way) -> Codes:
    """The nearest code of each number. Under a root none but zero gets the code of zero."""
    each = np.repeat(scales, BLOCK)[: len(rounded)]
    with np.errstate(all="ignore"):
        small = np.where(each > 0, np.abs(rounded) / each, 0.0)
    if way.scheme == "fp8":
        size: npt.NDArray[np.int64] = _fp8_codes(small)
    else:
        size = np.rint(np.minimum(small, way.limit)).astype(np.int64)
    if way.domain == "root":
        return np.where((rounded > 0) & (size == 0), 1, size).astype(np.uint8)
    if way.scheme == "fp8":
        return (size | np.where(rounded < 0, 0x80, 0)).astype(np.uint8)
    signed = np.where(rounded < 0, -size, size)
    return (signed & (0xF if way.scheme == "int4" else 0xFF)).astype(np.uint8)


def _decode(codes: Codes, scales: Floats, old: planes.Numbers | None, way: _Way) -> planes.Numbers:
    """Bit patterns of the elements."""
    if way.scheme == "fp8":
        numbers = _FP8[codes]
    elif way.domain == "root":
        numbers = codes.astype(np.float64)
    elif way.scheme == "int8":
        numbers = codes.view(np.int8).astype(np.float64)
    else:
        numbers = ((codes ^ 8).astype(np.int16) - 8).astype(np.float64)
    with np.errstate(all="ignore"):
        numbers *= np.repeat(scales, BLOCK)[: len(codes)]
        if way.domain == "root":
            numbers *= numbers
        elif old is not None:
            numbers += _floats(old, way.dtype)
        return _patterns(numbers, way.dtype)


def _floats(raw: planes.Numbers, dtype: str) -> Floats:
    with np.errstate(all="ignore"):  # a signalling NaN
        if dtype == "bfloat16":
            return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return raw.view(f"<f{raw.itemsize}").astype(np.float64)


def _patterns(numbers: Floats, dtype: str) -> planes.Numbers:
    """Rounded to the dtype; what is too large becomes infinite."""
    if dtype != "bfloat16":
        return numbers.astype(f"<f{ITEM_BYTES[dtype]}").view(f"<u{ITEM_BYTES[dtype]}")
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype("<u2")


def _packed(codes: Codes, scheme: str) -> Codes:
    if scheme != "int4":
        return codes
    pairs = np.pad(codes, (0, len(codes) % 2)).reshape(-1, 2)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).astype(np.uint8)


def _unpacked(codes: Codes, scheme: str, count: int) -> Codes:
    if scheme != "int4":
        return codes
    return np.stack((codes & 0xF, codes >> 4), axis=1).reshape(-1)[:count]


def _fp8_table() -> Floats:
    """What each code of e4m3 means, 0x7F and 0xFF, which are NaN there, the largest number."""
    size = np.arange(128)
    exponent, mantissa = size >> 3, (size & 7) / 8
    found = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    found[127] = found[126]
    return np.concatenate((found, -found))


_FP8 = _fp8_table()


def _fp8_codes(small: Floats) -> npt.NDArray[np.int64]:
    """The nearest codes of numbers that are not negative, even ones at ties."""
    exponent = np.clip(np.frexp(np.maximum(small, 2.0**-6))[1] - 1, -6, 8)
    steps = np.rint(np.ldexp(np.minimum(small, _SIGNED["fp8"]), 3 - exponent))
    codes: npt.NDArray[np.int64] = np.minimum((exponent + 7) * 8 + steps.astype(np.int64) - 8, 126)
    return codes


def _section(data: bytes, width: int) -> bytes:
    encoded = planes.encode(data, width)
    return _SECTION.pack(encoded.codec, len(encoded.data)) + bytes(encoded.data)


def _read_section(view: memoryview, at: int, size_bytes: int) -> tuple[Buffer, int]:
    if len(view) - at < _SECTION.size:
        raise ValueError("cut short")
    codec, length = _SECTION.unpack_from(view, at)
    at += _SECTION.size
    if len(view) - at < length:
        raise ValueError("cut short")
    if codec not in (planes.IDENTITY, planes.PLANES):
        raise ValueError(f"a section of codec {codec}")
    return planes.decode(codec, view[at : at + length], size_bytes), at + length


def _require_end(view: memoryview, at: int) -> None:
    if at != len(view):
        raise ValueError(f"{len(view) - at} bytes after the end")


def _head(stored: Buffer) -> tuple[str, str, int, int, int, float]:
    """(scheme, domain, bytes of a scale, elements, exact elements, bound)."""
    if len(stored) < _HEAD.size:
        raise ValueError("cut short")
    scheme, domain, scale_bytes, zero, count, num_exact, bound = _HEAD.unpack_from(stored)
    names = {number: name for name, number in _SCHEMES.items()}, {number: name for name, number in _DOMAINS.items()}
    if scheme not in names[0] or domain not in names[1] or zero or scale_bytes not in ((0,) if not scheme else (4, 8)):
        raise ValueError(f"no scheme {scheme} of domain {domain} with scales of {scale_bytes} bytes")
    if not 0 <= bound < float("inf"):
        raise ValueError(f"a bound of {bound}")
    return names[0][scheme], names[1][domain], scale_bytes, count, num_exact, bound
