"""JSON lines: whole lines only, torn ends cut, lost steps taken back, nothing of anybody else's touched."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, suicide
from tests.rigs.synthetic_run import uninterrupted
from unbroken.core.errors import Damaged, Refused
from unbroken.core.ports import arm
from unbroken.loggers import feed
from unbroken.loggers.choose import Target
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo
from unbroken.loggers.to_jsonl import JsonLines
from unbroken.store.tiers.disk import DiskTier


def rows(first: int, last: int) -> list[Row]:
    return [Row(step=k, values={"loss": 1 / k, "word": "ä" * 50, "samples": 8}) for k in range(first, last + 1)]


def held(folder: Path, step: int = 10**9) -> int:
    sink = JsonLines("")
    try:
        return sink.open(RunInfo("id", str(folder), step))
    finally:
        sink.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of 5 steps."""
    sink = JsonLines("")
    assert sink.open(RunInfo("id", str(tmp_path), 0)) == 0
    sink.write(rows(1, 2))
    sink.write(rows(3, 5))
    sink.close()
    return tmp_path


def test_what_is_written_is_read_back(folder: Path) -> None:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert found == [{"step": row.step, **row.values} for row in rows(1, 5)]
    assert held(folder) == 5


def test_values_that_json_lacks_are_read_back_by_pythons_json(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path / "deep" / "file.jsonl"))
    sink.open(RunInfo("id", str(tmp_path), 0))
    sink.write([Row(step=1, values={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 5e-324, "e": 2**63 - 1, "f": True, "samples": 1})])
    sink.close()
    text = (tmp_path / "deep" / "file.jsonl").read_text()
    assert text == '{"step":1,"a":NaN,"b":Infinity,"c":-Infinity,"d":5e-324,"e":9223372036854775807,"f":true,"samples":1}\n'
    assert math.isnan(json.loads(text)["a"])


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_line_is_cut_off_and_comes_again(folder: Path, cut: int) -> None:
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    os.truncate(path, len(whole) - cut)
    sink = JsonLines("")
    assert sink.open(RunInfo("id", str(folder), 9)) == 4
    sink.write(rows(5, 5))
    sink.close()
    assert path.read_bytes() == whole


def test_steps_beyond_what_survives_are_taken_back(folder: Path) -> None:
    whole = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert held(folder, 3) == 3
    assert (folder / "metrics.jsonl").read_bytes() == b"".join(whole[:3])
    assert held(folder, 0) == 0
    assert (folder / "metrics.jsonl").read_bytes() == b""


def test_long_files_are_read_from_their_end(folder: Path) -> None:
    sink = JsonLines("")
    sink.open(RunInfo("id", str(folder), 9))
    sink.write(rows(6, 3000))
    sink.close()
    assert held(folder) == 3000
    assert held(folder, 7) == 7
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 7


@pytest.mark.parametrize(
    "line", [b"hello\n", b"[1]\n", b'{"loss":1}\n', b'{"step":"5"}\n', b'{"step":0}\n', b"\n", b"\xff\n", b"[" * 9999 + b"\n"]
)
def test_I3_a_line_of_somebody_elses_is_an_error_and_stays(folder: Path, line: bytes) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line)
    before = path.read_bytes()
    with pytest.raises(Damaged, match=r"metrics\.jsonl: its last line .* is not the row of a step: move the file away"):
        held(folder)
    assert path.read_bytes() == before


def test_I3_a_line_longer_than_a_row_is_an_error(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b"\n" + b"x" * (2 << 20) + b"\n")
    with pytest.raises(Damaged, match="a line is longer than a row can be: move the file away"):
        held(folder)


def test_two_writers_do_not_mix(folder: Path) -> None:
    first, second = JsonLines(""), JsonLines("")
    first.open(RunInfo("id", str(folder), 9))
    with pytest.raises(Refused, match="another process writes it"):
        second.open(RunInfo("id", str(folder), 9))
    second.close()
    first.write(rows(6, 6))
    first.close()
    assert held(folder) == 6


def test_in_the_run_folder_nothing_but_a_regular_file_is_written(folder: Path, tmp_path: Path) -> None:
    path, other = folder / "metrics.jsonl", tmp_path / "other"
    path.rename(other)
    before = other.read_bytes()
    path.symlink_to(other)
    with pytest.raises(Refused, match="not a regular file but a link"):
        held(folder, 0)
    assert other.read_bytes() == before
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Refused, match="not a regular file"):
        held(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(Refused, match="not a regular file"):
        held(folder)


def test_I9_a_file_that_holds_rows_of_another_run_or_branch_or_of_nobody_known_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    sink = JsonLines(str(path))
    sink.open(RunInfo("a", "/a", 0))
    sink.write(rows(1, 5))
    sink.close()
    before = path.read_bytes()
    for stranger in (RunInfo("b", "/b", 0), RunInfo("b", "/b", 9), RunInfo("a", "/a", 2, "hot")):
        with pytest.raises(Refused, match=r"shared\.jsonl: holds lines that are not of this run or branch: log to another file"):
            sink.open(stranger)
        sink.close()
    (tmp_path / "shared.jsonl.run").unlink()
    with pytest.raises(Refused, match="holds lines that are not of this run"):
        sink.open(RunInfo("a", "/a", 0))
    sink.close()
    assert path.read_bytes() == before
    (tmp_path / "shared.jsonl.run").write_text("a")
    assert sink.open(RunInfo("a", "/a", 4)) == 4
    sink.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_I8_killed_after_a_batch_of_rows_the_file_goes_on_without_a_gap_or_a_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    uninterrupted(DiskTier(str(tmp_path)), num_steps=12)
    monkeypatch.setattr(feed, "_BATCH_ROWS", 3)
    left = [nth]

    def strike() -> None:
        left[0] -= 1
        if not left[0]:
            suicide()

    def act(say: object) -> None:
        arm("log.written", strike)
        feed.complete(Target("jsonl"), str(tmp_path))

    _, status = in_child(act)
    assert os.WIFSIGNALED(status)
    assert feed.complete(Target("jsonl"), str(tmp_path)) == (3 * nth, 12)
    found = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == list(range(1, 13))
