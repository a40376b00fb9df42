"""Pieces into live objects, in place: first everything is compared, then everything is put; a difference leaves the target untouched.

Tensors, arrays and generators are filled, objects get load_state_dict(), plain values and containers of plain values become exactly
what was saved. A dict (or list) that holds tensors or objects is a layout: its keys (or length) must be those of the checkpoint.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unbroken.capture import generators, pointers, scalars, tensors
from unbroken.capture.flatten import has_state
from unbroken.capture.rebuild import DICT_LIKE, LIST_LIKE, Builder, Pieces
from unbroken.core.errors import LayoutMismatch
from unbroken.core.limits import MAX_DEPTH

_WRAPPERS = ("module.", "_orig_mod.")
_INNER_WRAPPER = re.compile(r"(?:(?<=^)|(?<=\.))(?:module|_orig_mod)\.")

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load left out: names `missing` from the checkpoint, `unexpected` in it, `mismatched` in shape or dtype, as texts.

    All are empty after a strict load. `step` is the checkpoint's, where the caller knows it.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    step: int | None = None


def _peeled(names: list[str]) -> Iterator[list[str]]:
    yield names
    while names:
        prefix = next((w for w in _WRAPPERS if all(name.startswith(w) for name in names)), None)
        if prefix is None:
            return
        names = [name.removeprefix(prefix) for name in names]
        yield names


def match_names(wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str] | None:
    """Which saved name belongs to each wanted one: the same, or the same but for `module.` and `_orig_mod.` of wrappers.

    Equal sets match as they are. Else wrapper prefixes shared by all names of a side are taken off, one by one; at last those
    inside names too (a compiled submodule). None if the sets still differ.
    """
    ours, theirs = list(wanted), list(saved)
    candidates = [(a, b) for a in _peeled(ours) for b in _peeled(theirs)]
    candidates.append(([_INNER_WRAPPER.sub("", name) for name in ours], [_INNER_WRAPPER.sub("", name) for name in theirs]))
    for a, b in candidates:
        if set(a) == set(b) and len(set(a)) == len(a) == len(b):
            found = dict(zip(b, theirs, strict=True))
            return {name: found[bare] for name, bare in zip(ours, a, strict=True)}
    return None


def _holds_state(value: Any, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        raise ValueError(f"into= nests containers more than {MAX_DEPTH} deep, or holds itself")
    if isinstance(value, dict):
        return any(_holds_state(child, depth + 1) for child in value.values())
    if isinstance(value, list | tuple | deque):
        return any(_holds_state(child, depth + 1) for child in value)
    return isinstance(value, torch.Tensor | np.ndarray) or type(value) in generators.KINDS or has_state(value)


def _same_bytes(a: memoryview, b: memoryview) -> bool:
    return np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


@dataclass(slots=True)
class _Load:
    """One load: `compare` fills the lists, `put` then acts and returns what belongs in the target's place."""

    builder: Builder
    cast: bool
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    num_loaded: int = 0
    skipped: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    pairs: dict[str, dict[Any, str]] = field(default_factory=dict)
    views: dict[tensors.View, tuple[str, Path]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # a freed tensor's address must not be taken for a tie

    def compare(self, pointer: str, target: Any, path: Path) -> None:
        """Note every difference between what lies at `pointer` and `target`. Raises Damaged for bytes that cannot be read."""
        if isinstance(target, torch.Tensor):
            self._compare_tensor(pointer, target, path)
        elif isinstance(target, np.ndarray):
            self._compare_array(pointer, target, path)
        elif type(target) in generators.KINDS:
            self._compare_generator(pointer, target, path)
        elif isinstance(target, dict):
            self._compare_dict(pointer, target, path)
        elif isinstance(target, list | tuple | deque):
            self._compare_list(pointer, target, path)
        elif has_state(target):
            self._compare_object(pointer, target, path)
        else:
            self._compare_plain(pointer, target, path)

    def _differ(self, pointer: str, path: Path, stored: str, live: str) -> None:
        self.mismatched.append(f"{pointers.spell(path)}: {stored} in the checkpoint, {live} in the target")
        self.skipped.add(pointer)

    def _form(self, pointer: str) -> str:
        _, piece, _ = self.builder.target(pointer)
        return f"{piece.dtype}{list(piece.shape)}" if piece.dtype in tensors.DTYPES or piece.shape else piece.dtype

    def _compare_tensor(self, pointer: str, target: torch.Tensor, path: Path) -> None:
        where, piece, _ = self.builder.target(pointer)
        live = f"{tensors.name_of(target.dtype)}{list(target.shape)}"
        reason = tensors.unwritable(target)
        if reason is not None:
            return self._differ(pointer, path, self._form(pointer), reason)
        if piece.dtype not in tensors.DTYPES or piece.shape != tuple(target.shape):
            return self._differ(pointer, path, self._form(pointer), live)
        castable = self.cast and torch.can_cast(tensors.DTYPES[piece.dtype], target.dtype)
        if tensors.DTYPES[piece.dtype] is not target.dtype and not castable:
            return self._differ(pointer, path, self._form(pointer), live)
        self.builder.check(where)
        if not self._tie_drifted(pointer, target, path):
            self.num_loaded += 1
        return None

    def _tie_drifted(self, pointer: str, target: torch.Tensor, path: Path) -> bool:
        """True, and noted, if the target is one tensor with an earlier one but the checkpoint has two values for them."""
        where, _, data = self.builder.target(pointer)
        view = tensors.view_key(target)
        first, first_path = (where, path) if view is None else self.views.setdefault(view, (where, path))
        if first == where or _same_bytes(data, self.builder.target(first)[2]):
            return False
        other = pointers.spell(first_path)
        self._differ(pointer, path, f"values other than those of {other}", f"one tensor with {other}")
        return True

    def _compare_array(self, pointer: str, target: np.ndarray[Any, Any], path: Path) -> None:
        piece, _ = self.builder.node(pointer)
        live = f"np.array:{target.dtype.name}{list(target.shape)}"
        if not target.flags.writeable:
            return self._differ(pointer, path, self._form(pointer), f"{live}, read-only")
        if not scalars.is_array(piece.dtype) or piece.shape != target.shape:
            return self._differ(pointer, path, self._form(pointer), live)
        saved = self.builder.build(pointer)
        if saved.dtype != target.dtype and not (self.cast and np.can_cast(saved.dtype, target.dtype, "same_kind")):
            return self._differ(pointer, path, self._form(pointer), live)
        self.num_loaded += 1
        return None

    def _compare_generator(self, pointer: str, target: Any, path: Path) -> None:
        kind = generators.KINDS[type(target)]
        if self.builder.node(pointer)[0].dtype != kind.name:
            return self._differ(pointer, path, self._form(pointer), kind.name)
        if not kind.same(target, self.builder.generator_state(pointer)):
            return self._differ(pointer, path, f"a {kind.name} of another kind or device", f"{kind.name} {target!r}")
        self.builder.check(pointer)
        self.num_loaded += 1
        return None

    def _compare_plain(self, pointer: str, target: Any, path: Path) -> None:
        dtype = self.builder.node(pointer)[0].dtype
        if target is not None and not isinstance(target, set | frozenset):
            scalar = (scalars.is_scalar(dtype) and not scalars.is_array(dtype)) or dtype in tensors.NAMED
            if not scalar:
                return self._differ(pointer, path, self._form(pointer), type(target).__name__)
        return self._replace(pointer)

    def _replace(self, pointer: str) -> None:
        self.builder.check(pointer)
        self.whole.add(pointer)
        self.num_loaded += 1

    def _match(self, pointer: str, keys: Iterable[Any], path: Path) -> dict[Any, str]:
        """Live key -> token of the saved entry; what has no partner is noted."""
        wanted = {pointers.token(key): key for key in keys}
        saved = self.builder.tokens(pointer)
        found = match_names(wanted, saved)
        if found is None:
            found = {name: name for name in wanted if name in set(saved)}
            self.missing += [pointers.spell((*path, key)) for name, key in wanted.items() if name not in found]
            self.unexpected += [pointers.spell((*path, pointers.key(name))) for name in saved if name not in found]
        order = {name: i for i, name in enumerate(saved)}
        return {wanted[name]: found[name] for name in sorted(found, key=lambda name: order[found[name]])}

    def _compare_dict(self, pointer: str, target: dict[Any, Any], path: Path) -> None:
        if self.builder.node(pointer)[0].dtype not in DICT_LIKE:
            return self._differ(pointer, path, self._form(pointer), type(target).__name__)
        self.builder.keys(pointer)
        if not target or (path and not _holds_state(target) and not self.builder.holds_state(pointer)):
            return self._replace(pointer)
        self.pairs[pointer] = self._match(pointer, target, path)
        for key, name in self.pairs[pointer].items():
            self.compare(f"{pointer}/{name}", target[key], (*path, key))
        return None

    def _compare_list(self, pointer: str, target: Sequence[Any] | deque[Any], path: Path) -> None:
        if self.builder.node(pointer)[0].dtype not in LIST_LIKE:
            return self._differ(pointer, path, self._form(pointer), type(target).__name__)
        if not target or (not _holds_state(target) and not self.builder.holds_state(pointer)):
            return self._replace(pointer)
        num = self.builder.length(pointer)[0]
        if num != len(target):
            return self._differ(pointer, path, f"{num} items", f"{len(target)}")
        for i, child in enumerate(target):
            self.compare(f"{pointer}/{i}", child, (*path, pointers.Index(i)))
        return None

    def _compare_object(self, pointer: str, target: Any, path: Path) -> None:
        if self.builder.node(pointer)[0].dtype not in DICT_LIKE:
            return self._differ(pointer, path, self._form(pointer), type(target).__name__)
        self.builder.check(pointer)
        state = target.state_dict()
        if isinstance(target, torch.nn.Module):
            self.pairs[pointer] = self._match(pointer, state, path)
            self.alive.append(state)
            for key, name in self.pairs[pointer].items():
                place, value = f"{pointer}/{name}", state[key]
                self._compare_inside(place, value, (*path, key))
                if isinstance(value, torch.Tensor) and place not in self.skipped:
                    self._tie_drifted(place, value, (*path, key))
            self.num_loaded += bool(self.pairs[pointer]) or not state
            return None
        before = len(self.mismatched)
        self._compare_inside(pointer, state, path)
        if isinstance(target, torch.optim.Optimizer):
            self._compare_groups(pointer, target, path)
        if len(self.mismatched) > before:
            self.skipped.add(pointer)
        else:
            self.num_loaded += 1
        return None

    def _compare_inside(self, pointer: str, value: Any, path: Path) -> None:
        """Within an object's state only shapes and dtypes of tensors present on both sides count: the object judges the rest."""
        _, piece, _ = self.builder.target(pointer)
        if isinstance(value, torch.Tensor) and piece.dtype in tensors.DTYPES:
            other = tensors.DTYPES[piece.dtype]
            castable = other is value.dtype or (self.cast and torch.can_cast(other, value.dtype))
            if piece.shape != tuple(value.shape) or not castable:
                self._differ(pointer, path, self._form(pointer), f"{tensors.name_of(value.dtype)}{list(value.shape)}")
        elif isinstance(value, dict) and piece.dtype in DICT_LIKE:
            saved = set(self.builder.tokens(pointer))
            for key, child in value.items():
                name = pointers.token(key)
                if name in saved:
                    self._compare_inside(f"{pointer}/{name}", child, (*path, key))
        elif isinstance(value, list | tuple) and piece.dtype in LIST_LIKE:
            for i, (child, place) in enumerate(zip(value, self.builder.children(pointer), strict=False)):
                self._compare_inside(place, child, (*path, pointers.Index(i)))

    def _compare_groups(self, pointer: str, optimizer: torch.optim.Optimizer, path: Path) -> None:
        saved = self.builder.build(pointer).get("param_groups")
        live = [len(group["params"]) for group in optimizer.param_groups]
        groups = [len(g["params"]) for g in saved if isinstance(g, dict) and "params" in g] if isinstance(saved, list) else None
        if groups != live:
            self._differ(pointer, (*path, "param_groups"), f"groups of {groups} parameters", f"groups of {live}")

    def put(self, pointer: str, target: Any) -> Any:
        """Load what lies at `pointer`; the value that now belongs where `target` was (itself, if it could be filled)."""
        if pointer in self.skipped:
            return target
        if isinstance(target, torch.Tensor):
            _, piece, data = self.builder.target(pointer)
            tensors.fill(target, piece.dtype, piece.shape, data)
            return target
        if isinstance(target, np.ndarray):
            np.copyto(target, self.builder.build(pointer), casting="same_kind")
            return target
        if type(target) in generators.KINDS:
            generators.KINDS[type(target)].put(target, self.builder.generator_state(pointer))
            return target
        if isinstance(target, dict | list | tuple | deque | set):
            return self._put_container(pointer, target)
        if has_state(target):
            return self._put_object(pointer, target)
        return self.builder.build(pointer)

    def _put_container(self, pointer: str, target: Any) -> Any:
        if isinstance(target, dict):
            return self._put_dict(pointer, target)
        if pointer in self.whole:
            values: Any = self.builder.build(pointer)
        else:
            values = [self.put(f"{pointer}/{i}", child) for i, child in enumerate(target)]
        if isinstance(target, tuple):
            return tuple(values)
        if not isinstance(values, set | frozenset if isinstance(target, set) else list | tuple | deque):
            return values
        target.clear()
        target.update(values) if isinstance(target, set) else target.extend(values)
        return target

    def _put_dict(self, pointer: str, target: dict[Any, Any]) -> dict[Any, Any]:
        if pointer in self.whole:
            values = self.builder.build(pointer)
            target.clear()
        else:
            values = {key: self.put(f"{pointer}/{name}", target[key]) for key, name in self.pairs[pointer].items()}
            if len(values) == len(target) and list(values) != list(target):
                target.clear()  # same keys in the order of the checkpoint, so that the next save has the same bytes
        for key, value in values.items():
            target[key] = value
        return target

    def _put_object(self, pointer: str, target: Any) -> Any:
        if isinstance(target, torch.nn.Module):
            state = target.state_dict()
            for key, name in self.pairs[pointer].items():
                if f"{pointer}/{name}" not in self.skipped:
                    state[key] = self.builder.build(f"{pointer}/{name}")
            target.load_state_dict(state)
        elif isinstance(target, torch.optim.Optimizer):
            load_optimizer(target, self.builder.build(pointer))
        else:
            target.load_state_dict(self.builder.build(pointer))
        return target

    def text(self) -> str:
        """All differences in one text."""
        lines = [f"missing from the checkpoint: {name}" for name in self.missing]
        lines += [f"unexpected in the checkpoint: {name}" for name in self.unexpected]
        lines += self.mismatched
        return "\n  ".join(lines)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict(), undoing its silent cast of floating state to the parameter's dtype."""
    optimizer.load_state_dict(state)
    live = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(saved, live, strict=True):
        for name, value in state.get("state", {}).get(number, {}).items():
            now = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype is not value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)


