"""Several data sets in one stream: exact shares in every stretch, each data set walked through by itself, nothing remembered."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.limits import MAX_DATASETS, MAX_SHARES
from unbroken.order.mixture import Interleaving, Part
from unbroken.order.skips import Skips
from unbroken.order.units import SampleOrder

shares = st.lists(st.integers(1, 50), min_size=1, max_size=9)
starts = st.integers(0, 200) | st.integers(2**53 - 5, 2**53 + 5) | st.integers(0, 2**80)


@given(shares=shares, seed=st.integers(0, 2**64 - 1), start=starts, num=st.integers(0, 400))
def test_any_stretch_has_its_shares_to_within_the_depth_of_the_splits(shares: list[int], seed: int, start: int, num: int) -> None:
    turns = Interleaving(shares, seed).turns(range(start, start + num))
    bound = (len(shares) - 1).bit_length()
    for number, share in enumerate(shares):
        off = abs(int((turns == number).sum()) * sum(shares) - num * share)
        assert off < bound * sum(shares) or (bound == off == 0)


def test_the_bound_is_no_looser_than_it_must_be() -> None:
    """Coin flips, and the tested bound made one sample smaller, both fail on the same stretches."""
    turns = Interleaving([3, 1, 2, 5, 7], 3).turns(range(20_000))
    worst = max(
        abs(np.convolve(turns == number, np.ones(size), "valid") - size * share / 18).max()
        for number, share in enumerate([3, 1, 2, 5, 7])
        for size in (7, 18, 100)
    )
    assert 1.0 < worst < 3.0
    drawn = np.random.default_rng(0).choice(5, 20_000, p=np.array([3, 1, 2, 5, 7]) / 18)
    assert abs(np.convolve(drawn == 4, np.ones(100), "valid") - 100 * 7 / 18).max() > 3.0


@given(shares=shares, seed=st.integers(0, 99), start=starts, num=st.integers(0, 200))
def test_B32_counts_and_turns_agree_at_any_width(shares: list[int], seed: int, start: int, num: int) -> None:
    one = Interleaving(shares, seed)
    before, after = one.counts(start), one.counts(start + num)
    turns = one.turns(range(start, start + num)).tolist()
    assert [b - a for a, b in zip(before, after, strict=True)] == [turns.count(number) for number in range(len(shares))]
    assert sum(before) == start


def test_turns_depend_on_the_seed_and_not_on_where_one_begins_to_look() -> None:
    one = Interleaving([5, 3, 2], 7)
    whole = one.turns(range(1000)).tolist()
    assert [one.turns(range(p, p + 1)).item() for p in range(1000)] == whole
    assert len({tuple(Interleaving([5, 3, 2], seed).turns(range(20)).tolist()) for seed in range(20)}) > 3


@pytest.mark.parametrize("wrong", [[], [0, 1], [-1, 5], [MAX_SHARES, 1], [1] * (MAX_DATASETS + 1)])
def test_senseless_shares_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match=r"data sets|shares"):
        Interleaving(wrong, 0)


def mixture(units: int = 4, **options: int) -> SampleOrder:
    return SampleOrder([Part("code", 30, 3), Part("web", 100, 7)], 10, units, **({"seed": 5} | options))


def test_B28_each_data_set_is_walked_through_once_per_epoch_of_its_own() -> None:
    ids = mixture().ids(range(1000))
    code, web = ids[ids < 30], ids[ids >= 30] - 30
    assert abs(len(code) - 300) < 1
    for one, size in ((code, 30), (web, 100)):
        epochs = [one[i : i + size].tolist() for i in range(0, len(one) - size + 1, size)]
        assert len(epochs) >= 6
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("units", [1, 2, 3, 7, 10])
def test_I7_B31_a_mixture_does_not_depend_on_the_units(units: int) -> None:
    order = mixture(units)
    assert [i for step in range(1, 31) for unit in range(units) for i in order.unit_ids(step, unit).tolist()] == mixture().ids(
        range(300)
    ).tolist()


def test_data_sets_of_one_size_are_not_walked_alike() -> None:
    order = SampleOrder([Part("a", 50, 1), Part("b", 50, 1)], 10, 1, seed=5)
    ids = order.ids(range(100))
    assert ids[ids < 50].tolist() != (ids[ids >= 50] - 50).tolist()
    assert len(set(order.keys(range(300)))) == 300, "no two samples may draw the same numbers"


def test_what_is_skipped_of_one_moves_nothing_of_the_other() -> None:
    skipping = SampleOrder([Part("code", 30, 3, Skips(np.array([4, 9]))), Part("web", 100, 7)], 10, 4, seed=5)
    ids, plain = skipping.ids(range(300)), mixture().ids(range(300))
    assert ids[ids >= 30].tolist() == plain[plain >= 30].tolist()
    assert Counter((ids < 30).tolist()) == Counter((plain < 30).tolist())
    assert not {4, 9} & set(ids.tolist())


def test_epochs_of_a_mixture_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="total_steps"):
        mixture(epochs=2)


def test_a_step_that_would_read_one_small_data_set_for_ever_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"all 1 samples of 'tiny' more than 1024 times"):
        SampleOrder([Part("tiny", 1, 1), Part("web", 10**6, 1)], 4096, 1)


FAR = """
import re, sys, time
import numpy as np
from unbroken.order.mixture import Part
from unbroken.order.units import SampleOrder
parts = 10**12 if sys.argv[1] == "one" else [Part("a", 6 * 10**11, 7), Part("b", 4 * 10**11, 3)]
order = SampleOrder(parts, 4096, 4, seed=7)
order.unit_ids(1, 0)
began, num = time.process_time(), 0
for step in range(2**53 // 4096, 2**53 // 4096 + 100):
    num += len(np.concatenate([order.unit_ids(step, unit) for unit in range(4)]))
seconds = time.process_time() - began
print(num, seconds / num * 1e6, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


@pytest.mark.parametrize("kind", ["one", "two"])
def test_B32_a_trillion_samples_cost_no_memory_and_less_than_2_us_each(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", FAR, kind], capture_output=True, text=True, check=True, timeout=60)
    num, us, peak_mib = map(float, done.stdout.split())
    assert num == 409_600
    assert us < 2.0
    assert peak_mib < 50, "the whole process, Python and NumPy included"
