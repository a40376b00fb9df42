"""A step that is given up leaves nothing behind: not in the loop's own random numbers, not in the loader's position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.tiny_run import loss_of, open_run, samples
from tests.rigs.torture_runs import journal
from unbroken.step.exchange import Exchange, ExchangeFailed

STEPS = 6
HIT = 4
PLACES = ("before the units", "between the units", "before the step")


class Shards:
    """A loader that knows its own position."""

    def __init__(self) -> None:
        self.data, self.place = samples(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 64:
            self.place += 4
            yield self.data[self.place - 4 : self.place]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def life(directory: Path, steps: int, leave_at: str = "", *, own: bool = True) -> list[float]:
    """Train with numbers that the loop draws itself, once per step, as mixup does; leave the loop in step 4 where told."""
    random.seed(1)
    np.random.seed(1)
    options: dict[str, Any] = {} if own else {"data": Shards()}
    run = open_run(directory, total_steps=steps, lose_at_most="100 steps", **options)
    losses: list[float] = []
    for batch in run:
        mix = random.random() + float(np.random.rand()) + float(torch.rand(()))
        if batch.step == HIT and leave_at == PLACES[0]:
            break
        for micro in batch:
            micro.backward(loss_of(run.model, micro) * mix)
            if batch.step == HIT and leave_at == PLACES[1]:
                break
        if batch.step == HIT and leave_at:
            break
        if run.step():
            losses.append(run.loss)
    run.close()
    return losses


@pytest.mark.parametrize("own", [True, False], ids=["Batches", "stateful"])
@pytest.mark.parametrize("place", PLACES)
def test_I13_a_run_closed_inside_a_step_goes_on_as_if_the_step_had_never_begun(tmp_path: Path, place: str, own: bool) -> None:
    whole = life(tmp_path / "whole", STEPS, own=own)
    first = life(tmp_path / "run", STEPS, place, own=own)
    assert len(first) == HIT - 1
    assert unbroken.open(tmp_path / "run").steps()[-1].step == HIT - 1, "close() commits the last boundary"
    assert first + life(tmp_path / "run", STEPS, own=own) == whole
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"


@pytest.mark.parametrize("own", [True, False], ids=["Batches", "stateful"])
def test_I8_a_step_repeated_in_place_draws_the_same_numbers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    whole = life(tmp_path / "whole", STEPS, own=own)
    genuine, left = Exchange.scatter, iter([False] * (HIT - 1) + [True] + [False] * STEPS)

    def fail_once(self: Exchange, *frames: Any) -> torch.Tensor:
        if next(left):
            raise ExchangeFailed("a peer has hung up")
        return genuine(self, *frames)

    monkeypatch.setattr(Exchange, "scatter", fail_once)
    assert life(tmp_path / "run", STEPS, own=own) == whole
    certificate = unbroken.open(tmp_path / "run").certify(tmp_path / "whole")
    assert (certificate.grade, certificate.generations) == ("exact", 1), certificate.problems
    assert [record["attempt"] for record in journal(tmp_path / "run") if record["type"] == "step"] == [0, 0, 0, 1, 0, 0]
