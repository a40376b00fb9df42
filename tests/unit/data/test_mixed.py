"""Mixtures and skips as a user gives them: what is read, and what is refused with the remedy."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rigs.loader_lives import Augmented
from tests.unit.data.test_loader import all_ranks, bound, plain, take
from unbroken.core.errors import LayoutMismatch
from unbroken.core.limits import MAX_SHARES, MAX_SKIPPED
from unbroken.data.loader import Batches, as_source, keyed
from unbroken.data.mixed import read_skips, whole_shares
from unbroken.order.ledger import check_same, expected, parse, unit_digest
from unbroken.order.skips import Skips


class Offset(Augmented):
    """Item i is i plus a number that tells the data set."""

    def __init__(self, num_samples: int, offset: int) -> None:
        super().__init__(num_samples)
        self.offset = offset

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        first, *rest = super().__getitem__(index)
        return first + self.offset, *rest


def two(**options: Any) -> Batches:
    datasets = {"web": Offset(100, 1000), "code": Offset(30, 2000)}
    return Batches(datasets, **({"weights": {"web": 0.7, "code": 0.3}, "global_batch": 10, "seed": 7} | options))


def test_I7_B31_a_mixture_is_the_same_at_any_world_size_and_number_of_workers() -> None:
    alone = all_ranks(two, 1)
    for world_size in (2, 3, 4):
        assert all_ranks(two, world_size) == alone
    assert all_ranks(lambda: two(num_workers=2), 1) == alone
    draws = [draw for unit in alone for draw in unit[4][2]]
    assert len(set(draws)) == len(draws), "two samples were augmented alike"


def test_a_mixture_goes_on_at_any_step_without_replay() -> None:
    whole = plain(take(bound(two()), 40))
    for step in (1, 17, 39):
        source = bound(two())
        source.load_state({}, step)
        assert plain(take(source, 1)) == [unit for unit in whole if unit[0] == step + 1]


def test_shares_are_exact_and_samples_come_from_where_their_ids_say() -> None:
    data = two(skip={"code": [4, range(10, 12)]})
    units = take(bound(data), 100)
    ids = [i for u in units for i in u.ids.tolist()]
    values = [v for u in units for v in u.data[0].tolist()]
    for sample, value in zip(ids, values, strict=True):
        name, index = data.origin(sample)
        assert value == index + {"web": 1000, "code": 2000}[name]
    code = [data.origin(i)[1] for i in ids if data.origin(i)[0] == "code"]
    assert abs(len(code) - 300) <= 1
    assert set(code) == set(range(30)) - {4, 10, 11}
    assert sorted(code[:27]) == sorted(set(range(30)) - {4, 10, 11}), "an epoch of 27"


def test_I8_facts_give_the_digests_of_a_mixture_with_skips() -> None:
    data = two(skip={"web": [1, 2, 3]})
    source = bound(data)
    options = {"units": 4, "data": source.facts()}
    lists = {digest: Skips.from_gaps(gaps) for digest, gaps in source.recorded().items()}
    assert list(source.facts()["datasets"]) == ["code", "web"]
    assert expected(options, 1) is None, "the list itself is not in the facts"
    order = parse(options, lists)
    assert order is not None
    for unit in take(source, 5):
        assert unit_digest(unit.ids) == unit_digest(order.unit_ids(unit.step, unit.unit))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": {"web": 0.6, "code": 0.4}}, "datasets.code.share: the run was born with 3, now it is 2"),
        ({"skip": {"web": [5]}}, "datasets.web.skip.num: the run was born with None, now it is 1"),
    ],
)
def test_B31_changed_weights_and_skips_are_refused_by_their_facts(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        check_same(as_source(two()).facts(), as_source(two(**change)).facts())


def test_the_order_of_the_dict_and_the_scale_of_the_weights_do_not_matter() -> None:
    datasets = {"code": Offset(30, 2000), "web": Offset(100, 1000)}
    other = Batches(datasets, weights={"code": 3, "web": 7}, global_batch=10, seed=7)
    check_same(as_source(two()).facts(), as_source(other).facts())
    assert plain(take(bound(other), 3)) == plain(take(bound(two()), 3))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 0.7, "b": 0.3}, {"a": 7, "b": 3}),
        ({"a": 2, "b": 4, "c": 6}, {"a": 1, "b": 2, "c": 3}),
        ({"a": 1e-6, "b": 1.0}, {"a": 1, "b": 1_000_000}),
        ({"a": Fraction(1, 3), "b": Fraction(2, 3)}, {"a": 1, "b": 2}),
        ({"a": 10**30, "b": 10**30}, {"a": 1, "b": 1}),
    ],
)
def test_weights_are_meant_as_they_are_written(weights: dict[str, Any], shares: dict[str, int]) -> None:
    assert whole_shares(weights) == shares


@pytest.mark.parametrize("weights", [{"a": 1 / 3, "b": 2 / 3}, {"a": 1e-300, "b": 1.0}, {"a": 1e300, "b": 3.3, "c": 1 / 7}])
def test_weights_that_no_small_numbers_give_are_the_nearest(weights: dict[str, float]) -> None:
    shares = whole_shares(weights)
    assert sum(shares.values()) <= MAX_SHARES and min(shares.values()) >= 1
    for name, weight in weights.items():
        assert shares[name] / sum(shares.values()) == pytest.approx(weight / sum(weights.values()), abs=1e-8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Batches({"a": [1]}, global_batch=1), TypeError, "need weights="),
        (lambda: Batches([1], weights={"a": 1}, global_batch=1), TypeError, "as a dict"),
        (lambda: Batches({"a": [1]}, weights={"b": 1}, global_batch=1), ValueError, "one share for each of"),
        (lambda: Batches({"a": [1]}, weights=[1], global_batch=1), ValueError, "one share for each of"),  # type: ignore[arg-type]
        (lambda: two(weights={"web": 0, "code": 1}), ValueError, r"weights\['web'\]=0.*leave a data set out"),
        (lambda: two(weights={"web": float("nan"), "code": 1}), ValueError, "nan"),
        (lambda: two(weights={"web": True, "code": 1}), ValueError, "True"),
        (lambda: two(skip=[3]), ValueError, "dict of lists by name"),
        (lambda: two(skip={"wbe": [3]}), ValueError, "dict of lists by name"),
        (lambda: two(epochs=1), ValueError, "total_steps"),
        (lambda: Batches({"a": [], "b": [1]}, weights={"a": 1, "b": 1}, global_batch=1), ValueError, "empty"),
        (lambda: Batches({"": [1], "b": [1]}, weights={"": 1, "b": 1}, global_batch=1), ValueError, "1 to 100 characters"),
        (lambda: Batches([1], global_batch=1, num_worker=2), TypeError, "num_worker"),  # type: ignore[call-arg]
    ],
)
def test_senseless_mixtures_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_keyed_data_set_and_one_with_numbers_as_keys_are_taken_as_they_are() -> None:
    data = Batches({"a": keyed(Offset(4, 0)), "b": Offset(4, 50)}, weights={"a": 1, "b": 1}, global_batch=4)
    assert len(take(bound(data), 2)) == 8
    assert [u.data.tolist() for u in take(bound(Batches({0: 5, 1: 6}, global_batch=2, shuffle=False), 2), 1)] == [[5], [6]]
    assert data.origin(5) == ("b", 1)
    with pytest.raises(IndexError):
        data.origin(8)


# -- skips -----------------------------------------------------------------------------------------------------------------------


def single(**options: Any) -> Batches:
    return Batches(Augmented(50), **({"global_batch": 4, "seed": 7} | options))


def samples(data: Batches, num_steps: int) -> list[tuple[Any, ...]]:
    """(id, draws) of every sample, in order."""
    return [row for u in take(bound(data), num_steps) if u.data for row in zip(*[part.tolist() for part in u.data[:4]], strict=True)]


def test_skipped_samples_are_never_loaded_and_the_others_keep_order_and_draws() -> None:
    whole, rest = samples(single(epochs=2), 25), samples(single(epochs=2, skip=[3, 17, 49]), 30)
    assert rest == [row for row in whole if row[0] not in (3, 17, 49)]
    assert as_source(single(epochs=2, skip=[3, 17, 49])).num_steps() == 24


@pytest.mark.parametrize(
    "given",
    [
        [40, 3, 4, 5],
        {40, 3, 4, 5},
        (40, range(3, 6)),
        [range(3, 6), range(40, 41)],
        np.array([40, 5, 3, 4], dtype=np.uint8),
        torch.tensor([3, 4, 5, 40]),
        iter([3, 4, 5, 40]),
    ],
)
def test_ids_come_in_any_form(given: Any) -> None:
    assert read_skips(given, 50, "skip=").ids.tolist() == [3, 4, 5, 40]


def test_a_text_file_of_ids_and_ranges(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("# what was found in May\n40\n\n3:6   # three of them\n")
    assert read_skips(path, 50, "skip=").ids.tolist() == [3, 4, 5, 40]
    assert samples(single(skip=str(path)), 5) == samples(single(skip=[3, 4, 5, 40]), 5)
    for text, words in (("1\n1 2\n", "line 2: '1 2'"), ("x", "line 1"), ("1:2:3", "line 1"), ("9" * 100, "line 1"), ("1:", "line 1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_skips(path, 50, "skip=")
    path.write_text("7\n7")
    with pytest.raises(ValueError, match=r"bad\.txt: sample 7 is named twice"):
        read_skips(path, 50, "skip=")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([1, 2, 1], ValueError, "sample 1 is named twice"),
        ([range(3), 2], ValueError, "sample 2 is named twice"),
        ([50], ValueError, "there is no sample 50: the data set has 50"),
        ([-1], ValueError, "there is no sample -1"),
        (range(50), ValueError, "all 50 samples"),
        ([True], TypeError, "whole numbers"),
        ([1.0], TypeError, "whole numbers"),
        (np.array([1.5]), TypeError, "whole numbers"),
        (np.array([[1]]), TypeError, "one dimension"),
        (np.array([2**63], dtype=np.uint64), ValueError, "there is no sample 9223372036854775808"),
        ([2**70], TypeError, "whole numbers"),
        (7, TypeError, "give ids"),
        (range(MAX_SKIPPED + 1), ValueError, "Subset"),
        ([range(2**62)], ValueError, "Subset"),
    ],
)
def test_senseless_skips_name_the_first_that_is_wrong(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_skips(given, 50, "skip=")


def test_a_file_that_is_missing_says_so() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-list"):
        single(skip="no-such-list.txt")
