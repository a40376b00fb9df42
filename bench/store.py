"""Saving and loading one real state, durable and verified, beside the raw disk and beside what people use today.

    python -m bench.store [--rounds 7] > bench/results/store.json

A 58.9M-parameter GPT in fp32 under AdamW, 706 MB, one real step further in each round. Every round saves by every way in turn, each time to
a new file and durable when it returns (fsync where the tool does not), then loads cold (the file's pages dropped from the cache) and warm.
"ours, differences" stores what differs from the checkpoint of the round before. The raw O_DIRECT write and read of as many bytes in the
same round are 1; "raw, cached" is the read through the cache. Only ours verifies what it reads. Peak memory of a save above the state is
measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

import unbroken
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text

WIDTH, DEPTH, CONTEXT, BATCH, STEPS = 640, 12, 128, 2, 5
BLOCK = 8 << 20


class Way(NamedTuple):
    """`save(folder, state, step)` is durable on return; `load(folder)` gives the state back into memory."""

    save: Callable[[Path, Any, int], None]
    load: Callable[[Path], Any]


def trained(steps: int) -> tuple[dict[str, Any], Callable[[], None]]:
    """The state after so many steps on real text, and what makes one more, in place."""
    torch.manual_seed(0)
    model = ByteGPT(width=WIDTH, depth=DEPTH, heads=10, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = ByteWindows(library_text(), CONTEXT)
    number = itertools.count()

    def step() -> None:
        start = next(number) * BATCH
        x, y = (torch.stack(column) for column in zip(*(data[start + i] for i in range(BATCH)), strict=True))
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()

    for _ in range(steps):
        step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step


def tensors_of(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    if torch.is_tensor(state):
        return {prefix: state.contiguous()}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        found |= tensors_of(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def sync_tree(folder: Path) -> None:
    """All files and folders below, durable."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def save_raw(folder: Path, state: Any, step: int) -> None:
    """As many bytes from aligned memory, in blocks of 8 MiB."""
    size = sum(tensor.nbytes for tensor in tensors_of(state).values()) // BLOCK * BLOCK
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    for _ in range(size // BLOCK):
        os.write(fd, RAW)
    os.fsync(fd)
    os.close(fd)


def load_raw(folder: Path) -> None:
    fd = os.open(folder / "raw", os.O_RDONLY | os.O_DIRECT)
    while os.readv(fd, [RAW]):
        pass
    os.close(fd)


def load_cached(folder: Path) -> None:
    fd = os.open(folder / "raw", os.O_RDONLY)
    while os.readv(fd, [RAW]):
        pass
    os.close(fd)


RAW = mmap.mmap(-1, BLOCK)


def save_ours(folder: Path, state: Any, step: int) -> None:
    store(folder).save(step, state, wait=True)


def store(folder: Path, full_every: str | None = None) -> unbroken.Store:
    if folder not in STORES:
        STORES[folder] = unbroken.Store(folder, keep=1, full_every=full_every)
    return STORES[folder]


def save_differences(folder: Path, state: Any, step: int) -> None:
    store(folder, "1000000 steps").save(step, state, wait=True)


STORES: dict[Path, unbroken.Store] = {}


def load_ours(folder: Path) -> Any:
    return unbroken.open(str(folder)).load()


def save_torch(folder: Path, state: Any, step: int) -> None:
    torch.save(state, folder / "state.pt")
    sync_tree(folder)


def load_torch(folder: Path) -> Any:
    return torch.load(folder / "state.pt", weights_only=True)


def save_dcp(folder: Path, state: Any, step: int) -> None:
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    dcp.save(state, checkpoint_id=str(folder / "dcp"))


def load_dcp(folder: Path) -> Any:
    target = {"model": {k: torch.empty_like(v) for k, v in STATE["model"].items()}, "optimizer": blank(STATE["optimizer"])}
    dcp.load(target, checkpoint_id=str(folder / "dcp"))
    return target


def blank(state: Any) -> Any:
    if torch.is_tensor(state):
        return torch.empty_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else state


def save_safetensors(folder: Path, state: Any, step: int) -> None:
    from safetensors.torch import save_file

    unique = {name: tensor for name, tensor in tensors_of(state).items() if name != "model.head.weight"}
    save_file(unique, str(folder / "state.safetensors"))
    sync_tree(folder)


def load_safetensors(folder: Path) -> Any:
    from safetensors.torch import load_file

    found = load_file(str(folder / "state.safetensors"))
    for tensor in found.values():  # mapped: nothing has been read before somebody looks
        tensor.sum()
    return found


WAYS = {
    "raw": Way(save_raw, load_raw),
    "raw, cached": Way(save_raw, load_cached),
    "ours": Way(save_ours, load_ours),
    "ours, differences": Way(save_differences, load_ours),
    "torch.save": Way(save_torch, load_torch),
    "dcp": Way(save_dcp, load_dcp),
    "safetensors": Way(save_safetensors, load_safetensors),
}
STATE: dict[str, Any] = {}


def seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    kept = act()
    took = time.perf_counter() - began
    del kept
    gc.collect()
    return took


def measure(base: Path, rounds: int, one_step: Callable[[], None]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {"save": [], "load_cold": [], "load_warm": []} for name in WAYS}
    for number in range(-1, rounds):  # the first is not counted: it makes folders, buffers and pages
        one_step()
        for name, way in WAYS.items() if number % 2 else reversed(WAYS.items()):
            folder = base / name
            folder.mkdir(exist_ok=True)
            took = {"save": seconds(lambda: way.save(folder, STATE, number + 2))}  # noqa: B023  (called at once)
            drop_from_cache(folder)
            took["load_cold"] = seconds(lambda: way.load(folder))  # noqa: B023
            took["load_warm"] = seconds(lambda: way.load(folder))  # noqa: B023
            if number >= 0:
                for what, value in took.items():
                    found[name][what].append(value)
            print(f"round {number + 1} of {rounds}, {name}: {took}", file=sys.stderr, flush=True)
    return found


def peak(name: str) -> int:
    """Bytes above the state that one save takes at most, in a process of its own."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "bench.store", "--peak", name], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def print_peak(name: str) -> None:
    STATE.update(trained(1)[0])
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        WAYS[name].save(Path(folder), STATE, 1)
        print(resident("VmHWM") - before)
        for one in STORES.values():
            one.close()


def resident(field: str) -> int:
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    if options.peak:
        return print_peak(options.peak)
    state, one_step = trained(STEPS)
    STATE.update(state)
    base = Path(tempfile.mkdtemp(prefix="store-"))
    try:
        told = measure(base, options.rounds, one_step)
        for one in STORES.values():
            one.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    ways: dict[str, Any] = {}
    for name, columns in told.items():
        ways[name] = {what: statistics.median(values) for what, values in columns.items()}
        for what, against in (("save", "save"), ("load_cold", "load_cold"), ("load_warm", "load_warm")):
            ratios = [mine / raw for mine, raw in zip(columns[what], told["raw"][against], strict=True)]
            ways[name][f"{what}_of_raw"] = statistics.median(ratios)
        ways[name]["peak_bytes"] = 0 if name.startswith("raw") else peak(name)
    size = sum(tensor.nbytes for tensor in tensors_of(STATE).values())
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    json.dump(
        {"rounds": options.rounds, "state_bytes": size, "machine": machine, "load": os.getloadavg(), "ways": ways}, sys.stdout, indent=1
    )
    print()


if __name__ == "__main__":
    main()
