"""The whole state of a training process as named pieces, and back.

    /model/parameters  /model/buffers  /model/modes  /model/frozen        restored, logical   framework
    /optimizer/groups  /optimizer/state  /scheduler  /scaler  /extras     restored, logical   framework
    /data  /counters                                                      restored, logical   scheduling
    /rng  /loader                                                         restored, per rank  framework, scheduling
    /model/structure  /environment                                        compared            framework, hardware
    /hardware  /topology  /layout  /options                               recorded            hardware, scheduling

Optimizer state is keyed by parameter name, so that it survives another order within a group. Where there is one model (optimizer,
scheduler) its key is left out of the pointers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unbroken.capture import names
from unbroken.capture.fit import Fit
from unbroken.capture.streams import Streams
from unbroken.capture.tree import Item, flatten, load_into, rebuild
from unbroken.core.ports import Buffer
from unbroken.core.records import Piece

Pieces = Mapping[str, tuple[Piece, Buffer]]


@dataclass
class Parts:
    """What the user handed over, each under a key; a lone object has the key ""."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    schedulers: dict[str, Any] = field(default_factory=dict)
    scaler: Any = None
    extras: dict[str, Any] = field(default_factory=dict)


def keyed_parts(value: Any, what: str) -> dict[str, Any]:
    """One object, a list or a dict of them as a dict; ValueError where a key cannot stand in a name."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not key or "." in key:
                raise ValueError(f"{what}: key {key!r} must be a non-empty string without dots")
        return dict(value)
    if isinstance(value, list | tuple):
        return {str(i): item for i, item in enumerate(value)} if len(value) != 1 else {"": value[0]}
    return {"": value}


def _folded(parts: dict[str, Any]) -> Any:
    return parts[""] if set(parts) == {""} else parts


class Stack:
    """Walks the live objects. Holds references, never copies; `collect` costs about 2 us per piece on the host, no device work."""

    def __init__(self, parts: Parts, streams: Streams) -> None:
        self.parts = parts
        self.streams = streams
        if parts.scaler is not None and not isinstance(parts.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler= got {parts.scaler!r:.100}: pass a torch.amp.GradScaler, or leave it out")
        self.names = names.parameter_names(parts.models)
        self._check_optimizers()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every trainable or frozen parameter once, by its first name, in registration order."""
        found: dict[str, nn.Parameter] = {}
        for model in self.parts.models.values():
            for value in names.parameters(model).values():
                found.setdefault(self.names[id(value)], value)
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer once, by its first name."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for key, model in self.parts.models.items():
            for name, value in names.buffers(model).items():
                if id(value) not in seen:
                    seen.add(id(value))
                    found[f"{key}.{name}" if key else name] = value
        return found

    def collect(self, position: Mapping[str, Any], counters: Mapping[str, Any], loader: Mapping[str, Any]) -> list[Item]:
        """All restored pieces as they stand now; `loader` is this rank's own. TypeError names the path of what cannot be stored."""
        parts = self.parts
        items = self._model_items()
        items += flatten(_folded({k: self._groups(o) for k, o in parts.optimizers.items()}), "/optimizer/groups", kind="optimizer_option")
        items += flatten(_folded({k: self._state(o) for k, o in parts.optimizers.items()}), "/optimizer/state", kind="optimizer_state")
        if parts.schedulers:
            items += flatten(_folded({k: s.state_dict() for k, s in parts.schedulers.items()}), "/scheduler", kind="scheduler")
        if parts.scaler is not None:
            items += flatten(parts.scaler.state_dict(), "/scaler", kind="scaler")
        if parts.extras:
            items += flatten(parts.extras, "/extras", kind="extra")
        items += flatten(dict(position), "/data", kind="data", layer="scheduling")
        items += flatten(dict(counters), "/counters", kind="counter", layer="scheduling")
        if loader:
            items += flatten(dict(loader), "/loader", kind="data", scope="rank", layer="scheduling")
        items += flatten(self.streams.read(), "/rng", kind="rng", scope="rank")
        return items

    def structure(self) -> dict[str, str]:
        """Class and options of every module: a changed dropout rate or kernel size is no restored state, but it changes the run."""
        found = {}
        for key, model in self.parts.models.items():
            for name, module in names.modules(model):
                found[f"{key}.{name}" if key and name else key or name] = f"{type(module).__name__}({module.extra_repr()})"
        return found

    def restore(self, pieces: Pieces, *, own_streams: bool) -> None:
        """Put stored pieces into the live objects, in place. LayoutMismatch lists every difference and leaves all untouched.

        `own_streams`: the pieces hold this very rank's random streams.
        """
        self._check(pieces)
        for place, live in (("/model/parameters", self._tensors(names.parameters)), ("/model/buffers", self._tensors(names.buffers))):
            load_into(pieces, live, pointer=place)
        self._restore_modes(pieces)
        self._restore_optimizers(pieces)
        if self.parts.schedulers:
            saved = rebuild(pieces, "/scheduler")
            for key, scheduler in self.parts.schedulers.items():
                scheduler.load_state_dict(saved if key == "" else saved[key])
        if self.parts.scaler is not None:
            self.parts.scaler.load_state_dict(rebuild(pieces, "/scaler"))
        if self.parts.extras:
            load_into(pieces, self.parts.extras, pointer="/extras")
        if own_streams:
            self.streams.write(rebuild(pieces, "/rng"))

    def _tensors(self, of: Any) -> Any:
        return _folded({key: of(model) for key, model in self.parts.models.items()})

    def _model_items(self) -> list[Item]:
        items = flatten(self._tensors(names.parameters), "/model/parameters", kind="parameter")
        items += flatten(self._tensors(names.buffers), "/model/buffers", kind="buffer")
        modes = {key: {n: m.training for n, m in names.modules(model)} for key, model in self.parts.models.items()}
        items += flatten(_folded(modes), "/model/modes", kind="mode")
        frozen = sorted(name for name, p in self.parameters().items() if not p.requires_grad)
        return items + flatten(frozen, "/model/frozen", kind="mode")

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [{**group, "params": sorted(self.names[id(p)] for p in group["params"])} for group in optimizer.param_groups]

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        named = {self.names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        return {name: optimizer.state[named[name]] for name in sorted(named) if optimizer.state.get(named[name])}

    def _check_optimizers(self) -> None:
        if not self.parts.optimizers:
            raise TypeError("optimizer= got nothing: pass the torch.optim.Optimizer (or a list or dict of them) that trains the model")
        for key, optimizer in self.parts.optimizers.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"optimizer= got {optimizer!r:.100}: pass a torch.optim.Optimizer, made from the model's parameters")
            for i, group in enumerate(optimizer.param_groups):
                if any(id(p) not in self.names for p in group["params"]):
                    label = f"optimizer {key!r}" if key else "the optimizer"
                    raise ValueError(
                        f"{label}, group {i}, holds a parameter of no model given to Run: pass that model too, as model={{...}}"
                    )

    def _check(self, pieces: Pieces) -> None:
        """Everything that will be put, before anything is touched."""
        parts, fit = self.parts, Fit(pieces)
        fit.tensors(self._model_items())
        for place, of in (("/model/parameters", names.parameters), ("/model/buffers", names.buffers)):
            fit.fillable(place, self._tensors(of))
        fit.optimizers({key: self._groups(optimizer) for key, optimizer in parts.optimizers.items()})
        fit.objects("/scheduler", parts.schedulers)
        fit.objects("/scaler", {} if parts.scaler is None else {"": parts.scaler})
        fit.values("/extras", parts.extras)
        fit.require()

    def _restore_modes(self, pieces: Pieces) -> None:
        modes, frozen = rebuild(pieces, "/model/modes"), set(rebuild(pieces, "/model/frozen"))
        for key, model in self.parts.models.items():
            saved = modes if key == "" else modes[key]
            for name, module in names.modules(model):
                module.training = saved.get(name, module.training)
        for name, parameter in self.parameters().items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def _restore_optimizers(self, pieces: Pieces) -> None:
        by_name = self.parameters()
        for key, optimizer in self.parts.optimizers.items():
            tail = f"/{key}" if key else ""
            for group, saved in zip(optimizer.param_groups, rebuild(pieces, "/optimizer/groups" + tail), strict=True):
                for option, value in saved.items():
                    if option != "params":
                        _set_option(group, option, value)
            saved_state = rebuild(pieces, "/optimizer/state" + tail)
            on_device = {id(p): bool(g.get("capturable") or g.get("fused")) for g in optimizer.param_groups for p in g["params"]}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
            for name, values in saved_state.items():
                parameter = by_name[name]
                optimizer.state[parameter] = {
                    k: _beside(parameter, v, on_host=k == "step" and not on_device[id(parameter)]) if torch.is_tensor(v) else v
                    for k, v in values.items()
                }


def _beside(parameter: torch.Tensor, value: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    """On the parameter's device and, where it has its shape, in its strides: a fused optimizer walks memory, not elements."""
    if on_host or value.shape != parameter.shape or parameter.is_contiguous():
        return value.to("cpu" if on_host else parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _set_option(group: dict[str, Any], option: str, value: Any) -> None:
    live = group.get(option)
    if torch.is_tensor(live) and torch.is_tensor(value):
        live.copy_(value)
    else:
        group[option] = value
