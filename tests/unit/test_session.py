"""Wrong calls of Run: refused with what to do instead, and without harm to what was right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from tests.rigs.tiny_run import Tiny, bits_of, commits, end_daemon, loss_of, open_run, samples
from unbroken.core.errors import Refused

STEPS = 3


pytestmark = pytest.mark.usefixtures("runtime")


def train(run: unbroken.Run) -> dict[str, bytes]:
    """The rest of a run, by the book."""
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step(clip_grad_norm=1.0)
    return bits_of(run.model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run without wrong calls ends in."""
    return train(open_run(tmp_path_factory.mktemp("clean"), total_steps=STEPS))


def test_wrong_calls_inside_a_step_are_refused_and_leave_no_trace(directory: Path, expected: dict[str, bytes]) -> None:
    run = open_run(directory, total_steps=STEPS)
    with pytest.raises(RuntimeError, match="after 0 of 2 units"):
        run.step()
    for batch in run:
        with pytest.raises(RuntimeError, match="after 0 of 2 units: iterate over the whole batch"):
            run.step()
        for number, micro in enumerate(batch):
            with pytest.raises(RuntimeError, match=r"run\.save\(\) belongs after run\.step\(\)"):
                run.save()
            with pytest.raises(TypeError, match="one element, the mean"):
                micro.backward(torch.ones(3))
            micro.backward(loss_of(run.model, micro))
            with pytest.raises(RuntimeError, match="has had its backward"):
                micro.backward(torch.ones((), requires_grad=True))
            if number == 0:
                with pytest.raises(RuntimeError, match="after 1 of 2 units"):
                    run.step()
        with pytest.raises(RuntimeError, match=f"batch of step {batch.step} was iterated before"):
            list(batch)
        assert run.step(clip_grad_norm=1.0)
        with pytest.raises(RuntimeError, match="called twice for one batch"):
            run.step()
        run.save()
    assert bits_of(run.model) == expected
    assert run.completed == STEPS
    for act in (run.step, run.save, lambda: list(run), lambda: run.save(wait=True)):
        with pytest.raises(RuntimeError, match="this run is closed; make a new Run"):
            act()
    run.close()
    assert [commit.step for commit in commits(directory)][-1] == STEPS


def test_a_step_that_was_left_out_ends_the_loop_with_the_remedy(directory: Path) -> None:
    run = open_run(directory, total_steps=STEPS)
    with pytest.raises(RuntimeError, match=r"without run\.step\(\) or run\.update\(\); one of them"):
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
    assert run.completed == 0
    run.close()


def test_a_unit_that_was_left_out_ends_the_loop_with_its_number(directory: Path) -> None:
    run = open_run(directory, total_steps=STEPS)
    with pytest.raises(RuntimeError, match=r"unit 0 of step 1 ended without micro\.backward\(loss\)"):
        for batch in run:
            for _ in batch:
                pass
    run.close()


@pytest.mark.parametrize("units_done", [0, 1])
def test_B27_a_loop_that_was_left_inside_a_step_begins_that_step_again(
    directory: Path, expected: dict[str, bytes], units_done: int
) -> None:
    """An interrupt in a notebook: statistics, gradients, data and random numbers are those of the step's beginning."""
    run = open_run(directory, total_steps=STEPS)
    for batch in run:
        for number, micro in enumerate(batch):
            loss = loss_of(run.model, micro)
            if number == units_done and run.completed == 1:
                loss.backward()  # type: ignore[no-untyped-call]
                break
            micro.backward(loss)
        else:
            run.step(clip_grad_norm=1.0)
            continue
        break
    assert run.completed == 1
    assert train(run) == expected


def test_leaving_the_loop_after_a_step_loses_nothing(directory: Path, expected: dict[str, bytes]) -> None:
    run = open_run(directory, total_steps=STEPS)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step(clip_grad_norm=1.0)
        break
    run.save(wait=True)
    assert [commit.step for commit in commits(directory)][-1] == 1
    assert train(run) == expected


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


