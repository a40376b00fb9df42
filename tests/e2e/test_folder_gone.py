"""The folder is removed in mid-run and the daemon dies with it: training goes on unsaved, says so, and makes nothing anew."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.tiny_run import commits, daemon_pid, loss_of, open_run
from tests.rigs.torture_runs import wait_until
from unbroken.core.os import is_alive
from unbroken.recover.link import SaveWarning

pytestmark = pytest.mark.alone


def train(directory: Path, steps: int, strike: Callable[[], None], at: int, wait_until_saved: bool = True) -> list[str]:
    """Train to the end, striking after step `at`; the SaveWarnings."""
    run = open_run(directory, total_steps=steps)
    with contextlib.closing(run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
            assert run.step()
            if run.completed == at:
                if wait_until_saved:
                    wait_until(lambda: any(c.step == at - 1 for c in commits(directory)), 20, "the step before is on disk")
                strike()
    assert run.completed == steps
    return [str(w.message) for w in caught if issubclass(w.category, SaveWarning)]


def kill_daemon(directory: Path) -> None:
    pid = daemon_pid(directory)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 20, "the daemon is dead")


@pytest.mark.parametrize("then", ["gone", "empty", "another run"])
def test_I10_a_folder_that_is_gone_is_not_filled_anew_by_another_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], then: str
) -> None:
    directory, other = tmp_path / "run", tmp_path / "other"
    if then == "another run":
        open_run(other, total_steps=1).close()
        kill_daemon(other)

    def strike() -> None:
        kill_daemon(directory)
        shutil.rmtree(directory)
        if then == "empty":
            directory.mkdir()
        if then == "another run":
            shutil.copytree(other, directory)

    told = train(directory, 6, strike, at=3)
    refusals = [text for text in told if "the run folder has been removed or replaced: training goes on unsaved" in text]
    assert refusals and len(set(refusals)) == 1, "one text, which Python prints once"
    reported = r"checkpoints that were not saved: steps (4, )?5, 6 \(first: SaveFailed: the run folder has been removed"
    assert re.search(reported, capsys.readouterr().err)
    assert daemon_pid(directory) is None, "none was started"
    if then == "gone":
        assert not directory.exists()
    else:
        left = {} if then == "empty" else {str(p.relative_to(other)): p.read_bytes() for p in other.rglob("*") if p.is_file()}
        assert {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()} == left


def test_a_daemon_that_dies_before_anything_was_saved_is_replaced(tmp_path: Path) -> None:
    """Nothing but the run itself is in the folder then: the plan is a fresh start, and it is this run's own."""
    directory = tmp_path / "run"
    told = train(directory, 4, lambda: kill_daemon(directory), at=1, wait_until_saved=False)
    assert not any("removed" in text for text in told)
    assert commits(directory)[-1].step == 4
