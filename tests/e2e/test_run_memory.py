"""B40 for a Run: thirty checkpoints leave trainer and daemon as large as five did; thousands of small tensors are no trouble."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.tiny_run import daemon_pid
from unbroken.store.tiers.disk import DiskTier

MIB = 1 << 20


def private(pid: int) -> int:
    """Bytes that belong to this process alone; memory slots are shared and counted apart."""
    found = psutil.Process(pid).memory_full_info()
    return int(found.uss)


class Wide(nn.Module):
    """One parameter of 16 MiB; only its first element has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4 * MIB))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w[0] * x


def test_B40_a_B10_neither_trainer_nor_daemon_nor_folder_grows_with_checkpoints(tmp_path: Path) -> None:
    model = Wide()
    run = unbroken.Run(
        tmp_path / "run",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data=unbroken.Batches(TensorDataset(torch.ones(64)), global_batch=2, seed=1),
        lose_at_most="1 steps",
        total_steps=30,
        units=1,
    )
    seen: list[tuple[int, int, int]] = []
    for batch in run:
        for micro in batch:
            micro.backward(model(micro.data[0]).sum())
        run.step()
        with torch.no_grad():
            model.w.add_(1.0)  # every chunk is another one, so that nothing is shared
        run.save(wait=True)
        daemon = daemon_pid(tmp_path / "run")
        assert daemon is not None
        tier = DiskTier(str(tmp_path / "run"))
        stored = sum(tier.size(path) for path in tier.list("packs"))
        seen.append((private(psutil.Process().pid), private(daemon), stored))
    early, late = seen[4], seen[28]
    most = 40 * MIB  # less than one state; 24 were saved meanwhile. The allocator may keep a tensor more or less
    assert late[0] - early[0] < most, "the trainer"
    assert late[1] - early[1] < most, "the daemon"
    assert late[2] <= 1.1 * early[2], "the folder: three checkpoints by default"
    assert late[2] < 3.2 * 16 * MIB


class Small(nn.Module):
    """So many parameters of four numbers."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.full((4,), float(i))) for i in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.all)).sum() * x


@pytest.mark.parametrize("num", [4000])
def test_B40_c_thousands_of_small_parameters_and_their_optimizer_state(tmp_path: Path, num: int) -> None:
    def life(steps: int) -> tuple[float, Small]:
        model = Small(num)
        run = unbroken.Run(
            tmp_path / "run",
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
            data=unbroken.Batches(TensorDataset(torch.ones(64)), global_batch=2, seed=1),
            total_steps=steps,
            units=1,
        )
        begin_s = time.perf_counter()
        for batch in run:
            for micro in batch:
                micro.backward(model(micro.data[0]).sum())
            run.step()
        return time.perf_counter() - begin_s, model

    took_s, _ = life(1)
    assert took_s < 20
    _, model = life(2)
    stored = unbroken.open(tmp_path / "run").load()
    assert len(stored["optimizer"]["state"]) == num
    assert torch.equal(stored["model"]["parameters"][f"all.{num - 1}"], model.all[num - 1])
    assert sum(path.is_file() for path in (tmp_path / "run").rglob("*")) <= 100
