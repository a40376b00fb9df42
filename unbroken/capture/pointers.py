"""Names of pieces: JSON Pointers (RFC 6901) whose tokens keep the type of the key they stand for, and the same names as Python reads.

A token is the key itself for text ("weight"), its index for a list item ("0"), and a typed spelling for any other key:
"#int:25", "#float:1.5", "#bool:True", "#none", "#bytes:00ff", "#tuple:[...]"; text that begins with '#' gets one more '#'.
The mapping is one to one, so {25: ..., "25": ...} keeps two entries.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

_NAN = "nan:"
_MAX_SHOWN_CHARS = 80
_INT64 = 1 << 63


def _spelled_float(value: float) -> str:
    return repr(value) if not math.isnan(value) else _NAN + struct.pack(">d", value).hex()


def _spelled_str(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, and pointers are stored as UTF-8
        return "#str:" + value.encode("utf-8", "surrogatepass").hex()
    return "#" + value if value.startswith("#") else value


def _name(key: Any) -> str:
    kind = type(key)
    if kind is str:
        return _spelled_str(str(key))
    if key is None:
        return "#none"
    if kind is bool:
        return f"#bool:{key}"
    if kind is int:
        return f"#int:{key}" if -_INT64 <= key < _INT64 else f"#int:{key:#x}"
    if kind is float:
        return "#float:" + _spelled_float(key)
    if kind is bytes:
        return f"#bytes:{key.hex()}"
    if kind is tuple:
        return "#tuple:" + msgspec.json.encode([_name(k) for k in key]).decode()
    raise TypeError(f"a key of type {kind.__qualname__}; keys may be str, int, float, bool, None, bytes, or tuples of these")


def _parsed(kind: str, text: str) -> Any:
    match kind:
        case "str":
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case "bool":
            return text == "True"
        case "int":
            return int(text, 16 if "x" in text else 10)
        case "float":
            return struct.unpack(">d", bytes.fromhex(text[len(_NAN) :]))[0] if text.startswith(_NAN) else float(text)
        case "bytes":
            return bytes.fromhex(text)
        case "tuple":
            return tuple(_key(name) for name in msgspec.json.decode(text, type=list[str]))
        case _:
            raise ValueError(kind)


def _key(name: str) -> Any:
    if not name.startswith("#"):
        return name
    if name.startswith("##"):
        return name[1:]
    if name == "#none":
        return None
    kind, _, text = name[1:].partition(":")
    return _parsed(kind, text)


def token(key: Any) -> str:
    """The pointer token of a dict key. TypeError (without a path) when the key's type has none."""
    return _name(key).replace("~", "~0").replace("/", "~1")


def key(text: str) -> Any:
    """The dict key a token stands for. ValueError when no key is spelled like that."""
    try:
        found = _key(text.replace("~1", "/").replace("~0", "~"))
        same = token(found) == text
    except (ValueError, TypeError, struct.error, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no key is spelled {text[:_MAX_SHOWN_CHARS]!r}") from error
    if not same:
        raise ValueError(f"no key is spelled {text[:_MAX_SHOWN_CHARS]!r}")
    return found


class Index(int):
    """A position in a list or tuple, told apart from an int key when a path is spelled."""


def spell(path: Sequence[Any]) -> str:
    """A path of keys and indices as Python would write it: `sched.fns[0]`, `model["0.weight"]`; the whole state is "state"."""
    parts: list[str] = []
    for step in path:
        if type(step) is str and step.isidentifier():
            parts.append(f".{step}" if parts else step)
        elif isinstance(step, Index):
            parts.append(f"[{int(step)}]")
        elif parts or type(step) is not str:
            shown = '"' + step + '"' if type(step) is str else repr(step)
            parts.append(f"[{shown[:_MAX_SHOWN_CHARS]}]")
        else:
            parts.append(step[:_MAX_SHOWN_CHARS])
    return "".join(parts) or "state"


def split(pointer: str) -> list[Any]:
    """The keys along a pointer, for `spell`: a token of digits only is read as an index. Malformed tokens stay as they are."""
    path: list[Any] = []
    for text in pointer.split("/")[1:]:
        try:
            found = key(text)
        except ValueError:
            found = text
        path.append(Index(text) if text.isascii() and text.isdigit() else found)
    return path
