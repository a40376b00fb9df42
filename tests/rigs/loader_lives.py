"""A loader's life in a process of its own: what came out of it from one interrupt to the next, and the state it left.

Processes come from a fork server that has torch imported, so that each costs a tenth of a second and shares nothing with the test.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.rigs.step_rank import raw
from unbroken.capture.tree import flatten, rebuild
from unbroken.data.loader import Batches, Sampler, Source, Unit, as_source, keyed
from unbroken.order.units import blocks


class Augmented:
    """Item i is its number, three draws as an augmentation would make them, and the worker that made it (-1: none)."""

    def __init__(self, num_samples: int = 100) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        worker = get_worker_info()
        return index, random.random(), int(np.random.randint(10**9)), float(torch.rand(())), -1 if worker is None else worker.id


class Resumable:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self.epoch = self.done = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)
        start, self.done = self.done, 0
        for place in range(start, self.num_samples):
            self.done = place + 1
            yield torch.tensor([order[place]])
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Lines(IterableDataset[Any]):
    """A stream cut into stripes for its workers, each of which knows how far it has come."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.done = num_samples, 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = np.random.default_rng(7).permutation(self.num_samples)[first::step].tolist()
        start, self.done = self.done, 0
        for place in range(start, len(order)):
            self.done = place + 1
            yield order[place], random.random()
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


@dataclass(frozen=True)
class Setting:
    """Which kind of loader, over how many samples, with which workers."""

    kind: str
    num_workers: int = 0
    persistent: bool = False
    num_samples: int = 100
    global_batch: int = 1
    units: int = 1
    epochs: int | None = 3
    extra: dict[str, Any] = field(default_factory=dict)


def make(setting: Setting, rank: int = 0, world_size: int = 1) -> Source:
    """The source of this setting, bound and at its first step."""
    dataset = Augmented(setting.num_samples)
    workers: dict[str, Any] = {"num_workers": setting.num_workers}
    if setting.persistent:
        workers["persistent_workers"] = True
    unit_size = setting.global_batch // setting.units
    if setting.kind == "batches":
        data: Any = Batches(dataset, global_batch=setting.global_batch, seed=7, epochs=setting.epochs, num_workers=setting.num_workers)
    elif setting.kind == "sampler":
        sampler = Sampler(dataset, global_batch=setting.global_batch, seed=7, epochs=setting.epochs)
        data = DataLoader(keyed(dataset), batch_size=unit_size, sampler=sampler, **workers)
    elif setting.kind == "distributed":
        replicas = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=7)  # type: ignore[arg-type]
        data = DataLoader(dataset, batch_size=unit_size, sampler=replicas, **workers)  # type: ignore[arg-type]
    elif setting.kind.startswith("torchdata"):
        workers |= setting.extra
        if setting.kind == "torchdata-unseeded":
            workers["shuffle"] = True
            torch.manual_seed(7)
        if setting.kind == "torchdata":
            workers |= {"shuffle": True, "generator": torch.Generator().manual_seed(7)}
        elif setting.kind == "torchdata-striped":
            workers["sampler"] = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=7)  # type: ignore[arg-type]
        streamed: Any = Lines(setting.num_samples) if setting.kind == "torchdata-stream" else dataset
        data = StatefulDataLoader(streamed, batch_size=unit_size, **workers)
    else:
        data = Resumable(setting.num_samples, seed=7)
    source = as_source(data, units=setting.units, rank=rank, world_size=world_size)
    source.bind(units=setting.units, block=blocks(setting.units, world_size)[rank], rank=rank, world_size=world_size)
    return source


@dataclass(frozen=True)
class Life:
    """Steps `start`+1 .. `stop` of a setting, from the state that the life before left; validation runs at some of them."""

    setting: Setting
    start: int
    stop: int
    state: dict[str, Any] | None = None
    validate_at: tuple[int, ...] = ()


def live(life: Life) -> tuple[list[Any], dict[str, Any], list[int]]:
    """(what came out: one [step, unit, ids, values] per unit; the state at the end; the numbers of batches each validation saw)."""
    torch.set_num_threads(1)
    source = make(life.setting)
    if life.state is not None:
        source.load_state(rebuild(life.state, "/loader") if life.state else {}, life.start)
        assert as_stored(source.state()) == life.state
    came_out, validated = [], []
    per_step = life.setting.units
    for unit in islice(source.units(), (life.stop - life.start) * per_step):
        came_out.append([unit.step, unit.unit, unit.ids.tolist(), values(unit)])
        if unit.step in life.validate_at:
            validated.append(len(list(islice(DataLoader(Augmented(50), batch_size=1, shuffle=True), 5))))  # type: ignore[arg-type]
    state = as_stored(source.state())
    source.close()
    return came_out, state, validated


def as_stored(state: dict[str, Any]) -> dict[str, Any]:
    """A loader's state as a checkpoint holds it: no object of Python's, bytes and names only."""
    return {item.piece.pointer: (item.piece, raw(item)) for item in flatten(state, "/loader")} if state else {}


def values(unit: Unit) -> list[Any]:
    """The unit's numbers, without the worker's."""
    if unit.data is None:
        return []
    return [part.tolist() for part in unit.data[:4]] if isinstance(unit.data, list | tuple) else unit.data.tolist()


def _answer(connection: Any, work: Callable[[Any], Any], argument: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for the loader's workers; a fork server's child would use that again
    connection.send(work(argument))
    connection.close()


def in_new_process(work: Callable[[Any], Any], argument: Any, timeout_s: float = 60.0) -> Any:
    """`work(argument)` in a new process that has done nothing before; its answer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rigs.loader_lives"])
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, argument))
    process.start()
    theirs.close()
    try:
        assert mine.poll(timeout_s), f"no answer within {timeout_s:g} s"
        return mine.recv()
    finally:
        process.join(timeout_s)
        mine.close()
