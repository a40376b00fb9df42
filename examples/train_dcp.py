"""An FSDP2 loop as in torchtitan, whose checkpoints are ours: kill it at any moment, start it again, on as many ranks as you like.

    torchrun --nproc-per-node 2 examples/train_dcp.py checkpoints
    torchrun --nproc-per-node 4 examples/train_dcp.py checkpoints

`unbroken ls checkpoints` lists what is there, `unbroken verify checkpoints` checks every byte of it.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unbroken.integrations.dcp import StorageReader, StorageWriter, latest

STEPS = 40


class State:
    """Model and optimizer under their full names, and the step: what torchtitan keeps, too."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main(folder: str) -> None:
    """Train up to STEPS from wherever the folder has got to; rank 0 prints the steps and their losses."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 63), nn.GELU(), nn.Linear(63, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    if latest(folder) is not None:
        dcp.load({"train": state}, storage_reader=StorageReader(folder))

    while state.step < STEPS:
        data = torch.Generator().manual_seed(state.step)  # every rank takes the whole batch, so that any number of them trains alike
        x = torch.randn(32, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        if dist.get_rank() == 0:
            print(f"step {state.step} loss {loss.item():.4f}", flush=True)
        if state.step % 5 == 0:
            dcp.save({"train": state}, storage_writer=StorageWriter(folder, step=state.step, keep=2))
    dist.destroy_process_group()


main(sys.argv[1])
