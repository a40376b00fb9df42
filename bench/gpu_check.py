"""What only an accelerator can show. Run by bench/gpu_check.sh; `--device cpu --share-gb 0.05` goes the same way without one.

1. syncs: how often `run.step()` waits for the device, counted by torch's sync debug mode; the goal is none.
2. capture: a share of 20 GB is copied to the host every 5 steps while it trains: seconds of the copy, throughput against plain training.
3. restart: a worker is killed; seconds to the first new step, split into process (imports, fork), context, model, restore and first step,
   with `torch.compile` and without.

Each part is a process of its own with a time limit, and its failure is written down and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbroken

PART_TIMEOUT_S = 150
EVERY, TURNS = 5, 5


def device_of(name: str) -> torch.device:
    """The accelerator, or what was asked for."""
    return torch.device(name) if name != "auto" else torch.accelerator.current_accelerator() or torch.device("cpu")


def model_of(num_bytes: float, device: torch.device) -> nn.Module:
    """Square layers whose parameters and Adam state take about `num_bytes`."""
    width = 8192 if num_bytes > 5e9 else 2048 if num_bytes > 5e8 else 256
    depth = max(2, round(num_bytes / (12 * width * width)))
    return nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(width, width, bias=False), nn.GELU()))).to(device)


def data_of(model: nn.Module) -> torch.utils.data.TensorDataset:
    """Random samples on the host."""
    width = next(model.parameters()).shape[1]
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x)


def loss_of(model: nn.Module, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    x = x.to(device, non_blocking=True)
    return nn.functional.mse_loss(model(x), x)


def open_run(folder: str, model: nn.Module, steps: int, interval: str) -> unbroken.Run:
    """A Run over this model, 16 samples in 2 units per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=next(model.parameters()).is_cuda)
    data = unbroken.Batches(data_of(model), global_batch=16, seed=0)
    return unbroken.Run(folder, model=model, optimizer=optimizer, data=data, units=2, total_steps=steps, lose_at_most=interval)


def wait(device: torch.device) -> None:
    """Until the device has done all it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def syncs(device: torch.device, share: float) -> dict[str, Any]:
    """Warnings of torch's sync debug mode within `run.step()`, per step, and where they come from."""
    if device.type != "cuda":
        return {"skipped": f"torch's sync debug mode watches CUDA devices only, this is {device.type}"}
    found: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(folder, model_of(min(share, 1e9), device), 12, "100 steps")
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro.x, device))
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.step()
            torch.cuda.set_sync_debug_mode("default")
            found.append([f"{os.path.relpath(w.filename)}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)])
    late = found[3:]
    return {"per_step": statistics.median(map(len, late)), "places": sorted({place for step in late for place in step})}


def capture(device: torch.device, share: float) -> dict[str, Any]:
    """Plain turns and turns with a snapshot each, in turn, on one model."""
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(folder, model_of(share, device), EVERY * (2 * TURNS + 2) + 1, f"{EVERY} steps")
        seconds, began = [], time.perf_counter()
        for batch in run:
            if run.completed % EVERY == 0 and run.completed:
                wait(device)
                seconds.append(time.perf_counter() - began)
                began = time.perf_counter()
            for micro in batch:
                micro.backward(loss_of(run.model, micro.x, device))
            run.step()
        run.close()
        facts = [e["facts"] for e in _events(folder) if e.get("name") == "captured"][2:]
        model, plain = run.model, []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        x = data_of(model).tensors[0][:8]
        for _ in range(TURNS + 1):
            wait(device)
            began = time.perf_counter()
            for _ in range(EVERY):
                for _ in range(2):
                    (loss_of(model, x, device) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            wait(device)
            plain.append(time.perf_counter() - began)
    with_snapshot, without = statistics.median(seconds[2:]), statistics.median(plain[1:])
    return {
        "state_bytes": facts[-1]["size_bytes"],
        "capture_s": statistics.median(f["capture_s"] for f in facts),
        "stall_s": statistics.median(f["stall_s"] for f in facts),
        "bytes_per_s": facts[-1]["size_bytes"] / statistics.median(f["capture_s"] for f in facts),
        "steps_per_turn": EVERY,
        "turn_s": {"with_snapshot": with_snapshot, "plain": without},
        "throughput": without / with_snapshot,
    }


def _events(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "runs/main/journal/00000000.jsonl").read_bytes().split(b"\n")[1:-1]
    return [json.loads(line)["record"] for line in lines]


def worker(folder: str, device: torch.device, share: float, compiled: bool) -> None:
    """The script of the restart part: says when each of its stages was reached, and kills itself once in step 4."""
    at = {"process": time.monotonic()}
    if device.type != "cpu":
        torch.zeros(1, device=device)
    at["context"] = time.monotonic()
    model = model_of(min(share, 1e9), device)
    model = torch.compile(model) if compiled else model  # type: ignore[assignment]
    at["model"] = time.monotonic()
    run = open_run(os.path.join(folder, "run"), model, 8, "1 steps")
    at["restore"] = time.monotonic()
    killed = Path(folder, "killed")
    for batch in run:
        if batch.step == 4 and not killed.exists():
            killed.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        for micro in batch:
            micro.backward(loss_of(run.model, micro.x, device))
        run.step()
        wait(device)
        if killed.exists() and not Path(folder, "back.json").exists():
            at["first_step"] = time.monotonic()
            Path(folder, "back.json").write_text(json.dumps(at))


def restart(device: torch.device, share: float) -> dict[str, Any]:
    """Seconds of each stage after the kill."""
    found: dict[str, Any] = {}
    for name in ("plain", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            script = [
                str(Path(__file__)),
                "--part",
                f"worker-{name}",
                "--folder",
                folder,
                "--device",
                str(device),
                "--share-gb",
                str(share / 1e9),
            ]
            command = [sys.executable, "-W", "ignore", "-m", "unbroken", "run", "--nproc-per-node", "1", *script]
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PART_TIMEOUT_S, check=False)
            if done.returncode:
                found[name] = {"failed": done.stderr[-2000:]}
                continue
            before, at = float(Path(folder, "killed").read_text()), json.loads(Path(folder, "back.json").read_text())
            found[name] = {"total_s": at["first_step"] - before}
            for stage, moment in at.items():
                found[name][f"{stage}_s"], before = moment - before, moment
    return found


def in_a_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part's result, or how it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_check", "--part", part, "--device", options.device]
    try:
        done = subprocess.run(
            [*command, "--share-gb", str(options.share_gb)], capture_output=True, text=True, timeout=2 * PART_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {2 * PART_TIMEOUT_S} s"}
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 else {"failed": (done.stderr or done.stdout)[-2000:]}
    return found


def main() -> int:
    """All parts, or one; 0 when all went through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share-gb", type=float, default=20.0)
    parser.add_argument("--part", default="all")
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    device, share = device_of(options.device), options.share_gb * 1e9
    if options.part.startswith("worker"):
        worker(options.folder, device, share, options.part.endswith("compiled"))
        return 0
    if options.part != "all":
        print(json.dumps({"syncs": syncs, "capture": capture, "restart": restart}[options.part](device, share)))
        return 0
    if device.type == "cpu" and options.device == "auto":
        print("no accelerator here: nothing to check")
        return 0
    parts = {part: in_a_process(part, options) for part in ("syncs", "capture", "restart")}
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    machine = {"device": name, "cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    text = json.dumps({"command": "bench/gpu_check.sh", "machine": machine, **parts}, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    return int(any("failed" in json.dumps(found) for found in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
