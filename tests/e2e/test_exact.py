"""One state root, whoever computes the units, with and without faults (must hold with 3 and 4 ranks: two-rank sums commute)."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

import unbroken
from tests.rigs.torture_runs import finish, launch, reference

CAMPAIGN = bool(os.environ.get("UNBROKEN_CAMPAIGN"))
SEEDS = (1, 2, 3, 4, 5) if CAMPAIGN else (1, 2)
WORLDS = (1, 2, 3, 4) if CAMPAIGN else (1, 3, 4)
STEPS = 8
PLACES = (
    "step.forward",
    "step.backward",
    "step.reduce",
    "step.optimizer",
    "step.applied",
    "capture.begin",
    "capture.copied",
    "capture.ready",
)


def faults_for(seed: int, ranks: int) -> list[dict[str, object]]:
    """Two kills, one in each of the first two generations."""
    rng = random.Random(seed * 10 + ranks)
    first, second = sorted(rng.sample(range(2, STEPS), 2))
    return [
        {"at": rng.choice(PLACES), "step": first, "rank": rng.randrange(ranks), "generation": 0, "action": "kill"},
        {"at": rng.choice(PLACES), "step": second, "rank": rng.randrange(ranks), "generation": 1, "action": "kill"},
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_I13_I14_one_root_at_every_world_size(tmp_path: Path, seed: int) -> None:
    """Dropout, BatchNorm, tied weights, a rarely used parameter, -0.0 and 28 decades of gradients."""
    results = {ranks: reference(tmp_path / f"w{ranks}", STEPS, ranks=ranks, seed=seed) for ranks in WORLDS}
    assert len({r["root"] for r in results.values()}) == 1, results
    assert len({tuple(r["losses"]) for r in results.values()}) == 1, results


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [w for w in WORLDS if w > 1])
def test_I8_I13_faults_leave_no_trace_in_the_bits(tmp_path: Path, seed: int, ranks: int) -> None:
    expected = reference(tmp_path / "reference", STEPS, seed=seed)
    process = launch(tmp_path / "hit", STEPS, ranks=ranks, seed=seed, faults=faults_for(seed, ranks))
    code, out, err = finish(process)
    assert code == 0, err
    strikes = [json.loads(line) for line in Path(f"{tmp_path / 'hit'}.faults").read_text().splitlines()]
    assert len(strikes) == 2
    certificate = unbroken.open(str(tmp_path / "hit")).certify(against=str(tmp_path / "reference"))
    assert certificate.certified, certificate
    assert certificate.grade == "exact"
    assert certificate.final_root == expected["root"], out
    assert certificate.samples_exactly_once


def test_I7_units_finer_than_ranks_and_uneven_blocks(tmp_path: Path) -> None:
    """Six units on 1, 4 and 7 ranks: blocks of 2+2+1+1, and a rank without any."""
    roots = {ranks: reference(tmp_path / f"w{ranks}", 4, ranks=ranks, TORTURE_UNITS="6")["root"] for ranks in (1, 4, 7)}
    assert len(set(roots.values())) == 1, roots


def test_I14_changes_of_world_size_in_one_run(tmp_path: Path) -> None:
    """3 ranks, then 4, then 1, then 2: each continues where the last one stopped, to the same root."""
    expected = reference(tmp_path / "reference", STEPS)
    for steps, ranks in ((2, 3), (5, 4), (6, 1), (STEPS, 2)):
        result = reference(tmp_path / "changed", steps, ranks=ranks)
    assert result["root"] == expected["root"]
    certificate = unbroken.open(str(tmp_path / "changed")).certify(against=str(tmp_path / "reference"))
    assert certificate.certified
    assert certificate.world_sizes == [3, 4, 1, 2]
