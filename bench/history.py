"""What a history of checkpoints takes: 20 of them, 10 steps apart, of a byte-level GPT that is really trained, each way of storing them.

    python -m bench.history [--width 256 --depth 6] [--warm 300] > bench/results/history.json

Two trainings in fp32 under AdamW: of all parameters, and of the last block and the norm alone (frozen backbone). Bytes are what lies in
the folder; the entropy bound is what an ideal coder of single bytes would need for the same differences, base by base. Restore is a
verified load of the last checkpoint and of the deepest one. Processor time, because other processes run here, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unbroken.capture.tree import flatten, write_item
from unbroken.codec.digest import digest
from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.planes import entropy_bytes
from unbroken.core.limits import CHUNK_BYTES, SMALL_PIECE_BYTES
from unbroken.core.ports import SystemClock
from unbroken.core.records import CommitEntry, Generation, RunFacts, Writer
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.disk import DiskTier

NUM, EVERY, BATCH, CONTEXT = 20, 10, 8, 64
WAYS: dict[str, Encoding | None] = {"whole": None, "planes": Encoding(max_depth=0), "delta": Encoding(max_depth=8)}
WRITER = Writer(host="bench", pid=0, boot_id="", since="")


def states(width: int, depth: int, warm: int, *, frozen: bool) -> Iterator[list[Part]]:
    """The whole state after each EVERY steps, once `warm` steps are done."""
    torch.manual_seed(0)
    model = ByteGPT(width=width, depth=depth, heads=4, context=CONTEXT)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith((f"blocks.{depth - 1}.", "norm.")))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data, generator = ByteWindows(library_text(), CONTEXT), torch.Generator().manual_seed(1)
    for step in range(1, warm + NUM * EVERY + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50)
        rows = torch.randint(len(data), (BATCH,), generator=generator)
        x, y = (torch.stack(column) for column in zip(*(data[int(i)] for i in rows), strict=True))
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        if step > warm and step % EVERY == 0:
            yield parts_of({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def parts_of(state: Any) -> list[Part]:
    parts = []
    for item in flatten(state):
        view = memoryview(bytearray(item.nbytes))
        write_item(item, view)
        parts.append(Part(item.piece, view))
    return parts


class Folder:
    """A run's folder that one way of storing writes to."""

    def __init__(self, path: Path, encoding: Encoding | None) -> None:
        self.path, self.encoding = path, encoding
        facts = RunFacts(run_id="bench", created="")
        self.repository = Repository.create(DiskTier(str(path)), facts)
        self.generation: Generation = self.repository.open_generation(
            base_step=0, base_root="", source="fresh", nonce="0" * 32, world_size=1, writer=WRITER, clock=SystemClock()
        )
        self.seconds: list[float] = []

    def save(self, step: int, parts: list[Part]) -> None:
        began_s = time.process_time()
        written = self.repository.write(
            step=step, generation=0, nonce=self.generation.nonce, node=0, world_size=1,
            logical=parts, per_rank={0: []}, encoding=self.encoding,
        )  # fmt: skip
        self.repository.commit(
            manifests=[written], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=SystemClock()
        )  # fmt: skip
        self.seconds.append(time.process_time() - began_s)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def restore_s(self, commit: CommitEntry) -> float:
        began_s = time.process_time()
        for manifest in self.repository.manifests(commit):
            for _ in self.repository.read_pieces(manifest, manifest.pieces):
                pass
        return time.process_time() - began_s


def bound(parts: list[Part], before: dict[str, bytes], depth: int, seen: set[str]) -> float:
    """Bytes that the zero-order entropy of these pieces allows, chunk by chunk, against those of the checkpoint before.

    Chunks in `seen` are stored already.
    """
    total = 0.0
    for part in parts:
        data, old = bytes(part.data), before.get(part.piece.pointer)
        width = ITEM_BYTES.get(part.piece.dtype, 1)
        if len(data) <= SMALL_PIECE_BYTES:
            total += len(data)
            continue
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            base = None if old is None or not depth else old[start : start + CHUNK_BYTES]
            if (known := digest(chunk)) not in seen:
                total += entropy_bytes(chunk, width, base)
            seen.add(known)
    return total


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for frozen in (False, True):
        arms = {name: Folder(folder / f"{name}-{frozen}", way) for name, way in WAYS.items()}
        bounds, before, raw_bytes = {"planes": 0.0, "delta": 0.0}, {}, 0
        seen: dict[str, set[str]] = {name: set() for name in bounds}
        for number, parts in enumerate(states(options.width, options.depth, options.warm, frozen=frozen)):
            for arm in arms.values():
                arm.save((number + 1) * EVERY, parts)
            raw_bytes += sum(len(part.data) for part in parts)
            bounds["planes"] += bound(parts, {}, 0, seen["planes"])
            bounds["delta"] += bound(parts, before, number % 9, seen["delta"])
            before = {part.piece.pointer: bytes(part.data) for part in parts}
            print(f"{'frozen' if frozen else 'all'} {number + 1}: {[arm.size_bytes >> 20 for arm in arms.values()]} MiB", file=sys.stderr)
        found["frozen backbone" if frozen else "all trained"] = {
            name: arm_facts(arm, raw_bytes, bounds.get(name)) for name, arm in arms.items()
        } | {"raw_bytes_of_20": raw_bytes}
        for arm in arms.values():
            shutil.rmtree(arm.path)
    return found


def arm_facts(arm: Folder, raw_bytes: int, bound_bytes: float | None) -> dict[str, Any]:
    commits = arm.repository.visible()
    deepest = max(commits, key=lambda c: (c.kind == "incremental", c.step)) if arm.encoding else commits[-1]
    facts: dict[str, Any] = {
        "bytes": arm.size_bytes,
        "saving": 1 - arm.size_bytes / raw_bytes,
        "save_cpu_s_per_gb": statistics.median(arm.seconds[1:]) / (raw_bytes / NUM / 1e9),
        "restore_cpu_s_per_gb": arm.restore_s(deepest) / (raw_bytes / NUM / 1e9),
    }
    if bound_bytes is not None:
        facts |= {"entropy_bound_bytes": round(bound_bytes), "above_bound": arm.size_bytes / bound_bytes - 1}
    return facts


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--warm", type=int, default=300)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        found = measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    json.dump({"options": vars(options), "machine": machine, "num": NUM, "every": EVERY} | found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
