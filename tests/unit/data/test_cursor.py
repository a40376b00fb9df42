"""A rank's place in its data: each unit once, a repeated step again, and an end that is said aloud (I8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from unbroken.data.cursor import Cursor
from unbroken.data.loader import Batches, as_source
from unbroken.data.source import Source, Unit


def bound(block: range, *, units: int = 4, epochs: int | None = None) -> tuple[Cursor, Source]:
    """A cursor over ten samples, four per step, each unit one sample."""
    source = as_source(Batches(TensorDataset(torch.arange(10)), global_batch=4, shuffle=False, epochs=epochs))
    source.bind(units=units, block=block, rank=0, world_size=1)
    return Cursor(source, block), source


def step_of(cursor: Cursor, step: int) -> list[int]:
    return [int(i) for number in cursor.block for i in cursor.take(step, number).ids]


def test_I8_each_unit_is_handed_out_once_and_steps_follow_each_other() -> None:
    cursor, _ = bound(range(1, 3))
    cursor.start(1, {})
    assert [step_of(cursor, step) for step in (1, 2, 3)] == [[1, 2], [5, 6], [9, 0]]


def test_a_start_in_mid_run_begins_with_its_step() -> None:
    cursor, _ = bound(range(4))
    cursor.start(3, {})
    assert step_of(cursor, 3) == [8, 9, 0, 1]


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
def test_I8_a_repeated_step_hands_out_the_same_units_again(taken: int) -> None:
    cursor, _ = bound(range(4))
    cursor.start(2, {})
    assert cursor.has_step()
    for number in range(taken):
        cursor.take(2, number)
    cursor.repeat(2)
    assert [step_of(cursor, step) for step in (2, 3)] == [[4, 5, 6, 7], [8, 9, 0, 1]]


def test_asking_for_a_step_twice_loses_nothing() -> None:
    cursor, _ = bound(range(4))
    cursor.start(1, {})
    assert cursor.has_step() and cursor.has_step()
    assert step_of(cursor, 1) == [0, 1, 2, 3]


def test_the_data_end_between_steps() -> None:
    cursor, _ = bound(range(4), epochs=1)
    cursor.start(3, {})
    assert [cursor.take(3, number).weight for number in range(4)] == [1, 1, 0, 0], "the last step is short"
    assert not cursor.has_step()
    with pytest.raises(RuntimeError, match="inside step 4, before unit 0"):
        cursor.take(4, 0)


def test_a_rank_without_units_never_ends_the_run() -> None:
    cursor, _ = bound(range(4, 4))
    cursor.start(1, {})
    assert cursor.has_step()
    assert step_of(cursor, 1) == []


def test_a_unit_out_of_turn_is_a_bug_of_ours() -> None:
    cursor, _ = bound(range(4))
    cursor.start(1, {})
    with pytest.raises(AssertionError, match=r"loader gave \(1, 0\), due was \(1, 1\)"):
        cursor.take(1, 1)


class Counter:
    """A loader that knows where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.tensor([self.at])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_continues_behind_the_boundary_where_it_was_taken() -> None:
    def made() -> tuple[Cursor, Source]:
        source = as_source(Counter(), units=2)
        source.bind(units=2, block=range(2), rank=0, world_size=1)
        return Cursor(source, range(2)), source

    cursor, source = made()
    cursor.start(1, {})
    for number in range(2):
        cursor.take(1, number)
    state = source.state()
    assert cursor.has_step(), "loads ahead, after the boundary"
    assert source.state() != state
    other, _ = made()
    other.start(2, state)
    assert [int(other.take(2, number).data) for number in range(2)] == [3, 4]


class Short:
    """A source whose data end in the middle of a step."""

    grade = "exact"

    def facts(self) -> dict[str, Any]:
        return {}

    def default_units(self, world_size: int) -> int:
        return 2

    def num_steps(self) -> int | None:
        return None

    def bind(self, *, units: int, block: range, rank: int, world_size: int) -> None: ...

    def seek(self, step: int) -> None: ...

    def units(self) -> Iterator[Unit]:
        yield Unit(1, 0, np.array([0]), 1, None)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


def test_data_that_end_inside_a_step_are_an_error_with_a_remedy() -> None:
    cursor = Cursor(Short(), range(2))  # type: ignore[arg-type]  # a plain attribute where the Protocol has a property
    cursor.start(1, {})
    cursor.take(1, 0)
    with pytest.raises(RuntimeError, match=r"inside step 1, before unit 1.*unbroken\.Batches"):
        cursor.take(1, 1)
