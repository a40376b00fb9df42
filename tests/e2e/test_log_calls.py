"""`run.log` in one process: where it may be called, whose failure it survives, and what a lost daemon or checkpoint does to rows."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs.tiny_run import commits, daemon_pid, damage_newest, end_daemon, loss_of, open_run
from unbroken.core.os import is_alive
from unbroken.loggers import Row, RunInfo

STEPS = 6


pytestmark = pytest.mark.usefixtures("runtime")


def train(directory: Path, steps: int, log: Callable[[unbroken.Run], None] = lambda run: None, **options: Any) -> unbroken.Run:
    """Train up to `steps` steps in all; `log` is called after each."""
    run = open_run(directory, total_steps=steps, **options)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step()
        log(run)
    return run


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weight(run: unbroken.Run) -> None:
    run.log(weight=run.model.body[0].weight.detach()[0, 0], twice=2 * run.completed)


def test_without_a_call_each_step_has_its_loss_and_its_samples(directory: Path) -> None:
    losses = []
    train(directory, 3, lambda run: losses.append(run.loss), lose_at_most="100 steps")
    assert rows_of(directory) == [{"step": k + 1, "loss": loss, "samples": 8} for k, loss in enumerate(losses)]
    assert unbroken.open(directory).verify().ok
    assert unbroken.open(directory).certify().certified


def test_a_step_has_its_metrics_when_it_is_committed_and_not_before(directory: Path) -> None:
    seen = []

    def log(run: unbroken.Run) -> None:
        path = directory / "metrics.jsonl"
        seen.append([row["step"] for row in rows_of(directory)] if path.exists() else [])
        weight(run)
        if run.completed == 4:
            run.save(wait=True)

    train(directory, STEPS, log, lose_at_most="100 steps")
    assert seen[:4] == [[]] * 4
    assert all(steps in ([], [1, 2, 3, 4]) for steps in seen[4:])
    rows = rows_of(directory)
    assert [(row["step"], row["twice"]) for row in rows] == [(k, 2 * k) for k in range(1, STEPS + 1)]
    assert len({row["weight"] for row in rows}) == STEPS, "the value of its own step"


def test_metrics_belong_after_the_step_and_are_checked_at_the_call(directory: Path) -> None:
    run = open_run(directory, total_steps=3, lose_at_most="100 steps")
    with pytest.raises(RuntimeError, match=r"run\.log\(\) belongs after run\.step\(\)"):
        run.log(a=1)
    for batch in run:
        with pytest.raises(RuntimeError, match=r"run\.log\(\) belongs after run\.step\(\)"):
            run.log(a=1)
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step()
        with pytest.raises(TypeError, match="metric 'b': got a list"):
            run.log(a=1, b=[2])
        with pytest.raises(ValueError, match="metric 'a:b'"):
            run.log(**{"a:b": 1})
        run.log(a=2)
        if run.completed == 2:
            break
    run.log(c=3)
    run.save()
    with pytest.raises(RuntimeError, match=r"step 2 has been saved already: call run\.log\(\) before run\.save\(\)"):
        run.log(d=4)
    run.close()
    with pytest.raises(RuntimeError, match="closed"):
        run.log(a=1)
    assert [sorted(row) for row in rows_of(directory)] == [["a", "loss", "samples", "step"], ["a", "c", "loss", "samples", "step"]]


def test_a_loss_of_the_loops_own_takes_the_place_of_the_automatic_one(directory: Path) -> None:
    train(directory, 2, lambda run: run.log(loss=torch.tensor(float("nan")), samples=run.completed, word="a"))
    rows = rows_of(directory)
    assert [(row["samples"], row["word"]) for row in rows] == [(1, "a"), (2, "a")]
    assert all(math.isnan(row["loss"]) for row in rows)


def test_no_sink_is_a_choice_and_the_rows_can_be_had_later(directory: Path) -> None:
    from unbroken.loggers.choose import targets
    from unbroken.loggers.feed import complete

    train(directory, 2, weight, log_to=None)
    assert not (directory / "metrics.jsonl").exists()
    assert complete(targets("jsonl")[0], str(directory)) == (0, 2)
    assert [row["twice"] for row in rows_of(directory)] == [2, 4]


def test_I13_after_a_damaged_checkpoint_the_rows_are_those_of_an_undisturbed_run(directory: Path, tmp_path: Path) -> None:
    def log(run: unbroken.Run) -> None:
        weight(run)
        run.save(wait=True)

    train(directory, 4, log, width=5000, keep=10)
    end_daemon(directory)
    assert rows_of(directory)[-1]["step"] == 4
    damage_newest(directory)
    train(directory, STEPS, lambda run: run.log(again=True) or log(run), width=5000, keep=10)
    train(tmp_path / "clean", STEPS, weight, width=5000)
    end_daemon(tmp_path / "clean")
    rows = rows_of(directory)
    assert [row.pop("again", False) for row in rows] == [False, False, False, True, True, True], "step 4 is that of the new attempt"
    assert rows == rows_of(tmp_path / "clean")


@pytest.mark.parametrize("dies_at", [5, 7, 8])
def test_I9_a_daemon_that_dies_loses_no_row(directory: Path, tmp_path: Path, dies_at: int) -> None:
    """Also when it dies right before the end, where no further step would tell of it."""

    def log(run: unbroken.Run) -> None:
        weight(run)
        if run.completed == 2:
            run.save(wait=True)
        if run.completed == dies_at:
            pid = daemon_pid(directory)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while is_alive(pid):
                pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unbroken.SaveWarning)  # whether one is given depends on who notices first
        train(directory, 8, log, lose_at_most="100 steps")
    assert {commit.generation for commit in commits(directory)} == {0, 1}
    train(tmp_path / "clean", 8, weight)
    end_daemon(tmp_path / "clean")
    assert rows_of(directory) == rows_of(tmp_path / "clean")


def test_I9_a_daemon_that_dies_while_it_writes_the_last_snapshot_is_replaced_and_the_last_step_kept(directory: Path) -> None:
    def stop_daemon_and_kill_it_later(run: unbroken.Run) -> None:
        if run.completed != STEPS:
            return
        pid = daemon_pid(directory)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    with warnings.catch_warnings():
        warnings.simplefilter("error", unbroken.SaveWarning)
        train(directory, STEPS, stop_daemon_and_kill_it_later, lose_at_most="100 steps")
    newest = commits(directory)[-1]
    assert (newest.step, newest.generation) == (STEPS, 1)


class Broken:
    """A sink that never works."""

    def __init__(self) -> None:
        self.num_opened = 0

    def open(self, run: RunInfo) -> int:
        self.num_opened += 1
        raise RuntimeError("no server here")

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


def test_I9_a_sink_that_fails_is_one_warning_and_a_line_at_the_end(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = Broken()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(directory, STEPS, lambda run: run.save(wait=True), log_to=[sink, "jsonl"])
    words = [str(one.message) for one in told if "metrics" in str(one.message)]
    assert words == ["metrics do not reach Broken, training goes on, it is tried again after each commit: RuntimeError: no server here"]
    assert "unbroken: metrics: Broken holds steps up to 0: RuntimeError: no server here; the next start" in capsys.readouterr().err
    assert sink.num_opened > 2
    assert [row["step"] for row in rows_of(directory)] == list(range(1, STEPS + 1))


def test_a_cell_that_is_run_twice_goes_on_in_the_same_file(directory: Path) -> None:
    first = open_run(directory, total_steps=STEPS)
    for batch in first:
        for micro in batch:
            micro.backward(loss_of(first.model, micro))
        assert first.step()
        weight(first)
        if first.completed == 3:
            break
    train(directory, STEPS, weight)
    rows = rows_of(directory)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all("weight" in row for row in rows)


def test_a_row_that_was_not_written_when_the_run_ended_is_written_at_the_next_start(directory: Path) -> None:
    train(directory, 3, weight)
    whole = (directory / "metrics.jsonl").read_bytes()
    os.truncate(directory / "metrics.jsonl", len(whole) - 50)  # as if killed after the last commit, within a line
    train(directory, 3, weight)
    assert (directory / "metrics.jsonl").read_bytes() == whole
