"""The block-wise rule of the samples says the same as the ledger, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.order.ledger import describe, digests
from unbroken.order.units import SampleOrder
from unbroken.proof import samples
from unbroken.proof.samples import ExpectedUnits, expected_units


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(3, 60),
    global_batch=st.integers(1, 20),
    units=st.integers(1, 6),
    shuffle=st.booleans(),
    epochs=st.none() | st.integers(1, 3),
    block=st.integers(1, 100),
)
def test_I7_blocks_agree_with_the_ledger(
    num_samples: int, global_batch: int, units: int, shuffle: bool, epochs: int | None, block: int
) -> None:
    order = SampleOrder(num_samples, global_batch, units, seed=5, shuffle=shuffle, epochs=epochs)
    rule = ExpectedUnits(order)
    rule._block_steps = block
    steps = [*range(1, 30), 7, 2, 300]
    assert [rule(step) for step in steps] == [digests(order, step) for step in steps]


def test_a_foreign_order_has_no_rule() -> None:
    assert expected_units({}, {}) is None
    assert expected_units({"data": {"kind": "foreign"}, "units": 4}, {}) is None
    order = SampleOrder(10, 4, 2)
    rule = expected_units({"data": describe("batches", order), "units": 2}, {})
    assert rule is not None
    assert rule(3) == digests(order, 3)


def test_a_large_batch_is_one_step_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_BLOCK_SAMPLES", 4)
    order = SampleOrder(100, 10, 2)
    assert ExpectedUnits(order)(2) == digests(order, 2)
