"""Names of modules, parameters and buffers without the marks that wrappers leave (`module.`, `_orig_mod.`).

A wrapper is known by its class, not by its name: a plain model with a child called `module` keeps it (B18 f).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unbroken.core.limits import MAX_DEPTH


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel and torch.compile. An averaging wrapper stays: it has state of its own."""
    for _ in range(MAX_DEPTH):
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
            inner = module._modules["_orig_mod"]
            assert inner is not None
            module = inner
        else:
            return module
    raise ValueError(f"a model is wrapped more than {MAX_DEPTH} times")


def modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module, shared ones under each of their names, in registration order."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from modules(child, f"{prefix}.{name}" if prefix else name)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by name; a tied one stands under each of its names."""
    found: dict[str, nn.Parameter] = {}
    for prefix, module in modules(model):
        for name, value in module._parameters.items():
            if value is not None:
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer by name, those that state_dict leaves out included: they too decide what the next step computes."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in modules(model):
        for name, value in module._buffers.items():
            if value is not None:
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def buffers_once(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Every buffer of all models once, by its first name, preceded by the model's key where there are several models."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, model in models.items():
        for name, value in buffers(model).items():
            if id(value) not in seen:
                seen.add(id(value))
                found[f"{key}.{name}" if key else name] = value
    return found


def transient_buffers(models: Mapping[str, nn.Module]) -> list[str]:
    """Names of the buffers that state_dict leaves out, as in `buffers_once`, each under all of its names."""
    found = []
    for key, model in models.items():
        for prefix, module in modules(model):
            found += [".".join(part for part in (key, prefix, name) if part) for name in sorted(module._non_persistent_buffers_set)]
    return found


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """id of a parameter -> its first name, preceded by the model's key where there are several models."""
    names: dict[int, str] = {}
    for key, model in models.items():
        for name, value in parameters(model).items():
            names.setdefault(id(value), f"{key}.{name}" if key else name)
    return names
