"""Data that keeps its own order: torch loaders over a sampler of torch, and objects with a state_dict.

Each `next()` of such a loader is one unit, so what a unit holds depends on the number of ranks: the run continues exactly at equal world
size and is refused at any other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from unbroken.data.mixed import unkeyed
from unbroken.data.source import (
    Grade,
    IndexedUnits,
    SampleKey,
    Unit,
    UnitDataset,
    UnitIndex,
    WorkerStart,
    end_workers,
    kept_streams,
    loader_settings,
    seed_streams,
)
from unbroken.order.streams import MAX_SEED, sample_seed, stream_seed

FIX = (
    "give the order to unbroken, e.g.\n"
    "    DataLoader(dataset, batch_size=8, sampler=unbroken.Sampler(dataset, global_batch=64, seed=7))\n"
    "or\n"
    "    unbroken.Batches(dataset, global_batch=64, seed=7)"
)


def refuse(what: str) -> ValueError:
    """The error for a loader whose position cannot be restored, with the line that mends it."""
    return ValueError(f"{what}: its position cannot be restored exactly; {FIX}")


def plain_batches(loader: DataLoader[Any]) -> BatchSampler:
    """The DataLoader's BatchSampler over a sampler; ValueError with the remedy where anything else decides what it yields."""
    batches = loader.batch_sampler
    known = hasattr(loader, "state_dict")  # torchdata's loader, whose batches are torch's
    if not isinstance(batches, BatchSampler) or not (known or type(batches) is BatchSampler):
        raise refuse("a DataLoader without batches, or with a batch_sampler of its own")
    if not (known or type(loader).__iter__ is DataLoader.__iter__):
        raise refuse(f"{type(loader).__name__} changes how a DataLoader iterates")
    return batches


class _Share:
    """This rank's share of a loader of which each `next()` is one unit, pass after pass without end."""

    grade: Grade = "equal-world-size"

    def __init__(self, units: int | None, rank: int, world_size: int) -> None:
        self.units_given = units
        self.rank = rank
        self.world_size = world_size
        self.block = range(0)

    def recorded(self) -> dict[str, Any]:
        return {}

    def num_steps(self) -> int | None:
        """Endless, or only the loader knows when it ends."""
        return None

    def default_units(self, world_size: int) -> int:
        """The number the user gave: nothing else says how many batches of a foreign loader make a step."""
        if self.units_given is None:
            raise ValueError(
                f"this loader needs units=: each of its batches is one unit, so say how many make a step over all ranks, "
                f"a multiple of the world size (units={world_size} is one batch per rank and step)"
            )
        return self.units_given

    def bind(self, *, units: int, block: range, rank: int, world_size: int) -> None:
        """Every rank takes equally many batches per step; ValueError otherwise."""
        if units % world_size:
            raise ValueError(
                f"units={units} is not a multiple of world_size={world_size}: each rank's loader gives equally many batches per step, "
                f"so use units={-(-units // world_size) * world_size}, another number of ranks, or unbroken.Batches"
            )
        if (rank, world_size) != (self.rank, self.world_size):
            raise ValueError(f"made for rank {self.rank} of {self.world_size}, bound to rank {rank} of {world_size}")
        assert len(block) == units // world_size, "an equal share is a contiguous block"
        self.units_given = units
        self.block = block


