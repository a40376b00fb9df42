"""State to pieces: one walk over dicts, lists, objects with state_dict() and leaves. Nothing is copied but scalars and arrays."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import torch

from unbroken.capture import generators, pointers, scalars, tensors
from unbroken.core.limits import MAX_DEPTH, MAX_PIECES, MAX_POINTER_CHARS
from unbroken.core.records import Layer, Piece, Role, Scope

DICTS: dict[type, str] = {dict: "py:dict", OrderedDict: "py:OrderedDict", Counter: "py:Counter"}
LISTS: dict[type, str] = {list: "py:list", tuple: "py:tuple"}
SETS: dict[type, str] = {set: "py:set", frozenset: "py:frozenset"}
DEQUE = "py:deque"
OBJECT = "py:state_dict"
ALIAS = "alias"


@dataclass(slots=True)
class Item:
    """A piece and its value: bytes, or the live tensor itself, which is read only when `write_item` copies it."""

    piece: Piece
    data: torch.Tensor | bytes

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.numel() * self.data.element_size()


def write_item(item: Item, view: memoryview) -> None:
    """Copy an item's logical bytes into `view`, writable and exactly `item.nbytes` long. Cost: one pass over the bytes."""
    if isinstance(item.data, bytes):
        view[:] = item.data
    else:
        tensors.write(item.data, view)


def view(item: Item) -> memoryview:
    """An item's logical bytes; those of a contiguous tensor on the CPU are not copied, so they are as they will be when they are read."""
    if isinstance(item.data, bytes):
        return memoryview(item.data)
    flat = item.data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat.view(-1).view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def has_state(value: Any) -> bool:
    """True for an object (no class) that has both state_dict() and load_state_dict()."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _remedy(value: Any) -> str:
    if isinstance(value, Enum):
        return "an Enum member; store its .value"
    if isinstance(value, (dict, list, tuple, set, int, float, str, bytes)):
        base = next(kind for kind in (dict, list, tuple, set, int, float, str, bytes) if isinstance(value, kind))
        return f"a {type(value).__qualname__}, a subclass of {base.__name__} that would not come back as one; convert it first"
    return f"a value of type {type(value).__qualname__}; leave it out, or give its class state_dict() and load_state_dict()"


class _Walk:
    """`like` is the piece whose labels (scope, role, layer, kind, captured) all pieces get."""

    def __init__(self, like: Piece) -> None:
        self.items: list[Item] = []
        self._like = like
        self._path: list[Any] = pointers.split(like.pointer)
        self._open: set[int] = set()
        self._views: dict[tensors.View, str] = {}

    def refuse(self, reason: str) -> TypeError:
        return TypeError(f"{pointers.spell(self._path)}: cannot store {reason}")

    def add(self, pointer: str, dtype: str, data: torch.Tensor | bytes, shape: Sequence[int] = (), kind: str = "") -> None:
        if len(pointer) > MAX_POINTER_CHARS or len(self.items) >= MAX_PIECES:
            raise self.refuse(f"a name of more than {MAX_POINTER_CHARS} characters, or more than {MAX_PIECES} pieces")
        piece = Piece(
            pointer=pointer,
            dtype=dtype,
            shape=tuple(shape),
            scope=self._like.scope,
            role=self._like.role,
            layer=self._like.layer,
            kind=kind or self._like.kind,
            captured=self._like.captured,
        )
        self.items.append(Item(piece, data))

    def visit(self, value: Any, pointer: str) -> None:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, pointer)
        try:
            leaf = scalars.encode(value)
        except TypeError as error:
            raise self.refuse(str(error)) from None
        if leaf is not None:
            return self.add(pointer, leaf[0], leaf[2], leaf[1])
        named = tensors.encode(value)
        if named is not None:
            return self.add(pointer, *named)
        return self._enter(value, pointer)

    def _tensor(self, value: torch.Tensor, pointer: str) -> None:
        reason = tensors.refusal(value)
        if reason is not None:
            raise self.refuse(reason)
        view = tensors.view_key(value)
        first = pointer if view is None else self._views.setdefault(view, pointer)
        if first != pointer:
            return self.add(pointer, ALIAS, first.encode())
        return self.add(pointer, tensors.name_of(value.dtype), value, value.shape)

    def _enter(self, value: Any, pointer: str) -> None:
        if id(value) in self._open:
            raise self.refuse("a container that holds itself")
        if len(self._open) >= MAX_DEPTH:
            raise self.refuse(f"containers nested more than {MAX_DEPTH} deep")
        self._open.add(id(value))
        self._container(value, pointer)
        self._open.discard(id(value))

    def _container(self, value: Any, pointer: str) -> None:
        kind = type(value)
        if kind in DICTS:
            self._dict(value, pointer, DICTS[kind])
        elif kind in LISTS:
            self._list(value, pointer, LISTS[kind], len(value))
        elif kind is deque:
            self._list(value, pointer, DEQUE, [len(value), value.maxlen])
        elif kind in SETS:
            self.add(pointer, SETS[kind], msgspec.json.encode(sorted(self._tokens(value))), kind="container")
        elif kind in generators.KINDS:
            found = generators.KINDS[kind]
            self._dict(found.take(value), pointer, found.name)
        elif has_state(value):
            state = value.state_dict()
            if not isinstance(state, dict):
                raise self.refuse(f"an object whose state_dict() is a {type(state).__qualname__}; it must be a dict")
            self._dict(state, pointer, OBJECT)
        else:
            raise self.refuse(_remedy(value))

    def _tokens(self, keys: Iterable[Any]) -> list[str]:
        names = []
        for key in keys:
            try:
                names.append(pointers.token(key))
            except TypeError as error:
                raise self.refuse(str(error)) from None
        if len(set(names)) != len(names):
            raise self.refuse("two keys of the same spelling (NaN)")
        return names

    def _dict(self, value: dict[Any, Any], pointer: str, dtype: str) -> None:
        names = self._tokens(value)
        self.add(pointer, dtype, msgspec.json.encode(names), kind="container")
        for name, (key, child) in zip(names, value.items(), strict=True):
            self._path.append(key)
            self.visit(child, f"{pointer}/{name}")
            self._path.pop()

    def _list(self, value: Iterable[Any], pointer: str, dtype: str, header: Any) -> None:
        self.add(pointer, dtype, msgspec.json.encode(header), kind="container")
        for i, child in enumerate(value):
            self._path.append(pointers.Index(i))
            self.visit(child, f"{pointer}/{i}")
            self._path.pop()


def flatten(
    state: Any,
    pointer: str = "",
    *,
    scope: Scope = "logical",
    role: Role = "restored",
    layer: Layer = "framework",
    kind: str = "value",
    captured: str = "boundary",
) -> list[Item]:
    """The pieces of `state`, its own first, named beneath `pointer`; the keywords go into every piece as they are.

    In the step path: about 2 us a piece; tensors are referenced, not copied. TypeError names the first value that cannot be
    stored, by its path in Python notation, before anything has been written.
    """
    walk = _Walk(Piece(pointer=pointer, dtype="", scope=scope, role=role, layer=layer, kind=kind, captured=captured))
    walk.visit(state, pointer)
    return walk.items
