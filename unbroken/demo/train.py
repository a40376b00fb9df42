"""Trains a small GPT on the standard library's sources. Nothing in it knows about faults: kill it at any moment, it ends in the same bits.

unbroken run --nproc-per-node 3 unbroken/demo/train.py runs/gpt
"""

from __future__ import annotations

import argparse
import math
import os

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unbroken
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text

WARM_UP_STEPS = 10


def learning_rate(step: int, total_steps: int) -> float:
    """Factor of the peak rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="the run's folder; if it holds a run already, that run continues")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lose-at-most", default="30s")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = ByteGPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=2e-3)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))  # type: ignore[no-untyped-call]
    data = unbroken.Batches(ByteWindows(library_text()), global_batch=16, seed=args.seed)

    run = unbroken.Run(
        args.directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        extras={"ema": ema},
        lose_at_most=args.lose_at_most,
        total_steps=args.steps,
        units=4,
        seed=args.seed,
    )
    for batch in run:
        for micro in batch:
            micro.backward(model(micro.x, micro.y))
        if run.step(clip_grad_norm=1.0):
            ema.update_parameters(model)
            if os.environ.get("RANK", "0") == "0":
                print(f"step {run.completed} loss {run.loss:.4f}")


if __name__ == "__main__":
    main()