class _TorchOrder:
    """Batch after batch of one rank, as a torch sampler orders them, from any place on; augmentation is keyed by (seed, epoch, place)."""

    def __init__(self, batches: BatchSampler, rank: int, world_size: int) -> None:
        self.sampler: Any = batches.sampler
        self.batches = batches
        self.per_epoch = len(self.batches)
        if not self.per_epoch:
            raise ValueError("the DataLoader has no batch: the data set is empty, or smaller than one batch with drop_last=True")
        self.rank = rank
        self.world_size = world_size
        self.seed = getattr(self.sampler, "seed", 0) & MAX_SEED

    def facts(self) -> dict[str, Any]:
        return {
            "loader": type(self.sampler).__name__,
            "batch_size": self.batches.batch_size,
            "drop_last": self.batches.drop_last,
            "sampler_drop_last": getattr(self.sampler, "drop_last", False),
            "shuffle": getattr(self.sampler, "shuffle", False),
            "sampler_seed": getattr(self.sampler, "seed", 0),
            "seed": self.seed,
            "world_size": self.world_size,
        }

    def indices(self, block: range, first_step: int) -> Iterator[UnitIndex]:
        """One batch per unit of the block and step."""
        batches = self._keys(*divmod((first_step - 1) * len(block), self.per_epoch))
        for step in count(first_step):
            for unit in block:
                yield UnitIndex(step, unit, next(batches))

    def _keys(self, first_epoch: int, skip: int) -> Iterator[list[SampleKey]]:
        size = self.batches.batch_size
        for epoch in count(first_epoch):
            if isinstance(self.sampler, DistributedSampler):
                self.sampler.set_epoch(epoch)
            for number, ids in enumerate(islice(iter(self.batches), skip, None), start=skip):
                places = count((number * size * self.world_size) + self.rank, self.world_size)
                yield [SampleKey(sample, sample_seed(self.seed, epoch, place)) for sample, place in zip(ids, places, strict=False)]
            skip = 0


