"""A maker and a judge trained by `run.update()`, hard to keep exact; prints one JSON line with the root.

Dropout, BatchNorm in both, a gradient penalty, token weights one of which is 0, the maker's optimizer at every second step, own clipping,
own scheduler, gradients by own backward calls. argv: folder steps. FAIL="step turn rank place": a collective of that pass fails once on
that rank, before it begins or ("... late") after it has ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from unbroken.step.exchange import Exchange

RANK = int(os.environ.get("RANK", "0"))


def fail_once(update_of: list[int]) -> None:
    """Patch the wire of this rank; `update_of` is [step, turn], kept by the loop."""
    step, turn, rank, place, *late = os.environ.get("FAIL", "0 0 -1 scatter").split()
    if int(rank) != RANK or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    genuine, left = getattr(Exchange, place), [True]

    def call(self: Exchange, *given: Any) -> torch.Tensor:
        hit = update_of == [int(step), int(turn)] and left[0]
        if hit:
            left[0] = False
            if late:
                genuine(self, *given)
            from unbroken.step.exchange import ExchangeFailed

            raise ExchangeFailed("made to fail")
        return genuine(self, *given)

    setattr(Exchange, place, call)


def main() -> None:
    """Train up to `steps` steps in all."""
    directory, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    judge = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizers = {"maker": torch.optim.Adam(maker.parameters(), lr=1e-2), "judge": torch.optim.RMSprop(judge.parameters(), lr=1e-2)}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["judge"], 3, 0.5)
    points = torch.randn(120, 3, generator=torch.Generator().manual_seed(5)) * torch.tensor([1e-3, 1.0, 30.0])
    now = [0, 0]
    fail_once(now)
    run = unbroken.Run(
        directory,
        model={"maker": maker, "judge": judge},
        optimizer=optimizers,
        scheduler=scheduler,
        data=unbroken.Batches({"a": TensorDataset(points[:50]), "b": TensorDataset(points[50:])}, weights={"a": 1, "b": 2}, global_batch=24,
                              skip={"a": [3, 4], "b": range(7)}),
        lose_at_most="2 steps",
        total_steps=steps,
        units=6,
    )  # fmt: skip
    losses: list[str] = []
    for batch in run:
        now[:] = [batch.step, 0]
        with run.update() as update:
            for micro in batch:
                micro.weight = 0 if micro.unit == 4 else 1000 * micro.unit + 1
                made = maker(torch.randn(len(micro.x), 4)).detach()
                between = torch.lerp(made, micro.x, torch.rand(len(made), 1)).requires_grad_()
                (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
                loss = judge(made).mean() - judge(micro.x).mean() + (slope.norm(dim=1) - 1).square().mean()
                micro.backward(loss * float("nan") if micro.unit == 4 else loss)
            losses.append(update.reduce().hex())
            nn.utils.clip_grad_value_(judge.parameters(), 0.5)
            optimizers["judge"].step()
            scheduler.step()
            now[1] = 1
            if batch.step % 2:
                optimizers["maker"].zero_grad()
                for micro in batch:
                    for _ in range(2):
                        (-judge(maker(torch.randn(len(micro.x), 4))).mean() / 2).backward()
                    micro.backward(None)
                update.reduce()
                optimizers["maker"].step()
    if RANK == 0:
        print(json.dumps({"root": unbroken.open(directory).steps()[-1].root, "losses": losses}))


if __name__ == "__main__":
    main()
