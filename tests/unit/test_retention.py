"""B10: retention removes what it says, when it says so, and nothing else; for a Store and for a Run."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.states import no_space, s, struck, whole
from tests.rigs.store_run import WRITER, StillClock, start, steps
from tests.rigs.tiny_run import end_daemon, loss_of, open_run, train
from unbroken.config import parse_interval, resolve
from unbroken.core.errors import LayoutMismatch, Refused, SaveFailed
from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.messages import Rules
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.core.records import Keep
from unbroken.daemon.folder import RunFolder
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


def held(folder: Path) -> list[int]:
    return [one.step for one in unbroken.open(folder).steps()]


def packs(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("packs/*/*"))


# -- a Store ------------------------------------------------------------------------------------------------------------------


def test_B10_a_a_store_refuses_to_start_over_among_another_runs_higher_numbers(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path) as other:
        for k in (500, 600, 700):
            other.save(k, s(k))
    with unbroken.Store(tmp_path, keep=3) as fresh:
        for k in (100, 200, 300, 400):
            with pytest.raises(Refused, match=f"step {k} does not follow step 700, the newest in .*use another folder for another run"):
                fresh.save(k, s(k))
    assert held(tmp_path) == [500, 600, 700]
    assert whole(unbroken.Store(tmp_path).load()) == 700


def test_B10_a_whoever_goes_back_leaves_the_higher_numbers_behind_and_resumes_from_its_own(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=9) as store:
        for k in (100, 500, 600):
            store.save(k, s(k))
    with unbroken.Store(tmp_path, keep=3) as store:
        store.load(100)
        for k in (200, 300, 400):
            store.save(k, s(k), wait=True)
            assert k in held(tmp_path), "there right after its save"
    assert held(tmp_path) == [200, 300, 400]
    assert unbroken.Store(tmp_path).latest() == 400


def test_B10_b_the_best_is_a_milestone_and_stays_beside_the_newest(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=1) as store:
        for k in (1, 2, 3):
            store.save(k, s(k), milestone=k == 1)
    assert held(tmp_path) == [1, 3]
    assert [whole(unbroken.Store(tmp_path).load(k)) for k in (1, 3)] == [1, 3]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_B10_c_a_keep_that_would_empty_the_folder_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match="keep"):
        unbroken.Store(tmp_path / "store", keep=keep)
    with pytest.raises(ValueError, match="keep"):
        open_run(tmp_path / "run", keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_B10_d_after_each_save_so_many_are_there_and_a_failed_save_leaves_them(tmp_path: Path) -> None:
    counts = []
    with unbroken.Store(tmp_path, keep=3) as store:
        for k in range(1, 7):
            store.save(k, s(k), wait=True)
            counts.append(len(held(tmp_path)))
        with struck(no_space), pytest.raises(SaveFailed, match="No space left"):
            store.save(7, s(7), wait=True)
        assert held(tmp_path) == [4, 5, 6]
    assert counts == [1, 2, 3, 3, 3, 3]


def test_B10_e_a_smaller_keep_counts_from_the_next_save_on(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=5) as store:
        for k in range(1, 7):
            store.save(k, s(k))
    assert held(tmp_path) == [2, 3, 4, 5, 6]
    with unbroken.Store(tmp_path, keep=2) as store:
        store.save(7, s(7))
    assert held(tmp_path) == [6, 7]


@pytest.fixture
def failing_deletes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Removing a stored object fails once for each error number in the list."""
    errors: list[int] = []
    unlink = os.unlink

    def failing(path: str) -> None:
        if errors and ("/manifests/0" in path or path.endswith(".pack")):
            raise OSError(errors.pop(), "cannot be removed")
        unlink(path)

    monkeypatch.setattr(os, "unlink", failing)
    return errors


@pytest.mark.parametrize("number", [39, 16])
def test_B10_f_a_file_that_cannot_be_removed_is_removed_later(tmp_path: Path, failing_deletes: list[int], number: int) -> None:
    with unbroken.Store(tmp_path, keep=1) as store:
        store.save(1, s(1), wait=True)
        failing_deletes += [number] * 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store.save(2, s(2), wait=True)
            store._background.join(30, awaited=False)
        stored = len(list(tmp_path.glob("packs/*/*")) + list(tmp_path.glob("manifests/*")))
        assert failing_deletes == [] and (stored > 2 or caught), "it failed, and that is said or it is still there"
        store.save(3, s(3), wait=True)
    assert held(tmp_path) == [3]
    assert len(list(tmp_path.glob("packs/*/*")) + list(tmp_path.glob("manifests/*"))) == 2


