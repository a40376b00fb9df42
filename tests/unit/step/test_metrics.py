"""Metrics until they are sent: what counts is what a value was when it was logged, and nothing waits for a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.codec.metrics import encode
from unbroken.core.limits import MAX_MESSAGE_BYTES, MAX_METRICS_BYTES
from unbroken.core.messages import Journal
from unbroken.core.records import EventRecord
from unbroken.shm.channel import encode as encode_message
from unbroken.step import metrics
from unbroken.step.metrics import Metrics


def taken(values: dict[str, Any]) -> dict[str, Any]:
    one = Metrics()
    one.add(3, values)
    ((step, found),) = one.take(3, wait=False)
    assert step == 3
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (2, 2),
        (True, True),
        ("warm-up", "warm-up"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(4, dtype=torch.int32), 4),
        (torch.tensor(True), True),
        (torch.tensor(1.0, requires_grad=True) * 2, 2.0),
        (math.inf, math.inf),
    ],
)
def test_numbers_of_all_kinds_become_plain_ones(value: Any, expected: Any) -> None:
    found = taken({"a": value})["a"]
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(1), r"metric 'a': got a torch.float32 tensor of shape \(1,\) on cpu; log a 0-dim tensor"),
        (torch.ones((), device="meta"), "on meta; log a 0-dim tensor"),
        (torch.tensor(1j), "complex64 tensor"),
        (np.ones(1), "metric 'a': got a ndarray"),
        (np.complex64(1j), "got a complex"),
        (np.str_("x\ny"), "printable"),
        (np.datetime64("2026-01-01"), "got a date"),
        (object(), "got a object"),
    ],
)
def test_what_is_no_metric_is_refused_and_leaves_no_trace(value: Any, words: str) -> None:
    one = Metrics()
    one.add(1, {"kept": 1})
    with pytest.raises(TypeError, match=words):
        one.add(1, {"b": 2, "a": value})
    assert list(one.take(1, wait=True)) == [(1, {"kept": 1})]


def test_several_calls_merge_and_the_later_value_counts() -> None:
    one = Metrics()
    one.add(1, {"a": 1, "b": 2})
    one.add(1, {"b": 3, "c": 4})
    one.add(1, {})
    assert list(one.take(1, wait=False)) == [(1, {"a": 1, "b": 3, "c": 4})]
    assert list(one.take(1, wait=True)) == [], "once"


def test_a_value_that_is_written_over_after_the_call_is_what_it_was() -> None:
    one, value = Metrics(), torch.tensor(1.0)
    one.add(1, {"a": value})
    value.fill_(9)
    assert list(one.take(1, wait=True)) == [(1, {"a": 1.0})]


class OnItsWay:
    """A number that arrives when told."""

    def __init__(self, value: float) -> None:
        self.is_here, self.value, self.num_waits = False, value, 0

    def read(self) -> float:
        self.num_waits += not self.is_here
        return self.value


def test_a_value_on_its_way_is_not_waited_for_but_at_a_snapshot_and_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_taken", lambda name, value: value)
    late, later, here = OnItsWay(1.0), OnItsWay(2.0), OnItsWay(3.0)
    one = Metrics()
    one.add(1, {"a": late, "b": 5})
    assert list(one.take(1, wait=False)) == []
    one.add(2, {"a": later})
    assert list(one.take(2, wait=False)) == [(1, {"a": 1.0, "b": 5})], "a step later at the latest"
    assert list(one.take(2, wait=True)) == [(2, {"a": 2.0})]
    here.is_here = True
    one.add(3, {"a": here})
    assert list(one.take(3, wait=False)) == [(3, {"a": 3.0})]
    assert (late.num_waits, later.num_waits, here.num_waits) == (1, 1, 0)


def test_too_many_metrics_are_an_error_that_says_the_bound_and_the_most_fit_one_message() -> None:
    one = Metrics()
    most = MAX_METRICS_BYTES // (28 + 2 * 5)
    values = {f"{i:05d}": -1.2345678901234567e-300 for i in range(most)}
    one.add(1, values)
    with pytest.raises(ValueError, match=f"{most + 1} metrics of step 1 take .* at most {MAX_METRICS_BYTES}: log fewer"):
        one.add(1, {"more-": 1.0})
    ((_, found),) = one.take(1, wait=True)
    record = EventRecord(name="metrics", step=1, facts=encode(found))
    assert len(encode_message(Journal(generation=1, records=(record,)))) < MAX_MESSAGE_BYTES
