"""Items made ahead: the same ones, few of them, errors in their place, no thread left behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from unbroken.store.ahead import ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ahead"]


@pytest.mark.parametrize("num", [0, 1, 5, 200])
def test_the_same_items_in_the_same_order(num: int) -> None:
    assert list(ahead(iter(range(num)))) == list(range(num))
    assert threads() == []


def test_I11_at_most_so_many_are_made_too_early() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    stream = ahead(items(), depth=3)
    assert next(stream) == 0
    time.sleep(0.1)
    assert len(made) <= 1 + 3 + 1
    stream.close()
    assert threads() == []


def test_an_error_comes_where_its_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is wet")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(OSError, match="the disk is wet"):
        next(stream)
    assert threads() == []


def test_who_stops_early_leaves_no_thread() -> None:
    for number in ahead(itertools.count()):
        if number == 7:
            break
    assert threads() == []


def test_it_is_another_thread() -> None:
    def items() -> Iterator[str]:
        yield threading.current_thread().name

    assert list(ahead(items())) == ["ahead"]
