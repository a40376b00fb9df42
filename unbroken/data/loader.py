"""Data for a run: `Batches`, or a DataLoader with a `Sampler`, whose order unbroken owns; `as_source` adapts these and foreign loaders.

The order is a pure function of (samples, weights, skips, global_batch, units, seed, shuffle, epochs): a resumed run looks its position
up, on any number of ranks, with any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any, TypedDict, Unpack

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, default_collate

from unbroken.core.ports import environment
from unbroken.data.foreign import FIX, IndexedLoader, StatefulLoader, plain_batches
from unbroken.data.mixed import Mixed, as_parts, check_dataset, unkeyed
from unbroken.data.source import Grade, IndexedUnits, Keyed, SampleKey, Source, Unit, UnitDataset, UnitIndex, loader_settings
from unbroken.order import units as order_units
from unbroken.order.ledger import describe, lists
from unbroken.order.streams import sample_seed, stream_seed
from unbroken.order.units import SampleOrder

__all__ = ["Batches", "Sampler", "Source", "Unit", "as_source", "keyed"]


def keyed(dataset: Any) -> Any:
    """The same map-style data set, with Python's, NumPy's and torch's CPU stream seeded before each item from (seed, epoch, place).

    For augmentation in a DataLoader with an unbroken `Sampler`; `Batches` does it by itself. Must be the DataLoader's own data set,
    not wrapped further. In the main process the streams are put back afterwards. Cost: 20 us per item, 140 us in the main process.
    """
    check_dataset(dataset)
    return Keyed(dataset)


class Sampler(torch.utils.data.Sampler[int]):
    """The order of a run as a torch sampler: `DataLoader(dataset, batch_size=8, sampler=Sampler(dataset, global_batch=64, seed=7))`.

    Inside a Run it yields the ids of this rank's units; the DataLoader's batch_size must be the size of a unit, so that
    global_batch / batch_size units make a step. Outside a Run each iteration is the next whole epoch (`set_epoch` chooses one).
    It fixes the order only: a data set with augmentation needs `keyed(dataset)`.

    `samples` is the number of samples or a data set that has a length; `epochs=None` never ends.
    """

    def __init__(self, samples: Any, *, global_batch: int, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> None:
        num_samples = samples if isinstance(samples, int) else check_dataset(samples)
        self._take(SampleOrder(num_samples, global_batch, 1, seed=seed, shuffle=shuffle, epochs=epochs))

    @classmethod
    def _over(cls, whole: SampleOrder) -> Sampler:
        """The sampler of any order, one of several data sets included."""
        sampler = cls.__new__(cls)
        sampler._take(whole)
        return sampler

    def _take(self, whole: SampleOrder) -> None:
        self._whole = whole
        self._followed: tuple[SampleOrder, range, int] | None = None
        self._next_epoch = 0

    def _order(self, units: int) -> SampleOrder:
        """The whole order, cut into this many units per step."""
        whole = self._whole
        return SampleOrder(whole.parts, whole.global_batch, units, seed=whole.seed, shuffle=whole.shuffle, epochs=whole.epochs)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration outside a Run is this epoch."""
        self._next_epoch = epoch

    def _follow(self, order: SampleOrder, block: range, step: int) -> None:
        """Let the next iteration be over a rank's units, from `step` on."""
        self._followed = (order, block, step)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._whole.num_samples

    def __iter__(self) -> Iterator[int]:
        if self._followed is not None:
            followed, self._followed = self._followed, None
            return self._rank_ids(*followed)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return self._epoch_keys(epoch)

    def _rank_ids(self, order: SampleOrder, block: range, first_step: int) -> Iterator[int]:
        for step in _steps(order, first_step):
            for unit in block:
                yield from order.unit_ids(step, unit).tolist()

    def _epoch_keys(self, epoch: int, chunk: int = 1024) -> Iterator[int]:
        whole = self._whole
        for start in range(0, whole.num_samples, chunk):
            first = epoch * whole.num_samples
            positions = range(first + start, first + min(start + chunk, whole.num_samples))
            for sample, key in zip(whole.ids(positions).tolist(), whole.keys(positions), strict=True):
                yield SampleKey(sample, sample_seed(*key))


