"""A small model that is hard to keep exact, trained by the Run under test; prints one JSON line with its roots.

Dropout, BatchNorm, tied weights, a parameter that only some units use, gradients with -0.0 and a range of 1e-20..1e8, uneven blocks.
argv: folder steps [seed]. Environment: TORTURE_PRINT=1 prints every step's loss bits, TORTURE_LINEAGE names the branch.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import unbroken
from unbroken.step import reduce


class Torture(nn.Module):
    """Token classifier with everything that makes gradients depend on who computes them."""

    def __init__(self, width: int = 24, vocabulary: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.norm = nn.BatchNorm1d(width)
        self.rare = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.never = nn.Parameter(torch.ones(3))
        self.wide = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.float32))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        h = self.norm(self.body(self.embedding(x)))
        if int(x.sum()) % 2:
            h = h + self.rare(h) * 0.1
        h = h + (torch.rand(1) + random.random() + float(np.random.rand())) * 0.01
        extra = (self.wide * scale.mean(0)).sum()
        return F.linear(h, self.head.weight) + extra * 1e-8


def dataset(n: int = 240) -> torch.utils.data.TensorDataset:
    """Tokens, labels and a vector whose entries span 28 decades, one of them -0.0."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 32, (n,), generator=generator)
    y = torch.randint(0, 32, (n,), generator=generator)
    scale = torch.randn(n, 4, generator=generator) * torch.tensor([1e-20, 1e8, 1.0, 0.0])
    return torch.utils.data.TensorDataset(x, y, scale)


def main() -> None:
    """Train `steps` steps in all and print the result of rank 0."""
    directory, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    reduce.BUCKET_BYTES = 4000  # several buckets, so that gradients leave while backward still computes
    torch.manual_seed(seed)
    model = Torture()
    wide = [model.wide]
    rest = [p for p in model.parameters() if p is not model.wide]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 3e-3}, {"params": wide, "lr": 1e-4, "weight_decay": 0.0}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    data = unbroken.Batches(dataset(), global_batch=12, seed=seed)
    units = int(os.environ.get("TORTURE_UNITS", "4"))
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        extras={"ema": ema},
        lose_at_most=os.environ.get("TORTURE_INTERVAL", "3 steps"),
        total_steps=steps,
        units=units,
        lineage=os.environ.get("TORTURE_LINEAGE", "main"),
    )
    rank = int(os.environ.get("RANK", "0"))
    losses: list[str] = []
    leave_at = int(os.environ.get("TORTURE_LEAVE", "0"))
    while True:
        for batch in run:
            time.sleep(float(os.environ.get("TORTURE_SLEEP", "0")))
            for micro in batch:
                x, y, scale = micro.data
                micro.backward(F.cross_entropy(run.model(x, scale), y))
            if batch.step == leave_at:
                break
            if run.step(clip_grad_norm=1.0):
                ema.update_parameters(model)
                losses.append(run.loss.hex())
        else:
            break
        leave_at = 0
    info = unbroken.open(directory, os.environ.get("TORTURE_LINEAGE", "main")).steps()[-1]
    if rank == 0:
        print(json.dumps({"root": info.root, "step": info.step, "completed": run.completed, "losses": losses}))


if __name__ == "__main__":
    main()
