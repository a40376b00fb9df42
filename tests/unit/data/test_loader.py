"""Units do not depend on who loads them (I7), ids are those that came out, and what cannot continue exactly is refused with the remedy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler, Subset

from tests.rigs.loader_lives import Augmented, Resumable
from unbroken.data.loader import Batches, Sampler, Source, Unit, as_source, keyed
from unbroken.order.ledger import check_same, digests, expected, unit_digest
from unbroken.order.units import SampleOrder, blocks


def bound(data: Any, units: int = 4, rank: int = 0, world_size: int = 1, **options: Any) -> Source:
    source = as_source(data, units=units, rank=rank, world_size=world_size, **options)
    source.bind(units=units, block=blocks(units, world_size)[rank], rank=rank, world_size=world_size)
    return source


def take(source: Source, num_steps: int) -> list[Unit]:
    """The source's units of its next `num_steps` steps."""
    units: list[Unit] = []
    first = None
    for unit in source.units():
        first = unit.step if first is None else first
        if unit.step >= first + num_steps:
            break
        units.append(unit)
    source.close()
    return units


def plain(units: list[Unit]) -> list[Any]:
    """Comparable: (step, unit, ids, weight, numbers without the worker's)."""
    return [(u.step, u.unit, u.ids.tolist(), u.weight, None if u.data is None else [part.tolist() for part in u.data[:4]]) for u in units]


def all_ranks(make: Callable[[], Any], world_size: int, units: int = 4, num_steps: int = 12) -> list[Any]:
    found = [plain(take(bound(make(), units, rank, world_size), num_steps)) for rank in range(world_size)]
    return sorted((unit for rank in found for unit in rank), key=lambda unit: unit[:2])


def streams() -> tuple[Any, ...]:
    return (
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        torch.get_rng_state().tolist(),
    )


def batches(**options: Any) -> Batches:
    return Batches(Augmented(), **({"global_batch": 8, "seed": 7} | options))


