"""The ledger: digests that a run must show, from facts that may be damaged or hostile."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.errors import Damaged, LayoutMismatch, NewerFormat
from unbroken.order.ledger import ORDER_VERSION, check_same, describe, expected, parse, unit_digest
from unbroken.order.units import SampleOrder

DATA = {"kind": "batches", "num_samples": 100, "global_batch": 8, "seed": 7, "shuffle": True, "epochs": None, "order": 1}
OPTIONS: dict[str, Any] = {"units": 4, "data": DATA}


def changed(**facts: Any) -> dict[str, Any]:
    return OPTIONS | {"data": DATA | facts}


def test_golden_digests_never_change() -> None:
    assert unit_digest(np.array([3, 1, 2])) == "b627dbc99f1a3664d5ae5b945e9e6e60"
    assert unit_digest(np.array([3, 1, 2])) == blake3(b"".join(i.to_bytes(8, "little") for i in (3, 1, 2))).hexdigest()[:32]
    assert expected(OPTIONS, 13) == (
        "9922d1e0b1fdffc8a9bcee2b45f99a50",
        "1e377099c5fc92c1cd6ea7267ea6861d",
        "edc3a4d311bb2411b8ea134d99453902",
        "276d6bd2812a0a67d0376b41caeb17d1",
    )


def test_a_repeated_swapped_or_dropped_id_shows() -> None:
    ids = [5, 9, 2, 7]
    digests = {unit_digest(np.array(x)) for x in (ids, [5, 9, 9, 7], [9, 5, 2, 7], [5, 9, 2], [])}
    assert len(digests) == 5


def test_facts_describe_the_order_they_came_from() -> None:
    order = SampleOrder(100, 8, 4, seed=7)
    facts = describe("batches", order)
    assert facts == DATA and json.loads(json.dumps(facts)) == facts
    for step in (1, 13, 2**50):
        assert expected(OPTIONS, step) == tuple(unit_digest(order.unit_ids(step, unit)) for unit in range(4))


def test_nobody_may_have_computed_a_step_beyond_the_end() -> None:
    assert len(expected(changed(epochs=1), 13) or ()) == 4
    assert expected(changed(epochs=1), 14) == ()


@pytest.mark.parametrize("options", [{}, {"data": None}, {"units": 4, "data": {"kind": "foreign", "loader": "X", "world_size": 2}}])
def test_an_order_of_others_is_not_recomputed(options: dict[str, Any]) -> None:
    assert expected(options, 1) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": []}, "options.data is not a record"),
        ({"data": {"kind": 3}}, "options.data is not a record"),
        (changed(num_samples="100"), "options.data.num_samples"),
        (changed(num_samples=-5), "num_samples"),
        (changed(global_batch=2**60), "global_batch"),
        (changed(global_batch=None), "options.data.global_batch"),
        (changed(seed=1.5), "options.data.seed"),
        (changed(shuffle="yes"), "shuffle"),
        (changed(epochs=True), "options.data.epochs"),
        (changed(order=0), "order"),
        ({"data": DATA}, "options.units"),
        ({"units": 2**50, "data": DATA}, "units"),
        (changed(num_samples=1, global_batch=2**20), "more than 1024 times"),
    ],
)
def test_hostile_facts_are_damage_that_names_the_field(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Damaged, match=words) as caught:
        parse(options)
    assert caught.value.path == "run.json"


def test_an_order_of_a_newer_version_is_refused() -> None:
    with pytest.raises(NewerFormat, match="upgrade unbroken"):
        parse(changed(order=ORDER_VERSION + 1))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(max_size=8), x)
    )
)
def test_no_facts_whatever_raise_anything_else(value: Any) -> None:
    for options in ({"units": 4, "data": value}, {"units": value, "data": DATA}, *(changed(**{name: value}) for name in DATA)):
        with suppress(Damaged, NewerFormat):
            parse(options)


def test_B31_other_data_at_resume_is_named_with_both_values() -> None:
    check_same(DATA, dict(DATA))
    with pytest.raises(LayoutMismatch, match=r"global_batch: the run was born with 8, now it is 16\n  seed: .* 7, now it is 8") as caught:
        check_same(DATA, DATA | {"global_batch": 16, "seed": 8})
    assert caught.value.mismatched == ("global_batch", "seed")


def test_B31_another_world_size_names_both_and_the_remedy() -> None:
    facts = {"kind": "foreign", "world_size": 4}
    with pytest.raises(LayoutMismatch, match=r"born with 4, now it is 3\n.*start that many ranks.*unbroken\.Batches"):
        check_same(facts, facts | {"world_size": 3})


def test_stored_facts_that_are_no_record_are_damage() -> None:
    with pytest.raises(Damaged):
        check_same([], DATA)  # type: ignore[arg-type]
