"""A pickle as a description of what it would make. Nothing is imported, called or made: a class is a `Global`, a call is a `Made`.

This is how a pickle is looked at before torch may read it, and how DCP's metadata is read at all. It understands the opcodes that
Python's picklers of protocols 2 to 5 write for data; anything else is Damaged. The bytes may be hostile: what is described is
bounded by them, and a description that would unfold into much more (tuples of tuples of one tuple) is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unbroken.core.errors import Damaged

MAX_VALUES = 1 << 24
"""Of one pickle, unfolded: some 20 per tensor."""

_MAX_DEPTH = 200


@dataclass(eq=False, slots=True)
class Global:
    """A class or function by name, "torch.Size"."""

    name: str


@dataclass(eq=False, slots=True)
class Made:
    """What calling (or making) `kind` with `args` would give, and what would be put into it then."""

    kind: Any
    args: Any
    state: Any = None
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its class or function; "" where it is called through something else."""
        return self.kind.name if isinstance(self.kind, Global) else ""


@dataclass(eq=False, slots=True)
class Table:
    """A dict, as pairs: no key is hashed."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value under a text; None for none."""
        return next((value for name, value in self.pairs if isinstance(name, str) and name == key), None)


@dataclass(eq=False, slots=True)
class Elsewhere:
    """What is stored beside the pickle, by its id: a tensor's storage."""

    id: Any


class _Mark:
    pass


_MARK: Any = _Mark()
_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": Table}
_ARGUMENT = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
})  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self, path: str) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._path = path

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        stack = self.stack
        if name in _ARGUMENT:
            stack.append(argument)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            stack.append(tuple(reversed([self._pop() for _ in range(_TUPLES[name])])))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._other(name, argument)

    def _other(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "LIST":
                stack.append(self._since_mark())
            case "DICT":
                stack.append(Table(_in_pairs(self._since_mark())))
            case "EMPTY_SET":
                stack.append(Made(Global("builtins.set"), ()))
            case "FROZENSET":
                stack.append(Made(Global("builtins.frozenset"), (), items=self._since_mark()))
            case "BYTEARRAY8":
                stack.append(Made(Global("builtins.bytearray"), (bytes(argument),)))
            case "APPEND":
                self._extend([self._pop()])
            case "APPENDS" | "ADDITEMS":
                self._extend(self._since_mark())
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._set([(key, value)])
            case "SETITEMS":
                self._set(_in_pairs(self._since_mark()))
            case "POP":
                self._pop()
            case _:
                self._make(name, argument)

    def _make(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "GLOBAL":
                stack.append(Global(_spelled(*argument.split(" ", 1))))
            case "STACK_GLOBAL":
                attribute, module = self._pop(), self._pop()
                stack.append(Global(_spelled(module, attribute) if isinstance(module, str) and isinstance(attribute, str) else "?"))
            case "REDUCE" | "NEWOBJ":
                args, kind = self._pop(), self._pop()
                stack.append(Made(kind, args))
            case "NEWOBJ_EX":
                named, args, kind = self._pop(), self._pop(), self._pop()
                stack.append(Made(kind, (args, named)))
            case "BUILD":
                state, target = self._pop(), self._top()
                if not isinstance(target, Made):
                    raise self._damaged("BUILD of something that is no object")
                target.state = state if target.state is None else (target.state, state)
            case "BINPERSID":
                stack.append(Elsewhere(self._pop()))
            case _:
                raise self._damaged(f"holds the opcode {name}, which data do not need")

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(self._path, f"is no sound pickle: {reason}")

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise self._damaged("nothing where something must be")
        return self.stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self.stack.pop()
        return value

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while True:
            if not self.stack:
                raise self._damaged("a mark is missing")
            value = self.stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list | Made):
            raise self._damaged("items for something that is no list")
        (target if isinstance(target, list) else target.items).extend(values)

    def _set(self, pairs: list[tuple[Any, Any]]) -> None:
        target = self._top()
        if not isinstance(target, Table | Made):
            raise self._damaged("keys for something that is no dict")
        target.pairs.extend(pairs)


def _spelled(module: str, attribute: str) -> str:
    """Python 2 wrote "__builtin__", and pickles of protocol 2 still do."""
    return f"{'builtins' if module == '__builtin__' else module}.{attribute}"


def _in_pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def describe_pickle(data: bytes, path: str) -> Any:
    """What the pickle in `data` describes. Damaged names `path`. Cost: some 3 us per opcode; memory in proportion to `data`."""
    machine, is_whole = _Machine(path), False
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                is_whole = True
            else:
                machine.step(opcode.name, argument)
    except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError, AttributeError, TypeError) as error:
        raise Damaged(path, f"is no sound pickle: {error}") from error
    if not is_whole or len(machine.stack) != 1 or machine.stack[0] is _MARK:
        raise Damaged(path, "is no sound pickle: it does not end as one")
    _require_small(machine.stack[0], path)
    return machine.stack[0]


def inner(value: Any) -> Iterator[Any]:
    """What a description directly contains."""
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, Table):
        for pair in value.pairs:
            yield from pair
    elif isinstance(value, Made):
        yield value.kind
        yield value.args
        yield value.state
        yield from value.items
        for pair in value.pairs:
            yield from pair
    elif isinstance(value, Elsewhere):
        yield value.id


def everything(value: Any) -> Iterator[Any]:
    """A description and all within it, each object once."""
    seen, waiting = set(), [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | tuple | Table | Made | Elsewhere):
            if id(one) in seen:
                continue
            seen.add(id(one))
            waiting.extend(inner(one))
        yield one


def _require_small(value: Any, path: str) -> None:
    """Damaged for a description that holds itself, is nested too deep, or unfolds into too many values."""
    known: dict[int, int] = {}
    open_now: set[int] = set()

    def count(one: Any, depth: int) -> int:
        if not isinstance(one, list | tuple | Table | Made | Elsewhere):
            return 1
        if id(one) in known:
            return known[id(one)]
        if id(one) in open_now or depth > _MAX_DEPTH:
            raise Damaged(path, f"is no sound pickle: it holds itself, or is nested more than {_MAX_DEPTH} deep")
        open_now.add(id(one))
        total = 1 + sum(count(child, depth + 1) for child in inner(one))
        open_now.discard(id(one))
        known[id(one)] = total
        return total

    if count(value, 0) > MAX_VALUES:
        raise Damaged(path, f"describes more than {MAX_VALUES} values, far more than its bytes can mean")
