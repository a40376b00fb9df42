"""B37 (a), (b): one of three ranks fails, and all raise at once with its name and its words. Plain processes, without a launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unbroken
from tests.rigs.ranks import start_ranks
from tests.rigs.tiny_run import end_daemon
from tests.rigs.torture_runs import ROOT

pytestmark = pytest.mark.alone

LIMIT_S = 5.0


def fail_together(directory: Path, rank: int, place: str, steps: int = 8, **asked: Any) -> tuple[list[str], list[int]]:
    """Every rank's standard error and exit code. AssertionError unless all of them raised within LIMIT_S of what one of them met."""
    env = {"PYTHONPATH": str(ROOT), "HANG": json.dumps({"rank": rank, "places": {}} | asked)}
    processes = start_ranks([str(ROOT / "tests/rigs/hanging.py"), str(directory), str(steps)], 3, env)
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    struck_s = float(Path(f"{directory}.struck.{rank}.{place}").read_text())
    for number, error in enumerate(errors):
        raised = Path(f"{directory}.raised.{number}")
        assert raised.exists(), f"rank {number} went on alone: {error}"
        assert float(raised.read_text()) - struck_s < LIMIT_S, f"rank {number}"
    return errors, [process.returncode for process in processes]


@pytest.mark.parametrize("wait", [False, True])
def test_B37_a_a_save_that_raises_on_one_rank_ends_all_with_its_name_and_words(tmp_path: Path, wait: bool) -> None:
    """The error holds a lock: it could not be sent as an object. Waiting for the save must not mean waiting for the one that failed."""
    directory = tmp_path / "run"
    errors, codes = fail_together(directory, 1, "save", how="fail", places={"save": 3}, wait=wait)
    assert codes == [1, 1, 1]
    assert "Locked: the disk under the coffee machine is wet" in errors[1]
    for rank in (0, 2):
        assert "rank 1: " in errors[rank] or (not wait and "rank 1 is gone" in errors[rank]), "where they met is where they were told"
        assert "Locked: " in errors[rank] and "the disk under the coffee machine is wet" in errors[rank]
    end_daemon(directory)
    archive = unbroken.open(str(directory))
    assert archive.steps()[-1].step < 3, "nothing of it is committed"
    assert archive.verify().ok


def test_B37_b_a_shard_that_is_missing_on_one_rank_ends_all_with_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for process in start_ranks([str(ROOT / "tests/rigs/hanging.py"), str(directory), "2"], 3, {"PYTHONPATH": str(ROOT)}):
        assert process.communicate(timeout=100)[1] is not None
        assert process.returncode == 0
    end_daemon(directory)
    before = [commit.step for commit in unbroken.open(str(directory)).steps()]
    errors, codes = fail_together(directory, 2, "load", blind=2)
    assert codes == [3, 3, 3]
    for error in errors:
        assert "NoCheckpoint" in error
        assert "(on rank 2 only)" in error
        assert "packs/" in error
    end_daemon(directory)
    assert before == [0, 1, 2][-len(before) :]
    records = [line for path in (directory / "runs/main/journal").iterdir() for line in path.read_text().splitlines()]
    assert not any('"step":3' in line for line in records), "nothing was trained"


def test_B37_a_a_state_that_cannot_be_read_at_the_start_ends_all_with_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    errors, codes = fail_together(directory, 1, "start", how="fail", places={"start": 0})
    assert codes == [1, 1, 1]
    assert "Locked: the disk under the coffee machine is wet" in errors[1]
    for rank in (0, 2):
        assert "rank 1: the disk under the coffee machine is wet" in errors[rank]
    assert not directory.exists()
