"""The wire between ranks on real Gloo: same bits, unequal shares, a group that is abandoned is seen at once, and the next one works."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.rigs import exchange_ranks
from tests.rigs.ranks import run_ranks
from unbroken.step.exchange import Exchange, ExchangeFailed, join_world

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each of three processes saw."""
    return [json.loads(out.splitlines()[-1]) for out in run_ranks(["-m", "tests.rigs.exchange_ranks"], 3, timeout_s=60)]


def test_I14_three_processes_get_the_bits_of_one(told: list[dict[str, Any]]) -> None:
    alone = exchange_ranks.reduced(Exchange(CPU))
    assert [rank["reduced"] for rank in told] == [alone] * 3
    assert all(rank["same"] for rank in told), "and again, in a group built later"


def test_shares_of_different_lengths_arrive_whole_and_in_rank_order(told: list[dict[str, Any]]) -> None:
    expected = [{"rank": r, "text": "ü" * 10 ** (2 * r)} for r in range(3)]
    assert all(rank["shared"] == expected for rank in told)


def test_I8_what_ranks_tell_each_other_does_not_meet_gradients_that_are_still_on_their_way(told: list[dict[str, Any]]) -> None:
    """A loop that was left with buckets under way begins again, and asks all ranks something first."""
    assert [rank["beside"] for rank in told] == [[[0, 7, 14], True]] * 3


@pytest.mark.parametrize("collective", [0, 1])
def test_I11_a_rank_that_abandons_the_group_is_seen_by_the_others_at_once(told: list[dict[str, Any]], collective: int) -> None:
    for number, rank in enumerate(told):
        seconds, text = rank["failed"][collective]
        assert 0 <= seconds < 2, f"rank {number}: {text}"
    assert told[1]["failed"][collective][1] == "the ranks are not connected"


def test_the_next_group_works_and_its_name_may_come_twice(told: list[dict[str, Any]]) -> None:
    assert all(rank["after0"] == rank["after1"] == [0, 11, 22] for rank in told)


def test_nothing_can_be_exchanged_before_the_ranks_are_connected(told: list[dict[str, Any]]) -> None:
    assert {rank["unconnected"] for rank in told} == {"the ranks are not connected"}


def test_alone_every_collective_is_a_copy() -> None:
    exchange = Exchange(CPU)
    exchange.connect("x")
    frames = torch.arange(5, dtype=torch.uint8)
    assert torch.equal(exchange.scatter(frames, [5], [5]), frames)
    assert torch.equal(exchange.gather(frames), frames)
    assert exchange.share({"a": (1, 2)}, dict[str, list[int]]) == [{"a": [1, 2]}]
    exchange.abandon()
    assert torch.equal(exchange.gather(frames), frames)


def test_one_process_joins_no_world() -> None:
    assert not join_world(CPU)
    assert not torch.distributed.is_initialized()


def test_a_launchers_environment_that_says_too_little_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ExchangeFailed, match=r"launcher's environment.*MASTER_ADDR"):
        join_world(CPU)
