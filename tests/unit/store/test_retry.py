"""The tier that tries again: in bounded time, with growing pauses, and never what may have been done already."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rigs.store_run import CountedNonces
from unbroken.core.errors import Permanent, Transient
from unbroken.store.tiers.fault import Fault, FaultTier
from unbroken.store.tiers.memory import MemoryTier
from unbroken.store.tiers.retry import RetryTier


class JumpingClock:
    """A clock that moves by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def utc(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


def retrying(faults: list[Fault], clock: JumpingClock, total_s: float = 60.0) -> tuple[RetryTier, FaultTier]:
    failing = FaultTier(MemoryTier(), faults, clock=clock)
    return RetryTier(failing, total_s=total_s, clock=clock, nonces=CountedNonces("retry")), failing


def test_what_fails_for_a_while_succeeds_and_pauses_double(clock: JumpingClock) -> None:
    tier, failing = retrying([Fault("size", "transient", count=8)], clock)
    failing.create("a", [b"x"])
    assert tier.size("a") == 1
    limits = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(clock.slept) == 8
    assert all(limit / 2 <= pause <= limit for limit, pause in zip(limits, clock.slept, strict=True))
    assert len({pause / limit for limit, pause in zip(limits, clock.slept, strict=True)}) == 8, "drawn, not fixed"


@pytest.mark.parametrize("call", ["read", "size", "list", "folders", "delete", "sweep", "create", "append"])
def test_I11_every_call_ends_in_time_with_the_last_error(clock: JumpingClock, call: str) -> None:
    tier, _ = retrying([Fault(call, "transient", count=10**6)], clock, total_s=20)  # type: ignore[arg-type]
    arguments = {"sweep": (), "create": ("a", [b"x"]), "append": ("a", b"x")}.get(call, ("a",))
    with pytest.raises(Transient, match="planned"):
        getattr(tier, call)(*arguments)
    assert 10 < clock.now <= 20


@pytest.mark.parametrize("call", ["read", "size", "list", "create", "append"])
def test_what_is_permanent_is_raised_at_once(clock: JumpingClock, call: str) -> None:
    tier, failing = retrying([Fault(call, "permanent")], clock)  # type: ignore[arg-type]
    arguments = {"create": ("a", [b"x"]), "append": ("a", b"x")}.get(call, ("a",))
    with pytest.raises(Permanent):
        getattr(tier, call)(*arguments)
    assert not clock.slept
    assert len(failing.struck) == 1


@pytest.mark.parametrize("kind", ["transient", "applied", "short"])
def test_a_create_that_failed_is_there_once_and_has_succeeded(clock: JumpingClock, kind: str) -> None:
    tier, failing = retrying([Fault("create", kind)], clock)  # type: ignore[arg-type]
    assert tier.create("a", [b"one", b"two"]) == 6
    assert failing.struck
    assert tier.read("a") == b"onetwo"


@pytest.mark.parametrize("there", [b"onetw", b"onetwo!", b"other!", b""])
def test_B12_another_writers_object_is_not_taken_for_ours(clock: JumpingClock, there: bytes) -> None:
    tier, failing = retrying([Fault("create", "transient", skip=1)], clock)
    failing.create("a", [there])
    with pytest.raises(FileExistsError):
        tier.create("a", [b"one", b"two"])
    assert tier.read("a") == there


def test_B12_an_equal_object_that_was_there_before_is_not_ours(clock: JumpingClock) -> None:
    tier, failing = retrying([], clock)
    failing.create("a", [b"equal"])
    with pytest.raises(FileExistsError):
        tier.create("a", [b"equal"])


def test_parts_that_can_be_given_only_once_are_not_tried_again(clock: JumpingClock) -> None:
    tier, failing = retrying([Fault("create", "transient")], clock)
    with pytest.raises(Transient):
        tier.create("a", iter([b"one", b"two"]))
    assert len(failing.struck) == 1
    assert tier.list("") == []


@pytest.mark.parametrize("kind", ["transient", "applied"])
@pytest.mark.parametrize("before", [None, b"", b"before"])
@pytest.mark.parametrize("data", [b"", b"line\n"])
def test_an_append_that_failed_is_there_once(clock: JumpingClock, kind: str, before: bytes | None, data: bytes) -> None:
    tier, failing = retrying([], clock)
    if before is not None:
        failing.append("j", before)
    failing.add(Fault("append", kind))  # type: ignore[arg-type]
    tier.append("j", data)
    assert failing.struck
    assert tier.read("j") == (before or b"") + data


def test_an_append_of_which_half_is_there_is_not_added_to(clock: JumpingClock) -> None:
    tier, _ = retrying([Fault("append", "short")], clock)
    with pytest.raises(Permanent, match="neither nothing of it nor all of it"):
        tier.append("j", b"line\n")
    assert tier.read("j") == b"li"


def test_a_lost_answer_while_looking_is_looked_for_again(clock: JumpingClock) -> None:
    tier, _ = retrying([Fault("append", "applied"), Fault("size", "transient", count=3), Fault("read", "transient")], clock)
    tier.append("j", b"line\n")
    assert tier.read("j") == b"line\n"


@pytest.mark.parametrize("options", [{"first_s": 0}, {"first_s": 2, "max_s": 1}, {"total_s": -1}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    act: Callable[[], object] = lambda: RetryTier(MemoryTier(), **options)  # noqa: E731
    with pytest.raises(ValueError, match="use 0 < first_s"):
        act()
