"""Random generators held by the user, as plain dicts and back: torch.Generator, numpy Generator and RandomState, random.Random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of generator: its state as a dict of storable values, a new one for a state, and putting a state into one."""

    name: str
    take: Callable[[Any], dict[str, Any]]
    make: Callable[[dict[str, Any]], Any]
    put: Callable[[Any, dict[str, Any]], None]
    same: Callable[[Any, dict[str, Any]], bool]


def _take_random(generator: random.Random) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _put_random(generator: random.Random, state: dict[str, Any]) -> None:
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _make_random(state: dict[str, Any]) -> random.Random:
    generator = random.Random(0)
    _put_random(generator, state)
    return generator


def _bit_generator(state: dict[str, Any]) -> Any:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"names an unknown bit generator {str(name)[:40]!r}")
    return getattr(np.random, name)(0)


def _make_numpy(state: dict[str, Any]) -> np.random.Generator:
    generator = np.random.Generator(_bit_generator(state))
    generator.bit_generator.state = state
    return generator


def _put_numpy(generator: np.random.Generator, state: dict[str, Any]) -> None:
    generator.bit_generator.state = state


def _make_legacy(state: dict[str, Any]) -> np.random.RandomState:
    generator = np.random.RandomState(_bit_generator(state))
    generator.set_state(state)
    return generator


def _make_torch(state: dict[str, Any]) -> torch.Generator:
    generator = torch.Generator(torch.device(state["device"]))
    generator.set_state(state["state"])
    return generator


KINDS: dict[type, Kind] = {
    random.Random: Kind("random.Random", _take_random, _make_random, _put_random, lambda generator, state: True),
    np.random.Generator: Kind(
        "np.random.Generator",
        lambda generator: dict(generator.bit_generator.state),
        _make_numpy,
        _put_numpy,
        lambda generator, state: generator.bit_generator.state["bit_generator"] == state.get("bit_generator"),
    ),
    np.random.RandomState: Kind(
        "np.random.RandomState",
        lambda generator: dict(generator.get_state(legacy=False)),
        _make_legacy,
        lambda generator, state: generator.set_state(state),
        lambda generator, state: generator.get_state(legacy=False)["bit_generator"] == state.get("bit_generator"),
    ),
    torch.Generator: Kind(
        "torch.Generator",
        lambda generator: {"device": generator.device.type, "state": generator.get_state()},
        _make_torch,
        lambda generator, state: generator.set_state(state["state"]),
        lambda generator, state: generator.device.type == state.get("device"),
    ),
}

BY_NAME = {kind.name: kind for kind in KINDS.values()}
