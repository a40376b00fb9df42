"""What keeping a run costs while it trains: ours with everything on against plain training and against torch's own checkpoints.

    python -m bench.overhead [--rounds 15] [--others] > bench/results/overhead.json

One process, a 58.9M-parameter GPT in fp32 under AdamW (706 MB of state), a snapshot every 10 steps. All arms train in turn, 10 steps
each with a snapshot after the 3rd, so that what an arm does in the background falls into its own time; what is still going on at the
end of a turn is waited for and reported, not counted. Ratios are of neighbouring turns: short turns, because other guests of a host
come and go within minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils.data import Dataset

import unbroken
from unbroken.demo.model import ByteGPT

EVERY, OFFSET = 10, 7
BATCH, CONTEXT = 2, 128
THREADS = 2


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random bytes: the arithmetic of a step does not depend on what is learnt."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.randint(256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return window[:-1], window[1:]


def parts() -> tuple[ByteGPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ByteGPT(width=640, depth=12, heads=10, context=CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def plain(save: Callable[[Any, int], float] | None = None, settle: Callable[[], None] = lambda: None) -> Iterator[dict[str, float]]:
    """A loop without Run; `save(state, step)` every 10 steps, seconds that it blocked."""
    model, optimizer = parts()
    data, step = Tokens(), 0
    blocked, began = 0.0, time.perf_counter()
    while True:
        if step % EVERY == OFFSET:
            took = time.perf_counter() - began
            before_settle = time.perf_counter()
            settle()
            yield {"seconds": took, "backlog_s": time.perf_counter() - before_settle, "blocked_s": blocked}
            began = time.perf_counter()
        x, y = (torch.stack(column) for column in zip(*(data[step * BATCH + i] for i in range(BATCH)), strict=True))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if save is not None and step % EVERY == 0:
            blocked = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)


def ours(folder: Path) -> Iterator[dict[str, float]]:
    """The same under a Run with journal, daemon, hashing, memory and disk."""
    model, optimizer = parts()
    run = unbroken.Run(
        folder, model=model, optimizer=optimizer, data=unbroken.Batches(Tokens(), global_batch=BATCH), units=1,
        threads=THREADS, lose_at_most=f"{EVERY} steps", keep=1, hang_timeout="600s",
    )  # fmt: skip
    began = time.perf_counter()
    for batch in run:
        if run.completed % EVERY == OFFSET:
            took = time.perf_counter() - began
            before_settle = time.perf_counter()
            while run._opening.phase() != "idle":
                time.sleep(0.01)
            yield {"seconds": took, "backlog_s": time.perf_counter() - before_settle}
            began = time.perf_counter()
        for micro in batch:
            micro.backward(run.model(micro.x, micro.y))
        run.step()


def others(folder: Path) -> dict[str, Iterator[dict[str, float]]]:
    """torch's own ways to save the same state."""
    pending: list[Any] = []

    def settle() -> None:
        while pending:
            pending.pop().result()

    def timed(act: Callable[[Any, int], Any]) -> Callable[[Any, int], float]:
        def save(state: Any, step: int) -> float:
            began = time.perf_counter()
            act(state, step)
            return time.perf_counter() - began

        return save

    def place(name: str) -> str:
        shutil.rmtree(folder / name, ignore_errors=True)
        return str(folder / name)

    def asynchronous(name: str, **how: Any) -> Callable[[Any, int], None]:
        def save(state: Any, step: int) -> None:
            settle()
            pending.append(dcp.async_save(state, checkpoint_id=place(name), **how))

        return save

    on_cpu = {"use_pinned_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
    in_thread = DefaultStager(StagingOptions(use_shared_memory=False, **on_cpu))
    in_process = DefaultStager(StagingOptions(use_shared_memory=True, **on_cpu))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)  # the process that DCP writes in wants one

    def torch_save(state: Any, step: int) -> None:
        with open(folder / "torch.pt", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())

    return {
        "dcp_sync": plain(timed(lambda state, step: dcp.save(state, checkpoint_id=place("sync")))),
        "dcp_async": plain(timed(asynchronous("async")), settle),
        "dcp_stager": plain(timed(asynchronous("stager", async_stager=in_thread)), settle),
        "dcp_process": plain(
            timed(asynchronous("process", async_stager=in_process, async_checkpointer_type=AsyncCheckpointerType.PROCESS)), settle
        ),
        "torch_save": plain(timed(torch_save)),
    }


def interval(values: list[float]) -> list[float]:
    """Distribution-free interval that holds the median with at least 95 %, or all there is."""
    ordered, num = sorted(values), len(values)
    outside, rank = 0.0, 0  # the chance that the median lies beyond the rank-th value, on both sides
    while rank < num // 2 and outside + 2 * math.comb(num, rank) / 2**num <= 0.05:
        outside, rank = outside + 2 * math.comb(num, rank) / 2**num, rank + 1
    return [ordered[max(0, rank - 1)], ordered[min(num - 1, num - rank)]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def daemon_cpu_s(folder: Path) -> float:
    return sum(
        sum(process.cpu_times()[:2])
        for process in psutil.process_iter(["cmdline"])
        if "unbroken.agent" in (process.info["cmdline"] or []) and os.path.realpath(folder) in (process.info["cmdline"] or [])
    )


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--others", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    base = tempfile.mkdtemp(prefix="overhead-")
    try:
        json.dump(measure(Path(base), options.rounds, options.others), sys.stdout, indent=1)
        print()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def measure(base: Path, rounds: int, with_others: bool) -> dict[str, Any]:
    arms = {"plain": plain(), "ours": ours(base / "run")}
    if with_others:
        arms |= others(base)
    for arm in arms.values():
        next(arm), next(arm)  # the first steps, and one turn to warm up
    cpu_before, began = daemon_cpu_s(base / "run"), time.perf_counter()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in arms if number % 2 == 0 else reversed(arms):
            turns[name].append(next(arms[name]))
            print(f"round {number + 1} of {rounds}, {name}: {turns[name][-1]}", file=sys.stderr, flush=True)
    cpu_s, wall_s = daemon_cpu_s(base / "run") - cpu_before, time.perf_counter() - began
    captured = _captured(base / "run")
    found: dict[str, Any] = {}
    for name, told in turns.items():
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(turns["plain"], told, strict=True)]
        found[name] = {
            "step_s": statistics.median(t["seconds"] for t in told) / EVERY,
            "throughput_ratio": {"median": statistics.median(ratios), "interval": interval(ratios), "all": ratios},
            "backlog_s": statistics.median(t["backlog_s"] for t in told),
        }
        if name not in ("plain", "ours"):
            found[name]["blocked_s"] = statistics.median(t["blocked_s"] for t in told)
    found["ours"] |= {
        "blocked_s": statistics.median(c["stall_s"] for c in captured),
        "capture_s": statistics.median(c["capture_s"] for c in captured),
        "snapshot_bytes": captured[-1]["size_bytes"],
        "daemon_cpu_s_per_snapshot": cpu_s / rounds,
    }
    return {
        "command": f"python -m bench.overhead --rounds {rounds}{' --others' if with_others else ''}",
        "machine": {
            "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
            "load_before": os.getloadavg()[0], "commit": _commit(),
        },
        "steps_per_turn": EVERY, "snapshot_every": EVERY, "wall_s": wall_s, "arms": found,
    }  # fmt: skip


def _captured(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "runs/main/journal/00000000.jsonl").read_bytes().split(b"\n")[1:-1]
    records = [json.loads(line)["record"] for line in lines]
    return [r["facts"] for r in records if r.get("name") == "captured"][2:]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
