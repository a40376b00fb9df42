"""Files of other people: regular ones only, inside the folder that was named, read up to a bound."""

from __future__ import annotations

import os
import stat
from typing import Any

import msgspec

from unbroken.core.errors import Damaged, NoCheckpoint, Refused
from unbroken.core.limits import MAX_JSON_BYTES

_MAX_NAME_CHARS = 4096


def printable(text: str) -> str:
    """A text out of a file as it may be shown: what would move a terminal's cursor is spelled."""
    return text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode()


def short_name(path: str) -> str:
    """Its last two parts: a run folder holds no absolute path."""
    return "/".join(part for part in path.split("/")[-2:] if part)


def size_of(path: str) -> int:
    """Bytes of a regular file. NoCheckpoint where nothing is, Refused for a device, a pipe or a folder."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpoint(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{path[:200]!r}: cannot be read ({error})") from None
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{path}: is no regular file, and nothing else is opened")
    return found.st_size


def member(folder: str, name: Any, *, named_by: str) -> str:
    """The path of the file `name` of a folder, which something in it (`named_by`) lists. Refused where that is not inside the folder."""
    parts = name.split("/") if isinstance(name, str) else []
    bad = not parts or len(name) > _MAX_NAME_CHARS or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts)
    if bad:
        raise Refused(f"{named_by}: names {str(name)[:200]!r}, which is no file inside {folder}: nothing outside of it is read")
    path, home = os.path.join(folder, name), os.path.realpath(folder)
    real = os.path.realpath(path)
    if os.path.commonpath([home, real]) != home:
        raise Refused(f"{path}: is a link to {real}, outside of the folder, and not followed: copy the folder with its files (cp -rL)")
    return path


def read_bytes(path: str, at_most: int = MAX_JSON_BYTES) -> bytes:
    """A whole small file. Refused where it is larger than `at_most` bytes."""
    if size_of(path) > at_most:
        raise Refused(f"{path}: {size_of(path)} bytes, where at most {at_most} are read")
    with open(path, "rb") as file:
        return file.read(at_most)


def read_json(path: str) -> Any:
    """A JSON file's content; Damaged where it is none."""
    try:
        return msgspec.json.decode(read_bytes(path))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(path, f"is no JSON ({error})") from error
