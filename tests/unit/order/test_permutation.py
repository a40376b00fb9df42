"""The keyed permutation: a bijection for every n, another one per epoch and seed, the same one for ever, without a table."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.order.permutation import MAX_SAMPLES, Permutation

SIZES = sorted(
    {1, 2, 3, 5, 7, 11, 13, 97, 101, 997, 4099}
    | {2**k for k in range(13)}
    | {2**k + 1 for k in range(13)}
    | {2**k - 1 for k in range(1, 13)}
)

FIRST_IDS = {
    (1, 7, 0): [0],
    (5, 7, 0): [3, 2, 1, 0, 4],
    (5, 7, 1): [3, 1, 0, 2, 4],
    (100, 7, 0): [32, 67, 73, 37, 51, 84, 30, 46],
    (1_000_003, 0, 3): [231754, 752131, 679287, 200139, 667557, 987863, 339775, 183899],
    (10**12, 2**64 - 1, 12): [768155879862, 787380873024, 448161810902, 566509760914, 58394783972, 649073362877],
    (2**62, 7, 0): [944924448799292095, 3558618581206700414, 2916753992806797363, 3260310970543272293],
}


def whole(n: int, seed: int = 7, epoch: int = 0) -> list[int]:
    return Permutation(n, seed, epoch)(np.arange(n)).tolist()


@pytest.mark.parametrize("n", SIZES)
def test_B28_each_epoch_holds_each_sample_once(n: int) -> None:
    assert sorted(whole(n)) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_B28_any_size_seed_and_epoch_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(whole(n, seed, epoch)) == list(range(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, MAX_SAMPLES), data=st.data())
def test_B32_ids_of_any_size_stay_inside_and_do_not_collide(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    ids = Permutation(n, 1, 0)(np.array(positions, dtype=np.int64))
    assert ids.dtype == np.int64
    assert all(0 <= i < n for i in ids.tolist())
    assert len(set(ids.tolist())) == len(positions)


@pytest.mark.parametrize(("arguments", "first"), FIRST_IDS.items())
def test_golden_orders_never_change(arguments: tuple[int, int, int], first: list[int]) -> None:
    assert Permutation(*arguments)(np.arange(len(first))).tolist() == first


def test_I7_an_entry_does_not_depend_on_what_it_is_asked_with() -> None:
    permutation = Permutation(1000, 3, 2)
    together = permutation(np.arange(1000))
    assert [int(permutation(np.array([p]))[0]) for p in range(0, 1000, 37)] == together[::37].tolist()
    assert (permutation(np.arange(1000).reshape(10, 100)) == together.reshape(10, 100)).all()


def test_B28_epoch_orders_and_seeds_differ() -> None:
    orders = [tuple(whole(100, seed, epoch)) for seed in (0, 1, 2**63) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


def test_every_order_of_four_samples_comes_equally_often() -> None:
    num_orders, epochs = 24, 2400
    seen = Counter(tuple(whole(4, 7, epoch)) for epoch in range(epochs))
    mean = epochs / num_orders
    chi_square = sum((count - mean) ** 2 / mean for count in seen.values()) + (num_orders - len(seen)) * mean
    assert chi_square / (num_orders - 1) < 2.2


def test_tiny_data_sets_are_not_shuffled_by_affine_maps() -> None:
    """Eight rounds over three bits are affine in an eighth of all epochs, even permutations at random in a fifteenth."""

    def is_affine(order: list[int]) -> bool:
        return all(order[0] ^ order[a] ^ order[b] ^ order[a ^ b] == 0 for a, b in ((1, 2), (1, 4), (2, 4), (3, 4)))

    epochs = 1000
    assert sum(is_affine(whole(8, 7, epoch)) for epoch in range(epochs)) < epochs / 10


def test_an_order_over_a_trillion_samples_costs_no_memory_and_microseconds() -> None:
    before = psutil.Process().memory_info().rss
    permutation = Permutation(10**12, 7, 5)
    positions = np.arange(10**11, 10**11 + 200_000)
    permutation(positions[:1000])
    began = time.process_time()
    permutation(positions)
    assert (time.process_time() - began) / len(positions) < 2e-6
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.parametrize("position", [-1, 100, 2**62])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="positions must lie in"):
        Permutation(100, 0, 0)(np.array([0, position]))


@pytest.mark.parametrize(("n", "seed", "epoch"), [(0, 0, 0), (MAX_SAMPLES + 1, 0, 0), (5, -1, 0), (5, 2**64, 0), (5, 0, -1), (5, True, 0)])
def test_senseless_arguments_are_refused(n: int, seed: int, epoch: int) -> None:
    with pytest.raises(ValueError):
        Permutation(n, seed, epoch)
