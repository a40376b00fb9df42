"""What the guard says about a step whose loss is bad; what it does is in tests/e2e/test_anomalies.py."""

from __future__ import annotations

import math

from unbroken.guarding import _whose
from unbroken.step.reduce import RankFacts, Reduced, UnitFacts, bits


def unit(number: int, weight: int, loss: str) -> UnitFacts:
    return UnitFacts(number, "0" * 32, weight, loss, "", weight)


def test_the_unit_and_its_rank_are_named_and_losses_that_nobody_told_are_none() -> None:
    facts = [RankFacts((unit(0, 0, ""), unit(1, 5, bits(1.0)))), RankFacts((unit(2, 3, bits(math.nan)), unit(3, 0, bits(math.nan))))]
    assert _whose(Reduced(facts=facts, total_weight=8)) == " (that of unit 2 on rank 1 is nan)"
    untold = [RankFacts((unit(0, 4, ""), unit(1, 5, bits(1.0))))]
    assert _whose(Reduced(facts=untold, total_weight=9)) == "" and Reduced(facts=untold, total_weight=9).loss is None
