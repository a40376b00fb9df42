"""Metrics in the journal: every float comes back with its bits, what no sink can show is refused by name."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.codec.metrics import check_name, check_value, decode, encode, num_bytes
from unbroken.core.limits import MAX_METRIC_NAME_CHARS, MAX_METRIC_TEXT_CHARS
from unbroken.core.records import EventRecord, Record

VALUES = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.text('aé字 "\\', max_size=20), st.sampled_from(["nan"]))


def through_the_journal(values: dict[str, Any]) -> dict[str, Any]:
    raw = msgspec.json.encode(EventRecord(name="metrics", step=1, facts=encode(values)))
    record = msgspec.json.decode(raw, type=Record)
    assert isinstance(record, EventRecord)
    return decode(record.facts)


@given(st.dictionaries(st.sampled_from("abcdef"), VALUES))
def test_every_value_comes_back_as_it_was(values: dict[str, Any]) -> None:
    found = through_the_journal(values)
    assert list(found) == list(values)
    for name, value in values.items():
        assert type(found[name]) is type(value)
        if isinstance(value, float) and not math.isnan(value):
            assert struct.pack("d", found[name]) == struct.pack("d", value)
        else:
            assert found[name] == value or (math.isnan(value) and math.isnan(found[name]))


@given(st.dictionaries(st.text('añ/"\\ 字', min_size=1, max_size=9), VALUES, min_size=1))
def test_a_size_estimate_is_never_too_small(values: dict[str, Any]) -> None:
    raw = msgspec.json.encode(encode(values))
    assert len(raw) <= sum(num_bytes(name, value) + 6 for name, value in values.items()) + 2


def test_what_a_later_version_writes_is_passed_over() -> None:
    assert decode({"a": 1, "b": {"float": "huge"}, "c": [1], "d": None, "e": {"image": "x"}, "f": {"float": "-inf"}}) == {
        "a": 1,
        "f": -math.inf,
    }


@pytest.mark.parametrize("name", ["loss", "val/loss", "lr-group_1", "grad norm", "a.b", "0", "größe", "x" * MAX_METRIC_NAME_CHARS])
def test_a_name_that_every_sink_takes(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "a/../b", "./a", "_step", ".a", "a.", "a ", "a\n", "a:b", "a=b", "x" * (MAX_METRIC_NAME_CHARS + 1)]
)
def test_a_name_that_some_sink_refuses(name: str) -> None:
    with pytest.raises(ValueError, match="a name begins with a letter or digit"):
        check_name(name)


def test_the_number_of_the_step_is_no_metric() -> None:
    with pytest.raises(ValueError, match="metric 'step': every row has the number of its step"):
        check_name("step")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("a", None, "metric 'a': got a NoneType"),
        ("a", [1.0], "metric 'a': got a list"),
        ("a", 1j, "got a complex"),
        ("a", 2**63, "metric 'a': 64 bits are more than the 64 of an integer|more than the 64"),
        ("a", -(2**64), "more than the 64"),
        ("a", "x" * (MAX_METRIC_TEXT_CHARS + 1), "at most 1000 printable characters, this one has 1001"),
        ("a", "two\nlines", "printable"),
        ("loss", "high", "metric 'loss': got a str"),
        ("samples", "many", "metric 'samples': got a str"),
    ],
)
def test_what_is_no_metric_is_a_type_error_that_names_it(name: str, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_value(name, value)
