"""Public failure cases of data: second resumes and epoch ends (B28), changes at resume (B31), wide counters (B32)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import unbroken
from tests.e2e.test_bugs_run import One, numbers
from tests.rigs.ranks import run_ranks
from unbroken.data.loader import Batches, as_source
from unbroken.order.ledger import check_same
from unbroken.order.units import blocks

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

# -- B28: a Run's lives ----------------------------------------------------------------------------------------------------------

CUTS = (30, 40, 41, 99, 100, 101, 299, 300)
"""After 30 items, then 10 more, then 1 more, then at 99, at 100, at 101, at 299, and at the end."""


def life(directory: Path, data: Any, stop: int) -> list[int]:
    """The items of a life that ends after step `stop`; validation of five batches runs at items 50 and 100 of each epoch."""
    model = One()
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=data,
        units=1,
        total_steps=300,
        lose_at_most="1000 steps",
    )
    seen: list[int] = []
    for batch in run:
        for micro in batch:
            seen.append(int((micro.x[0] if torch.is_tensor(micro.x) else micro.x).item()))
            micro.backward(model.w * seen[-1])
        run.step()
        if run.completed % 50 == 0:
            with run.eval():
                loader = torch.utils.data.DataLoader(numbers(50), batch_size=10, shuffle=True)
                assert len(list(itertools.islice(loader, 5))) == 5
        if run.completed == stop:
            break
    run.close()
    return seen


@pytest.mark.parametrize("kind", ["batches", "torchdata"])
def test_B28_eight_lives_join_to_three_epochs(tmp_path: Path, kind: str) -> None:
    def data() -> Any:
        if kind == "batches":
            return unbroken.Batches(numbers(100), global_batch=1, seed=7)
        return StatefulDataLoader(numbers(100), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(7))

    whole = life(tmp_path / "whole", data(), 300)
    assert [item for stop in CUTS for item in life(tmp_path / "parts", data(), stop)] == whole
    epochs = [whole[i : i + 100] for i in (0, 100, 200)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    loaded = unbroken.open(tmp_path / "parts").load(keys=["/data", "/counters"])
    assert (loaded["/data"]["consumed_samples"], loaded["/counters"]["step"]) == (300, 300)
    assert unbroken.open(tmp_path / "parts").certify(tmp_path / "whole").grade == "exact"


# -- B31 -------------------------------------------------------------------------------------------------------------------------


def global_batches(world_size: int, first: int, last: int, **options: Any) -> list[list[int]]:
    """Ids of the steps first..last as all ranks of this world load them, after a resume before `first`."""
    given = {"samples": 24, "global_batch": 4, "units": 4, "num_workers": 0} | options
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        data = Batches(
            numbers(given["samples"]),
            global_batch=given["global_batch"],
            seed=3,
            num_workers=given["num_workers"],
            epochs=given.get("epochs"),
        )
        source = as_source(data, units=given["units"], rank=rank, world_size=world_size)
        block = blocks(given["units"], world_size)[rank]
        source.bind(units=given["units"], block=block, rank=rank, world_size=world_size)
        source.load_state({}, first - 1)
        for unit in source.units():
            if unit.step > last:
                break
            found[unit.step, unit.unit] = unit.ids.tolist()
        source.close()
    return [[i for unit in range(given["units"]) for i in found.get((step, unit), [])] for step in range(first, last + 1)]


@pytest.mark.parametrize("ranks", [4, 2, 1, 3, 8])
def test_B31_a_saved_on_four_ranks_and_resumed_on_others_then_changed_again(ranks: int) -> None:
    whole = global_batches(4, 1, 6)
    parts = global_batches(4, 1, 2) + global_batches(ranks, 3, 3) + global_batches(5 - ranks % 4, 4, 6)
    assert parts == whole, "same samples in the same order, divisor or not"
    assert sorted(i for batch in whole for i in batch) == list(range(24))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
def test_B31_b_workers_from_two_to_eight_to_none() -> None:
    parts = [b for first, workers in ((1, 2), (3, 8), (5, 0)) for b in global_batches(2, first, first + 1, num_workers=workers)]
    assert parts == global_batches(2, 1, 6)


def test_B31_c_another_global_batch_is_refused_with_both_numbers() -> None:
    born, now = (as_source(Batches(numbers(24), global_batch=size)).facts() for size in (4, 8))
    with pytest.raises(unbroken.LayoutMismatch, match="global_batch: the run was born with 4, now it is 8"):
        check_same(born, now)


def test_B31_d_ten_samples_on_four_ranks_and_then_three_are_each_seen_once_without_padding() -> None:
    options = {"samples": 10, "epochs": 1}
    parts = global_batches(4, 1, 1, **options) + global_batches(3, 2, 3, **options)
    assert sorted(i for batch in parts for i in batch) == list(range(10))
    assert [len(batch) for batch in parts] == [4, 4, 2], "the last step is short: two units are empty"
    assert parts == global_batches(4, 1, 3, **options)


REPLICAS = """
import sys, torch, unbroken
from torch import nn
torch.manual_seed(0)
model = nn.Linear(1, 1)
run = unbroken.Run(sys.argv[1], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), units=2, total_steps=2,
                   data=unbroken.Batches(torch.utils.data.TensorDataset(torch.ones(24, 1)), global_batch=4))
