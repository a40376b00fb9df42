"""The whole state of a training process as named pieces, and back.

    /model/parameters  /model/buffers  /model/modes  /model/frozen        restored, logical   framework
    /optimizer/groups  /optimizer/state  /scheduler  /scaler  /extras     restored, logical   framework
    /data  /counters                                                      restored, logical   scheduling
    /rng  /loader                                                         restored, per rank  framework, scheduling
    /model/structure  /environment                                        compared            framework, hardware
    /hardware  /topology  /layout  /options  /naming                      recorded            hardware, scheduling

Optimizer state is keyed by parameter name, so that it survives another order within a group. Where there is one model (optimizer,
scheduler) its key is left out of the pointers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from unbroken.capture import names, pointers, tensors
from unbroken.capture.finite import fault_of
from unbroken.capture.fit import Fit
from unbroken.capture.restore import load_optimizer
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


LAZY_BUFFERS = "/model/lazy_buffers"
"""Names of the buffers that were not there, or not of their size, when the Run was made."""


class Stack:
    """Walks the live objects. Holds references, never copies; `collect` costs about 2 us per piece on the host, no device work."""

    def __init__(self, parts: Parts, streams: Streams) -> None:
        self.parts = parts
        self.streams = streams
        self.notes: list[str] = []
        self._born = {name: buffer.shape for name, buffer in names.buffers_once(parts.models).items()}
        self._born_nan = {id(buffer) for buffer in self.buffers().values() if fault_of(buffer) == "NaN"}
        if parts.scaler is not None and not isinstance(parts.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler= got {parts.scaler!r:.100}: pass a torch.amp.GradScaler, or leave it out")
        self.names = names.parameter_names(parts.models)
        self._check_optimizers()
        self._check_schedulers()
        for name, buffer in self.buffers().items():
            reason = tensors.unwritable(buffer)
            if reason is not None:
                raise ValueError(f"buffer {name!r} cannot be put back: {reason}; register a copy of it (tensor.clone())")

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every trainable or frozen parameter once, by its first name, in registration order."""
        found: dict[str, nn.Parameter] = {}
        for model in self.parts.models.values():
            for value in names.parameters(model).values():
                found.setdefault(self.names[id(value)], value)
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer once, by its first name."""
        return names.buffers_once(self.parts.models)

    def collect(self, position: Mapping[str, Any], counters: Mapping[str, Any], loader: Mapping[str, Any]) -> list[Item]:
        """All restored pieces as they stand now; `loader` is this rank's own. TypeError names the path of what cannot be stored."""
        parts = self.parts
        items = self._model_items()
        items += flatten(_folded({k: self._groups(o) for k, o in parts.optimizers.items()}), "/optimizer/groups", kind="optimizer_option")
        items += flatten(_folded({k: self._state(o) for k, o in parts.optimizers.items()}), "/optimizer/state", kind="optimizer_state")
        other = {k: found for k, o in parts.optimizers.items() if (found := self._other_state(o))}
        if other:
            items += flatten(other, "/optimizer/other", kind="optimizer_state")
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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """All modules in evaluation mode; afterwards each is in its own mode again."""
        before = [(module, module.training) for model in self.parts.models.values() for module in model.modules()]
        try:
            for module, _ in before:
                module.training = False
            yield
        finally:
            for module, was_training in before:
                module.training = was_training

    def versions(self) -> list[tuple[int, int]]:
        """Changes when somebody writes a parameter; cheap, and not proof that the values are others."""
        return [(id(p), p._version) for p in self.parameters().values()]

    def structure(self) -> dict[str, str]:
        """Class and options of every module, classes of optimizers and schedulers: no restored state, but a change changes the run."""
        found: dict[str, str] = {}
        for what, objects in (("optimizer", self.parts.optimizers), ("scheduler", self.parts.schedulers)):
            found |= {f"({what} {key}".strip() + ")": type(value).__name__ for key, value in objects.items()}
        for key, model in self.parts.models.items():
            for name, module in names.modules(model):
                found[f"{key}.{name}" if key and name else key or name] = f"{type(module).__name__}({module.extra_repr()})"
        return found

    def naming(self) -> str:
        """What other formats need to name things as torch does, as JSON: buffers not in state_dict, parameters in the optimizers' order."""
        order = {k: [[self.names[id(p)] for p in g["params"]] for g in o.param_groups] for k, o in self.parts.optimizers.items()}
        return msgspec.json.encode({"transient_buffers": names.transient_buffers(self.parts.models), "optimizer_order": order}).decode()

    def restore(self, pieces: Pieces, *, own_streams: bool) -> None:
        """Put stored pieces into the live objects, in place. LayoutMismatch lists every difference and leaves all untouched.

        `own_streams`: the pieces hold this very rank's random streams.
        """
        lazy = self._lazy_buffers(pieces)
        self._check(pieces, set(lazy))
        for pointer, (module, name) in lazy.items():
            dtype, shape = pieces[pointer][0].dtype, pieces[pointer][0].shape
            module.register_buffer(name, torch.empty(shape, dtype=tensors.DTYPES[dtype], device=self.streams.device), persistent=False)
        for place, live in (("/model/parameters", self._tensors(names.parameters)), ("/model/buffers", self._tensors(names.buffers))):
            load_into(pieces, live, pointer=place)
        # a checkpoint holds NaN in buffers that were born with it only; a script that makes them without is made to hold it, too
        self._born_nan |= {id(buffer) for buffer in self.buffers().values() if fault_of(buffer) == "NaN"}
        self._restore_modes(pieces)
        if "/model/extra_state" in pieces:
            live_modules = self._with_extra_state()
            for name, value in rebuild(pieces, "/model/extra_state").items():
                live_modules[name].set_extra_state(value)
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
        for item in items:  # where numbers that are not finite may be meant (see codec.finite); an alias's data are bytes
            if isinstance(item.data, nn.Parameter) and not item.data.requires_grad:
                item.piece = msgspec.structs.replace(item.piece, kind="frozen")
            elif id(item.data) in self._born_nan:
                item.piece = msgspec.structs.replace(item.piece, kind="nan_buffer")
        modes = {key: {n: m.training for n, m in names.modules(model)} for key, model in self.parts.models.items()}
        items += flatten(_folded(modes), "/model/modes", kind="mode")
        frozen = sorted(name for name, p in self.parameters().items() if not p.requires_grad)
        items += flatten(frozen, "/model/frozen", kind="mode")
        made_later = sorted(name for name, b in self.buffers().items() if self._born.get(name) != b.shape)
        items += flatten(made_later, LAZY_BUFFERS, kind="mode") if made_later else []
        extra = {name: module.get_extra_state() for name, module in self._with_extra_state().items()}
        return items + (flatten(extra, "/model/extra_state", kind="module_state") if extra else [])

    def _with_extra_state(self) -> dict[str, nn.Module]:
        """Modules that keep state of their own besides tensors, by name (`get_extra_state`, as in fp8 layers)."""
        found = {}
        for key, model in self.parts.models.items():
            for name, module in names.modules(model):
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    found[".".join(part for part in (key, name) if part)] = module
        return found

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        # the members first: an optimizer's own load_state_dict moves them to the end
        return [{"params": []} | group | {"params": sorted(self.names[id(p)] for p in group["params"])} for group in optimizer.param_groups]

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        named = {self.names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        return {name: optimizer.state[named[name]] for name in sorted(named) if optimizer.state.get(named[name])}

    def _other_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What an optimizer keeps besides parameters' state: entries of `state` under other keys, and its own part of `state_dict`."""
        shared = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
        own: dict[str, Any] = {}
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            own = {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
        return {name: part for name, part in (("shared", shared), ("own", own)) if part}

    def _check_schedulers(self) -> None:
        known = {id(optimizer) for optimizer in self.parts.optimizers.values()}
        for scheduler in self.parts.schedulers.values():
            if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
                raise TypeError(f"scheduler= got {scheduler!r:.100}: pass a torch.optim.lr_scheduler, made from the optimizer")
            owner = getattr(scheduler, "optimizer", None)
            if isinstance(owner, torch.optim.Optimizer) and id(owner) not in known:
                raise ValueError(
                    f"scheduler {type(scheduler).__name__} belongs to an optimizer that Run was not given: make it from that one"
                )

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

    def _lazy_buffers(self, pieces: Pieces) -> dict[str, tuple[nn.Module, str]]:
        """Buffers that were made or resized while the run was under way (caches): not there yet, or not of that size."""
        found = {}
        made_later = set(rebuild(pieces, LAZY_BUFFERS)) if LAZY_BUFFERS in pieces else set()
        for key, model in self.parts.models.items():
            modules = dict(names.modules(model))
            prefix = f"/model/buffers/{key}/" if key else "/model/buffers/"
            for pointer, (piece, _) in pieces.items():
                if not pointer.startswith(prefix) or piece.dtype not in tensors.DTYPES:
                    continue
                full_name = pointers.key(pointer.removeprefix(prefix))
                path, _, name = full_name.rpartition(".")
                if (f"{key}.{full_name}" if key else full_name) in made_later and path in modules:
                    found[pointer] = (modules[path], name)
        return found

    def _check(self, pieces: Pieces, lazy: Set[str]) -> None:
        """Everything that will be put, before anything is touched."""
        parts, fit = self.parts, Fit(pieces)
        fit.tensors(self._model_items(), lazy)
        fit.names("/model/extra_state", self._with_extra_state())
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
                self._note_changed_options(key, group, saved)
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
        self._restore_other(pieces)

    def _restore_other(self, pieces: Pieces) -> None:
        saved = rebuild(pieces, "/optimizer/other") if "/optimizer/other" in pieces else {}
        for key, optimizer in self.parts.optimizers.items():
            for name in [name for name in optimizer.state if not torch.is_tensor(name)]:
                del optimizer.state[name]
            optimizer.state.update(saved.get(key, {}).get("shared", {}))
            if "own" in saved.get(key, {}):
                load_optimizer(optimizer, optimizer.state_dict() | saved[key]["own"])

    def _note_changed_options(self, key: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Options in the script that the checkpoint overrides; what a scheduler moves is told apart by its own note of the beginning."""
        for option in sorted(set(group) & set(saved) - {"params", "initial_lr"}):
            name = "initial_lr" if option == "lr" and "initial_lr" in group and "initial_lr" in saved else option
            now, before = group[name], saved[name]
            if isinstance(now, int | float | str | bool | tuple) and isinstance(before, int | float | str | bool | tuple) and now != before:
                label = f"optimizer {key!r}" if key else "optimizer"
                self.notes.append(f"{label}: {name}={now!r} in the script is not used, the checkpoint has {before!r}")


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
