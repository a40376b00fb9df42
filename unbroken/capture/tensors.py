"""Leaves of torch: tensors as little-endian bytes in logical order, and torch's names for dtypes, devices and sizes.

A tensor keeps dtype, shape and bits (NaN payloads, -0.0 and denormals included). It does not keep strides (channels_last comes back
contiguous), device (it comes back on the CPU), requires_grad, or being a Parameter: these belong to the object that holds it.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import msgspec
import numpy as np
import torch

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_DIMS = 64

View = tuple[Any, ...]


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32, for any dtype of torch."""
    return str(dtype).removeprefix("torch.")


def refusal(tensor: torch.Tensor) -> str | None:
    """Why this tensor cannot be stored; None if it can."""
    if type(tensor) not in _PLAIN:
        return f"a tensor of type {type(tensor).__qualname__}; only plain torch tensors can be stored yet"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values; move it to a real device first"
    if tensor.is_quantized:
        return "a quantized tensor; store tensor.int_repr() with its scale and zero point"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; store tensor.to_dense(), or its indices and values"
    if tensor.dtype not in _NAME_OF:
        return f"a tensor of dtype {tensor.dtype}, which is not supported"
    return None


def view_key(tensor: torch.Tensor) -> View | None:
    """Equal for two tensors that are the same view of the same storage, while both live; None for an empty tensor."""
    if tensor.numel() == 0:
        return None
    lazy = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *lazy)


def write(tensor: torch.Tensor, view: memoryview) -> None:
    """Copy the tensor's logical bytes into `view`, which has exactly their size. One pass, no temporary if contiguous on the CPU."""
    size = tensor.numel() * tensor.element_size()
    assert len(view) == size, f"{size} bytes into a view of {len(view)}"
    if size:
        torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def check(dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
    """ValueError with the reason if the bytes cannot be a tensor of this dtype and shape. Allocates nothing."""
    if dtype not in DTYPES:
        raise ValueError(f"has an unknown dtype {dtype[:40]!r}")
    if len(shape) > _MAX_DIMS or math.prod(max(n, 1) for n in shape) > sys.maxsize // 16:
        raise ValueError(f"claims a shape no tensor can have ({len(shape)} dimensions)")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if len(data) != expected:
        raise ValueError(f"holds {len(data)} bytes where {dtype}{list(shape)} takes {expected}")
    if dtype == "bool" and expected and np.frombuffer(data, np.uint8).max() > 1:
        raise ValueError("holds bytes other than 0 and 1 where booleans belong")


def read(dtype: str, shape: tuple[int, ...], data: memoryview, *, adopt: bool = False) -> torch.Tensor:
    """A contiguous CPU tensor that owns its memory. ValueError with the reason, before allocating, if the bytes do not fit.

    adopt: where `data` is memory mapped for nobody else that memory becomes the tensor's, whose storage cannot be resized then.
    """
    check(dtype, shape, data)
    if adopt and isinstance(data.obj, mmap.mmap) and not data.readonly and len(data):
        return torch.frombuffer(data, dtype=DTYPES[dtype]).view(shape)
    out = torch.empty(shape, dtype=DTYPES[dtype])
    if len(data):
        out.view(-1).view(torch.uint8).numpy().data[:] = data
    return out


def fill(target: torch.Tensor, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
    """Put stored values into a tensor of this shape, in place, converting them where its dtype is another. Checked by the caller.

    Without a temporary where the target is contiguous, on the CPU and of the stored dtype.
    """
    is_plain = target.is_contiguous() and target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
    with torch.no_grad():
        if is_plain and target.dtype is DTYPES[dtype] and len(data):
            target.detach().view(-1).view(torch.uint8).numpy().data[:] = data
            torch.autograd.graph.increment_version(target)
        else:
            target.copy_(read(dtype, shape, data))


def unwritable(tensor: torch.Tensor) -> str | None:
    """Why no values can be put into this tensor in place; None if they can."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor on {tensor.device}, which cannot be filled in place"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, which cannot be filled in place"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "an expanded tensor, whose elements share memory"
    return None


def encode(value: Any) -> tuple[str, bytes] | None:
    """A torch.dtype, torch.device or torch.Size as (dtype name, bytes); None if it is none of these."""
    if isinstance(value, torch.dtype):
        return "torch.dtype", name_of(value).encode()
    if isinstance(value, torch.device):
        return "torch.device", str(value).encode()
    if type(value) is torch.Size:
        return "torch.Size", msgspec.json.encode(list(value))
    return None


def decode(dtype: str, data: memoryview) -> Any:
    """The value `encode` was given. ValueError with the reason if the bytes say no such thing."""
    if dtype == "torch.Size":
        try:
            return torch.Size(msgspec.json.decode(data, type=list[int]))
        except (msgspec.MsgspecError, RuntimeError, OverflowError) as error:
            raise ValueError("is no list of sizes") from error
    text = bytes(data).decode("ascii", "replace")
    if dtype == "torch.device":
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise ValueError(f"names an unknown device {text[:40]!r}") from error
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"names an unknown torch dtype {text[:40]!r}")
    return found


NAMED = frozenset({"torch.dtype", "torch.device", "torch.Size"})
