"""Random streams: inside a unit they depend on (seed, step, unit) only; outside, a rank has its own, which no unit disturbs (I7).

Python's `random`, NumPy's legacy global state and torch's default generators (CPU and the run's device) are covered; generators that
the user holds belong into `extras`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unbroken.order.streams import rank_seed, stream_seed


def _device_module(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device)


class Streams:
    """The process's global random streams, switched between the rank's own and a unit's.

    Cost of a switch: about 60 us on the host, no device work.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self._own: tuple[Any, Any, torch.Tensor, torch.Tensor | None] | None = None
        self._marked = self._raw()

    def mark(self) -> None:
        """Remember the rank's own streams as they stand at a step's boundary. About 30 us on the host."""
        self._marked = self._raw()

    def back(self) -> None:
        """The rank's own streams return to the last mark: what the loop drew in a step that is given up is drawn again."""
        self._own = self._marked
        self.leave()

    def enter(self, step: int, unit: int, turn: int = 0) -> None:
        """Put the streams of unit (step, unit) in place, others each time that the step's units come; the rank's own are set aside."""
        if self._own is None:
            self._own = self._raw()
        name = f"/{turn}" if turn else ""
        random.seed(stream_seed(self.seed, step, unit, f"python{name}"))
        word = stream_seed(self.seed, step, unit, f"numpy{name}")
        np.random.seed([word & 0xFFFFFFFF, word >> 32])
        seed_torch(stream_seed(self.seed, step, unit, f"torch{name}"), self.device)

    def leave(self) -> None:
        """The rank's own streams return."""
        if self._own is not None:
            (python, legacy, cpu, device), self._own = self._own, None
            random.setstate(python)
            np.random.set_state(legacy)
            torch.set_rng_state(cpu)
            if device is not None:
                _device_module(self.device).set_rng_state(device, self.device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is drawn inside does not move the streams."""
        python, legacy, cpu, device = self._raw()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
            torch.set_rng_state(cpu)
            if device is not None:
                _device_module(self.device).set_rng_state(device, self.device)

    def _raw(self) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
        module = _device_module(self.device)
        device = None if module is None else module.get_rng_state(self.device)
        return random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), device

    def read(self) -> dict[str, Any]:
        """The current state, as plain values: 625 words for python, 624 + 2 for NumPy, byte tensors for torch."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
            "numpy": {"name": name, "keys": keys, "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
            "torch": {"cpu": torch.get_rng_state()},
        }
        module = _device_module(self.device)
        if module is not None:
            state["torch"][self.device.type] = module.get_rng_state(self.device)
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Put back what `read` gave; a device's stream is left alone where the state has none for it."""
        python, legacy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(int(w) for w in python["words"]), python["gauss"]))
        np.random.set_state((legacy["name"], legacy["keys"], legacy["position"], legacy["has_gauss"], legacy["cached"]))
        torch.set_rng_state(state["torch"]["cpu"])
        module = _device_module(self.device)
        if module is not None and self.device.type in state["torch"]:
            module.set_rng_state(state["torch"][self.device.type], self.device)

    def start_anew(self, generation: int, rank: int) -> None:
        """Give a rank that no checkpoint knows a stream of its own, unlike any other rank's."""
        random.seed(rank_seed(self.seed, generation, rank, "python"))
        word = rank_seed(self.seed, generation, rank, "numpy")
        np.random.seed([word & 0xFFFFFFFF, word >> 32])
        seed_torch(rank_seed(self.seed, generation, rank, "torch"), self.device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's default CPU generator and that of `device`, no other device."""
    torch.default_generator.manual_seed(seed)
    module = _device_module(device)
    if module is not None:
        module.manual_seed(seed)