def test_B10_g_two_clean_ups_at_once_are_one(tmp_path: Path) -> None:
    trainer = start(DiskTier(str(tmp_path)), nonces=SystemNonces())
    for k in range(1, 9):
        trainer.save(k)
    failures: list[BaseException] = []

    def clean() -> None:
        try:
            trainer.repository.collect(Keep(newest=2), writer=WRITER, clock=StillClock())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=clean) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert steps(DiskTier(str(tmp_path))) == [7, 8]
    assert Repository.open(DiskTier(str(tmp_path))).verify().ok


# -- a Run --------------------------------------------------------------------------------------------------------------------


def test_B10_a_a_run_takes_another_runs_folder_for_its_own_or_refuses(tmp_path: Path) -> None:
    train(tmp_path, 3)
    other = unbroken.Batches(TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)), global_batch=8, seed=1)
    with pytest.raises(LayoutMismatch, match="the data is not what this run was born with"):
        open_run(tmp_path, data=other)
    with pytest.raises(Refused, match="a run exists here"):
        open_run(tmp_path, resume="never")
    assert held(tmp_path) == [1, 2, 3]


def test_B10_b_a_runs_milestone_stays_beside_the_newest(tmp_path: Path) -> None:
    run = open_run(tmp_path, keep=1, total_steps=3)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        run.save(milestone=run.completed == 1, wait=True)
    assert held(tmp_path) == [1, 3]


def test_B10_b_a_rule_makes_milestones(tmp_path: Path) -> None:
    """Also where no snapshot would have been due."""
    run = open_run(tmp_path, keep=1, total_steps=7, milestone_every="3 steps", lose_at_most="5 steps")
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
    assert [(one.step, one.milestone) for one in unbroken.open(tmp_path).steps()] == [(3, True), (6, True), (7, False)]
    end_daemon(tmp_path)
    run = open_run(tmp_path, keep=1, total_steps=9, milestone_every="3 steps", lose_at_most="5 steps")
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
    assert held(tmp_path) == [3, 6, 9]
    assert unbroken.open(tmp_path).certify().certified


@pytest.mark.parametrize("text", ["1h", "0 steps", "often", 5])
def test_a_rule_for_milestones_counts_steps(text: Any) -> None:
    with pytest.raises(ValueError, match='such as "1000 steps"'):
        resolve("60s", "auto", {"milestone_every": text})
    assert resolve("60s", "auto", {"milestone_every": None}).milestone_every is None
    assert [step for step in range(7) if resolve("60s", "auto", {"milestone_every": "3 steps"}).is_milestone(step)] == [3, 6]
    assert parse_interval("3 steps").steps == 3


def test_B10_d_after_each_step_of_a_run_so_many_are_there_and_by_default_no_more(tmp_path: Path) -> None:
    counts, sizes = [], []
    run = open_run(tmp_path, total_steps=8, width=5000)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        run.save(wait=True)
        counts.append(len(held(tmp_path)))
        sizes.append(packs(tmp_path))
    assert counts[1:] == [2, 3, 3, 3, 3, 3, 3], "as each step's boundary has left them; step 0 is one"
    assert KEEP_NEWEST == 3
    assert max(sizes[4:]) <= 1.05 * sizes[3], sizes


def test_B10_e_a_smaller_keep_of_a_run_counts_from_the_next_checkpoint_on(tmp_path: Path) -> None:
    train(tmp_path, 6, keep=5)
    assert held(tmp_path) == [2, 3, 4, 5, 6]
    train(tmp_path, 7, keep=2)
    assert held(tmp_path) == [6, 7]


@pytest.mark.parametrize("number", [39, 16])
def test_B10_f_I9_the_daemons_clean_up_fails_and_the_checkpoint_stands(tmp_path: Path, failing_deletes: list[int], number: int) -> None:
    """The daemon's own code, in this process; training is told nothing but the commit."""
    folder = RunFolder(str(tmp_path), SystemClock(), SystemNonces())
    trainer = start(DiskTier(str(tmp_path)), nonces=SystemNonces())
    for k in (1, 2):
        trainer.save(k)
    folder.rules = Rules(keep=Keep(newest=1))
    failing_deletes += [number]
    folder.collect(trainer.repository)
    assert failing_deletes == []
    left = {*DiskTier(str(tmp_path)).list(paths.MANIFESTS), *DiskTier(str(tmp_path)).list(paths.PACKS)}
    assert len(left) == 3, "one of two could not be removed"
    trainer.save(3)
    folder.collect(trainer.repository)
    assert steps(DiskTier(str(tmp_path))) == [3]
    assert len({*DiskTier(str(tmp_path)).list(paths.MANIFESTS), *DiskTier(str(tmp_path)).list(paths.PACKS)}) == 2


