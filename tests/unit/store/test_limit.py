"""The tier with a bandwidth limit: the average holds over reads, writes and threads, and small calls do not wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.store.test_retry import JumpingClock
from unbroken.core.ports import SystemClock
from unbroken.store.tiers.limit import LimitTier
from unbroken.store.tiers.memory import MemoryTier
from unbroken.store.tiers.traits import traits_of


def test_the_average_holds_over_reads_and_writes() -> None:
    clock = JumpingClock()
    tier = LimitTier(MemoryTier(), 1000, clock=clock)
    tier.create("a", [bytes(3000), bytes(2000)])
    tier.append("j", bytes(1000))
    for _ in range(4):
        tier.read("a", 0, 1000)
    assert clock.now == pytest.approx((5000 + 1000 + 4000 - 1000) / 1000)  # a second's worth came at once


def test_what_was_not_used_is_saved_up_for_one_second_only() -> None:
    clock = JumpingClock()
    tier = LimitTier(MemoryTier(), 1000, clock=clock)
    tier.append("j", bytes(1000))
    clock.now = 100.0
    tier.append("j", bytes(2000))
    assert clock.now == pytest.approx(101.0)


def test_a_large_part_goes_out_in_slices_as_it_is_paid_for() -> None:
    clock = JumpingClock()
    sizes: list[int] = []

    class Seen(MemoryTier):
        def create(self, path, parts):  # type: ignore[no-untyped-def]
            return super().create(path, [sizes.append(len(part)) or part for part in parts])

    tier = LimitTier(Seen(), 1 << 20, clock=clock)
    tier.create("a", [bytes(5 << 20)])
    assert sizes == [1 << 20] * 5
    assert clock.slept == pytest.approx([1.0] * 4)
    assert tier.size("a") == 5 << 20


def test_threads_share_one_limit() -> None:
    clock = SystemClock()
    tier = LimitTier(MemoryTier(), 100_000, clock=clock)
    start = clock.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: tier.create(f"a/{i}", [bytes(20_000)]), range(8)))
    assert 0.55 <= clock.monotonic() - start < 5


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LimitTier(MemoryTier(), rate)


def test_the_limit_is_a_trait() -> None:
    assert traits_of(LimitTier(MemoryTier(), 5e6)).bytes_per_s == 5e6
    assert traits_of(MemoryTier()).bytes_per_s is None
    assert not traits_of(object()).conditional_put
