"""The tier that fails as planned: each kind does what it says, where and as often as it says. And what the store makes of it."""

from __future__ import annotations

import pytest

from tests.rigs.store_run import load as load_commit
from tests.rigs.store_run import start, steps, whole_value
from tests.unit.store.test_retry import JumpingClock
from unbroken.core.errors import Permanent, Transient
from unbroken.store.log import Log
from unbroken.store.repository import Repository
from unbroken.store.tiers.fault import Fault, FaultTier
from unbroken.store.tiers.memory import MemoryTier
from unbroken.store.tiers.probe import probe
from unbroken.store.tiers.retry import RetryTier


def test_a_fault_strikes_by_call_pattern_skip_and_count() -> None:
    tier = FaultTier(MemoryTier(), [Fault("create", "permanent", pattern="packs/*", skip=1, count=2)])
    done = []
    for i in range(5):
        tier.create(f"log/{i}", [b"x"])
        try:
            tier.create(f"packs/a/{i}", [b"x"])
            done.append(i)
        except Permanent:
            pass
    assert done == [0, 3, 4]
    assert tier.struck == [("create", "packs/a/1", "permanent"), ("create", "packs/a/2", "permanent")]


def test_an_error_leaves_nothing_and_a_lost_answer_leaves_all() -> None:
    tier = FaultTier(MemoryTier(), [Fault("create", "transient"), Fault("create", "short", skip=1), Fault("create", "applied", skip=2)])
    for path in ("transient", "short", "applied"):
        with pytest.raises(Transient, match=path):
            tier.create(path, [b"abcd"])
    assert tier.list("") == ["applied"]


def test_short_appends_and_reads_are_half() -> None:
    tier = FaultTier(MemoryTier(), [Fault("append", "short", skip=1), Fault("read", "short")])
    tier.append("j", b"abcd")
    with pytest.raises(Transient):
        tier.append("j", b"efgh")
    assert (tier.read("j"), tier.read("j")) == (b"abc", b"abcdef")


def test_a_delay_passes_by_the_clock() -> None:
    clock = JumpingClock()
    tier = FaultTier(MemoryTier(), [Fault("create", "delay", seconds=7.0)], clock=clock)
    tier.create("a", [b"x"])
    assert (clock.slept, tier.read("a")) == ([7.0], b"x")


def test_a_listing_lags_and_catches_up() -> None:
    clock = JumpingClock()
    tier = FaultTier(MemoryTier(), [Fault("list", "lag", count=2, seconds=5), Fault("folders", "lag")], clock=clock)
    tier.create("a/old/1", [b"x"])
    clock.now = 10.0
    tier.create("a/new/1", [b"x"])
    assert tier.list("a") == ["a/old/1"]
    assert tier.folders("a") == []
    clock.now = 16.0
    assert tier.list("a") == ["a/new/1", "a/old/1"]
    assert tier.folders("a") == ["new", "old"]


def test_a_probe_sees_that_a_condition_is_ignored() -> None:
    found = probe(FaultTier(MemoryTier(), [Fault("create", "unconditional", count=100)]))
    assert not found.conditional_put
    assert "put-if-absent does not hold" in found.faults[0]


def test_a_probe_sees_a_condition_that_holds_only_without_haste() -> None:
    tier = FaultTier(MemoryTier(), [Fault("create", "unconditional", pattern="*/race", count=100)])
    found = probe(tier)
    assert not found.conditional_put
    assert "of 4 creates of one name at once 4 succeeded" in found.faults[0]
    assert tier.list("") == []


def test_a_probe_sees_listings_that_lag_and_short_reads() -> None:
    assert probe(FaultTier(MemoryTier(), [Fault("list", "lag")])).faults == ("an object just made is not listed: listings lag",)
    assert probe(FaultTier(MemoryTier(), [Fault("read", "short", skip=2)])).faults == ("parts of an object cannot be read",)


@pytest.mark.parametrize("fault", [("create", "lag"), ("list", "unconditional"), ("read", "applied"), ("read", "nonsense")])
def test_a_fault_that_cannot_be_is_refused(fault: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="fault"):
        Fault(*fault)  # type: ignore[arg-type]


def test_the_log_finds_its_head_although_listings_lag() -> None:
    memory = MemoryTier()
    trainer = start(FaultTier(memory, [Fault("list", "lag", count=10**6)]))
    for step in range(1, 6):
        trainer.save(step)
    lagging = FaultTier(memory, [])
    lagging._created = dict.fromkeys(memory.list("runs/main/log")[2:], 1e18)
    lagging.add(Fault("list", "lag", count=10**6))
    assert Log.open(lagging).head == Log.open(memory).head == 5
    assert steps(lagging) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["transient", "applied"])
def test_I9_a_run_behind_a_tier_that_fails_now_and_then_loses_nothing(kind: str) -> None:
    clock = JumpingClock()
    memory = MemoryTier()
    faults = [Fault(call, kind, skip=skip) for call in ("create", "append") for skip in range(0, 60, 3)]  # type: ignore[arg-type]
    failing = FaultTier(memory, faults, clock=clock)
    trainer = start(RetryTier(failing, clock=clock))
    failures = 0
    for step in range(1, 8):
        while True:
            try:
                trainer.save(step)
                break
            except Transient:  # a pack's parts come once: the daemon tries the whole save again
                failures += 1
    assert len(failing.struck) > 10
    repository = Repository.open(memory)
    assert [commit.step for commit in repository.visible()] == list(range(1, 8))
    assert [whole_value(load_commit(repository, commit)) for commit in repository.visible()] == list(range(1, 8))
    assert len([path for path in memory.list("runs/main/log")]) == 8, "no entry was written twice"
