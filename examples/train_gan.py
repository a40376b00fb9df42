"""Two networks against each other, each with an optimizer of its own, that cannot be broken: kill it and start it again, same bits.

    python examples/train_gan.py runs/gan
    unbroken run --nproc-per-node 3 examples/train_gan.py runs/gan

The judge learns at every step, with a gradient penalty; the maker at every second one. `with run.update()` makes one update of both.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken


def ring(num: int) -> TensorDataset:
    """Points [num, 2] on a noisy circle."""
    chance = torch.Generator().manual_seed(1)
    angle = torch.rand(num, generator=chance) * 2 * torch.pi
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(num, 2, generator=chance))


def penalty(judge: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """How far the judge's slope is from one, on points between real and made ones."""
    between = torch.lerp(made, real, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
judge = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
optimizers = {name: torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for name, m in (("maker", maker), ("judge", judge))}

run = unbroken.Run(
    sys.argv[1],
    model={"maker": maker, "judge": judge},
    optimizer=optimizers,
    data=unbroken.Batches(ring(4096), global_batch=64, seed=7),
    lose_at_most="5 steps",
    total_steps=40,
    units=4,
)
for batch in run:
    with run.update() as update:
        for micro in batch:
            made = maker(torch.randn(len(micro.x), 8)).detach()
            micro.backward(judge(made).mean() - judge(micro.x).mean() + 10 * penalty(judge, micro.x, made))
        update.reduce()  # .grad: the gradient of the whole step, on every rank
        optimizers["judge"].step()
        if batch.step % 2 == 0:
            for micro in batch:  # the same units again, with other random numbers
                micro.backward(-judge(maker(torch.randn(len(micro.x), 8))).mean())
            update.reduce()
            nn.utils.clip_grad_norm_(maker.parameters(), 1.0)
            optimizers["maker"].step()
