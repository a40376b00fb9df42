"""Random states as a Hugging Face Trainer writes them, checked, as `Streams` takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def as_streams(saved: Any, device: str) -> dict[str, Any]:
    """{"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": tensor, "cuda": tensor} for `Streams.write`.

    ValueError where something is missing or is no such state.
    """
    if not isinstance(saved, dict) or not {"python", "numpy", "cpu"} <= saved.keys():
        raise ValueError("python, numpy and cpu are not all there")
    state: dict[str, Any] = {"python": _python(saved["python"]), "numpy": _numpy(saved["numpy"]), "torch": {"cpu": _torch(saved["cpu"])}}
    if device != "cpu" and isinstance(saved.get(device), torch.Tensor):
        state["torch"][device] = _bytes(saved[device])
    return state


def _python(value: Any) -> dict[str, Any]:
    is_one = (
        isinstance(value, tuple | list)
        and len(value) == 3
        and type(value[0]) is int
        and value[0] == 3
        and isinstance(value[1], tuple | list)
    )
    if not is_one or len(value[1]) != _PYTHON_WORDS or not all(type(w) is int and 0 <= w < 1 << 32 for w in value[1]):
        raise ValueError("python: is no state of random.Random")
    if value[1][-1] > _NUMPY_WORDS or not (value[2] is None or type(value[2]) is float):
        raise ValueError("python: is no state of random.Random")
    return {"version": 3, "words": np.array(value[1], dtype=np.uint32), "gauss": value[2]}


def _numpy(value: Any) -> dict[str, Any]:
    is_one = (
        isinstance(value, tuple | list)
        and len(value) == 5
        and isinstance(value[0], str)
        and value[0] == "MT19937"
        and isinstance(value[1], np.ndarray)
    )
    if not is_one or value[1].shape != (_NUMPY_WORDS,) or value[1].dtype != np.uint32 or type(value[2]) is not int:
        raise ValueError("numpy: is no state of its legacy generator")
    if not 0 <= value[2] <= _NUMPY_WORDS or type(value[3]) is not int or value[3] not in (0, 1) or not isinstance(value[4], float):
        raise ValueError("numpy: is no state of its legacy generator")
    return {
        "name": "MT19937",
        "keys": value[1].astype(np.uint32),
        "position": int(value[2]),
        "has_gauss": int(value[3]),
        "cached": float(value[4]),
    }


def _torch(value: Any) -> torch.Tensor:
    state = _bytes(value)
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"cpu: is no state of a generator ({error})") from error
    return state


def _bytes(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.uint8 or value.dim() != 1:
        raise ValueError("a generator's state is no vector of bytes")
    return value.clone()
