"""Seeds as pure functions: the same numbers whoever computes a unit, wherever, however often it was tried (I7).

One rule: BLAKE3 over a tag, the integers as 16 bytes little-endian, and the stream's name.
"""

from __future__ import annotations

from blake3 import blake3

_INT_BYTES = 16
MAX_SEED = 2**64 - 1


def check_seed(seed: int) -> int:
    """The seed itself, or a ValueError: seeds are integers in [0, 2**64)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}")
    return seed


def key_bytes(purpose: str, *numbers: int, name: str = "", length: int = 8) -> bytes:
    """`length` bytes that depend on all arguments; numbers lie in [0, 2**127). Cost: about 2 microseconds."""
    packed = b"".join(number.to_bytes(_INT_BYTES, "little") for number in numbers)
    return blake3(b"unbroken.order.1/" + purpose.encode() + b"\0" + packed + name.encode()).digest(length=length)


def _seed(purpose: str, *numbers: int, name: str = "") -> int:
    return int.from_bytes(key_bytes(purpose, *numbers, name=name), "little")


def stream_seed(seed: int, step: int, unit: int, stream: str) -> int:
    """64-bit seed of one random stream ("python", "numpy", "torch", ...) while unit (step, unit) is computed."""
    return _seed("unit", seed, step, unit, name=stream)


def sample_seed(seed: int, epoch: int, position: int) -> int:
    """64-bit seed of everything random in loading the sample that stands at `position` of `epoch`'s order."""
    return _seed("sample", seed, epoch, position)


def rank_seed(seed: int, generation: int, rank: int, stream: str) -> int:
    """64-bit seed for a new rank's own stream, used outside units; distinct per generation, rank and stream."""
    return _seed("rank", seed, generation, rank, name=stream)


def part_seed(seed: int, name: str) -> int:
    """64-bit seed of the walk over one data set of several, so that two of one size are not walked alike."""
    return _seed("part", seed, name=name)
