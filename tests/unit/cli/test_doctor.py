"""`unbroken doctor` as a process: its JSON, its exit codes, and that it says what a container lacks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.synthetic_run import interrupted
from unbroken.cluster.settings import LAUNCH
from unbroken.config import RUN
from unbroken.store.tiers.disk import DiskTier


def doctor(*args: str | Path, code: int = 0, limit: Callable[[], None] | None = None, cwd: Path | None = None) -> Any:
    command = [sys.executable, "-m", "unbroken", "doctor", "--json", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit, cwd=cwd)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("\n") == 1, "one document on one line"
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried with the fork server takes as long as its imports; once with torch is enough, see test_look."""
    monkeypatch.setenv("UNBROKEN_PRELOAD", "json")


def test_a_report_of_a_run_has_every_check(tmp_path: Path) -> None:
    interrupted(DiskTier(str(tmp_path / "run")))
    before = sorted(tmp_path.rglob("*"))
    report = doctor(tmp_path / "run")
    assert set(report) == {"ok", "directory", "findings"}
    found = {one["name"]: one for one in report["findings"]}
    assert {"python", "packages", "warm start", "threads", "memory", "memory files", "/dev/shm", "open files", "file size"} <= found.keys()
    assert {"address space", "locked memory", "processes", "core dumps", "signals", "loopback", "host name"} <= found.keys()
    assert {"runtime folder", "run folder", "file system", "disk room", "disk promises", "write bandwidth", "clock"} <= found.keys()
    assert {"memory of the run", "disk of the run"} <= found.keys()
    assert "a run with" in found["run folder"]["seen"]
    assert all(set(one) == {"name", "status", "seen", "remedy"} for one in report["findings"])
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_limits_that_would_break_a_run_are_problems(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, 100 << 20))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    report = doctor(code=1, limit=limit)
    wrong = {one["name"]: one["remedy"] for one in report["findings"] if one["status"] == "problem"}
    assert wrong.keys() == {"file size", "open files"}
    assert report["ok"] is False
    assert report["directory"] is None


@pytest.mark.parametrize(("make", "words"), [("file", "not a folder"), ("foreign", "holds 1 files such as 'x'")])
def test_a_place_where_no_run_can_be_is_a_problem(tmp_path: Path, make: str, words: str) -> None:
    place = tmp_path / "place"
    if make == "file":
        place.touch()
    else:
        place.mkdir()
        (place / "x").touch()
    found = {one["name"]: one for one in doctor(place, code=1)["findings"]}
    assert words in found["run folder"]["seen"]


def test_options_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNBROKEN_PRELOAD")
    (tmp_path / "unbroken.toml").write_text("[run]\nkeep = 7\n\n[launch]\ngrace_s = 1\n")
    monkeypatch.setenv("UNBROKEN_UNITS", "8")
    monkeypatch.setenv("UNBROKEN_UNIT", "8")
    shown = doctor("--config", cwd=tmp_path)
    assert shown["file"] == str(tmp_path / "unbroken.toml")
    assert shown["strange_variables"] == {"UNBROKEN_UNIT": "UNBROKEN_UNITS"}
    assert [one["name"] for one in shown["options"]] == [setting.name for table in (RUN, LAUNCH) for setting in table.settings]
    by_name = {one["name"]: (one["value"], one["origin"]) for one in shown["options"]}
    assert by_name["keep"] == (7, f"{tmp_path / 'unbroken.toml'}:2")
    assert by_name["grace_s"] == (1, f"{tmp_path / 'unbroken.toml'}:5")
    assert by_name["units"] == (8, "UNBROKEN_UNITS")
    assert by_name["lose_at_most"] == ("60s", "default")


def test_a_wrong_option_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "unbroken.toml").write_text("[run]\nkep = 7\n")
    error = doctor("--config", code=2, cwd=tmp_path)["error"]
    assert "unbroken.toml:2: [run] has no 'kep': did you mean 'keep'?" in error["text"]
    assert "leave DIR out" in doctor("--config", "x", code=2, cwd=tmp_path)["error"]["text"]


def test_for_people_each_remedy_stands_below_what_was_seen(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unbroken", "doctor", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "not there yet: a run would make it" in done.stdout
