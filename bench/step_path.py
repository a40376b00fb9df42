"""What a Run adds to each step and to each snapshot, against the same loop without it: interleaved, medians and quartiles.

    python -m bench.step_path > bench/results/step_path.json

One process, one thread, a GPT of a few million parameters on CPU. The two loops compute the same units; the plain one accumulates
gradients and steps. Snapshots every 10 steps are on, with hashing, journal and daemon.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

import unbroken
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text

STEPS = 10
ROUNDS = 9
UNITS = 4


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.utils.data.Dataset) -> Iterator[float]:
    """Seconds of STEPS steps, again and again."""
    at = 0
    while True:
        began = time.perf_counter()
        for _ in range(STEPS):
            for _ in range(UNITS):
                x, y = (torch.stack(column) for column in zip(*(data[(at + i) % len(data)] for i in range(4)), strict=True))
                at += 4
                (model(x, y) / UNITS).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield time.perf_counter() - began


def kept(run: unbroken.Run) -> Iterator[float]:
    """The same under a Run; its boundary and snapshot are inside the measured time."""
    began = time.perf_counter()
    for batch in run:
        if run.completed % STEPS == 0 and run.completed:
            yield time.perf_counter() - began
            began = time.perf_counter()
        for micro in batch:
            micro.backward(run.model(micro.x, micro.y))
        run.step(clip_grad_norm=1.0)


def main() -> None:
    """Print one JSON document."""
    torch.set_num_threads(1)
    data = ByteWindows(library_text())
    models = [ByteGPT(), ByteGPT()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    size = sum(p.numel() for p in models[0].parameters())
    with tempfile.TemporaryDirectory() as folder:
        run = unbroken.Run(
            folder, model=models[1], optimizer=optimizers[1], data=unbroken.Batches(data, global_batch=16), units=UNITS,
            lose_at_most=f"{STEPS} steps", total_steps=STEPS * (ROUNDS + 2) + 1,
        )  # fmt: skip
        a, b = plain(models[0], optimizers[0], data), kept(run)
        next(a), next(b)
        pairs = [(next(a), next(b)) for _ in range(ROUNDS)]
        run.close()
        events = [json.loads(line)["record"] for line in _lines(folder)]
    captured = [e["facts"] for e in events if e.get("name") == "captured"]
    ratios = sorted(x / y for x, y in pairs)
    document = {
        "command": "python -m bench.step_path",
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "parameters": size,
        "steps_per_round": STEPS,
        "rounds": ROUNDS,
        "plain_step_s": statistics.median(x for x, _ in pairs) / STEPS,
        "run_step_s": statistics.median(y for _, y in pairs) / STEPS,
        "throughput_ratio": {"median": statistics.median(ratios), "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]},
        "capture_s": statistics.median(c["capture_s"] for c in captured),
        "stall_s": statistics.median(c["stall_s"] for c in captured),
        "snapshot_bytes": captured[-1]["size_bytes"],
    }
    json.dump(document, sys.stdout, indent=1)
    print()


def _lines(folder: str) -> list[bytes]:
    with open(os.path.join(folder, "runs/main/journal/00000000.jsonl"), "rb") as f:
        return f.read().split(b"\n")[1:-1]


if __name__ == "__main__":
    main()
