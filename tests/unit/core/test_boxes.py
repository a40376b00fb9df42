"""Boxes: what is not the region, each element once, is said; whatever is, passes."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.boxes import Box, misfit, whole

SMALL = st.integers(0, 4)


@pytest.mark.parametrize(
    ("shape", "boxes", "reason"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], ""),
        ((4,), [((2,), (2,)), ((4,), (0,)), ((0,), (2,))], ""),
        ((), [((), ())], ""),
        ((0, 3), [], ""),
        ((), [], "missing: 0 of 1"),
        ((), [((), ()), ((), ())], "overlap"),
        ((4,), [((0,), (3,))], "missing: 3 of 4"),
        ((4,), [((0,), (3,)), ((2,), (1,))], r"\[0\] and \[2\] overlap"),
        ((4,), [((0,), (3,)), ((2,), (3,))], "outside"),
        ((4,), [((3,), (2,))], "outside"),
        ((4, 2), [((0,), (4,))], "1 dimensions where 2"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (2, 1))], "overlap"),
        ((1 << 61,), [((0,), (1 << 61,))], ""),
    ],
)
def test_what_is_wrong_is_said(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], reason: str) -> None:
    found = misfit(whole(shape), [Box(*box) for box in boxes])
    assert re.search(reason, found) if reason else found == ""


@settings(max_examples=200, deadline=None)
@given(st.tuples(SMALL, SMALL), st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), max_size=5))
def test_it_is_right_as_counting_elements_is(shape: tuple[int, int], drawn: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, b), (c, d)) for a, b, c, d in drawn]
    counts = np.zeros((10, 10), int)
    for box in boxes:
        counts[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))] += 1
    wanted = np.zeros((10, 10), int)
    wanted[: shape[0], : shape[1]] = 1
    assert (misfit(whole(shape), boxes) == "") == bool((counts == wanted).all())


def test_a_grid_of_many_boxes_is_checked_at_once() -> None:
    boxes = [Box((i, j * 3), (1, 3)) for i, j in itertools.product(range(1000), range(8))]
    assert misfit(whole((1000, 24)), boxes) == ""


def test_common_parts_and_their_places() -> None:
    assert Box((0, 2), (4, 4)).common(Box((2, 0), (4, 3))) == Box((2, 2), (2, 1))
    assert Box((0,), (2,)).common(Box((2,), (2,))) is None
    assert Box((2, 2), (2, 1)).slices(Box((0, 2), (4, 4))) == (slice(2, 4), slice(0, 1))
