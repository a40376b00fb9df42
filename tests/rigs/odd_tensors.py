"""Every tensor of the public failure case B16, and how to compare two of them by their bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def from_bits(dtype: torch.dtype, *words: int) -> torch.Tensor:
    """A tensor of these bit patterns."""
    raw = b"".join(word.to_bytes(dtype.itemsize, "little") for word in words)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


MAKERS: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(3.5),
    "size 1": lambda: torch.ones(1),
    "empty": lambda: torch.ones(0),
    "empty (0, 3)": lambda: torch.ones(0, 3),
    "empty (3, 0, 2)": lambda: torch.ones(3, 0, 2),
    "bool": lambda: torch.tensor([True, False, True]),
    "uint8": lambda: torch.tensor([255], dtype=torch.uint8),
    "int64": lambda: torch.tensor([2**62 + 1]),
    "float16": lambda: torch.tensor([65504.0], dtype=torch.float16),
    "bfloat16": lambda: from_bits(torch.bfloat16, 0x3F81),
    "float8": lambda: from_bits(torch.float8_e4m3fn, 0x7E),
    "complex64": lambda: torch.tensor([1 + 2j], dtype=torch.complex64),
    "complex128": lambda: torch.tensor([1 + 2j], dtype=torch.complex128),
    "nan with payload": lambda: from_bits(torch.float32, 0x7FC00001),
    "-0.0, inf, denormal": lambda: torch.tensor([-0.0, math.inf, 1e-45]),
    "transposed": lambda: torch.arange(6).reshape(2, 3).T,
    "expanded": lambda: torch.tensor(7.0).expand(4),
    "numpy reversed": lambda: np.arange(5)[::-1],
    "channels_last": lambda: torch.arange(8.0).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last),
    "300 odd bytes": lambda: torch.arange(300, dtype=torch.int32).to(torch.uint8),
    "a float64 beside them": lambda: torch.tensor([1.5, 2.5], dtype=torch.float64),
}


def odd_tensors() -> dict[str, Any]:
    """One of each."""
    return {name: make() for name, make in MAKERS.items()}


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and the bytes of the elements in logical order."""
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}", value.shape, np.ascontiguousarray(value).tobytes()
    flat = value.detach().clone(memory_format=torch.contiguous_format)
    return str(value.dtype), tuple(value.shape), flat.reshape(-1).view(torch.uint8).numpy().tobytes()
