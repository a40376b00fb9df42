"""The tree over units: the same expression whoever holds which units (I14)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.order.tree import Node, cover, merge, parent, root, sibling, span
from unbroken.order.units import blocks


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def one_rank(num_units: int) -> str:
    """The expression by its definition, top down."""

    def text(node: Node) -> str:
        units = span(node, num_units)
        if len(units) == 1:
            return str(units[0])
        left = Node(node.level - 1, node.index * 2)
        right = sibling(left)
        return join(text(left), text(right)) if span(right, num_units) else text(left)

    return text(root(num_units))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[range]]:
    num_units = draw(st.integers(1, 70))
    cuts = draw(st.lists(st.integers(0, num_units), max_size=8))
    edges = [0, *sorted(cuts), num_units]
    return num_units, [range(a, b) for a, b in pairwise(edges)]


@given(partitions())
def test_I14_any_contiguous_partition_gives_the_expression_of_one_rank(case: tuple[int, list[range]]) -> None:
    num_units, parts = case
    gathered: dict[Node, str] = {}
    for block in parts:
        held: dict[Node, str] = {}
        for unit in block:  # as a rank meets them, merging at once
            held = merge(held | {Node(0, unit): str(unit)}, join, num_units)
        assert sorted(held) == sorted(cover(block, num_units))
        assert held.keys().isdisjoint(gathered)
        gathered |= held
    assert merge(gathered, join, num_units) == {root(num_units): one_rank(num_units)}


@given(partitions())
def test_cover_is_exact_and_maximal(case: tuple[int, list[range]]) -> None:
    num_units, parts = case
    for block in parts:
        nodes = cover(block, num_units)
        assert [unit for node in nodes for unit in span(node, num_units)] == list(block)
        assert len(nodes) <= 2 * max(1, num_units.bit_length())
        for node in nodes:
            if node != root(num_units):
                above = span(parent(node), num_units)
                assert not (block.start <= above.start and above.stop <= block.stop), f"{node} could have been its parent"


def test_the_trial_of_three_ranks_and_four_units() -> None:
    assert blocks(4, 3) == [range(0, 2), range(2, 3), range(3, 4)]
    assert [cover(block, 4) for block in blocks(4, 3)] == [[Node(1, 0)], [Node(0, 2)], [Node(0, 3)]]


def test_a_clipped_node_counts_as_whole() -> None:
    assert cover(range(4, 5), 5) == [Node(2, 1)]
    assert cover(range(0, 5), 5) == [Node(3, 0)]
    assert merge({Node(0, 4): "4"}, join, 5) == {Node(2, 1): "4"}


def test_sums_really_depend_on_the_tree() -> None:
    """Were addition associative, the tests above would prove nothing about bits."""
    numbers = {Node(0, unit): value for unit, value in enumerate([1.0, 2.0**-53, 2.0**-53, -1.0])}
    add = float.__add__
    assert merge(numbers, add, 4) == merge(dict(reversed(numbers.items())), add, 4) == {root(4): 2.0**-53}
    assert ((1.0 + 2.0**-53) + 2.0**-53) + -1.0 == 0.0


@pytest.mark.parametrize("block", [range(-1, 2), range(0, 9), range(0, 8, 2), range(9, 9)])
def test_a_block_outside_is_refused(block: range) -> None:
    with pytest.raises(ValueError, match="contiguous range"):
        cover(block, 8)


def test_a_unit_that_comes_twice_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        merge({Node(0, 0): "a", Node(0, 1): "b", Node(1, 0): "c"}, join, 4)
