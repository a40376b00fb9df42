"""Trainings in which chosen batches go bad: the loss, the gradient or the update of a unit, on any number of ranks.

python -m tests.rigs.anomalous_run DIR JSON     {"bad": {"13": "loss"}, ...}; see `Case`
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from unbroken.core.ports import SystemClock

STEPS = 20


class Case(Struct, frozen=True, kw_only=True):
    """What goes wrong, and how the run is made. Batch i is the number i, and a step adds it: w += i.

    `bad`: batch -> "loss" (NaN), "odd" (NaN, its gradient is finite), "gradient" (NaN, the loss is finite), "huge" (a finite gradient whose
    square overflows in an optimizer's state), "spike" (a loss of 1e6) or "scaled" (an infinite gradient for a GradScaler). `unit`: only
    this unit of the step is bad. `saves`: the loop waits for the checkpoints of these steps. `asks`: it asks for those of these.
    `passes`: of `run.update()`, with the optimizer's step after each; 0 for `run.step()`.
    """

    bad: dict[int, str] = {}
    unit: int | None = None
    units: int = 1
    steps: int = STEPS
    every: int = 5
    rules: dict[str, Any] = {}
    spike: dict[str, Any] = {}
    clip: float | None = None
    adam: bool = False
    reduce: str = "ordered"
    tells_loss: bool = True
    passes: int = 0
    pause_s: float = 0.02
    saves: tuple[int, ...] = (10,)
    asks: tuple[int, ...] = ()


class Bad(torch.autograd.Function):
    """Hands its input on and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.by, None


class Sum(nn.Module):
    """One weight that adds up what it sees, a mask with -inf, and dropout that makes the random streams matter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        self.noisy = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.full((2, 2), -math.inf))

    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        noise = nn.functional.dropout(self.noisy, 0.5).sum() * 1e-3
        return -(Bad.apply(self.w, by) * x).sum() + noise  # type: ignore[no-untyped-call]


BY = {"gradient": math.nan, "huge": 1e30, "scaled": math.inf}


def loss_of(model: nn.Module, micro: Any, case: Case) -> torch.Tensor:
    """The unit's loss, bad where the case says so. The step's number is the batch's."""
    kind = case.bad.get(micro.step, "") if case.unit in (None, micro.unit) else ""
    loss: torch.Tensor = model(micro.x.float(), BY.get(kind, 1.0))
    if kind == "loss":
        return loss * math.nan
    if kind == "odd":
        return loss + math.nan
    return loss + 1e6 if kind == "spike" else loss


def open_run(directory: Path | str, case: Case, extras: dict[str, Any] | None = None, **options: Any) -> unbroken.Run:
    """The run of a case; its extras, an EMA and a best value that is still infinite, are put into `extras`."""
    torch.manual_seed(0)
    model: Any = Sum()
    kind = torch.optim.Adam if case.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1.0)
    extras = {} if extras is None else extras
    extras |= {"ema": torch.optim.swa_utils.AveragedModel(model, use_buffers=False), "best": math.inf}
    numbers = torch.arange(1, case.steps + 1, dtype=torch.float32).repeat_interleave(case.units)
    spike = unbroken.Spike(**case.spike) if case.spike else None
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        "data": unbroken.Batches(TensorDataset(numbers), global_batch=case.units, shuffle=False, epochs=1),
        "extras": extras,
        "units": case.units,
        "lose_at_most": f"{case.every} steps",
        "reduce": case.reduce,
        "anomalies": unbroken.Anomalies(spike=spike, **case.rules),
    }
    return unbroken.Run(directory, **given | options)


def compute(run: unbroken.Run, batch: Any, case: Case) -> None:
    """Forward and backward of this rank's units."""
    for micro in batch:
        loss = loss_of(run.model, micro, case)
        if case.tells_loss:
            micro.backward(loss)
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        if case.reduce == "ordered":
            micro.backward(None)


def update(run: unbroken.Run, batch: Any, case: Case) -> bool:
    """The same update by the loop's own hand, as often as there are passes."""
    parts = run._stack.parts
    with run.update() as own:
        for number in range(case.passes):
            if number:
                compute(run, batch, case)
                own.reduce()
            parts.optimizers[""].step()
        parts.schedulers[""].step()
    return True


def train(run: unbroken.Run, case: Case, extras: dict[str, Any]) -> list[tuple[int, bool]]:
    """The rest of a run; (step, what run.step() said) of every turn of the loop."""
    seen = []
    for batch in run:
        compute(run, batch, case)
        done = run.step(clip_grad_norm=case.clip) if not case.passes else update(run, batch, case)
        if done:
            extras["ema"].update_parameters(run.model)
        seen.append((batch.step, done))
        if done and batch.step in case.saves:
            run.save(wait=True)
        if done and batch.step in case.asks:
            run.save()
        SystemClock().sleep(case.pause_s)  # the daemon shall not fall behind
    return seen


def main(directory: str, case: Case) -> None:
    """One rank's life; its last line says how it ended."""
    warnings.simplefilter("always")
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    train(run, case, extras)
    print(msgspec.json.encode({"w": run.model.w.item(), "completed": run.completed}).decode())


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Case, strict=False))
