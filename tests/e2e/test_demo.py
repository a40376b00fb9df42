"""The main job as a user runs it: `unbroken demo --json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unbroken.demo.plan import INTERVAL_STEPS, plan_faults
from unbroken.demo.story import PHASES, read_accounts
from unbroken.proof.certify import certify
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


def run_demo(folder: Path, seed: int, ranks: int) -> dict[str, Any]:
    """The JSON of one demo; everything the issue promises about it is checked here."""
    command = [sys.executable, "-m", "unbroken", "demo", "--json", "--dir", str(folder), "--seed", str(seed), "--ranks", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    plan = plan_faults(seed, ranks)
    assert (result["certified"], result["grade"], result["fell_back"]) == (True, "exact", True)
    assert result["losses_equal"] and result["state_root_equal"] and result["samples_exactly_once"]
    assert result["kills"] >= 4
    assert result["steps_lost_total"] > 0
    assert result["world_sizes"] == [ranks] * 5 + [plan.ranks_after]
    assert result["problems"] == []
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    for spread in (result["capture_s"], result["stall_s"]):
        assert spread["n"] >= 80 // INTERVAL_STEPS
        assert 0 < spread["median"] <= spread["max"]
    assert [recovery["at"] for recovery in result["recovery_s"]] == [*(fault.at for fault in plan.kills), "power"]
    for recovery in result["recovery_s"]:
        phases = [recovery[f"{name}_s"] for name in PHASES]
        assert all(seconds >= 0 for seconds in phases), recovery
        assert abs(sum(phases) - recovery["total_s"]) < 0.005, recovery
        assert recovery["base_step"] < recovery["step"]
        assert recovery["world_size"] == ranks
    others = ("launcher", "fork server", "daemon")
    power = result["recovery_s"][-1]
    assert power["source"] == "disk"
    assert ranks + len(others) <= power["kills"] <= 2 * ranks + len(others), "and the standby processes, if they were there yet"
    return result


@pytest.mark.timeout(900)
def test_I13_the_demo_is_certified_exact_on_three_ranks(tmp_path: Path) -> None:
    result = run_demo(tmp_path / "demo", seed=1, ranks=3)
    _phases_are_what_injector_and_journal_noted(tmp_path / "demo", result)
    interrupted, reference = (DiskTier(str(tmp_path / "demo" / name)) for name in ("interrupted", "reference"))
    assert certify(interrupted).grade == "sequence"
    certificate = certify(interrupted, against=reference)
    assert (certificate.grade, certificate.superseded_equal) == ("exact", True)
    assert len(certificate.condemned) == 1
    assert certificate.differences == []
    _fell_back_below_the_damage_and_obeyed_the_polite_end(interrupted)
    output = (tmp_path / "demo" / "interrupted-output.txt").read_text()
    assert output.count(certificate.condemned[0].reason) == 1, "one warning that says what was wrong"


def _phases_are_what_injector_and_journal_noted(demo: Path, result: dict[str, Any]) -> None:
    """The clock starts with the injector's own line and stops with the journal's line of the lost step; in between all is in order."""
    accounts = read_accounts(Repository.open(DiskTier(str(demo / "interrupted"))))
    strikes = [json.loads(line) for line in (demo / "interrupted-faults.jsonl").read_text().splitlines()]
    for strike, recovery in zip([s for s in strikes if s["action"] == "kill"], result["recovery_s"], strict=False):
        account = accounts[strike["generation"] + 1]
        assert abs(account.applied[strike["step"]] - strike["time_s"] - recovery["total_s"]) < 0.005
        noted: dict[str, float] = {}
        for event in account.events:
            if event.name in ("recovery", "start"):
                noted |= event.at
        seen_by_launcher = () if strike["at"] == "power" else ("detect",)  # which has died, too
        order = [strike["time_s"], *(noted[name] for name in (*seen_by_launcher, "process", "rendezvous", "rollback", "align"))]
        assert all(later - earlier > -0.05 for earlier, later in pairwise(order)), (order, "phases overlap")


def _fell_back_below_the_damage_and_obeyed_the_polite_end(interrupted: DiskTier) -> None:
    repository = Repository.open(interrupted)
    accounts = read_accounts(repository)
    (condemned,) = repository.log.state.condemned
    before, after, moved = (accounts[number] for number in (3, 4, 5))
    assert (after.source, after.world_size) == ("disk", before.world_size)
    assert after.base_step < condemned.step
    assert max(after.applied) > max(before.applied), "it went on for some steps"
    (stopped,) = [event for event in after.events if event.name == "stopped"]
    assert stopped.step == moved.base_step == max(after.applied), "the step was finished and committed, nothing was lost"
    assert moved.world_size != after.world_size


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_campaign_any_seed_on_two_three_and_four_ranks(seed: int, ranks: int, tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", seed=seed, ranks=ranks)