class Loading(TypedDict, total=False):
    """How `Batches` loads; each as in torch's DataLoader."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    prefetch_factor: int | None
    multiprocessing_context: Any


class Batches:
    """Batches of one or several map-style data sets: shuffled anew each epoch, the same at any number of ranks and workers.

    `global_batch` samples make a step over all ranks; `epochs=None` never ends, otherwise the last step may be smaller. `seed` fixes
    the order and, before each `dataset[i]`, Python's, NumPy's and torch's CPU stream, in which a collation that draws goes on; loading
    leaves the process's own streams untouched. `num_workers`, `collate_fn`, `pin_memory`, `prefetch_factor` and
    `multiprocessing_context` are those of DataLoader.

    A mixture: `Batches({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3}, global_batch=64)`. Each data set is walked through
    by itself, each sample once per its epoch; in any stretch of samples each has its share to within log2(number of data sets) samples,
    rounded up. Samples have one numbering, data set after data set by name: `origin(micro.ids[0])` tells where one comes from.

    `skip`: ids, ranges of ids, or a text file with an id or `first:stop` per line, none of which is ever loaded; in a mixture a dict of
    these by name. The others keep their order and their random numbers; an epoch is shorter by what is skipped.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        weights: Mapping[str, float] | None = None,
        skip: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        unknown = sorted(set(loading) - set(Loading.__annotations__))
        if unknown:
            raise TypeError(f"Batches() got unknown arguments {unknown}")
        num_workers = loading.get("num_workers", 0)
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers must be 0 (load in this process) or more, not {num_workers!r}")
        self.dataset, parts = as_parts(dataset, weights, skip)
        self._sampler = Sampler._over(SampleOrder(parts, global_batch, 1, seed=seed, shuffle=shuffle, epochs=epochs))
        settings = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "multiprocessing_context": None} | loading
        self._collate = settings.pop("collate_fn", None) or default_collate
        self._settings = settings

    def origin(self, sample_id: int) -> tuple[str, int]:
        """The data set that a sample comes from ("" where there is only one) and its index in it."""
        return self.dataset.origin(int(sample_id)) if isinstance(self.dataset, Mixed) else ("", int(sample_id))


class OrderedSource(IndexedUnits):
    """This rank's units of a run whose order is ours."""

    def __init__(self, kind: str, dataset: UnitDataset, sampler: Sampler, settings: Mapping[str, Any], unit_size: int | None) -> None:
        self.kind = kind
        self.grade: Grade = "exact" if dataset.keyed else "order-only"
        super().__init__(dataset, settings)
        self._sampler = sampler
        self._unit_size = unit_size
        self._order = sampler._order(1)
        self._block = range(0)

    def facts(self) -> dict[str, Any]:
        facts = describe(self.kind, self._order)
        return facts if self.kind == "batches" else facts | {"keyed": self.grade == "exact"}

    def recorded(self) -> dict[str, Any]:
        return {digest: listed.gaps() for digest, listed in lists(self._order).items()}

    def default_units(self, world_size: int) -> int:
        if self._unit_size is None:
            return order_units.default_units(world_size, self._order.global_batch)
        return self._order.global_batch // self._unit_size

    def num_steps(self) -> int | None:
        return self._order.num_steps

    def bind(self, *, units: int, block: range, rank: int, world_size: int) -> None:
        """ValueError when the loader's batch_size is not the size of a unit."""
        global_batch = self._order.global_batch
        if self._unit_size is not None and units * self._unit_size != global_batch:
            raise ValueError(
                f"units={units} with global_batch={global_batch} makes units of {global_batch / units:g} samples, but the DataLoader has "
                f"batch_size={self._unit_size}: use units={global_batch // self._unit_size}, or another batch_size"
            )
        self._order = self._sampler._order(units)
        self._block = block

    def units(self) -> Iterator[Unit]:
        if not self._block:
            return iter(())
        indices = _indices(self._sampler, self._order, self._block, self._step)
        return self._stream.open(indices, stream_seed(self._order.seed, self._step, self._block.start, "workers"))


