"""Retry in place only when nobody applied the step."""

from __future__ import annotations

from unbroken.core.limits import MAX_JOURNAL_LINE_BYTES
from unbroken.core.messages import Refuse
from unbroken.daemon.verdict import VERDICT_TIMEOUT_S, Decision, Refusals

ALL = {0, 1, 2}


def refusal(rank: int, step: int = 5, attempt: int = 0, generation: int = 1) -> Refuse:
    return Refuse(generation=generation, step=step, attempt=attempt, rank=rank, reason=f"gloo on {rank}")


def refuse_all(refusals: Refusals, ranks: list[int], step: int = 5, attempt: int = 0) -> Decision | None:
    verdict = None
    for rank in ranks:
        assert verdict is None
        verdict = refusals.refuse(refusal(rank, step, attempt), ALL, 3, 100.0)
    return verdict


def test_all_members_refused_so_the_step_is_tried_again() -> None:
    refusals = Refusals()
    verdict = refuse_all(refusals, [2, 0, 1])
    assert verdict is not None
    assert (verdict.verdict.retry, verdict.verdict.attempt, verdict.ranks) == (True, 1, [0, 1, 2])
    assert (verdict.step, verdict.attempt, verdict.reasons["2"]) == (5, 0, "gloo on 2")
    second = refuse_all(refusals, [0, 1, 2], attempt=1)
    assert second is not None
    assert (second.verdict.retry, second.verdict.attempt) == (True, 2)


def test_a_member_that_leaves_ends_the_hope_also_for_those_who_speak_later() -> None:
    refusals = Refusals()
    assert refuse_all(refusals, [0]) is None
    verdict = refusals.left(2)
    assert verdict is not None
    assert (verdict.verdict.retry, verdict.ranks) == (False, [0])
    late = refusals.refuse(refusal(1), {0, 1}, 3, 100.0)
    assert late is not None
    assert (late.verdict.retry, late.ranks) == (False, [1])


def test_a_member_that_is_absent_already_denies_at_once() -> None:
    verdict = Refusals().refuse(refusal(0), {0, 1}, 3, 100.0)
    assert verdict is not None
    assert not verdict.verdict.retry
    assert "rank 2 is gone" in verdict.verdict.reason


def test_a_member_that_applied_the_step_denies_before_and_after() -> None:
    refusals = Refusals()
    assert refuse_all(refusals, [0, 1]) is None
    assert refusals.applied(1, 4) is None
    verdict = refusals.applied(1, 5)
    assert verdict is not None
    assert (verdict.verdict.retry, verdict.ranks) == (False, [0, 1])
    other = Refusals()
    assert other.applied(1, 5) is None
    denied = other.refuse(refusal(0), ALL, 3, 100.0)
    assert denied is not None
    assert not denied.verdict.retry


def test_different_attempts_never_agree() -> None:
    refusals = Refusals()
    assert refuse_all(refusals, [0, 1]) is None
    verdict = refusals.refuse(refusal(2, step=6), ALL, 3, 100.0)
    assert verdict is not None
    assert (verdict.verdict.retry, verdict.ranks) == (False, [0, 1, 2])


def test_I11_patience_ends() -> None:
    refusals = Refusals()
    deadlines = [refusals.deadline_s]
    assert refuse_all(refusals, [0, 1]) is None
    deadlines.append(refusals.deadline_s)
    assert deadlines == [None, 100.0 + VERDICT_TIMEOUT_S]
    assert refusals.expire(100.0 + VERDICT_TIMEOUT_S - 1) is None
    verdict = refusals.expire(100.0 + VERDICT_TIMEOUT_S)
    assert verdict is not None
    assert not verdict.verdict.retry
    assert refusals.expire(1e9) is None


def test_a_new_generation_forgets_the_old_one() -> None:
    refusals = Refusals()
    refusals.applied(1, 9)
    assert refuse_all(refusals, [0]) is not None
    refusals.opened()
    assert refusals.refuse(refusal(0, generation=2), ALL, 3, 100.0) is None


def test_the_reasons_of_many_ranks_fit_into_a_journal_line() -> None:
    refusals, ranks = Refusals(), range(500)
    for rank in ranks:
        message = Refuse(generation=1, step=5, attempt=0, rank=rank, reason="x" * 100_000)
        decision = refusals.refuse(message, set(ranks), len(ranks), 100.0)
    assert decision is not None
    assert sum(map(len, decision.reasons.values())) < MAX_JOURNAL_LINE_BYTES / 2


def test_B37_why_a_member_left_is_told_to_those_who_refused_before_and_after() -> None:
    refusals = Refusals()
    assert refusals.left(2, "OSError: wet disk") is None
    early = refusals.refuse(refusal(0), ALL, 3, 100.0)
    assert early is not None
    assert "rank 2 is gone: OSError: wet disk" in early.verdict.reason, "it is connected still, and will not speak"
    waiting = Refusals()
    assert refuse_all(waiting, [0, 1]) is None
    late = waiting.left(2, "OSError: wet disk")
    assert late is not None
    assert "rank 2 is gone: OSError: wet disk" in late.verdict.reason
    refusals.opened()
    assert refuse_all(refusals, [0, 1]) is None, "the next generation has another rank 2"


def test_B37_a_the_rank_that_said_why_is_named_before_those_that_merely_went_after_it() -> None:
    refusals = Refusals()
    refusals.left(2, "OSError: wet disk")
    refusals.left(1)
    denied = refusals.refuse(refusal(0), {0}, 3, 100.0)
    assert denied is not None
    assert "rank 2 is gone: OSError: wet disk" in denied.verdict.reason
