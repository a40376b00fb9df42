"""What a run asks of its data, and the machinery that turns indices into units in this process or in workers.

A torch DataLoader runs over a data set *of units*: its index names the unit and its samples, its item is the finished unit with the ids
that were really asked of the user's data set. So ids travel with the samples through workers and collation, and the ledger sees what
was trained on, not what should have been.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from unbroken.core.os import die_with_parent, heed_only
from unbroken.core.ports import stop_signals

Grade = Literal["exact", "equal-world-size", "order-only"]

_NUMPY_SALT = 0x9E3779B97F4A7C15
_TORCH_SALT = 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit `unit` of step `step`: the ids that came out of the loader, the number of samples, and the collated data.

    A unit of a short last batch may be empty: weight 0, data None.
    """

    step: int
    unit: int
    ids: NDArray[np.int64]
    weight: int
    data: Any


class Facts(Protocol):
    """What is known of the data before a rank knows its share."""

    @property
    def grade(self) -> Grade:
        """What may be claimed after a resume: "exact" (any world size), "equal-world-size", "order-only" (augmentation is not keyed)."""

    def facts(self) -> dict[str, Any]:
        """Birth facts, JSON-able, compared at resume (`order.ledger.check_same`)."""

    def recorded(self) -> dict[str, Any]:
        """What belongs to the facts and is too long for them; stored with each checkpoint under `order.ledger.SKIPS`."""

    def default_units(self, world_size: int) -> int:
        """Units per step when the user names none; ValueError with the remedy where there is no good answer."""

    def num_steps(self) -> int | None:
        """Steps until the data ends; None when endless or unknown."""


class Source(Facts, Protocol):
    """One rank's units, step after step. Used by one thread; `bind` comes first, once per start."""

    def bind(self, *, units: int, block: range, rank: int, world_size: int) -> None:
        """Fix the number of units and this rank's block of them; an empty block yields nothing."""

    def seek(self, step: int) -> None:
        """The next `units()` starts with this step's units (>= 1); iterators handed out before end. Call it to repeat a step, too."""

    def units(self) -> Iterator[Unit]:
        """This rank's units in order until the data ends, never loading in the caller's thread ahead of being asked."""

    def state(self) -> dict[str, Any]:
        """This rank's further pieces at the boundary of the step whose units came last; {} where (seed, step) says it all."""

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Stand where `state` was taken, at the boundary of `step`: the next units belong to step + 1."""

    def close(self) -> None:
        """End the workers. May be called twice."""


class SampleKey(int):
    """A sample's id that carries the seed of everything random in loading it. Works as an index wherever an int does."""

    seed: int

    def __new__(cls, sample_id: int, seed: int) -> SampleKey:
        key = super().__new__(cls, sample_id)
        key.seed = seed
        return key

    def __reduce__(self) -> tuple[type[SampleKey], tuple[int, int]]:
        return SampleKey, (int(self), self.seed)


class UnitIndex(NamedTuple):
    """Asks for one unit."""

    step: int
    unit: int
    keys: Sequence[SampleKey]


class Loaded(NamedTuple):
    """What comes back from a worker. A tuple, so that pinning memory reaches the tensors inside."""

    step: int
    unit: int
    ids: NDArray[np.int64]
    data: Any


def seed_streams(seed: int) -> None:
    """Seed Python's, NumPy's legacy and torch's CPU stream of this process from 64 bits, each differently. About 20 microseconds."""
    word = seed ^ _NUMPY_SALT
    random.seed(seed)
    np.random.seed([word & 0xFFFFFFFF, word >> 32])
    torch.default_generator.manual_seed(seed ^ _TORCH_SALT)


@contextmanager
def kept_streams() -> Iterator[None]:
    """The process's own three streams are afterwards as they were before. About 120 microseconds."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


class Keyed(Dataset[Any]):
    """See `unbroken.data.loader.keyed`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        if not isinstance(key, SampleKey):
            raise TypeError(
                f"keyed() got the plain index {key!r}, which says nothing of the sample's place in the run: "
                "keyed(dataset) must be the DataLoader's own data set, and its sampler an unbroken.Sampler"
            )
        if get_worker_info() is None:
            with kept_streams():
                seed_streams(key.seed)
                return self.dataset[int(key)]
        seed_streams(key.seed)
        return self.dataset[int(key)]


