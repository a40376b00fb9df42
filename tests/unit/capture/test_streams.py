"""Random streams: a unit's depend on (seed, step, unit) only, the rank's own are not disturbed, and all of it can be stored (I7)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.rigs.step_rank import raw
from unbroken.capture.streams import Streams, seed_torch
from unbroken.capture.tree import flatten, rebuild

CPU = torch.device("cpu")
Draw = tuple[float, float, float, float, float]


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Other tests keep theirs."""
    streams = Streams(0, CPU)
    kept = streams.read()
    yield
    streams.write(kept)


def draw() -> Draw:
    """One number of each kind; the Gaussians leave half of a pair behind in the state."""
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def unit(streams: Streams, step: int, number: int) -> Draw:
    streams.enter(step, number)
    try:
        return draw()
    finally:
        streams.leave()


def test_I7_the_ranks_own_streams_go_on_as_if_no_unit_had_been_computed() -> None:
    streams = Streams(7, CPU)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw() for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = [draw()]
    for number in range(3):
        streams.enter(5, number)
        draw()
    streams.leave()
    found.append(draw())
    streams.leave()
    found.append(draw())
    assert found == expected


def test_I7_a_units_numbers_depend_on_seed_step_and_unit_only() -> None:
    first = unit(Streams(7, CPU), 3, 2)
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    draw()
    streams = Streams(7, CPU)
    streams.enter(3, 1)
    draw()
    assert unit(streams, 3, 2) == first
    assert unit(streams, 3, 2) == first, "and however often it is tried"
    others = [unit(Streams(8, CPU), 3, 2), unit(streams, 4, 2), unit(streams, 3, 1), unit(streams, 2, 3)]
    values = [*first, *(value for other in others for value in other)]
    assert len(set(values)) == len(values), "every argument moves every stream, and no two streams are alike"


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    items = flatten(state, "/rng", scope="rank")
    found = rebuild({item.piece.pointer: (item.piece, raw(item)) for item in items}, "/rng")
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_B24_what_is_read_can_be_stored_and_continues_at_the_very_place(drawn: int) -> None:
    """With half a Gaussian pair pending or not, and past the 624 words of a state."""
    streams = Streams(7, CPU)
    for _ in range(drawn):
        draw()
    stored = through_a_checkpoint(streams.read())
    expected = [draw() for _ in range(3)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    draw()
    streams.write(stored)
    assert [draw() for _ in range(3)] == expected


def test_a_state_for_another_device_leaves_this_ones_alone() -> None:
    streams = Streams(7, CPU)
    state = streams.read()
    state["torch"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    expected = draw()
    streams.write(state)
    assert draw() == expected


def test_B24_a_rank_that_no_checkpoint_knows_gets_a_stream_unlike_any_other() -> None:
    def started(seed: int, generation: int, rank: int) -> Draw:
        Streams(seed, CPU).start_anew(generation, rank)
        return draw()

    first = started(7, 1, 3)
    assert started(7, 1, 3) == first
    others = [started(8, 1, 3), started(7, 2, 3), started(7, 1, 4), started(7, 3, 1), unit(Streams(7, CPU), 1, 3)]
    values = [*first, *(value for other in others for value in other)]
    assert len(set(values)) == len(values)


def test_seeding_torch_touches_no_other_library() -> None:
    def numpys() -> list[int]:
        state = np.random.get_state(legacy=False)["state"]
        assert isinstance(state, dict)
        return [int(word) for word in state["key"]]

    python, numpy = random.getstate(), numpys()
    seed_torch(2**64 - 1, CPU)
    assert random.getstate() == python
    assert numpys() == numpy
