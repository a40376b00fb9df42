"""Foreign optimizer state against a live optimizer: by parameter name where the source has names, else by the parameters' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unbroken.capture.tensors import name_of, refusal
from unbroken.importing.weights import peeled

_OF_THE_HOST = ("foreach", "fused", "capturable", "differentiable")
"""How to compute, not what: the live optimizer's own stay."""

_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax"}
)
"""What torch's optimizers keep for each element."""

_OWN_TEXT = frozenset({"params", "param_names"})


class Unfit(Exception):
    """Why the state cannot be put in, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def fitted(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any], listed: Sequence[str], notes: list[str]
) -> dict[str, Any]:
    """A state dict for `optimizer.load_state_dict`, numbered as its parameters are. `names` by id; `listed`: names by the source's number.

    Unfit lists every misfit. Nothing is changed. `notes` gets options that the script has otherwise.
    """
    groups, state = saved.get("param_groups"), saved.get("state", {})
    live = optimizer.param_groups
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) and isinstance(g.get("params"), list | tuple) for g in groups):
        raise Unfit(["its param_groups are no list of groups with params"])
    if not isinstance(state, Mapping):
        raise Unfit(["its state is no dict"])
    sizes, here = [len(group["params"]) for group in groups], [len(group["params"]) for group in live]
    if sizes != here:
        raise Unfit([f"groups of {sizes} parameters in the source, of {here} live"])
    wrong: list[str] = []
    order = _order(optimizer, names, groups, listed, wrong)
    numbers = {id(p): i for i, p in enumerate(p for group in live for p in group["params"])}
    out_state: dict[int, Any] = {}
    known = set()
    for label, parameter in order.items():
        key = label if label in state else str(label)
        known.add(key)
        if key in state:
            out_state[numbers[id(parameter)]] = _checked(state[key], parameter, names[id(parameter)], wrong)
    wrong += [f"state for {key!r}, which is no parameter of a group" for key in list(state)[:20] if key not in known]
    out_groups = [_options(number, group, kept, notes, wrong) for number, (group, kept) in enumerate(zip(live, groups, strict=True))]
    if wrong:
        raise Unfit(wrong)
    for group, own in zip(out_groups, live, strict=True):
        group["params"] = [numbers[id(p)] for p in own["params"]]
    return {"state": out_state, "param_groups": out_groups}


def _order(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], groups: list[Any], listed: Sequence[str], wrong: list[str]
) -> dict[Any, torch.Tensor]:
    """The source's number (or name) of each parameter -> the live one."""
    found: dict[Any, torch.Tensor] = {}
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        labels = list(saved["params"])
        if not all(type(label) in (int, str) for label in labels) or len(set(labels)) != len(labels) or found.keys() & set(labels):
            wrong.append(f"group {number} has parameters without a number or name, or one twice")
            continue
        told = _told(labels, saved, listed)
        if told is None:
            found |= dict(zip(labels, group["params"], strict=True))
            continue
        live = {names[id(p)]: p for p in group["params"]}
        matched = _same_names(list(live), told)
        if matched is None:
            gone, new = sorted(set(told) - set(live))[:20], sorted(set(live) - set(told))[:20]
            wrong.append(f"group {number} has {gone or 'no parameters'} in the source where the live one has {new}")
            continue
        found |= {label: live[matched[name]] for label, name in zip(labels, told, strict=True)}
    return found


def _told(labels: list[Any], saved: Mapping[str, Any], listed: Sequence[str]) -> list[str] | None:
    """Names of a group's parameters, where the source has any."""
    named = saved.get("param_names")
    if isinstance(named, list) and len(named) == len(labels) and all(isinstance(name, str) for name in named):
        return named
    if labels and all(isinstance(label, str) and not label.isdecimal() for label in labels):
        return labels
    if listed and all(type(label) is int and 0 <= label < len(listed) for label in labels):
        return [listed[label] for label in labels]
    return None


def _same_names(live: list[str], told: list[str]) -> dict[str, str] | None:
    """Told name -> live name, marks of wrappers taken off where that makes all match; None if they are others."""
    for mine, _ in peeled({name: name for name in live}):
        for other, _ in peeled({name: name for name in told}):
            if mine.keys() == other.keys() and len(mine) == len(live) == len(told):
                return {other[short]: name for short, name in mine.items()}
    return None


def _checked(values: Any, parameter: torch.Tensor, name: str, wrong: list[str]) -> Any:
    """One parameter's state, as far as can be known without its optimizer: moments have the parameter's shape, a step is a number.

    Of other names a tensor with as many dimensions as the parameter has its shape, or is 1 wide where it is factored.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        wrong.append(f"{name}: its state is no dict")
        return {}
    for key, value in values.items():
        if not _is_fit(key, value, parameter):
            what = f"{name_of(value.dtype)}{list(value.shape)}" if torch.is_tensor(value) else f"{str(value)[:40]!r}"
            wrong.append(f"{name}: {key} is {what} in the source, the parameter {list(parameter.shape)}")
    return dict(values)


def _is_fit(key: str, value: Any, parameter: torch.Tensor) -> bool:
    if key == "step":
        return _is_number(value)
    if torch.is_tensor(value):
        if refusal(value.detach()) is not None:
            return False
        if key in _MOMENTS:
            return value.shape == parameter.shape and (value.is_floating_point() or value.is_complex())
        return value.dim() != parameter.dim() or all(have in (1, want) for have, want in zip(value.shape, parameter.shape, strict=True))
    return key not in _MOMENTS or (value is None and key == "momentum_buffer")


def _options(number: int, live: Mapping[str, Any], saved: Mapping[str, Any], notes: list[str], wrong: list[str]) -> dict[str, Any]:
    """The live group's options with the source's values; how to compute stays as it is here."""
    out = {key: value for key, value in live.items() if key not in _OWN_TEXT}
    for key, value in saved.items():
        # a scheduler's note is taken where a scheduler of ours looks at it: else the next process would not have it, and not resume
        if key in _OWN_TEXT or key in _OF_THE_HOST or (key == "initial_lr" and key not in live):
            continue
        if key not in live:
            wrong.append(f"group {number} has an option {str(key)[:60]!r}, which the live optimizer does not know: another class?")
        elif not _alike(live[key], value):
            wrong.append(f"group {number}: {key} is {str(value)[:60]!r} in the source, {live[key]!r} live: not of one kind")
        else:
            if repr(live[key]) != repr(value):
                notes.append(f"optimizer, group {number}: {key}={live[key]!r} in the script is not used, the source has {value!r}")
            out[key] = value
    return out


def _alike(live: Any, value: Any) -> bool:
    """Of one kind: numbers (a tensor of one, too), flags, lists of as many alike."""
    if isinstance(live, list | tuple) or isinstance(value, list | tuple):
        both = isinstance(live, list | tuple) and isinstance(value, list | tuple) and len(live) == len(value)
        return both and all(map(_alike, live, value))
    if live is None or isinstance(live, bool) or isinstance(value, bool):
        return live is None or type(live) is type(value)
    return (_is_number(live) and _is_number(value)) or type(live) is type(value) is str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (torch.is_tensor(value) and value.numel() == 1)
