"""What `run.log` was given for a step, from the call to the journal. Values on an accelerator are fetched without waiting for them.

A call costs a microsecond per value; a value on an accelerator one small asynchronous copy. It is read when it has arrived, at the
next boundary at the latest: then the step after has waited for its losses, and so for everything before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from unbroken.codec.metrics import Value, check_name, check_value, num_bytes
from unbroken.core.limits import MAX_METRICS_BYTES


class Later(Protocol):
    """A number on its way from a device."""

    @property
    def is_here(self) -> bool:
        """Has it arrived? Never waits."""

    def read(self) -> Any:
        """The number; waits for it."""


class Fetched:
    """One 0-dim tensor on its way into pinned memory: what it holds now counts, whatever is written into it later."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach(), non_blocking=True)
        self._arrival = torch.Event(device=value.device)
        self._arrival.record()

    @property
    def is_here(self) -> bool:
        return bool(self._arrival.query())

    def read(self) -> Any:
        self._arrival.synchronize()
        return self._host.item()


class Metrics:
    """Metrics that have not been sent yet, by step: those of the step just completed, and where values are on their way of one more."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, Value | Later]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Merge into what the step has; of two values under one name the later one counts. All or nothing.

        TypeError names what is no metric; ValueError a name that a sink would refuse, and too many of them.
        """
        if not metrics:
            return
        merged = dict(self._by_step.get(step, {}))
        for name, value in metrics.items():
            check_name(name)
            merged[name] = _taken(name, value)
        size = sum(num_bytes(name, value if isinstance(value, str) else 0) for name, value in merged.items())
        if size > MAX_METRICS_BYTES:
            raise ValueError(
                f"{len(merged)} metrics of step {step} take {size} bytes in the journal, at most {MAX_METRICS_BYTES}: log fewer, or "
                "under shorter names"
            )
        self._by_step[step] = merged

    def take(self, step: int, *, wait: bool) -> Iterator[tuple[int, dict[str, Value]]]:
        """The steps whose values are here, in order, once each. Waits for earlier steps than `step`, and with `wait` for all."""
        for known in sorted(self._by_step):
            values = self._by_step[known]
            if wait or known < step or all(_is_here(value) for value in values.values()):
                del self._by_step[known]
                yield known, {name: _read(name, value) for name, value in values.items()}


def _taken(name: str, value: Any) -> Value | Later:
    if isinstance(value, torch.Tensor):
        if value.ndim or value.is_complex() or value.device.type == "meta":
            what = f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device.type}"
            raise TypeError(f"metric {name!r}: got {what}; log a 0-dim tensor of real numbers")
        return check_value(name, value.item()) if value.device.type in ("cpu", "mps") else Fetched(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return check_value(name, value.item())
    return check_value(name, value)


def _is_here(value: Value | Later) -> bool:
    return isinstance(value, float | int | str) or value.is_here


def _read(name: str, value: Value | Later) -> Value:
    return value if isinstance(value, float | int | str) else check_value(name, value.read())
