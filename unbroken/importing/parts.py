"""Which part of a foreign state is what: weights, optimizers, schedulers, scaler, how far it was; and what nobody here understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unbroken.importing.foreign import Foreign, step_of

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "net", "weights", "module", "params")
_OPTIMIZER = ("optimizer", "optimizer_states", "optimizer_state_dict", "optim", "optimizer_state", "optimizers", "opt")
_SCHEDULER = ("scheduler", "lr_schedulers", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "schedulers", "sched")
_SCALER = ("scaler", "MixedPrecision", "scaler_state_dict", "grad_scaler", "native_amp_scaling_state")
_TOLD = ("global_step", "step", "iteration", "iter", "iter_num", "epoch", "trainer_state", "rng_state", "counters", "data")
_OURS = ("optimizer_parameters", "modes")
"""What our own export adds, and `Run` does not need: it has the same from the live objects."""

_VERSIONS = ("pytorch-lightning_version",)


@dataclass(kw_only=True)
class Parts:
    """Parts by what they are. Several optimizers or schedulers are listed in their order, under their keys where they have any."""

    model: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    scaler: Mapping[str, Any] | None = None
    names: dict[str, list[str]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def understand(foreign: Foreign) -> Parts:
    """Sort a state into parts. Never fails: what is not understood is `left_over`, by name."""
    state, parts = foreign.state, Parts(notes=list(foreign.notes))
    if not isinstance(state, Mapping):
        parts.left_over.append(f"the whole state, which is a {type(state).__name__}")
        return parts
    state = _inside(state, parts)
    if _is_weights(state):
        _weights(state, "", parts)
        return parts
    used = set(_TOLD) | set(_OURS) | set(_VERSIONS)
    used |= _take(state, _MODEL, lambda value, name: _take_model(value, name, parts))
    used |= _take(state, _OPTIMIZER, lambda value, _: _keyed(value, parts.optimizers, _is_optimizer))
    used |= _take(state, _SCHEDULER, lambda value, _: _keyed(value, parts.schedulers, _is_scheduler))
    used |= _take(state, _SCALER, lambda value, _: _take_scaler(value, parts))
    _take(state, ("optimizer_parameters",), lambda value, _: _take_names(value, parts))
    step, epoch = foreign.step if foreign.step is not None else step_of(state), state.get("epoch")
    parts.progress |= {} if step is None else {"step": step}
    parts.progress |= {"epoch": epoch} if isinstance(epoch, int | float) else {}
    parts.left_over += [str(name) for name in state if name not in used]
    return parts


def _inside(state: Mapping[Any, Any], parts: Parts) -> Mapping[Any, Any]:
    """What a single key wraps ({"app": {...}}), as DCP's recipes write it."""
    if len(state) == 1:
        name, value = next(iter(state.items()))
        if (
            isinstance(value, Mapping)
            and not _is_weights(value)
            and name not in _MODEL
            and any(key in value for key in (*_MODEL, *_OPTIMIZER))
        ):
            parts.notes.append(f"everything lies under {str(name)!r}")
            return value
    return state


def _take(state: Mapping[Any, Any], names: tuple[str, ...], take: Any) -> set[str]:
    """Let `take` have the first of the named values that it accepts."""
    for name in names:
        if name in state and take(state[name], name):
            return {name}
    return set()


def _is_weights(value: Any) -> bool:
    """Texts to tensors, at least one; what else modules keep may be among them."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    return any(torch.is_tensor(one) for one in value.values()) and all(
        torch.is_tensor(one) or name.endswith("_extra_state") for name, one in value.items()
    )


def _weights(value: Mapping[str, Any], prefix: str, parts: Parts) -> None:
    parts.model = dict(parts.model) | {prefix + name: one for name, one in value.items() if torch.is_tensor(one)}
    parts.left_over += [prefix + name for name, one in value.items() if not torch.is_tensor(one)]


def _take_model(value: Any, name: str, parts: Parts) -> bool:
    if _is_weights(value):
        _weights(value, "", parts)
        return True
    if isinstance(value, Mapping) and value and all(isinstance(key, str) and _is_weights(one) for key, one in value.items()):
        for key, one in value.items():  # several models, each under its key
            _weights(one, f"{key}.", parts)
        return True
    return False


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("param_groups"), list)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _keyed(value: Any, into: dict[str, Mapping[str, Any]], is_one: Any) -> bool:
    """One, a list or a dict of them; nothing at all is fine, too."""
    if value is None or (isinstance(value, dict | list) and not value):
        return True
    if is_one(value) and not (value and all(is_one(one) for one in value.values())):
        into[""] = value
    elif isinstance(value, list) and all(is_one(one) for one in value):
        into.update({"" if len(value) == 1 else str(i): one for i, one in enumerate(value)})
    elif isinstance(value, Mapping) and value and all(isinstance(key, str) and is_one(one) for key, one in value.items()):
        into.update(value)
    else:
        return False
    return True


def _take_scaler(value: Any, parts: Parts) -> bool:
    if not isinstance(value, Mapping) or "scale" not in value:
        return value is None or (isinstance(value, dict) and not value)
    parts.scaler = value
    return True


def _take_names(value: Any, parts: Parts) -> bool:
    """Names of each optimizer's parameters by number, as our own export lists them."""
    table = {"": value} if isinstance(value, list) else value if isinstance(value, Mapping) else {}
    parts.names = {key: list(names) for key, names in table.items() if isinstance(names, list) and all(isinstance(n, str) for n in names)}
    return True