class UnitDataset(Dataset[Loaded]):
    """The user's map-style data set seen as a data set of units.

    `keyed`: everything random depends on the keys only; a collation that draws goes on in the streams of its last sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], keyed: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.keyed = keyed

    def __getitem__(self, index: UnitIndex) -> Loaded:
        if not index.keys:
            return Loaded(index.step, index.unit, np.empty(0, dtype=np.int64), None)
        if self.keyed and get_worker_info() is None:
            with kept_streams():
                return self._load(index)
        return self._load(index)

    def _load(self, index: UnitIndex) -> Loaded:
        pairs = [(int(key), self._sample(key, index)) for key in index.keys]
        data = self.collate([sample for _, sample in pairs])
        return Loaded(index.step, index.unit, np.array([number for number, _ in pairs], dtype=np.int64), data)

    def _sample(self, key: SampleKey, index: UnitIndex) -> Any:
        where = f"while loading sample {int(key)} for unit {index.unit} of step {index.step}"
        try:
            if self.keyed:
                seed_streams(key.seed)
            return self.dataset[int(key)]
        except StopIteration as error:  # would end the data silently
            raise RuntimeError(f"the data set raised StopIteration {where}") from error
        except Exception as error:  # raised again: only says where it happened
            error.add_note(where)
            raise


class WorkerStart:
    """Runs first in each worker process: it ends with its trainer, and only when its trainer says so."""

    def __init__(self, first: Callable[[int], None] | None) -> None:
        self.first = first
        self.trainer = os.getpid()
        self.from_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if self.from_main_thread:  # the death signal would come with the end of the thread that made us
            die_with_parent()
        heed_only(self.trainer, stop_signals())
        if self.first is not None:
            self.first(worker)


class UnitStream:
    """Loads units in the order of their indices. One set of workers lives from `open` to `close` or an error, over all epochs.

    The indices must not refer back to this object: a DataLoader that dies in a cycle waits 5 s for each of its workers.
    """

    def __init__(self, dataset: UnitDataset, settings: Mapping[str, Any]) -> None:
        self._dataset = dataset
        self._settings = dict(settings)
        self._iterator: Any = None

    def open(self, indices: Iterable[UnitIndex], seed: int) -> Iterator[Unit]:
        """Start over with these indices; the iterator of an earlier `open` ends. `seed` is for workers' streams outside samples."""
        self.close()
        settings = self._settings | {"worker_init_fn": WorkerStart(self._settings.get("worker_init_fn"))}
        generator = torch.Generator()
        generator.manual_seed(seed)
        loader: DataLoader[Loaded] = DataLoader(
            self._dataset, batch_size=None, sampler=indices, collate_fn=_as_it_is, generator=generator, **settings
        )
        self._iterator = iter(loader)
        return self._units(self._iterator)

    def _units(self, iterator: Iterator[Loaded]) -> Iterator[Unit]:
        while iterator is self._iterator:
            try:
                loaded = next(iterator, None)
            except BaseException:  # raised again: whatever it was, the workers must not outlive it
                self.close()
                raise
            if loaded is None:
                return
            yield Unit(loaded.step, loaded.unit, loaded.ids, len(loaded.ids), loaded.data)

    def close(self) -> None:
        """End the workers now instead of whenever the last reference goes."""
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)


class IndexedUnits:
    """The half of a Source that looks its units up: the step says where it stands, so that it has no state of its own."""

    def __init__(self, dataset: UnitDataset, settings: Mapping[str, Any]) -> None:
        self._stream = UnitStream(dataset, settings)
        self._step = 1

    def seek(self, step: int) -> None:
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        self._stream.close()
        self._step = step

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        self.seek(step + 1)

    def close(self) -> None:
        self._stream.close()


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has any."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _as_it_is(loaded: Any) -> Any:
    return loaded


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a user's DataLoader loads, without what and in which order."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return settings
