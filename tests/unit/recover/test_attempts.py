"""What a restart must find again, from what earlier attempts of the launch have opened."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from unbroken.recover.attempts import attempt, must_find, opened_so_far, tell_launcher

A, B, C, X = "/a", "/b", "/c", "/x"


@pytest.mark.parametrize(
    ("directory", "now", "opened", "answer"),
    [
        (A, 0, None, (0, "")),
        (A, 0, [], (0, "")),
        (A, 2, None, (2, "")),  # torchrun: nobody knows, so it must be there
        (A, 2, [], (0, "")),  # no attempt has come as far as opening a run
        (A, 1, [(0, A)], (1, "")),
        (X, 1, [(0, A)], (1, A)),  # the working directory has changed
        (A, 2, [(0, A), (1, A)], (2, "")),
        (X, 2, [(0, A), (1, A)], (2, A)),
        # a sweep: jobs one after the other in one process, killed in the second
        (A, 1, [(0, A), (0, B)], (1, "")),
        (B, 1, [(0, A), (0, B), (1, A)], (1, "")),
        (C, 1, [(0, A), (0, B), (1, A), (1, B)], (0, "")),  # the third job is new
        (C, 1, [(0, A), (0, B), (1, A)], (1, B)),  # but not before the second one was found again
        (C, 1, [(0, A), (0, B), (1, B)], (0, "")),  # one that is finished may be passed over
        (A, 1, [(0, ""), (1, B)], (1, "")),  # a torn line: a run was opened, nobody knows where
    ],
)
def test_I10_a_restart_must_find_what_was_opened_before(
    directory: str, now: int, opened: list[tuple[int, str]] | None, answer: tuple[int, str]
) -> None:
    assert must_find(directory, now, opened) == answer


def test_the_launcher_is_told_where_the_run_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_launcher("nobody asks")
    assert opened_so_far() is None
    launch = tmp_path / "launch.jsonl"
    monkeypatch.setenv("UNBROKEN_LAUNCH_FILE", str(launch))
    assert opened_so_far() == []
    for rank, directory, restarts in (("0", "/a", "0"), ("1", "/b", "0"), ("0", "/c d\n", "1")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert attempt() == int(restarts)
        tell_launcher(directory)
    lines = [msgspec.json.decode(line) for line in launch.read_bytes().splitlines()]
    assert lines == [
        {"directory": "/a", "attempt": 0, "lineage": "main"},
        {"directory": "/c d\n", "attempt": 1, "lineage": "main"},
    ]
    assert opened_so_far() == [(0, "/a"), (1, "/c d\n")]


@pytest.mark.parametrize("line", [b"{}", b'{"directory": 3, "attempt": 0}', b'{"directory": "/a", "att', b"\xff", b"[]"])
def test_B39_a_torn_line_counts_as_a_run_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setenv("UNBROKEN_LAUNCH_FILE", str(tmp_path / "launch.jsonl"))
    (tmp_path / "launch.jsonl").write_bytes(line + b"\n")
    assert opened_so_far() == [(0, "")]
    assert must_find(A, 1, opened_so_far()) == (1, "")


@pytest.mark.parametrize(("text", "number"), [("", 0), ("x", 0), ("-1", 0), ("12", 12)])
def test_the_number_of_the_attempt(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    assert attempt() == number