def differences(pieces: Pieces, into: Any, *, pointer: str = "") -> LoadReport:
    """What a strict `load_into` would refuse; nothing is changed."""
    load = _Load(Builder(pieces), cast=False)
    load.compare(pointer, into, ())
    return LoadReport(tuple(load.missing), tuple(load.unexpected), tuple(load.mismatched))


def load_into(pieces: Pieces, into: Any, *, strict: bool = True, pointer: str = "", cast: bool = False) -> LoadReport:
    """Load the state at `pointer` into `into`: a tensor, array, dict, list, generator or object with load_state_dict(), in place.

    strict: any difference is one LayoutMismatch that lists them all, and `into` is as it was. strict=False loads what fits and
    reports the rest; it is still a LayoutMismatch when nothing fits. dtypes are converted only with cast=True, and only where torch
    calls it safe (float to float). Damaged if the pieces cannot be read; `into` is as it was. An object's own load_state_dict() may
    raise after others have been loaded. Cost: one pass over the bytes; a temporary of the largest tensor, or of one object's state.
    """
    fillable = isinstance(into, torch.Tensor | np.ndarray | dict | list | deque | set) or type(into) in generators.KINDS or has_state(into)
    if not fillable:
        raise TypeError(f"into= is a {type(into).__name__}, which cannot be filled in place; pass a dict, list, tensor, array or module")
    load = _Load(Builder(pieces), cast)
    load.compare(pointer, into, ())
    differs = load.missing or load.unexpected or load.mismatched
    if differs and (strict or not load.num_loaded):
        remedy = "strict=False loads what fits" if strict else "nothing fits"
        raise LayoutMismatch(
            f"the checkpoint does not fit the target, which is untouched ({remedy}):\n  {load.text()}",
            tuple(load.missing),
            tuple(load.unexpected),
            tuple(load.mismatched),
        )
    load.put(pointer, into)
    return LoadReport(tuple(load.missing), tuple(load.unexpected), tuple(load.mismatched))
