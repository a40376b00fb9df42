"""Which failure explains the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unbroken.cluster.cause import (
    MAX_ERROR_FILE_BYTES,
    MAX_MESSAGE_CHARS,
    has_error,
    is_mistake,
    read_error_file,
    root_cause,
    whole_message,
)


def error_file(folder: Path, text: str, written_ns: int) -> str:
    path = folder / f"{written_ns}.json"
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": "7", "py_callstack": ""}}}))
    os.utime(path, ns=(written_ns, written_ns))
    return str(path)


def test_B37_a_signal_explains_the_exceptions_of_those_who_lost_their_peer(tmp_path: Path) -> None:
    lost = error_file(tmp_path, "RuntimeError: Connection reset by peer", 10)
    assert root_cause({0: (1, lost), 1: (-9, ""), 2: (1, lost)}) == (1, "SIGKILL")


def test_B37_the_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    first, later = error_file(tmp_path, "ValueError: bad shard", 10), error_file(tmp_path, "RuntimeError: Connection reset", 11)
    assert root_cause({0: (1, later), 2: (1, first)}) == (2, "exit code 1: ValueError: bad shard")


def test_a_long_error_is_quoted_by_the_beginning_of_its_first_line(tmp_path: Path) -> None:
    long = error_file(tmp_path, "ValueError: " + "x" * 1000 + "\nsecond line", 10)
    assert root_cause({0: (1, long)}) == (0, "exit code 1: ValueError: " + "x" * 288)
    assert root_cause({0: (1, error_file(tmp_path, "KeyError: 'a'\nsecond line", 11))}) == (0, "exit code 1: KeyError: 'a'")


def test_a_code_without_a_text() -> None:
    assert root_cause({1: (7, "")}) == (1, "exit code 7")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"message": {"mess',
        b"[]",
        b'{"message": {"extraInfo": 3}}',
        b'{"message": {"message": 3}}',
        b"\xff\xfe",
        b"{}",
    ],
)
def test_B39_a_torn_or_foreign_error_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error_file(str(path)) == ("", 0)
    assert not has_error(str(path))


def test_B39_a_huge_error_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "' + "x" * MAX_ERROR_FILE_BYTES + '"}')
    assert read_error_file(str(path)) == ("", 0)
    path.write_text('{"message": "short"}')
    assert read_error_file(str(path))[0] == "short"
    assert read_error_file(str(tmp_path)) == read_error_file(str(tmp_path / "none")) == ("", 0)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"kinds": "JSONDecodeError ValueError Exception"}, True),
        ({"kinds": "MissingExtra ImportError"}, True),
        ({"kinds": "RuntimeError Exception"}, False),
        ({"kinds": "ValueErrors"}, False),
        ({"kinds": 3}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_mistake_is_told_by_the_kinds_of_its_error(tmp_path: Path, extra: object, expected: bool) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    assert is_mistake(str(path)) is expected
    assert not is_mistake(str(tmp_path / "none"))


def test_a_message_of_several_lines_is_kept_whole_for_the_end(tmp_path: Path) -> None:
    """The remedy often stands in its last line."""
    text = "unbroken.core.errors.LayoutMismatch: other facts:\n  units: born with 4, now 8\nGive them as they were"
    assert whole_message(4, error_file(tmp_path, text, 10)) == text
    assert whole_message(1, error_file(tmp_path, "ValueError: one line", 11)) == ""
    long = "ValueError: " + "x" * 400
    assert whole_message(1, error_file(tmp_path, long, 12)) == long
    assert len(whole_message(1, error_file(tmp_path, long * 100, 13))) == MAX_MESSAGE_CHARS
    assert whole_message(-9, error_file(tmp_path, text, 14)) == "", "a signal leaves none: the file is not its"
