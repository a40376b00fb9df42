"""How the cost of something grows with its size, on a machine where others work, too."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS = 5


def assert_grows(do: Callable[[int], object], few: int, many: int, at_most: float) -> None:
    """`many` of them cost at most that many times what `few` cost, in processor time, in one of five rounds.

    One round that shows it is enough: a neighbour makes things slower, never faster, and what grows with the square of the size shows
    (many / few) ** 2 in all of them.
    """

    def seconds(num: int) -> float:
        begin_s = time.process_time()
        do(num)
        return time.process_time() - begin_s

    seconds(few)  # what is loaded and cached on first use
    seen = []
    for _ in range(ROUNDS):
        seen.append(seconds(many) / seconds(few))
        if seen[-1] <= at_most:
            return
    raise AssertionError(f"{many} cost {min(seen):.3g} times what {few} cost, at most {at_most:g} times are allowed")