def sampled(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    dataset = keyed(Augmented()) if dataset is None else dataset
    return DataLoader(dataset, batch_size=2, sampler=Sampler(dataset, global_batch=8, seed=7), **options)


@pytest.mark.parametrize("make", [batches, sampled], ids=["batches", "sampler"])
def test_I7_B31_units_are_the_same_at_any_world_size(make: Callable[[], Any]) -> None:
    alone = all_ranks(make, 1)
    assert len(alone) == 48
    for world_size in (2, 3, 4, 6):
        assert all_ranks(make, world_size) == alone


def test_B31_workers_from_two_to_none_change_nothing() -> None:
    assert all_ranks(lambda: batches(num_workers=2), 1) == all_ranks(batches, 1) == all_ranks(lambda: sampled(num_workers=1), 1)


def test_I7_samples_do_not_depend_on_the_number_of_units() -> None:
    def samples(units: int) -> list[Any]:
        return [numbers for u in take(bound(batches(), units), 5) for numbers in zip(*[part.tolist() for part in u.data[:4]], strict=True)]

    assert samples(1) == samples(3) == samples(8)


@pytest.mark.parametrize("make", [batches, sampled], ids=["batches", "sampler"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_B24_loading_leaves_the_processs_own_streams_alone(make: Callable[..., Any], num_workers: int) -> None:
    before = streams()
    take(bound(make(num_workers=num_workers)), 3)
    assert streams() == before


def test_B24_an_own_gauss_in_waiting_survives_loading() -> None:
    random.seed(1)
    np.random.seed(1)
    expected_pair = [random.gauss(0, 1), random.gauss(0, 1)], np.random.standard_normal(2).tolist()
    random.seed(1)
    np.random.seed(1)
    first = random.gauss(0, 1), np.random.standard_normal()
    take(bound(batches()), 1)
    assert ([first[0], random.gauss(0, 1)], [first[1], np.random.standard_normal()]) == expected_pair


def test_B24_the_three_libraries_draw_different_numbers() -> None:
    class Draws(Augmented):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            return random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))

    drawn = [value for unit in take(bound(Batches(Draws(), global_batch=8)), 5) for part in unit.data for value in part.tolist()]
    assert len(set(drawn)) == len(drawn) == 120


class MaskingCollate:
    """A collation that draws, as masked language modelling does."""

    def __call__(self, samples: list[Any]) -> list[torch.Tensor]:
        return [torch.tensor([s[0] for s in samples]), torch.rand(len(samples)), torch.tensor([random.random(), np.random.random()])]


def test_I7_collation_may_draw_too() -> None:
    drawn = [
        all_ranks(lambda n=n: batches(collate_fn=MaskingCollate(), num_workers=n), w, num_steps=4) for w, n in ((1, 0), (1, 2), (3, 0))
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    masks = [tuple(unit[4][1]) for unit in drawn[0]]
    assert len(set(masks)) == len(masks)


def test_I8_digests_of_what_came_out_are_those_expected_from_the_facts() -> None:
    for data in (batches(epochs=2), sampled()):
        source = bound(data)
        options = {"units": 4, "data": source.facts()}
        by_step: dict[int, list[str]] = {}
        for unit in take(source, 25):
            by_step.setdefault(unit.step, []).append(unit_digest(unit.ids))
        assert len(by_step) == 25
        assert all(tuple(found) == expected(options, step) for step, found in by_step.items())


class BentSampler(Sampler):
    """Repeats, swaps or drops one id in step 3."""

    bend = "none"

    def __iter__(self) -> Iterator[int]:
        ids = super().__iter__()
        for number, sample in enumerate(ids):
            if number == 18 and self.bend == "repeat":
                yield from (sample, sample)
                next(ids)
            elif number == 18 and self.bend == "swap":
                yield next(ids)
                yield sample
            elif number != 18 or self.bend != "drop":
                yield sample


@pytest.mark.parametrize("bend", ["none", "repeat", "swap", "drop"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_repeats_swaps_or_drops_an_id_shows_in_the_digests(bend: str, num_workers: int) -> None:
    dataset = Augmented()
    sampler = BentSampler(dataset, global_batch=8, seed=7)
    sampler.bend = bend
    units = take(bound(DataLoader(keyed(dataset), batch_size=2, sampler=sampler, num_workers=num_workers)), 6)
    order = SampleOrder(100, 8, 4, seed=7)
    shown = [tuple(unit_digest(u.ids) for u in units if u.step == step) for step in range(1, 7)]
    due = [digests(order, step) for step in range(1, 7)]
    assert shown[:2] == due[:2]
    assert (shown == due) is (bend == "none")
    assert all(u.data[0].tolist() == u.ids.tolist() for u in units), "the ids are not those of the samples"


def test_B31_a_short_last_step_has_smaller_and_empty_units() -> None:
    source = bound(Batches(Augmented(10), global_batch=4, epochs=1))
    units = take(source, 10)
    assert source.num_steps() == 3
    assert [u.weight for u in units if u.step == 3] == [1, 1, 0, 0]
    assert units[-1].data is None and units[-1].ids.dtype == np.int64
    assert sorted(i for u in units for i in u.ids.tolist()) == list(range(10))


def test_a_rank_without_units_yields_nothing_but_knows_the_steps() -> None:
    source = bound(batches(epochs=1), 4, rank=5, world_size=6)
    assert list(source.units()) == []
    assert source.num_steps() == 13


def test_seek_repeats_a_step_and_ends_earlier_iterators() -> None:
    for data in (batches(), batches(num_workers=2), sampled()):
        source = bound(data)
        first = source.units()
        seen = [next(first) for _ in range(6)]
        source.seek(2)
        again = source.units()
        assert plain([next(again), next(again)]) == plain(seen[4:6])
        assert list(first) == []
        source.close()


def test_B28_iterating_outside_a_run_gives_whole_epochs_that_differ() -> None:
    loader = sampled()
    epochs = [[i for batch in loader for i in batch[0].tolist()] for _ in range(3)]
    assert len(loader) == 50
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert [i for batch in loader for i in batch[0].tolist()] == epochs[1]


def test_a_run_and_a_bare_loop_augment_alike() -> None:
    before = streams()
    bare = [[part.tolist() for part in batch[:4]] for batch in sampled()][:48]
    assert bare == [unit[4] for unit in plain(take(bound(sampled()), 12))]
    assert [[part.tolist() for part in batch[:4]] for batch in sampled(num_workers=2, generator=torch.Generator())][:48] == bare
    assert bare  # and neither touched the process's streams: the loop's own draw of a base seed aside
    assert streams()[:2] == before[:2]


def test_a_sampler_without_keys_claims_order_only() -> None:
    assert as_source(sampled(Augmented())).grade == "order-only"
    assert as_source(sampled()).grade == as_source(batches()).grade == "exact"
    assert [u.ids.tolist() for u in take(bound(sampled(Augmented())), 3)] == [u.ids.tolist() for u in take(bound(sampled()), 3)]


@pytest.mark.parametrize("index", [5, np.int64(5)])
def test_keyed_refuses_an_index_without_a_place(index: Any) -> None:
    with pytest.raises(TypeError, match="plain index"):
        keyed(Augmented())[index]
    with pytest.raises(TypeError, match="plain index"):
        next(iter(DataLoader(Subset(keyed(Augmented()), [1, 2]), batch_size=1)))


class Faulty(Augmented):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 42:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_data_set_keeps_its_type_and_names_the_sample(num_workers: int) -> None:
    before = streams()
    with pytest.raises(KeyError) as caught:
        take(bound(Batches(Faulty(KeyError("no such file")), global_batch=8, num_workers=num_workers)), 13)
    assert "while loading sample 42 for unit" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert streams() == before


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_data() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration while loading sample 42"):
        take(bound(Batches(Faulty(StopIteration()), global_batch=8)), 13)


class Vast:
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> int:
        return index


def test_B32_a_trillion_samples_cost_no_memory() -> None:
    take(bound(batches()), 1)
    before = psutil.Process().memory_info().rss
    source = bound(Batches(Vast(), global_batch=64, seed=7))
    source.seek(2**53 // 64)
    units = take(source, 3)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    order = SampleOrder(10**12, 64, 4, seed=7)
    assert [u.data.tolist() for u in units[:4]] == [order.unit_ids(2**53 // 64, unit).tolist() for unit in range(4)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Own(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))

    def __len__(self) -> int:
        return 100


class OtherLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


def refused(data: Any, error: type[Exception] = ValueError, words: str = "", **options: Any) -> None:
    with pytest.raises(error, match=words) as caught:
        bound(data, **options)
    assert "unbroken." in str(caught.value), "the remedy is missing"


def test_loaders_that_cannot_continue_exactly_are_refused_with_the_fix() -> None:
    dataset: Any = Augmented()
    refused(
        DataLoader(dataset, batch_size=2, shuffle=True), words=r"RandomSampler \(shuffle=True\)(.|\n)*sampler=unbroken\.Sampler\(dataset"
    )
    refused(DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 2, False)), words="RandomSampler")
    refused(DataLoader(dataset, batch_size=2, sampler=Own()), words="Own")
    refused(DataLoader(dataset, batch_sampler=[[0, 1], [2, 3]]), words="batch_sampler of its own")
    refused(DataLoader(dataset, batch_size=None), words="without batches")
    refused(OtherLoader(dataset, batch_size=2), words="OtherLoader changes how")
    refused(DataLoader(Stream(), batch_size=2), TypeError, "IterableDataset")
    refused(dataset, TypeError, "got a data set")
    refused(iter([1, 2]), TypeError, "no position that could be restored")
    refused(DataLoader(dataset, batch_size=2), words="each of the 2 ranks would train on the same samples", world_size=2)


def test_a_batch_sampler_over_our_sampler_is_as_good_as_a_sampler() -> None:
    dataset = keyed(Augmented())
    loader = DataLoader(dataset, batch_sampler=BatchSampler(Sampler(dataset, global_batch=8, seed=7), 2, False))
    assert plain(take(bound(loader), 3)) == plain(take(bound(sampled()), 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Batches([], global_batch=8), "empty"),
        (lambda: Batches(Augmented(), global_batch=0), "global_batch"),
        (lambda: Batches(Augmented(), global_batch=8, seed=-1), "seed"),
        (lambda: Batches(Augmented(), global_batch=8, num_workers=-1), "num_workers"),
        (lambda: as_source(batches()).default_units(3) and as_source(batches(global_batch=6)).default_units(3), "multiple of 4"),
        (
            lambda: bound(sampled(), units=8),
            "units=8 with global_batch=8 makes units of 1 samples, but the DataLoader has batch_size=2: use units=4",
        ),
        (lambda: bound(DataLoader(Augmented(), batch_size=3, sampler=Sampler(100, global_batch=8))), "not a multiple of batch_size=3"),  # type: ignore[arg-type]
        (lambda: bound(DataLoader(Augmented(), batch_size=2, sampler=Sampler(99, global_batch=8))), "Sampler is for 99 samples"),  # type: ignore[arg-type]
        (
            lambda: bound(DataLoader(Augmented(), batch_size=2, drop_last=True, sampler=Sampler(100, global_batch=8, epochs=1))),  # type: ignore[arg-type]
            "drop_last=True",
        ),
        (lambda: bound(batches()).seek(0), "steps count from 1"),
        (lambda: as_source(Resumable(10, 7)).default_units(2), r"needs units=.*units=2 is one batch per rank"),
        (lambda: bound(batches(epochs=0)), "epochs"),
        (lambda: bound(DataLoader(Augmented(3), batch_size=4, drop_last=True)), "no batch"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_value_errors_that_say_what_to_do(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("dataset", [Stream(), iter([1]), object()])
def test_a_data_set_must_be_map_style(dataset: Any) -> None:
    for make in (lambda: Batches(dataset, global_batch=8), lambda: Sampler(dataset, global_batch=8), lambda: keyed(dataset)):
        with pytest.raises(TypeError, match="map-style"):
            make()


def test_default_units_follow_the_world_size_or_the_batch_size() -> None:
    assert [as_source(batches()).default_units(n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert [as_source(sampled()).default_units(n) for n in (1, 2, 3, 4)] == [4, 4, 4, 4]
    assert as_source(Resumable(10, 7), units=6).default_units(3) == 6


def test_B31_changed_data_is_named_by_its_facts() -> None:
    born = as_source(batches()).facts()
    for change, name in (
        (batches(seed=8), "seed"),
        (batches(global_batch=16), "global_batch"),
        (batches(epochs=2), "epochs"),
        (sampled(), "kind"),
    ):
        with pytest.raises(Exception, match=f"{name}: the run was born with"):
            check_same(born, as_source(change).facts())


class Foreign:
    """A DataLoader over a DistributedSampler, one per rank."""

    @staticmethod
    def make(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
        dataset: Any = Augmented()
        return DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, world_size, rank, seed=3), **options)


def test_a_distributed_sampler_resumes_exactly_at_equal_world_size() -> None:
    for rank in range(2):
        whole = plain(take(bound(Foreign.make(rank, 2), 4, rank, 2), 30))
        assert [(step, unit) for step, unit, *_ in whole[:4]] == [(1, 2 * rank), (1, 2 * rank + 1), (2, 2 * rank), (2, 2 * rank + 1)]
        source = bound(Foreign.make(rank, 2, num_workers=1), 4, rank, 2)
        source.load_state({}, 17)
        assert plain(take(source, 13)) == whole[34:]


def test_a_distributed_sampler_keeps_torchs_own_order_in_each_epoch() -> None:
    units = take(bound(Foreign.make(1, 2), 4, 1, 2), 26)
    sampler = DistributedSampler(Augmented(), 2, 1, seed=3)  # type: ignore[arg-type]
    due: list[int] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        due += list(sampler)
    came_out = [i for u in units for i in u.ids.tolist()]
    assert came_out == due[: len(came_out)] and len(came_out) > 100


def test_B24_two_ranks_augment_differently() -> None:
    draws = [[x for u in take(bound(Foreign.make(rank, 2), 4, rank, 2), 5) for x in u.data[2].tolist()] for rank in range(2)]
    assert len(set(draws[0] + draws[1])) == 40


def test_B28_a_users_set_epoch_in_between_disturbs_nothing() -> None:
    loader = Foreign.make(0, 1)
    whole = plain(take(bound(Foreign.make(0, 1)), 20))
    source = bound(loader)
    units = source.units()
    seen = []
    for number in range(80):
        seen.append(next(units))
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
    source.close()
    assert plain(seen) == whole


def test_B31_a_foreign_loader_at_another_world_size_is_refused_with_both_numbers() -> None:
    born = as_source(Foreign.make(0, 4), units=12, rank=0, world_size=4).facts()
    now = as_source(Foreign.make(0, 3), units=12, rank=0, world_size=3).facts()
    with pytest.raises(Exception, match=r"born with 4, now it is 3\n.*start that many ranks"):
        check_same(born, now)
    with pytest.raises(ValueError, match=r"units=4 is not a multiple of world_size=3.*units=6"):
        bound(Foreign.make(0, 3), 4, 0, 3)
    with pytest.raises(ValueError, match="is for rank 0 of 4, this process is rank 0 of 3"):
        bound(Foreign.make(0, 4), 12, 0, 3)


def test_the_place_comes_from_the_launcher_where_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert as_source(Foreign.make(2, 3), units=3).facts()["world_size"] == 3


def test_a_sequential_loader_continues_on_one_rank() -> None:
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=2)  # type: ignore[arg-type]
    assert isinstance(loader.sampler, SequentialSampler)
    source = bound(loader)
    source.load_state({}, 20)
    assert [u.ids.tolist() for u in take(source, 1)] == [[60, 61], [62, 63], [64, 65], [66, 67]]


def test_an_object_with_state_dict_repeats_a_refused_step() -> None:
    whole = [u.data.tolist() for u in take(bound(Resumable(10, 7)), 6)]
    source = bound(Resumable(10, 7))
    units = source.units()
    seen = [next(units) for _ in range(7)]
    source.seek(2)
    again = source.units()
    seen = seen[:4] + [next(again) for _ in range(20)]
    assert [u.data.tolist() for u in seen] == whole
    assert [u.ids.tolist() for u in seen] == [[i] for i in range(24)]
    assert list(units) == []
    with pytest.raises(ValueError, match="stands at step 6 and can go to step 3 only by load_state"):
        source.seek(3)
    source.seek(7)
    assert next(source.units()).step == 7


def test_an_object_with_state_dict_is_graded_and_its_order_is_not_recomputed() -> None:
    source = bound(Resumable(10, 7))
    assert source.grade == "equal-world-size"
    assert source.facts()["ids"] == "unknown"
    assert expected({"units": 4, "data": source.facts()}, 1) is None


def test_an_object_that_gives_nothing_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="gave no batch in a whole pass"):
        take(bound(Resumable(0, 7)), 1)


class StatefulDataLoader(DataLoader[Any]):
    """As torchdata's: a DataLoader that iterates and batches by classes of its own."""

    def __iter__(self) -> Any:
        raise AssertionError("not asked")

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("not asked")

    load_state_dict = state_dict  # type: ignore[assignment]


def test_our_sampler_in_a_stateful_loader_is_exact_at_any_world_size() -> None:
    dataset = keyed(Augmented())
    loader = StatefulDataLoader(dataset, batch_size=2, sampler=Sampler(dataset, global_batch=8, seed=7))
    source = bound(loader)
    assert source.grade == "exact"
    assert plain(take(source, 3)) == plain(take(bound(sampled()), 3))
