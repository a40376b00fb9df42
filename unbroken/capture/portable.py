"""A stored state in formats that other tools read: safetensors with a JSON sidecar, or one file for `torch.load(weights_only=True)`.

    model.safetensors       weights under the names that `load_state_dict` expects; tied ones under each name
    optimizer.safetensors   "state.<parameter's number>.<name>"; other parts that hold tensors likewise, a file each
    state.json              everything: plain values as JSON, others typed, a tensor as {"$tensor": name, "file": file}

    {"model": ..., "optimizer": ..., ...}    in the torch file: state dicts as torch's own load_state_dict takes them

Parameters of an optimizer have numbers, as in torch; `optimizer_parameters` lists their names. Several models or optimizers lie under
their keys, in files of their own ("model.<key>.safetensors").

Both hold the whole state in memory. Nothing is ever read back from these files by us.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from unbroken.capture import generators, pointers, tensors
from unbroken.capture.rebuild import Pieces
from unbroken.capture.select import assemble
from unbroken.core.errors import MissingExtra

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAMES = ("/naming", "/layout")
"""Recorded pieces that tell how torch names and numbers things; the second one only in what order parameters were registered."""

_MAX_EXACT = 1 << 53
SIDECAR = "state.json"


class Exported(NamedTuple):
    """What was written: names of files, and what a person should know."""

    files: tuple[str, ...]
    notes: tuple[str, ...]


def state_dicts(pieces: Pieces) -> tuple[dict[str, Any], list[str]]:
    """The parts of a stored state by name, a run's with torch's names and numbers, and notes on what could not be named so."""
    restored = {pointer: found for pointer, found in pieces.items() if found[0].role == "restored"}
    whole = assemble(restored)
    if "/model/parameters" not in pieces:
        return (whole if isinstance(whole, dict) and all(isinstance(key, str) for key in whole) else {"state": whole}), []
    naming = msgspec.json.decode(bytes(pieces["/naming"][1])) if "/naming" in pieces else {}
    notes = [] if naming else ["written before names were recorded: buffers that state_dict leaves out are among the weights"]
    model, optimizer = whole.pop("model"), whole.pop("optimizer")
    several = _is_several(model["parameters"])
    keys = list(optimizer["groups"]) if isinstance(optimizer["groups"], dict) else [""]
    order = {key: _order(pieces, optimizer["groups"][key] if key else optimizer["groups"], naming, key, notes) for key in keys}
    optimizers = {key: _optimizer(optimizer, key, order[key]) for key in keys}
    numbered = {key: [name for names in order[key] for name in names] for key in keys}
    weights = _weights(model, set(naming.get("transient_buffers", ())), several)
    parts = {
        "model": weights if several else weights[""],
        "optimizer": optimizers if keys != [""] else optimizers[""],
        "optimizer_parameters": numbered if keys != [""] else numbered[""],
        "modes": {"training": model["modes"], "frozen": model["frozen"]},
    }
    return parts | whole, notes


def _is_several(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())


def _weights(model: Mapping[str, Any], transient: set[str], several: bool) -> dict[str, dict[str, Any]]:
    """Each model's state_dict: parameters, the buffers that belong to it, and what modules keep besides."""
    found: dict[str, dict[str, Any]] = {}
    for key in model["parameters"] if several else [""]:
        start = f"{key}." if key else ""
        own, buffers = (model[what][key] if several else model[what] for what in ("parameters", "buffers"))
        found[key] = dict(own) | {name: value for name, value in buffers.items() if start + name not in transient}
        for name, value in model.get("extra_state", {}).items():
            if not several or name == key or name.startswith(start):
                inner = "" if name == key else name.removeprefix(start)
                found[key][f"{inner}._extra_state" if inner else "_extra_state"] = value
    return found


