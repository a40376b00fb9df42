"""Which of several failures explains the others: from exit codes and from the error files that workers leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from unbroken.cluster.decide import describe

MAX_ERROR_CHARS = 300
"""Of an error's first line, which is what reasons quote; the whole text stays in the error file."""

MAX_MESSAGE_CHARS = 8000
"""Of a whole error, which is shown once, when the job ends."""

MISTAKES = frozenset({"ValueError", "TypeError", "SyntaxError", "ImportError", "FileNotFoundError"})
"""Kinds of errors, those derived from them included, that a program meets again when it is started again as it was."""

MAX_ERROR_FILE_BYTES = 1 << 20
"""A worker's error file larger than this is not read."""


def root_cause(failed: Mapping[int, tuple[int, str]]) -> tuple[int, str]:
    """The rank whose failure explains the others, and that failure in words. `failed`: global rank -> (exit code, path of its error file).

    A signal explains the exceptions of those who lost their peer, and so does an exit without a word; among exceptions the earliest.
    """
    ranked = []
    for rank, (code, path) in failed.items():
        text, moment_ns = read_error_file(path) if code > 0 else ("", 0)
        line = text.strip().partition("\n")[0][:MAX_ERROR_CHARS]
        ranked.append((code > 0, moment_ns, rank, describe(code) + (f": {line}" if line else "")))
    _, _, rank, error = min(ranked)
    return rank, error


def whole_message(code: int, path: str) -> str:
    """The text of a failure where its first line is not all: remedies stand below. "" otherwise."""
    text = read_error_file(path)[0].strip() if code > 0 else ""
    return text[:MAX_MESSAGE_CHARS] if text[:MAX_ERROR_CHARS] != text or "\n" in text else ""


def has_error(path: str) -> bool:
    """True when a worker has left an error there."""
    return bool(read_error_file(path)[0])


def is_mistake(path: str) -> bool:
    """True when the error a worker has left there is a mistake in the program or its arguments: the same start meets it again."""
    message, _ = _message(path)
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    kinds = extra.get("kinds") if isinstance(extra, dict) else None
    return isinstance(kinds, str) and not MISTAKES.isdisjoint(kinds.split())


def read_error_file(path: str) -> tuple[str, int]:
    """Message of an error file in TorchElastic's format and when it was written (ns, file time); ("", 0) if none can be read."""
    message, moment_ns = _message(path)
    text = message.get("message") if isinstance(message, dict) else message
    return (text, moment_ns) if isinstance(text, str) else ("", 0)


def _message(path: str) -> tuple[Any, int]:
    try:
        found = os.stat(path)
        if not os.path.isfile(path) or found.st_size > MAX_ERROR_FILE_BYTES:
            return None, 0
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any]).get("message"), found.st_mtime_ns
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None, 0
