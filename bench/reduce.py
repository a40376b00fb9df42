"""Which exact reduction: the ordered tree, fixed-point sums, or (not exact over world sizes) the ring? Medians of interleaved rounds.

    python bench/reduce.py [--numel 8000000] [--rounds 11] > bench/results/reduce.json

Each rank is a process of its own on Gloo over loopback, one thread each. Fixed point: values times 2**k (k from the largest exponent,
one extra small all-reduce), rounded to int64, summed in any order, scaled back.
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
import time

import torch
import torch.distributed as dist


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum neighbours until one is left."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def ordered(gradient: torch.Tensor, world_size: int) -> torch.Tensor:
    """All-to-all, tree sum of this rank's slice, all-gather."""
    out = torch.empty_like(gradient)
    dist.all_to_all_single(out, gradient)
    full = torch.empty_like(gradient)
    dist.all_gather_into_tensor(full, tree_sum(list(out.chunk(world_size))))
    return full


def fixed_point(gradient: torch.Tensor, world_size: int) -> torch.Tensor:
    """Integers add in any order; int64 leaves 62 - log2(W) bits below the largest value."""
    largest = gradient.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = 62 - world_size.bit_length() - int(torch.frexp(largest).exponent)
    whole = (gradient.double() * 2.0**exponent).round_().long()
    dist.all_reduce(whole)
    return (whole.double() * 2.0**-exponent).float()


def ring(gradient: torch.Tensor, world_size: int) -> torch.Tensor:
    """The plain all-reduce."""
    full = gradient.clone()
    dist.all_reduce(full)
    return full


def rank_main(numel: int, rounds: int) -> None:
    """One rank: time the three in turn, round after round; rank 0 prints medians in seconds and the largest error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 1e-3
    methods = {"ordered": ordered, "fixed_point": fixed_point, "ring": ring}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(rounds + 2):
        for name, method in methods.items():
            dist.barrier()
            began = time.perf_counter()
            method(gradient, world_size)
            if i >= 2:
                times[name].append(time.perf_counter() - began)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["ring"], strict=True)) for name in methods}
        print(json.dumps({"world_size": world_size, "median_s": medians, "ratio_to_ring": ratios}))
    dist.destroy_process_group()


def main() -> None:
    """Run 2, 3 and 4 ranks, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options.numel, options.rounds)
        return
    results = []
    for world_size in (2, 3, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        numel = options.numel // (world_size * 16) * world_size * 16
        command = [sys.executable, __file__, "--numel", str(numel), "--rounds", str(options.rounds)]
        ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(world_size)]
        results.append(json.loads(ranks[0].communicate()[0]))
        for process in ranks[1:]:
            process.wait()
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"command": "python -m bench.reduce", "numel": options.numel, "machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