def _order(pieces: Pieces, groups: list[dict[str, Any]], naming: Mapping[str, Any], key: str, notes: list[str]) -> list[list[str]]:
    """Names of each group's parameters in the order of the optimizer, which numbers them so; where it is not recorded, of the model."""
    stored = [list(group["params"]) for group in groups]
    order: list[list[str]] = naming.get("optimizer_order", {}).get(key, [])
    if [sorted(names) for names in order] == stored:
        return order
    notes.append(f"optimizer {key}".strip() + ": the order of its parameters is not recorded, that of the model is assumed")
    registered = {pointers.key(token): i for i, token in enumerate(msgspec.json.decode(bytes(pieces["/layout"][1])))}
    return [sorted(names, key=lambda name: registered[name]) for names in stored]


def _optimizer(stored: Mapping[str, Any], key: str, order: list[list[str]]) -> dict[str, Any]:
    """As `optimizer.state_dict()` gives it: parameters by number, groups in order."""
    groups, state = (stored[what][key] if key else stored[what] for what in ("groups", "state"))
    numbers = {name: i for i, name in enumerate(name for names in order for name in names)}
    out: dict[str, Any] = {"state": {numbers[name]: state[name] for name in sorted(state, key=numbers.__getitem__)}}
    out["param_groups"] = [group | {"params": [numbers[name] for name in names]} for group, names in zip(groups, order, strict=True)]
    other = stored.get("other", {}).get(key, {})
    out["state"] |= other.get("shared", {})
    own: dict[str, Any] = other.get("own", {})
    return out | own


def write_torch(parts: Mapping[str, Any], path: str) -> None:
    """One file of plain tensors and containers of builtin types, which `torch.load(path, weights_only=True)` reads."""
    with open(path, "xb") as file:
        # The one place where torch's own format is written. It pickles, but nothing here is more than a tensor, a dict, a list, a tuple
        # or a number, text or bytes, so that a reader needs no code from the file; and we never read it.
        torch.save(_plain(dict(parts)), file)  # noqa: TID251
        file.flush()
        os.fsync(file.fileno())


def write_safetensors(parts: Mapping[str, Any], folder: str, source: Mapping[str, Any]) -> list[str]:
    """Files in `folder`, which exists and is empty; their names. `source` says in the sidecar what was exported."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    state = {}
    for name, value, file in _by_file(parts):
        found = _Split(file)
        typed = found.typed(value, [])
        if found.tensors:
            files[file] = found.tensors
        state[name] = typed
    raw = msgspec.json.format(msgspec.json.encode({"format": "unbroken.export/1", "source": dict(source), "state": state}), indent=1)
    with open(os.path.join(folder, SIDECAR), "xb") as sidecar:
        sidecar.write(raw)
        sidecar.flush()
        os.fsync(sidecar.fileno())
        mode = os.fstat(sidecar.fileno()).st_mode & 0o777
    for file, values in files.items():
        path = os.path.join(folder, file)
        _save_safetensors(values, path)
        os.chmod(path, mode)  # the library makes files that only we may read
    return [*files, SIDECAR]


def _save_safetensors(values: dict[str, torch.Tensor], path: str) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra("safetensors", "safetensors") from error
    save_file(values, path, metadata={"format": "pt"})
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _by_file(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Each part with the name of its file; several models or optimizers have a file each."""
    pairs: list[tuple[str, Any]] = []
    for name, value in parts.items():
        if name in ("model", "optimizer") and isinstance(value, dict) and value and all(_is_part(name, v) for v in value.values()):
            pairs += [(f"{name}.{key}", one) for key, one in value.items()]
        else:
            pairs.append((name, value))
    taken: set[str] = {SIDECAR}
    for number, (name, value) in enumerate(pairs):
        file = f"{name}.safetensors" if _SAFE_NAME.fullmatch(name) else f"part-{number}.safetensors"
        file = file if file.lower() not in taken else f"part-{number}.safetensors"
        taken.add(file.lower())
        yield name, value, file


def _is_part(name: str, value: Any) -> bool:
    return isinstance(value, dict) and (name == "model" or "param_groups" in value)


