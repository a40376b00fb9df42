"""What people do in their loops, and in which order: nothing hangs, nothing is lost, the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import unbroken
from tests.rigs.tiny_run import end_daemon, loss_of, open_run, samples, train

STEPS = 6


@pytest.fixture(autouse=True)
def no_daemon_stays(tmp_path: Path) -> Iterator[None]:
    yield
    for directory in tmp_path.iterdir():
        if directory.is_dir():
            end_daemon(directory)


# -- errors and the same loop again --------------------------------------------------------------------------------------------


class Failing(Dataset[Any]):
    """Raises once, at the n-th sample asked for."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.inner = samples()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError("the file server does not answer")
        return self.inner[index]


@pytest.mark.parametrize("at", [1, 8, 9, 13, 17])
def test_a_loop_that_an_item_has_ended_is_begun_again_and_does_not_take_that_for_the_datas_end(tmp_path: Path, at: int) -> None:
    whole = train(tmp_path / "whole", STEPS)
    data = unbroken.Batches(Failing(at), global_batch=8, seed=1)
    run = open_run(tmp_path / "run", total_steps=STEPS, data=data)
    losses, lives = [], 0
    while len(losses) < STEPS and lives < 3:
        lives += 1
        try:
            for batch in run:
                for micro in batch:
                    micro.backward(loss_of(run.model, micro))
                run.step(clip_grad_norm=1.0)
                losses.append(run.loss)
        except OSError as error:
            assert "file server" in str(error)
    assert losses == whole
    assert lives == 2
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"
