"""A very small training in this very process, the end of its daemon, and damage to what it left on disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.torture_runs import wait_until
from unbroken.core.messages import Hello, Status, StatusReply, Welcome
from unbroken.core.os import is_alive
from unbroken.core.records import CommitEntry
from unbroken.shm.channel import connect
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

DATA_SEED = 1


class Tiny(nn.Module):
    """Two linear layers with batch statistics and dropout; `frozen` never changes, so that checkpoints share its chunk.

    With a width above 4096 the first layer and its moments have chunks of their own, which change with every step.
    """

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 2))
        self.frozen = nn.Parameter(torch.randn(150, 150), requires_grad=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def samples(n: int = 64) -> TensorDataset:
    """Features and labels, always the same."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(0, 2, (n,), generator=generator))


def open_run(directory: Path, *, model: Any = None, width: int = 3, init_seed: int = 3, **options: Any) -> unbroken.Run:
    """A Run over Tiny, AdamW and eight samples per step; any argument of Run may be replaced."""
    torch.manual_seed(init_seed)
    if model is None:
        model = Tiny(width)
    given: dict[str, Any] = {
        "model": model,
        "data": unbroken.Batches(samples(), global_batch=8, seed=DATA_SEED),
        "lose_at_most": "1 steps",
        "units": 2,
    } | options
    if "optimizer" not in given:
        given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return unbroken.Run(directory, **given)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], micro: Any) -> torch.Tensor:
    """Mean cross entropy of a unit."""
    return nn.functional.cross_entropy(model(micro.x), micro.y)


def train(directory: Path, steps: int, **options: Any) -> list[float]:
    """Train up to `steps` steps in all, each of them committed; the losses of this life."""
    run = open_run(directory, total_steps=steps, **options)
    losses = []
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step(clip_grad_norm=1.0)
        losses.append(run.loss)
        run.save(wait=True)
    return losses


def daemon_pid(directory: Path) -> int | None:
    """Process number of the daemon that serves this folder, None if none does."""
    try:
        channel = connect(str(directory), start=False)
    except OSError:
        return None
    try:
        channel.send(Hello(role="observer", pid=os.getpid()))
        assert isinstance(channel.receive(10.0)[0], Welcome)
        channel.send(Status())
        reply = channel.receive(10.0)[0]
        assert isinstance(reply, StatusReply), reply
        return int(reply.facts["pid"])
    except ConnectionError:  # it is just ending by itself
        return None
    finally:
        channel.close()


def end_daemon(directory: Path) -> None:
    """End the folder's daemon in good order, as it would by itself after a while: its memory slots are gone then."""
    pid = daemon_pid(directory)
    if pid is None:
        return
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: not is_alive(pid), 20, f"end of the daemon {pid}")


def commits(directory: Path) -> tuple[CommitEntry, ...]:
    """The checkpoints that count, ascending by step."""
    return Repository.open(DiskTier(str(directory))).visible()


def packs_of(directory: Path, commit: CommitEntry) -> set[str]:
    """Paths of the packs that a checkpoint needs."""
    return {chunk.pack for manifest in Repository.open(DiskTier(str(directory))).manifests(commit) for chunk in manifest.chunks}


def own_pack(directory: Path, commit: CommitEntry) -> str:
    """Path of the one pack that a checkpoint brought with it and that no other needs."""
    others = {pack for other in commits(directory) if other.step != commit.step for pack in packs_of(directory, other)}
    (own,) = packs_of(directory, commit) - others
    return own


def place_of(directory: Path, commit: CommitEntry, pointer: str) -> tuple[str, int]:
    """Where the first byte of a piece lies: path of the pack and offset in it."""
    for manifest in Repository.open(DiskTier(str(directory))).manifests(commit):
        for stored in manifest.pieces:
            if stored.piece.pointer == pointer:
                chunk = manifest.chunks[stored.extents[0].chunk]
                return chunk.pack, chunk.offset + stored.extents[0].offset
    raise KeyError(pointer)


def flip(path: Path, offset: int, bit: int = 0) -> bytes:
    """Change one bit of a file in place; what was in it."""
    raw = path.read_bytes()
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    path.write_bytes(changed)
    return raw


def damage_newest(directory: Path) -> tuple[CommitEntry, str]:
    """Change the first data byte of the newest checkpoint's own pack; that checkpoint and the pack's path."""
    newest = commits(directory)[-1]
    pack = own_pack(directory, newest)
    flip(directory / pack, 4096)
    return newest, pack


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in _walk(directory)}


def _walk(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def bits_of(model: nn.Module) -> dict[str, bytes]:
    """The bytes of every parameter and buffer."""
    return {
        name: value.detach().clone().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
    }