WRONG: list[tuple[Callable[[], dict[str, Any]], type[Exception], str]] = [
    (lambda: {"lose_at_most": "soon"}, ValueError, "lose_at_most='soon'"),
    (lambda: {"resume": "yes"}, ValueError, "resume='yes'"),
    (lambda: {"steps": 3}, TypeError, r"unknown options \['steps'\]"),
    (lambda: {"seed": -1}, ValueError, "seed must be"),
    (lambda: {"units": 4000}, ValueError, "at most 2048 micro-batches"),
    (lambda: {"units": 16}, ValueError, "units=16 with global_batch=8: some units would always be empty"),
    (lambda: {"threads": 100_000}, ValueError, "at most 1024 per rank"),
    (lambda: {"optimizer": None}, TypeError, "optimizer= got nothing"),
    (lambda: {"optimizer": []}, TypeError, "optimizer= got nothing"),
    (lambda: {"scaler": 3}, TypeError, "pass a torch.amp.GradScaler"),
    (lambda: {"scheduler": "cosine"}, TypeError, "scheduler= got 'cosine'"),
    (lambda: {"scheduler": torch.optim.lr_scheduler.StepLR}, TypeError, "made from the optimizer"),
    (lambda: {"scheduler": torch.optim.lr_scheduler.StepLR(sgd(Tiny()), 1)}, ValueError, "an optimizer that Run was not given"),
    (lambda: {"extras": [1, 2]}, TypeError, "extras= got a list"),
    (lambda: {"data": samples()}, TypeError, r"not a loader"),
    (lambda: {"data": DataLoader(samples(), shuffle=True), "units": 1}, ValueError, "cannot be restored exactly"),
    (lambda: {"data": [1, 2]}, TypeError, "data="),
    (lambda: {"model": nn.ReLU(), "optimizer": sgd(Tiny())}, ValueError, "no parameters"),
    (lambda: {"model": print, "optimizer": sgd(Tiny())}, TypeError, r"torch\.nn\.Module"),
    (lambda: {"model": {"a.b": Tiny()}, "optimizer": sgd(Tiny())}, ValueError, "key 'a.b'"),
    (lambda: {"optimizer": sgd(Tiny())}, ValueError, "a parameter of no model"),
    (lambda: {"model": (m := nn.Sequential(nn.SyncBatchNorm(2))), "optimizer": sgd(m)}, Refused, "SyncBatchNorm"),
    (
        lambda: {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(Tiny()))},
        TypeError,
        "needs a metric",
    ),
]


@pytest.mark.parametrize("clip", [-1.0, 0, float("nan")])
def test_a_norm_that_gradients_cannot_have_is_refused(directory: Path, clip: float) -> None:
    run = open_run(directory, total_steps=STEPS)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        with pytest.raises(ValueError, match="give a norm above 0"):
            run.step(clip_grad_norm=clip)
        with pytest.raises(TypeError, match="give a number"):
            run.step(clip_grad_norm="1")  # type: ignore[arg-type]
        break
    assert run.completed == 0
    run.close()


def test_only_a_folders_path_or_a_file_url_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="only a folder's path and file:///path exist yet"):
        open_run("s3://bucket/run")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    open_run(f"file://{tmp_path}/run", total_steps=1).close()  # type: ignore[arg-type]
    assert (tmp_path / "run" / "run.json").exists()
    end_daemon(tmp_path / "run")


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_argument_is_refused_before_anything_is_made(tmp_path: Path, number: int) -> None:
    arguments, error, words = WRONG[number]
    with pytest.raises(error, match=words):
        open_run(tmp_path / "run", **arguments())
    assert not (tmp_path / "run").exists()


def test_I10_must_finds_nothing_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(unbroken.NoCheckpoint) as caught:
        open_run(tmp_path / "run", resume="must")
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(f'{tmp_path / "run"}: resume="must"'), "the folder is named once"
    assert not (tmp_path / "run" / "run.json").exists()
    end_daemon(tmp_path / "run")


def test_a_run_as_a_context_closes_itself_but_not_over_an_error(directory: Path) -> None:
    with open_run(directory, total_steps=STEPS) as run:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        list(run)
    with pytest.raises(ZeroDivisionError), open_run(directory, total_steps=STEPS) as second:
        raise ZeroDivisionError
    assert not second._closed, "its state is in doubt: nothing is saved behind the user's back"
    second.close()