def logging(directory: Path, steps: int, losses: dict[int, float], **options: Any) -> None:
    """Train, log, save."""
    run = open_run(directory, total_steps=steps, lose_at_most="1000 steps", **options)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        if run.completed in losses:
            run.log(val_loss=losses[run.completed])
        run.save(wait=True)


def test_B10_b_the_best_of_a_run_stay_beside_the_newest_over_restarts_and_prune_knows_its_rules(tmp_path: Path) -> None:
    rule = {"keep": 1, "keep_best": "val_loss min 2"}
    logging(tmp_path, 5, {1: 0.5, 2: float("nan"), 3: 0.7, 4: 0.6}, **rule)
    assert held(tmp_path) == [1, 4, 5]
    end_daemon(tmp_path)
    made = unbroken.open(tmp_path).prune()
    assert (made.goes, made.num_leftovers) == ([], 0)
    assert made.rules == "the newest 1, milestones, the best 2 by val_loss (smallest)"
    logging(tmp_path, 8, {6: 0.4, 7: 0.9}, **rule)
    assert held(tmp_path) == [1, 6, 8]
    end_daemon(tmp_path)
    assert [one.step for one in unbroken.open(tmp_path).prune(keep=1).goes] == [1, 6]
    assert unbroken.open(tmp_path).certify().certified
    logging(tmp_path, 9, {})
    assert held(tmp_path) == [8, 9]
    certificate = unbroken.open(tmp_path).certify()
    assert certificate.certified, certificate.problems
    assert certificate.steps == 9


def test_a_run_keeps_one_every_so_many_steps_and_the_environment_may_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_KEEP_EVERY", "3 steps")
    monkeypatch.setenv("UNBROKEN_KEEP_HOURS", "1")
    train(tmp_path, 8, keep=1)
    assert held(tmp_path) == [3, 6, 8]


@pytest.mark.parametrize("option", [{"keep_every": "1h"}, {"keep_hours": 0}, {"keep_best": "max"}, {"keep": 0}])
def test_B10_c_a_rule_that_is_none_is_refused_by_store_and_run_before_anything_is_made(tmp_path: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=name):
        unbroken.Store(tmp_path / "store", **option)
    with pytest.raises(ValueError, match=name):
        open_run(tmp_path / "run", **option)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("metrics", "error"), [({"step": 1}, ValueError), ({"a": object()}, TypeError), ({3: 1.0}, TypeError)])
def test_a_stores_metrics_are_checked_before_anything_is_written(tmp_path: Path, metrics: Any, error: type[Exception]) -> None:
    with unbroken.Store(tmp_path / "store") as store, pytest.raises(error, match="metric"):
        store.save(1, s(1), metrics=metrics)
    assert not (tmp_path / "store").exists()


def test_B10_b_a_store_keeps_the_best_in_any_number_type(tmp_path: Path) -> None:
    values = [torch.tensor(0.3), np.float32(0.1), 0.2, True, 7]
    with unbroken.Store(tmp_path, keep=1, keep_best="val 2") as store:
        for k, value in enumerate(values):
            store.save(k, s(k), metrics={"val": value})
    assert held(tmp_path) == [1, 2, 4]


def test_B10_d_what_is_not_kept_is_no_checkpoint_when_the_save_returns_and_its_files_go_by_themselves(tmp_path: Path) -> None:
    """Nobody waits for the deletion of large files."""
    is_going, may_go = threading.Event(), threading.Event()

    def wait() -> None:
        is_going.set()
        may_go.wait(30)

    with struck(wait, "store.delete"), unbroken.Store(tmp_path, keep=1) as store:
        store.save(1, s(1), wait=True)
        store.save(2, s(2), wait=True)
        assert held(tmp_path) == [2]
        assert is_going.wait(30)
        store.save(3, s(3))  # goes on behind it
        may_go.set()
    assert held(tmp_path) == [3]
    assert len(list(tmp_path.glob("packs/*/*")) + list(tmp_path.glob("manifests/*"))) == 2
