"""The fixed binary tree over units: what makes a sum independent of who computed which unit (I14).

Node (level, index) stands for units [index << level, (index + 1) << level), clipped at the number of units U. Floating-point addition
does not associate, so the tree, not the ranks, says what is added to what: siblings only, the left operand always the lower index.
A node whose sibling lies wholly beyond U passes upward unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree; sorts by level, then by index."""

    level: int
    index: int  # type: ignore[assignment]  # the term of the field; tuple's own method is not missed


def root(num_units: int) -> Node:
    """The node that stands for all units."""
    if num_units < 1:
        raise ValueError(f"a tree needs at least one unit, not {num_units}")
    return Node((num_units - 1).bit_length(), 0)


def parent(node: Node) -> Node:
    """The node one level up."""
    return Node(node.level + 1, node.index >> 1)


def sibling(node: Node) -> Node:
    """The other child of this node's parent; it may lie beyond the units."""
    return Node(node.level, node.index ^ 1)


def span(node: Node, num_units: int) -> range:
    """Units of `node`; empty when it lies wholly beyond `num_units`."""
    start = node.index << node.level
    return range(min(start, num_units), min((node.index + 1) << node.level, num_units))


def cover(block: range, num_units: int) -> list[Node]:
    """The fewest nodes that together stand for exactly the units of a contiguous block, in unit order; [] for an empty block.

    At most 2 log2(U) of them. A node clipped by `num_units` counts as whole, so the last block may hold a node of high level.
    """
    if block.step != 1 or not 0 <= block.start <= max(block.start, block.stop) <= num_units:
        raise ValueError(f"a block is a contiguous range within range({num_units}), not {block!r}")
    top = root(num_units)
    nodes: list[Node] = []
    at = block.start
    while at < block.stop:
        node = Node(0, at)
        while node != top and node.index % 2 == 0 and span(parent(node), num_units).stop <= block.stop:
            node = parent(node)
        nodes.append(node)
        at = span(node, num_units).stop
    return nodes


def merge(nodes: Mapping[Node, T], add: Callable[[T, T], T], num_units: int) -> dict[Node, T]:
    """Merge siblings upward wherever both are there; what remains are the maximal nodes.

    `nodes` stand for disjoint units. From all units, or from the covers of all blocks, the single root remains. `add(left, right)` may
    reuse its operands' memory: each is used once. Cost besides the additions: O(len(nodes) * log2 U).
    """
    top = root(num_units)
    merged: dict[Node, T] = {}
    for start, start_value in sorted(nodes.items(), key=lambda item: item[0].index << item[0].level):
        node, value = Node(*start), start_value
        assert span(node, num_units), f"{node} lies beyond {num_units} units"
        while node != top:
            other = sibling(node)
            if other in merged:
                left, right = (merged.pop(other), value) if other.index < node.index else (value, merged.pop(other))
                value = add(left, right)
            elif span(other, num_units):
                break
            node = parent(node)
        assert node not in merged, f"{node} was given twice"
        merged[node] = value
    return merged
