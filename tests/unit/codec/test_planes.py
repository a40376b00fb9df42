"""Byte planes and differences: every bit comes back, the size is near what entropy allows, and hostile bytes end in a ValueError."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.memory import at_most
from unbroken.codec import planes
from unbroken.codec.planes import DIFFERENCE, IDENTITY, PLANES, XOR, decode, encode, entropy_bytes

RNG = np.random.default_rng(3)


def weights(num: int = 50_000, scale: float = 0.02) -> bytes:
    return (RNG.standard_normal(num) * scale).astype("<f4").tobytes()


def moved(data: bytes, by: float = 1e-4) -> bytes:
    """The weights after some steps."""
    old = np.frombuffer(data, "<f4")
    return (old + (RNG.standard_normal(len(old)) * by).astype("<f4")).astype("<f4").tobytes()


def back(data: bytes, width: int, base: bytes | None = None) -> int:
    """Encode and decode; the codec."""
    encoded = encode(data, width, base)
    assert bytes(decode(encoded.codec, encoded.data, len(data), base if encoded.codec in planes.NEEDS_BASE else None)) == data
    assert len(encoded.data) <= len(data)
    return encoded.codec


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=3000),
    other=st.binary(max_size=3000),
    width=st.sampled_from([1, 2, 3, 4, 8, 16]),
    repeat=st.integers(1, 9),
    change=st.integers(0, 255),
)
def test_every_bit_comes_back(data: bytes, other: bytes, width: int, repeat: int, change: int) -> None:
    whole = data * repeat
    near = bytes(b ^ change if i % 97 == 0 else b for i, b in enumerate(whole))
    for base in (None, other, near):
        back(whole, width, base)


@pytest.mark.parametrize("way", [PLANES, DIFFERENCE, XOR])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_way_comes_back_for_every_width(monkeypatch: pytest.MonkeyPatch, way: int, width: int) -> None:
    """Extreme bit patterns among them: differences wrap around."""
    monkeypatch.setattr(planes, "_choose", lambda sample, base, width: (way, 0.5))
    edge = struct.pack("<4Q", 0, 2**64 - 1, 1 << 63, 0x7FC0_0000_7F80_0000)
    data, base = edge * 100 + b"tail", edge[::-1] * 100 + b"taix"
    assert back(data, width, base) == way


def test_weights_shrink_as_they_are_and_more_against_what_they_were() -> None:
    old = weights()
    new = moved(old)
    alone, against = encode(new, 4), encode(new, 4, old)
    assert (alone.codec, against.codec) == (PLANES, DIFFERENCE)
    assert len(against.data) < 0.85 * len(alone.data) < 0.8 * len(new)
    assert len(against.data) < 1.03 * entropy_bytes(new, 4, old)


def test_what_cannot_shrink_is_left_as_it_is() -> None:
    data = RNG.bytes(100_000)
    assert encode(data, 4).codec == IDENTITY
    assert encode(data, 4, RNG.bytes(100_000)).codec == IDENTITY
    assert encode(data, 4).data is data


def test_a_base_of_another_length_is_not_used() -> None:
    old = weights()
    assert encode(old[:-4], 4, old).codec == PLANES


def test_rows_that_were_not_touched_cost_next_to_nothing() -> None:
    old = weights(1 << 18)
    new = bytearray(old)
    new[4096:8192] = moved(old[4096:8192])
    encoded = encode(bytes(new), 4, old)
    assert len(encoded.data) < len(new) / 50
    assert bytes(decode(encoded.codec, encoded.data, len(new), old)) == new


def test_the_bound_is_the_entropy_of_the_best_way() -> None:
    data = bytes(range(256)) * 64
    assert entropy_bytes(data, 1) == pytest.approx(len(data))
    assert entropy_bytes(data, 1, data) == 0
    assert entropy_bytes(data + b"x", 2) == pytest.approx(1 + 128 / 256 * len(data) * 7 / 8 + 128 / 256 * len(data) * 7 / 8)


@settings(max_examples=200, deadline=None)
@given(stored=st.binary(max_size=400), size=st.integers(0, 5000), codec=st.integers(0, 9), with_base=st.booleans())
def test_hostile_bytes_are_refused(stored: bytes, size: int, codec: int, with_base: bool) -> None:
    with contextlib.suppress(ValueError):
        assert len(decode(codec, stored, size, bytes(size) if with_base else None)) == size


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), to=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_one_changed_byte_is_refused_or_gives_as_many_bytes(at: int, to: int, cut: int) -> None:
    data = weights(2000)
    stored = bytearray(encode(data, 4).data)
    stored[at % len(stored)] = to
    for hostile in (bytes(stored), bytes(stored[: cut % len(stored)])):
        with contextlib.suppress(ValueError):
            assert len(decode(PLANES, hostile, len(data))) == len(data)


@pytest.mark.parametrize(
    ("codec", "stored", "size", "base", "words"),
    [
        (IDENTITY, b"abc", 4, None, "3 bytes where 4 belong"),
        (77, b"abc", 3, None, "unknown codec 77"),
        (PLANES, b"", 3, None, "width"),
        (PLANES, b"\x03", 3, None, "width"),
        (PLANES, b"\x01", 3, None, "cut short"),
        (PLANES, b"\x01\x00\x00\x00\x00\x09abc", 3, None, "cut short"),
        (PLANES, b"\x01" + struct.pack("<BI", 0, 3) + b"abcd", 3, None, "1 bytes after its planes where 0 belong"),
        (PLANES, b"\x01" + struct.pack("<BI", 9, 3) + b"abc", 3, None, "mode 9"),
        (PLANES, b"\x01" + struct.pack("<BI", 1, 3) + b"abc", 3, None, "cannot be decompressed"),
        (XOR, b"\x01" + struct.pack("<BI", 0, 3) + b"abc", 3, None, "a difference from a chunk of 3 bytes, but that has 0"),
        (XOR, b"\x01" + struct.pack("<BI", 0, 3) + b"abc", 3, b"ab", "but that has 2"),
    ],
)
def test_what_is_wrong_is_said(codec: int, stored: bytes, size: int, base: bytes | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(codec, stored, size, base)


def test_a_frame_that_claims_gigabytes_allocates_nothing() -> None:
    """A zstd frame may say any size; the library would allocate it."""
    lying = zstandard.ZstdCompressor().compress(bytes(1000))
    head = lying[:4] + bytes([0b1110_0000]) + struct.pack("<Q", 8 << 30) + lying[6:]
    stored = b"\x01" + struct.pack("<BI", 1, len(head)) + head
    with at_most(4 << 20), pytest.raises(ValueError, match=r"claims other than|cannot be decompressed"):
        decode(PLANES, stored, 1000)
