"""What all ranks do together all do, or all know who could not and why."""

from __future__ import annotations

import pytest

from tests.rigs.thread_exchange import all_ranks
from unbroken.core import errors
from unbroken.recover.together import together
from unbroken.step.exchange import Exchange


def test_each_rank_gets_its_own_result() -> None:
    assert all_ranks(3, lambda exchange: together(exchange, lambda: exchange.rank * 2)) == [0, 2, 4]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (errors.LayoutMismatch("another model", ("/w",)), errors.LayoutMismatch, "^rank 1: another model$"),
        (errors.NoCheckpoint("nothing there"), errors.NoCheckpoint, "^rank 1: nothing there$"),
        (ValueError("seed it"), ValueError, "^rank 1: seed it$"),
        (RuntimeError("boom"), errors.UnbrokenError, "^RuntimeError: rank 1: boom$"),
        (AssertionError("bug"), errors.UnbrokenError, "^AssertionError: rank 1: bug$"),
    ],
)
def test_the_failure_of_one_rank_is_raised_on_all_and_named(error: Exception, raised: type[Exception], words: str) -> None:
    def rank(exchange: Exchange) -> str:
        def act() -> str:
            if exchange.rank == 1:
                raise error
            return "done"

        if exchange.rank == 1:
            with pytest.raises(type(error)) as own:
                together(exchange, act)
            assert own.value is error, "who failed keeps its own traceback"
        else:
            with pytest.raises(raised, match=words):
                together(exchange, act)
        return str(together(exchange, lambda: "still in step"))

    assert all_ranks(3, rank) == ["still in step"] * 3


def test_of_several_failures_others_hear_of_the_first_rank() -> None:
    def rank(exchange: Exchange) -> None:
        def act() -> None:
            if exchange.rank:
                raise errors.Fenced(f"by {exchange.rank}")

        with pytest.raises(errors.Fenced, match=f"^by {exchange.rank}$" if exchange.rank else "^rank 1: by 1$"):
            together(exchange, act)

    all_ranks(3, rank)


def test_an_exit_code_survives_the_way_to_the_other_ranks() -> None:
    class Odd(errors.UnbrokenError):
        exit_code = 77

    def rank(exchange: Exchange) -> int:
        def act() -> None:
            if exchange.rank == 0:
                raise Odd("strange")

        with pytest.raises(errors.UnbrokenError) as caught:
            together(exchange, act)
        return caught.value.exit_code

    assert all_ranks(2, rank) == [77, 77]