class _Split:
    """Tensors of one part by dotted name, each once however often it occurs, and the rest as JSON."""

    def __init__(self, file: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._file = file
        self._seen: set[int] = set()

    def typed(self, value: Any, path: list[str]) -> Any:
        """The JSON of a value; what JSON does not know is {"$type": ..., ...}."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.name in tensors.DTYPES:
            return self._tensor(torch.from_numpy(value), path) | {"$type": f"np.array:{value.dtype.name}"}
        if type(value) in generators.KINDS:
            kind = generators.KINDS[type(value)]
            return {"$type": kind.name, "state": self.typed(kind.take(value), path)}
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, torch.Size):
            return _typed_scalar(value)
        if isinstance(value, list | tuple | deque | set | frozenset):
            items = [self.typed(one, [*path, str(i)]) for i, one in enumerate(value)]
            if type(value) is list:
                return items
            return {"$type": f"py:{type(value).__name__}", "items": items} | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})
        return _typed_scalar(value)

    def _tensor(self, value: torch.Tensor, path: list[str]) -> dict[str, Any]:
        name = ".".join(path) or "value"
        while name in self.tensors:
            name += "_"
        stored = torch.view_as_real(value) if value.dtype is torch.complex128 else value  # the one dtype that the format has not
        # what is in two places (tied weights) has its bytes under both names: each can be loaded by itself
        self.tensors[name] = stored.clone() if id(value) in self._seen or stored is not value else stored
        self._seen.add(id(value))
        told: dict[str, Any] = {"$tensor": name, "file": self._file}
        return told | ({"dtype": "complex128"} if stored is not value else {})

    def _dict(self, value: Mapping[Any, Any], path: list[str]) -> Any:
        pairs = [(key, self.typed(one, [*path, str(key)])) for key, one in value.items()]
        if type(value) is dict and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$type": f"py:{type(value).__name__}", "items": [[_typed_scalar(key), one] for key, one in pairs]}


def _typed_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < _MAX_EXACT):
        return value
    if type(value) is str and not any("\ud800" <= char <= "\udfff" for char in value):
        return value
    if isinstance(value, float) and type(value) is float and math.isfinite(value):
        return value
    kinds: dict[type, Callable[[Any], Any]] = {
        int: str,
        float: float.hex,
        complex: lambda v: [v.real.hex(), v.imag.hex()],
        str: lambda v: base64.b64encode(v.encode("utf-8", "surrogatepass")).decode(),
        bytes: lambda v: base64.b64encode(v).decode(),
        bytearray: lambda v: base64.b64encode(v).decode(),
        tuple: lambda v: [_typed_scalar(one) for one in v],
    }
    if type(value) in kinds:
        return {"$type": f"py:{type(value).__name__}", "value": kinds[type(value)](value)}
    named = tensors.encode(value)
    if named is not None:
        return {"$type": named[0], "value": named[1].decode()}
    array = np.asarray(value)
    kind = "np.array" if isinstance(value, np.ndarray) else "np"
    raw = base64.b64encode(array.tobytes()).decode()
    return {"$type": f"{kind}:{array.dtype.str}", "shape": list(array.shape), "value": raw}


def _plain(value: Any) -> Any:
    """Tensors, dicts, lists, tuples, numbers, text and bytes only; tensors that are one stay one."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.name in tensors.DTYPES:
            return torch.from_numpy(value)
        return (value.astype(str) if value.dtype.kind in "mM" else value).tolist()
    if isinstance(value, np.generic):
        return value.item() if value.dtype.kind not in "mM" else str(value)
    if type(value) in generators.KINDS:
        return _plain(generators.KINDS[type(value)].take(value))
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):  # a torch.Size, too
        return tuple(_plain(one) for one in value)
    if isinstance(value, list | deque):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(one) for one in value), key=repr)
    if isinstance(value, bytearray):
        return bytes(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value
