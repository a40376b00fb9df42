"""examples/train_dcp.py: killed on two ranks, it goes on where its newest checkpoint is, on three."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rigs.ranks import run_ranks, start_ranks
from unbroken.integrations.dcp import latest
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_dcp.py")


def losses(lines: list[str]) -> dict[int, float]:
    found = [match for line in lines if (match := re.fullmatch(r"step (\d+) loss ([\d.]+)\s*", line))]
    return {int(match[1]): float(match[2]) for match in found}


def test_the_example_is_short() -> None:
    assert len(Path(SCRIPT).read_text().splitlines()) <= 80


def test_the_example_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    ranks = start_ranks([SCRIPT, folder], 2)
    told: list[str] = []
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            told.append(line)
            if line.startswith("step 12 "):
                break
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            rest, errors = process.communicate(timeout=60)
            told += rest.splitlines()
    newest = latest(folder)
    assert newest is not None and newest >= 10, errors
    before, after = losses(told), losses(run_ranks([SCRIPT, folder], 3)[0].splitlines())
    assert min(after) == newest + 1 and max(after) == 40
    assert all(abs(after[step] - before[step]) < 2e-3 for step in after.keys() & before.keys())
    repository = Repository.open(DiskTier(folder))
    assert [commit.step for commit in repository.visible()] == [35, 40]
    assert repository.verify().ok