class IndexedLoader(_Share, IndexedUnits):
    """A DataLoader over a DistributedSampler or SequentialSampler. Its order is derived anew per epoch; whole batches are skipped
    by index, none is loaded in vain."""

    def __init__(self, loader: DataLoader[Any], *, units: int | None, rank: int, world_size: int) -> None:
        _Share.__init__(self, units, rank, world_size)
        batches = plain_batches(loader)
        _check_sampler(batches.sampler, rank, world_size)
        self._order = _TorchOrder(batches, rank, world_size)
        dataset: Any = unkeyed(loader.dataset)
        self._num_samples = len(dataset)
        IndexedUnits.__init__(self, UnitDataset(dataset, loader.collate_fn, keyed=True), loader_settings(loader))

    def facts(self) -> dict[str, Any]:
        return {"kind": "foreign", "ids": "sampler", "num_samples": self._num_samples} | self._order.facts()

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, batch in it) of this rank's first unit of `step`."""
        return divmod((step - 1) * (self.default_units(self.world_size) // self.world_size), self._order.per_epoch)

    def units(self) -> Iterator[Unit]:
        order = self._order
        return self._stream.open(order.indices(self.block, self._step), stream_seed(order.seed, self._step, self.rank, "workers"))


def _check_sampler(sampler: Any, rank: int, world_size: int) -> None:
    if type(sampler) is SequentialSampler:
        if world_size > 1:
            raise ValueError(
                f"without a sampler each of the {world_size} ranks would train on the same samples: "
                "use sampler=torch.utils.data.DistributedSampler(dataset), or " + FIX
            )
    elif type(sampler) is DistributedSampler:
        if (sampler.num_replicas, sampler.rank) != (world_size, rank):
            raise ValueError(
                f"the DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, this process is rank {rank} of {world_size}"
            )
    else:
        random = " (shuffle=True), a random order that is drawn anew at each start" if type(sampler) is RandomSampler else ""
        raise refuse(f"the loader's order comes from {type(sampler).__name__}{random}")


class StatefulLoader(_Share):
    """An object with `__iter__`, `state_dict` and `load_state_dict`, e.g. torchdata's StatefulDataLoader.

    Its own word is taken for its position; the ids of its samples are unknown, so they are counted instead. The units of the current
    step are held, so that a refused step can be repeated. Beginning a pass draws nothing from the process's streams: a start in mid-pass
    begins one too many. Cost: one state_dict() per step.
    """

    def __init__(self, loader: Any, *, units: int | None, rank: int, world_size: int) -> None:
        super().__init__(units, rank, world_size)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._step = 1
        self._held: list[Unit] = []
        self._handed_out = 0
        self._boundary: dict[str, Any] = {}
        self._turn = 0
        self._epoch = 0
        self._batches_in_epoch = 0
        self._samples = 0

    def facts(self) -> dict[str, Any]:
        return {"kind": "foreign", "loader": type(self._loader).__name__, "world_size": self.world_size, "ids": "unknown"}

    def seek(self, step: int) -> None:
        """Only to the current step, to repeat it, or to the one after it; further moves need `load_state`."""
        if step == self._step + 1 and len(self._held) == len(self.block):
            self._step, self._held = step, []
        if step != self._step:
            raise ValueError(f"{type(self._loader).__name__} stands at step {self._step} and can go to step {step} only by load_state")
        self._handed_out = 0
        self._turn += 1

    def units(self) -> Iterator[Unit]:
        self._turn += 1
        return self._units(self._turn)

    def _units(self, turn: int) -> Iterator[Unit]:
        while self.block and turn == self._turn:
            for number, unit in enumerate(self.block):
                if number >= len(self._held):
                    if number == 0:
                        self._boundary = copy.deepcopy(self._now())
                    self._held.append(self._pull(unit))
                self._handed_out = number + 1
                yield self._held[number]
                if turn != self._turn:
                    return
            self._step, self._held = self._step + 1, []

    def _pull(self, unit: int) -> Unit:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._next_pass()
            try:
                data = next(self._iterator)
            except StopIteration:
                self._iterator, self._epoch, self._batches_in_epoch = None, self._epoch + bool(self._batches_in_epoch), 0
                continue
            weight = num_samples(data)
            ids = np.arange(self._samples, self._samples + weight, dtype=np.int64)
            self._samples, self._batches_in_epoch = self._samples + weight, self._batches_in_epoch + 1
            return Unit(self._step, unit, ids, weight, data)
        raise ValueError(f"{type(self._loader).__name__} gave no batch in a whole pass: it is empty, or can be iterated only once")

    def _next_pass(self) -> Iterator[Any]:
        """Workers' seeds come from (pass, place, rank), so that no two passes and no two ranks augment alike."""
        self._set_epoch()
        with self._aside():
            return iter(self._loader)

    def _set_epoch(self) -> None:
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Where a pass may begin. That draws a seed for workers: from the process's stream, or from a generator that torchdata lets the
        sampler draw the next order from, too, and does not put back to where it was after that draw. And it starts the workers."""
        loader = self._loader
        ours = {"generator": None, "worker_init_fn": WorkerStart(loader.worker_init_fn)} if isinstance(loader, DataLoader) else {}
        theirs = {name: getattr(loader, name) for name in ours}
        with kept_streams():
            seed_streams(stream_seed(self._epoch, self._batches_in_epoch, self.rank, "workers"))
            try:
                _set(loader, ours)
                yield
            finally:
                _set(loader, theirs)

    def state(self) -> dict[str, Any]:
        """The loader's own state and our counters; after `seek` back to the current step those from before its units were read."""
        return self._boundary if self._held and not self._handed_out else self._now()

    def _now(self) -> dict[str, Any]:
        with self._aside():  # may begin a pass
            state = self._loader.state_dict()
        return {
            "loader": state,
            "epoch": self._epoch,
            "batches_in_epoch": self._batches_in_epoch,
            "samples": self._samples,
        }

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        self.close()
        self._epoch, self._batches_in_epoch, self._samples = state["epoch"], state["batches_in_epoch"], state["samples"]
        self._set_epoch()  # a loader may build its pass while its state is loaded or asked for
        self._loader.load_state_dict(state["loader"])
        self._step, self._held, self._handed_out = step + 1, [], 0
        self._turn += 1

    def close(self) -> None:
        """End the workers now. torchdata's loader holds its pass until an empty state is loaded."""
        self._turn += 1
        iterator, self._iterator = self._iterator, None
        if isinstance(self._loader, DataLoader):
            end_workers(iterator)
            self._loader.load_state_dict({})  # type: ignore[attr-defined]


def _set(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def num_samples(data: Any) -> int:
    """Samples in a collated batch: the length of its first tensor or array, 1 where there is none."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return int(data.shape[0]) if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        return num_samples(data[0]) if data and not isinstance(data[0], str | bytes | int | float) else max(1, len(data))
    return 1
