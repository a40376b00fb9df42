"""Pieces to state. The pieces may be hostile: every size is checked against its shape, every child must be there, nothing recurses far."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import msgspec

from unbroken.capture import generators, pointers, scalars, tensors
from unbroken.capture.flatten import ALIAS, DEQUE, DICTS, LISTS, OBJECT, SETS
from unbroken.core.errors import Damaged
from unbroken.core.limits import MAX_DEPTH
from unbroken.core.ports import Buffer
from unbroken.core.records import Piece

Pieces = Mapping[str, tuple[Piece, Buffer]]

DICT_LIKE = frozenset({*DICTS.values(), OBJECT})
LIST_LIKE = frozenset({*LISTS.values(), DEQUE})


def raw(data: Buffer) -> memoryview:
    """Any buffer as flat bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Builder:
    """Reads nodes of one set of pieces. Tensors that were aliases of each other come out as one tensor. Errors: Damaged.

    adopt: tensors may take over the memory of the pieces, which nobody else uses.
    """

    def __init__(self, pieces: Pieces, *, adopt: bool = False) -> None:
        self._pieces = pieces
        self._adopt = adopt
        self._tensors: dict[str, Any] = {}

    def node(self, pointer: str) -> tuple[Piece, memoryview]:
        """The piece at `pointer` and its bytes."""
        found = self._pieces.get(pointer)
        if found is None:
            raise Damaged(pointer or "/", "is missing, though its container lists it" if pointer else "is missing")
        return found[0], raw(found[1])

    def target(self, pointer: str) -> tuple[str, Piece, memoryview]:
        """The node at `pointer`, with an alias followed to the tensor it stands for."""
        piece, data = self.node(pointer)
        if piece.dtype != ALIAS:
            return pointer, piece, data
        other = bytes(data).decode("utf-8", "replace")
        if other not in self._pieces:
            raise Damaged(pointer, f"stands for {other[:80]!r}, which is not there")
        found, data = self.node(other)
        if found.dtype not in tensors.DTYPES:
            raise Damaged(pointer, f"stands for {other[:80]!r}, which is no tensor")
        return other, found, data

    def tokens(self, pointer: str) -> list[str]:
        """The names of a dict's entries, in order."""
        piece, data = self.node(pointer)
        try:
            names = msgspec.json.decode(data, type=list[str])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(pointer or "/", f"is no list of keys ({piece.dtype[:40]})") from error
        if len(set(names)) != len(names):
            raise Damaged(pointer or "/", "lists a key twice")
        return names

    def keys(self, pointer: str) -> list[Any]:
        """The keys that `tokens` spell."""
        try:
            return [pointers.key(name) for name in self.tokens(pointer)]
        except ValueError as error:
            raise Damaged(pointer or "/", str(error)) from error

    def length(self, pointer: str) -> tuple[int, int | None]:
        """Length of a list, tuple or deque, and the deque's maxlen."""
        piece, data = self.node(pointer)
        try:
            if piece.dtype != DEQUE:
                num, limit = msgspec.json.decode(data, type=int), None
            else:
                num, limit = msgspec.json.decode(data, type=tuple[int, int | None])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(pointer or "/", "is no length of a list") from error
        if not 0 <= num < max(len(self._pieces), 1) or (limit is not None and not num <= limit < 1 << 62):
            raise Damaged(pointer or "/", f"claims {num} items, more than there are pieces")
        return num, limit

    def children(self, pointer: str) -> list[str]:
        """Pointers of the direct children of the node, in order; [] for a leaf or a set."""
        dtype = self.node(pointer)[0].dtype
        if dtype in LIST_LIKE:
            return [f"{pointer}/{i}" for i in range(self.length(pointer)[0])]
        if dtype in DICT_LIKE or dtype in generators.BY_NAME:
            return [f"{pointer}/{name}" for name in self.tokens(pointer)]
        return []

    def check(self, pointer: str, depth: int = 0) -> None:
        """All that `build` would find wrong with what lies at `pointer`, without making its tensors."""
        if depth > MAX_DEPTH:
            raise Damaged(pointer, f"is nested more than {MAX_DEPTH} deep")
        _, piece, data = self.target(pointer)
        if piece.dtype in tensors.DTYPES:
            try:
                tensors.check(piece.dtype, piece.shape, data)
            except ValueError as error:
                raise Damaged(pointer or "/", str(error)) from error
        elif piece.dtype in DICT_LIKE or piece.dtype in LIST_LIKE:
            if piece.dtype in DICT_LIKE:
                self.keys(pointer)
            for child in self.children(pointer):
                self.check(child, depth + 1)
        else:
            self.build(pointer, depth)

    def holds_state(self, pointer: str, depth: int = 0) -> bool:
        """True if there is a tensor, array, generator or object at `pointer` or beneath: more than plain values."""
        if depth > MAX_DEPTH:
            raise Damaged(pointer, f"is nested more than {MAX_DEPTH} deep")
        dtype = self.node(pointer)[0].dtype
        if dtype in DICT_LIKE or dtype in LIST_LIKE:
            return dtype == OBJECT or any(self.holds_state(child, depth + 1) for child in self.children(pointer))
        return dtype == ALIAS or dtype in tensors.DTYPES or dtype in generators.BY_NAME or scalars.is_array(dtype)

    def build(self, pointer: str, depth: int = 0) -> Any:
        """The value at `pointer`, made anew; it owns its memory."""
        if depth > MAX_DEPTH:
            raise Damaged(pointer, f"is nested more than {MAX_DEPTH} deep")
        dtype = self.node(pointer)[0].dtype
        if dtype in DICT_LIKE:
            return self._dict(pointer, dtype, depth)
        if dtype in LIST_LIKE:
            num, limit = self.length(pointer)
            values = [self.build(f"{pointer}/{i}", depth + 1) for i in range(num)]
            return deque(values, limit) if dtype == DEQUE else tuple(values) if dtype == "py:tuple" else values
        if dtype in SETS.values():
            return self._set(pointer, dtype)
        if dtype in generators.BY_NAME:
            return self._generator(pointer, depth)
        return self._leaf(pointer)

    def _dict(self, pointer: str, dtype: str, depth: int) -> dict[Any, Any]:
        out: dict[Any, Any] = {"py:OrderedDict": OrderedDict, "py:Counter": Counter}.get(dtype, dict)()
        for name, key in zip(self.tokens(pointer), self.keys(pointer), strict=True):
            out[key] = self.build(f"{pointer}/{name}", depth + 1)
        if len(out) != len(self.tokens(pointer)):
            raise Damaged(pointer or "/", "lists two keys that are equal")
        return out

    def _set(self, pointer: str, dtype: str) -> set[Any] | frozenset[Any]:
        keys = self.keys(pointer)
        return frozenset(keys) if dtype == "py:frozenset" else set(keys)

    def generator_state(self, pointer: str, depth: int = 0) -> dict[str, Any]:
        """The state of a random generator as the dict its kind understands."""
        return self._dict(pointer, "py:dict", depth)

    def _generator(self, pointer: str, depth: int) -> Any:
        state = self.generator_state(pointer, depth)
        try:
            return generators.BY_NAME[self.node(pointer)[0].dtype].make(state)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, IndexError) as error:
            raise Damaged(pointer or "/", f"holds no state this generator accepts: {error}") from error

    def _leaf(self, pointer: str) -> Any:
        where, piece, data = self.target(pointer)
        try:
            if piece.dtype in tensors.DTYPES:
                if where not in self._tensors:
                    self._tensors[where] = tensors.read(piece.dtype, piece.shape, data, adopt=self._adopt)
                return self._tensors[where]
            if piece.dtype in tensors.NAMED:
                return tensors.decode(piece.dtype, data)
            if scalars.is_scalar(piece.dtype):
                return scalars.decode(piece.dtype, piece.shape, data)
        except (ValueError, UnicodeDecodeError) as error:
            raise Damaged(pointer or "/", str(error)) from error
        raise Damaged(pointer or "/", f"has a type this version does not know: {piece.dtype[:40]!r}")


def rebuild(pieces: Pieces, pointer: str = "", *, adopt: bool = False) -> Any:
    """The state that was flattened, from its pieces by pointer; `pointer` picks a part. Tensors are on the CPU and own their memory.

    adopt: they may take over that of the pieces, which nobody else uses.

    Pieces not reachable from `pointer` are passed over. Damaged names the pointer when bytes, shapes, lists or aliases do not fit.
    """
    return Builder(pieces, adopt=adopt).build(pointer)
