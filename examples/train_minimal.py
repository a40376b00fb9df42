"""A whole training script that cannot be broken: kill it whenever you like and start it again, it ends in the same bits.

    python examples/train_minimal.py runs/minimal
    torchrun --nproc-per-node 2 examples/train_minimal.py runs/minimal
    unbroken run --nproc-per-node 3 examples/train_minimal.py runs/minimal

Then `unbroken certify runs/minimal` proves it.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken


def spirals(num: int) -> TensorDataset:
    """Two interleaved spirals with noise: points [num, 2] and classes [num]."""
    chance = torch.Generator().manual_seed(1)
    side = torch.arange(num) % 2
    angle = torch.rand(num, generator=chance) * 3 * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * (angle * (1 - 2 * side))[:, None] / 10
    return TensorDataset(points + 0.02 * torch.randn(num, 2, generator=chance), side)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

run = unbroken.Run(
    sys.argv[1],
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    data=unbroken.Batches(spirals(4096), global_batch=64, seed=7),
    lose_at_most="5 steps",
    total_steps=60,
    units=4,
)
for batch in run:
    for micro in batch:
        micro.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
    run.step(clip_grad_norm=1.0)
