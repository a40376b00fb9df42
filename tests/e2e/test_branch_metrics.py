"""Metrics of a branch: a file of its own with the steps since it parted; the run's own file stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import unbroken
from tests.rigs.tiny_run import loss_of, open_run
from unbroken.loggers.choose import targets
from unbroken.loggers.feed import complete
from unbroken.loggers.sink import RunInfo


def train(directory: Path, steps: int, **options: str) -> None:
    run = open_run(directory, total_steps=steps, **options)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        run.log(rate=batch.step / 10)
        run.save(wait=True)
    run.close()


def rows(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["rate"]) for row in map(json.loads, path.read_text().splitlines())]


def test_a_branch_shows_its_own_steps_once_and_leaves_the_runs_alone(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    train(directory, 5)
    unbroken.open(directory).branch(4, "hot")
    train(directory, 6, lineage="hot")
    train(directory, 7, lineage="hot")
    assert rows(directory / "metrics.jsonl") == [(step, step / 10) for step in range(1, 6)]
    assert rows(directory / "metrics.hot.jsonl") == [(step, step / 10) for step in range(5, 8)]
    again = tmp_path / "again.jsonl"
    (target,) = targets(f"jsonl:{again}")
    assert complete(target, str(directory), "hot") == (0, 7)
    assert rows(again) == rows(directory / "metrics.hot.jsonl")


def test_trackers_know_a_branch_by_another_name() -> None:
    main, hot, cold = (RunInfo("ab" * 16, "/runs/gpt", 3, lineage) for lineage in ("main", "hot", "cold"))
    assert main.tracker_id == "ab" * 16 and len({main.tracker_id, hot.tracker_id, cold.tracker_id}) == 3
    assert len(hot.tracker_id) == 32 and (main.title, hot.title) == ("gpt", "gpt, hot")
