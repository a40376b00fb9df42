"""A walk without some samples is the same walk with them taken out."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.limits import MAX_SKIPPED
from unbroken.order.epochs import Epochs, Span
from unbroken.order.permutation import Permutation
from unbroken.order.skips import NO_SKIPS, Skips


def walk(num: int, *skipped: int, shuffle: bool = True) -> Epochs:
    return Epochs(num, seed=3, shuffle=shuffle, skips=Skips(np.array(sorted(skipped), dtype=np.int64)))


@given(num=st.integers(2, 300), data=st.data(), shuffle=st.booleans())
def test_the_others_keep_order_and_places(num: int, data: st.DataObject, shuffle: bool) -> None:
    skipped = data.draw(st.sets(st.integers(0, num - 1), max_size=num - 1))
    one, all_ = walk(num, *skipped, shuffle=shuffle), Epochs(num, seed=3, shuffle=shuffle)
    for epoch in range(3):
        ids = all_.ids(Span(epoch, 0, num)).tolist()
        kept = [(place, sample) for place, sample in enumerate(ids) if sample not in skipped]
        span = Span(epoch, 0, one.length)
        assert list(zip(one.places(span).tolist(), one.ids(span).tolist(), strict=True)) == kept
        first, last = sorted(data.draw(st.tuples(st.integers(0, len(kept)), st.integers(0, len(kept)))))
        assert one.ids(Span(epoch, first, last)).tolist() == [sample for _, sample in kept[first:last]]


def test_B28_epochs_are_shorter_by_what_is_skipped_and_follow_each_other() -> None:
    one = walk(10, 0, 3, 9)
    assert one.length == 7
    assert one.spans(range(5, 20)) == [Span(0, 5, 7), Span(1, 0, 7), Span(2, 0, 6)]
    assert one.locate(2**53 + 1) == divmod(2**53 + 1, 7)


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1))
def test_the_inverse_undoes_the_permutation(n: int, seed: int) -> None:
    everything = np.arange(n)
    order = Permutation(n, seed, 2)
    assert order.inverse(order(everything)).tolist() == everything.tolist()
    with pytest.raises(ValueError, match="ids must lie"):
        order.inverse(np.array([n]))


def test_a_million_skipped_of_a_trillion_cost_bounded_memory() -> None:
    ids = np.arange(0, 10**12, 10**6, dtype=np.int64)
    tracemalloc.start()
    skips = Skips(ids)
    one = Epochs(10**12, seed=1, skips=skips)
    found = one.ids(Span(5, 10**11, 10**11 + 4096))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 4096 and not (found % 10**6 == 0).any()
    assert peak < 64 << 20
    assert skips.gaps().nbytes <= 4 * 10**6


@given(st.sets(st.integers(0, 2**62 - 1), max_size=30))
def test_a_list_survives_its_stored_form(ids: set[int]) -> None:
    skips = Skips(np.array(sorted(ids), dtype=np.int64))
    again = Skips.from_gaps(skips.gaps())
    assert again.ids.tolist() == sorted(ids)
    assert again.facts() == skips.facts()


def test_narrow_gaps_are_stored_narrow() -> None:
    assert Skips(np.array([3, 9, 250])).gaps().dtype == np.uint8
    assert Skips(np.array([3, 2**40])).gaps().dtype == np.uint64
    assert NO_SKIPS.gaps().nbytes == 0


@pytest.mark.parametrize("gaps", [[2**63, 2**63], [5, 0], [0], [2**64 - 1, 1]])
def test_gaps_of_no_list_are_refused(gaps: list[int]) -> None:
    with pytest.raises(ValueError):
        Skips.from_gaps(np.array(gaps, dtype=np.uint64))


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [-1], [2**62]])
def test_lists_that_are_not_ascending_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Skips(np.array(ids))


def test_what_cannot_be_skipped() -> None:
    with pytest.raises(ValueError, match="sample 10 cannot be skipped: the data set has 10"):
        walk(10, 10)
    with pytest.raises(ValueError, match="all 3 samples"):
        walk(3, 0, 1, 2)
    with pytest.raises(ValueError, match="Subset"):
        Skips(np.arange(MAX_SKIPPED + 1))