for batch in run:
    for micro in batch:
        micro.backward(model(micro.x).sum())
    run.step()
"""


def test_B31_e_ranks_that_read_nothing_of_their_own_are_not_counted(tmp_path: Path) -> None:
    """Four ranks, two units: two ranks hold none and apply the same update."""
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS)
    run_ranks([str(script), str(tmp_path / "run")], 4)
    loaded = unbroken.open(tmp_path / "run").load(keys=["/data", "/counters"])
    assert (loaded["/data"]["consumed_samples"], loaded["/counters"]["samples"]) == (8, 8), "not 16"


# -- B32 -------------------------------------------------------------------------------------------------------------------------

WIDE = [2**31 - 1, 2**31, 2_150_400_000, 2**32 + 5, 2**53 + 1]


def counting(directory: Path, steps: int) -> unbroken.Run:
    model = One()
    return unbroken.Run(
        directory,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=unbroken.Batches(numbers(1000), global_batch=1),
        total_steps=steps,
        units=1,
    )


@pytest.mark.parametrize("consumed", WIDE)
def test_B32_a_counter_of_any_width_is_exact_after_a_start(tmp_path: Path, consumed: int) -> None:
    run = counting(tmp_path, 1)
    run._counters.samples = consumed - 1
    for batch in run:
        for micro in batch:
            micro.backward(nn.functional.relu(micro.x).sum() * next(iter(run.model.parameters())))
        run.step()
    loaded = unbroken.open(tmp_path).load(keys=["/data", "/counters"])
    assert (loaded["/data"]["consumed_samples"], loaded["/counters"]["samples"]) == (consumed, consumed)
    again = counting(tmp_path, 2)
    assert again._counters.samples == consumed and type(again._counters.samples) is int
    again.close()


@pytest.mark.parametrize("consumed", WIDE)
def test_B32_the_sample_after_so_many_is_the_one_of_the_modulus(consumed: int) -> None:
    class Plain:
        def __len__(self) -> int:
            return 1_000_003

        def __getitem__(self, index: int) -> int:
            return index

    source = as_source(Batches(Plain(), global_batch=1, shuffle=False))
    source.bind(units=1, block=range(1), rank=0, world_size=1)
    source.load_state({}, consumed)  # one sample a step
    unit = next(iter(source.units()))
    source.close()
    assert (unit.step, unit.ids.tolist(), unit.data.tolist()) == (consumed + 1, [consumed % 1_000_003], [consumed % 1_000_003])
    assert {2_150_400_000: 393550, 2**53 + 1: 224294}.get(consumed, unit.ids[0]) == unit.ids[0]


def test_B32_after_2500_of_1000_samples_500_are_left_of_the_epoch() -> None:
    source = as_source(Batches(numbers(1000), global_batch=100, seed=1, epochs=3))
    source.bind(units=1, block=range(1), rank=0, world_size=1)
    assert source.num_steps() == 30
    rest: list[int] = []
    source.load_state({}, 25)
    for unit in source.units():
        rest += unit.ids.tolist()
    source.load_state({}, 20)
    before = [i for unit in itertools.islice(source.units(), 5) for i in unit.ids.tolist()]
    source.close()
    assert len(rest) == 500 and sorted(before + rest) == list(range(1000))


@pytest.mark.parametrize("counter", [np.int32(123), np.uint32(123), np.array(123, dtype=np.int32), torch.tensor(123, dtype=torch.int32)])
def test_B32_a_file_with_a_32_bit_counter_loads_as_it_was(tmp_path: Path, counter: Any) -> None:
    with unbroken.Store(tmp_path) as store:
        store.save(1, {"consumed": counter}, wait=True)
    assert int(unbroken.Store(tmp_path).load()["consumed"]) == 123