def _indices(sampler: Sampler, order: SampleOrder, block: range, first_step: int) -> Iterator[UnitIndex]:
    """What the sampler yields, cut into units; places, and with them randomness, are those of the order."""
    sampler._follow(order, block, first_step)
    ids = iter(sampler)  # a user's subclass may change what comes out
    for step in _steps(order, first_step):
        for unit in block:
            due = order.keys(order.positions(step, unit))
            came_out = islice(ids, len(due))
            keys = [SampleKey(int(sample), sample_seed(*key)) for sample, key in zip(came_out, due, strict=False)]
            yield UnitIndex(step, unit, keys)


def as_source(data: Any, *, units: int | None = None, rank: int | None = None, world_size: int | None = None) -> Source:
    """What a run iterates, from what the user gave as `data=`; TypeError or ValueError with the remedy for what cannot continue exactly.

    `units`: batches per step over all ranks, which foreign loaders require. `rank` and `world_size` default to the launcher's.
    """
    rank = int(environment("RANK", "0")) if rank is None else rank
    world_size = int(environment("WORLD_SIZE", "1")) if world_size is None else world_size
    if isinstance(data, Batches):
        global_batch = data._sampler._order(1).global_batch
        if units is not None and units > global_batch:
            raise ValueError(
                f"units={units} with global_batch={global_batch}: some units would always be empty; give at most as many units"
            )
        dataset = UnitDataset(unkeyed(data.dataset), data._collate, keyed=True)
        return OrderedSource("batches", dataset, data._sampler, data._settings, unit_size=None)
    if isinstance(data, DataLoader):
        sampler = getattr(data.batch_sampler, "sampler", data.sampler)
        if isinstance(sampler, Sampler):
            return _with_sampler(data, sampler)
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") and hasattr(data, "__iter__"):
        return StatefulLoader(data, units=units, rank=rank, world_size=world_size)
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            raise TypeError(
                f"{type(data.dataset).__name__} is an IterableDataset, which cannot be asked for its position: "
                f"give a loader with state_dict and load_state_dict (torchdata's StatefulDataLoader), or make it map-style and {FIX}"
            )
        return IndexedLoader(data, units=units, rank=rank, world_size=world_size)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        raise TypeError(f"data= got a data set ({type(data).__name__}), not a loader: {FIX}")
    raise TypeError(f"data= got {type(data).__name__}, which has no position that could be restored (no state_dict): {FIX}")


def _with_sampler(loader: DataLoader[Any], sampler: Sampler) -> OrderedSource:
    batches = plain_batches(loader)
    order = sampler._order(1)
    num_samples = check_dataset(loader.dataset)
    if num_samples != order.num_samples:
        raise ValueError(f"the Sampler is for {order.num_samples} samples, the data set has {num_samples}: make it from this data set")
    if order.global_batch % batches.batch_size:
        raise ValueError(
            f"global_batch={order.global_batch} is not a multiple of batch_size={batches.batch_size}: "
            "each batch of the DataLoader is one unit"
        )
    if batches.drop_last and order.epochs is not None and order.num_samples * order.epochs % order.global_batch:
        raise ValueError("drop_last=True would lose the end of the last epoch: leave it out, the last step may be smaller")
    dataset = UnitDataset(unkeyed(loader.dataset), loader.collate_fn, keyed=isinstance(loader.dataset, Keyed))
    return OrderedSource("sampler", dataset, sampler, loader_settings(loader), unit_size=batches.batch_size)


def _steps(order: SampleOrder, first_step: int) -> Iterator[int]:
    return iter(count(first_step) if order.num_steps is None else range(first_step, order.num_steps + 1))
