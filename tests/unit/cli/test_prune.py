"""`unbroken prune` and `unbroken compact` as processes: their JSON, their exit codes, and what they tell people."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rigs.store_run import drifting, start, steps
from tests.unit.cli.test_commands import json_of, unbroken
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import SystemNonces
from unbroken.core.records import Writer
from unbroken.store.deltas import Encoding
from unbroken.store.lease import WriterLease
from unbroken.store.tiers.disk import DiskTier


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    tier = DiskTier(str(tmp_path / "run"))
    trainer = start(tier, nonces=SystemNonces())
    for step in (1, 2, 3, 4):
        trainer.save(step, milestone=step == 1)
    return tier


def test_json_has_the_fixed_fields_and_the_dry_run_tells_the_same(tier: DiskTier) -> None:
    wanted = {
        "lineage": str,
        "rules": str,
        "dry_run": bool,
        "stays": list,
        "goes": list,
        "freed_bytes": int,
        "num_files": int,
        "num_leftovers": int,
    }
    foreseen = json_of("prune", tier.root, "--keep", "1", "--keep-every", "3 steps", "--dry-run")
    assert {key: type(value) for key, value in foreseen.items()} == wanted
    assert [(one["step"], one["reasons"]) for one in foreseen["goes"]] == [(2, ["no rule keeps it"])]
    assert steps(tier) == [1, 2, 3, 4]
    made = json_of("prune", tier.root, "--keep", "1", "--keep-every", "3 steps")
    assert made == foreseen | {"dry_run": False}
    assert steps(tier) == [1, 3, 4]


def test_people_are_told_what_went_what_stays_and_why(tier: DiskTier) -> None:
    said = unbroken("prune", tier.root, "--keep", "1", "--keep-hours", "2").stdout
    assert [line.split()[0] for line in said.splitlines()[1:5]] == ["1", "2", "3", "4"]
    assert "milestone" in said and "the newest of the hour 2026-01-01T00Z" in said
    assert (
        "went   no rule keeps it" in said.replace("  went", "went") and "kept: the newest 1, milestones, one per hour for 2 hours" in said
    )
    assert "freed: 4 files, 0 of which dead writers have left" in said
    assert "0 B freed: 0 files" in unbroken("prune", tier.root, "--keep", "1").stdout


@pytest.mark.parametrize("option", [("--keep", "0"), ("--keep-every", "1h"), ("--keep-hours", "-1"), ("--keep-best", "max 3")])
def test_B10_c_nonsense_is_a_usage_error_that_names_the_option(tier: DiskTier, option: tuple[str, str]) -> None:
    error = json_of("prune", tier.root, *option, code=2)["error"]
    assert option[0].removeprefix("--").replace("-", "_") in error["text"]
    assert steps(tier) == [1, 2, 3, 4]


def test_B12_refused_with_exit_code_4_while_somebody_writes_and_3_where_nothing_is(tier: DiskTier, tmp_path: Path) -> None:
    lease = WriterLease.acquire(tier.root, Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now"))
    error = json_of("prune", tier.root, "--keep", "1", code=4)["error"]
    assert error["kind"] == "Fenced" and str(os.getpid()) in error["text"]
    assert json_of("prune", tier.root, "--keep", "1", "--dry-run")["goes"]
    lease.release()
    assert steps(tier) == [1, 2, 3, 4]
    assert json_of("prune", tmp_path / "nowhere", code=3)["error"]["kind"] == "NoCheckpoint"
    assert not (tmp_path / "nowhere").exists()


def test_I3_compact_says_what_it_does_and_then_there_is_nothing_to_do(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    trainer = start(tier, nonces=SystemNonces(), encoding=Encoding(max_depth=9))
    for step in range(1, 7):
        trainer.save(step, logical=drifting(step))
    unbroken("prune", tier.root, "--keep", "2")
    wanted = {"lineage": str, "dry_run": bool, "steps": list, "num_packs": int, "num_chunks": int, "num_whole": int}
    foreseen = json_of("compact", tier.root, "--dry-run")
    assert {key: type(value) for key, value in foreseen.items()} == wanted | {"written_bytes": int, "freed_bytes": int}
    assert foreseen["steps"] == [5, 6] and foreseen["num_whole"] == 1
    said = unbroken("compact", tier.root).stdout
    assert "are stored again" in said and "1 whole; checkpoints concerned: 5, 6" in said and said.rstrip().endswith("freed")
    assert unbroken("compact", tier.root).stdout == "nothing to do: no file is mostly unneeded\n"
    assert json_of("verify", tier.root)["ok"] and [one["step"] for one in json_of("ls", tier.root)] == [5, 6]
