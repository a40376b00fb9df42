"""Step time with the ordered reduction against DDP's ring, where communication is most of the step; 2 and 4 ranks.

    python -m bench.ordered [--rounds 9] > bench/results/ordered.json

Each rank is a process on Gloo over loopback, one thread each. An MLP of 25.2M parameters (101 MB of gradients), 8 samples per rank and
step, SGD. Four arms train in turn, 4 steps each: a plain DDP loop, a Run, a Run with reduce="ring" (DDP reduces), and a Run whose gradients
wait for the end of backward. Times are rank 0's; ratios are of neighbouring turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken

WIDTH, DEPTH, SAMPLES = 1024, 24, 8
STEPS = 4


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    layers = [module for _ in range(DEPTH) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def data(world_size: int) -> torch.utils.data.TensorDataset:
    """Enough samples that no epoch ends."""
    x = torch.randn(SAMPLES * world_size, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x)


def ddp(rank: int, world_size: int) -> Iterator[None]:
    """A plain loop; each turn begins where the last one ended."""
    model, optimizer = parts()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, y = (t[rank * SAMPLES : (rank + 1) * SAMPLES] for t in data(world_size).tensors)
    while True:
        yield
        for _ in range(STEPS):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def ours(folder: str, world_size: int, total: int, *, early: bool = True, reduce: str = "ordered") -> Iterator[None]:
    """The same under a Run; with "ring" DDP reduces and the Run keeps the rest."""
    model, optimizer = parts()
    if reduce == "ring":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    batches = unbroken.Batches(data(world_size), global_batch=SAMPLES * world_size, seed=0)
    run = unbroken.Run(
        folder, model=model, optimizer=optimizer, data=batches, units=world_size, lose_at_most="100000 steps", total_steps=total,
        reduce=reduce,
    )  # fmt: skip
    if not early:
        run._stepping._update._early.stop()
    for batch in run:
        if run.completed % STEPS == 0:
            yield
        for micro in batch:
            micro.backward(nn.functional.mse_loss(run.model(micro.x), micro.y))
        run.step()


def rank_main(folder: str, rounds: int) -> None:
    """One rank: all arms in turn; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = STEPS * (rounds + 2) + 1
    arms = {
        "ddp": ddp(rank, world_size),
        "ordered": ours(f"{folder}/early", world_size, total, early=True),
        "ring": ours(f"{folder}/ring", world_size, total, reduce="ring"),
        "ordered_without_overlap": ours(f"{folder}/late", world_size, total, early=False),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        for name, arm in arms.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            next(arm)
            if turn >= 2:
                times[name].append((time.perf_counter() - began) / STEPS)
                cpu[name].append((time.process_time() - used) / STEPS)
    if rank == 0:
        found = {
            name: {
                "median_step_s": round(statistics.median(values), 4),
                "median_cpu_s": round(statistics.median(cpu[name]), 4),
                "cpu_ratio_to_ddp": _quartiles([a / b for a, b in zip(cpu[name], cpu["ddp"], strict=True)]),
                "ratio_to_ring": _quartiles([a / b for a, b in zip(values, times["ring"], strict=True)]),
                "ratio_to_ddp": _quartiles([a / b for a, b in zip(values, times["ddp"], strict=True)]),
            }
            for name, values in times.items()
        }
        print(json.dumps({"world_size": world_size, "arms": found}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # the runs are cut off where they are


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """Run 2 and 4 ranks, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(os.environ["BENCH_FOLDER"], options.rounds)
    results = []
    for world_size in (2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": folder}
            command = [sys.executable, "-W", "ignore", "-m", "bench.ordered", "--rounds", str(options.rounds)]
            ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(world_size)]
            results.append(json.loads(ranks[0].communicate()[0].splitlines()[-1]))
            for process in ranks[1:]:
                process.communicate()
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"command": "python -m bench.ordered", "machine": machine, "steps_per_turn": STEPS, "results": results}, indent=1))


if __name__ == "__main__":
    main()
