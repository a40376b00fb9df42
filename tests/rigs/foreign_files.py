"""Checkpoints in the layouts of other trainers, made with torch itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


def training(num_steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A model, its optimizer and schedule after a few steps; always the same."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(num_steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def trainer_folder(folder: Path, step: int = 2) -> Path:
    """The layout of a Trainer's checkpoint, made with torch itself (`real_trainers` makes real ones)."""
    folder.mkdir(parents=True)
    model, optimizer, scheduler = training(step)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(rng, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5, "log_history": []}))
    (folder / "training_args.bin").write_bytes(b"\x80\x04never read")
    return folder


def lightning_file(path: Path) -> Path:
    """The layout of a Lightning checkpoint of such a training."""
    model, optimizer, scheduler = training()
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    state = {
        "epoch": 1, "global_step": 2, "pytorch-lightning_version": "2.6.0", "state_dict": weights,
        "loops": {}, "callbacks": {}, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
    }  # fmt: skip
    torch.save(state, path)
    return path
