"""The crash campaign in short; in full by `make campaign-crash`. And that it would find a store that loses something."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from bench.crash import SHARES, _alone, points_of, run, skipped
from tests.rigs import crash_points, powerloss
from tests.rigs.crash_faults import MUTANTS
from tests.rigs.s3_server import S3Server
from unbroken.chaos.inject import FAILPOINTS as OF_TRAINERS

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
COUNTS = {"failpoint": 15, "moment": 6, "timer": 3, "power": 16, "again": 2, "error": 18, "daemon": 5}
IN_OTHER_TESTS = {
    "copying.before_commit": "tests/unit/store/test_copying.py",
    "copying.committed": "tests/unit/store/test_copying.py",
    "copying.followed": "tests/unit/store/test_copying.py",
    "copying.objects": "tests/unit/store/test_copying.py",
    "copying.pack": "tests/unit/store/test_copying.py",
    "saving.before_commit": "tests/unit/test_checkpoints_saving.py",
    "export.written": "tests/unit/archive/test_exporting.py",
    "log.written": "tests/unit/loggers/test_to_jsonl.py",
    "import.written": "tests/unit/importing/test_storing.py",
    "sharing.share_written": "tests/contract/test_dcp.py",
    "prune.opened": "tests/crash/test_prune_kill.py",
    **dict.fromkeys(("compact.opened", "compact.copied", "compact.before_commit", "compact.committed"), "tests/crash/test_compact_kill.py"),
}
"""Failpoints that are no part of a store's life, each with the test that strikes there."""


def test_every_failpoint_is_in_a_campaign() -> None:
    named = {
        name
        for path in (ROOT / "unbroken").rglob("*.py")
        for name in re.findall(r'failpoint\("([\w.]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 25, "the search lost the failpoints"
    assert named - crash_points.FAILPOINTS - set(OF_TRAINERS) == set(IN_OTHER_TESTS)
    for name, path in IN_OTHER_TESTS.items():
        assert name in (ROOT / path).read_text(encoding="utf-8")
    assert named >= crash_points.FAILPOINTS


def test_every_kind_has_a_part_in_the_short_campaign() -> None:
    assert {*COUNTS, "s3", "s3kill"} == set(SHARES)


@pytest.mark.parametrize("kind", COUNTS)
def test_I1_I2_I3_I9_nothing_acknowledged_is_lost_whatever_ends_the_writer(kind: str) -> None:
    if why := skipped(kind):
        (pytest.fail if os.environ.get("CI") and "install" in why else pytest.skip)(why)
    points = points_of(kind, COUNTS[kind], SEED)
    print(f"seed {SEED}: {points}")
    assert len(points) >= COUNTS[kind] * 2 // 3
    assert [f"python -m bench.crash --point {name}: {wrong}" for name, wrong in run(points) if wrong] == []


def test_I1_I2_I3_I9_nothing_acknowledged_is_lost_in_a_bucket_either(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    points = points_of("s3", 6, SEED) + points_of("s3kill", 2, SEED)
    print(f"seed {SEED}: {points}")
    assert [f"python -m bench.crash --point {name}: {wrong}" for name, wrong in run(points) if wrong] == []


@pytest.mark.parametrize("mutant", [name for name in MUTANTS if "fsync" in name])
def test_I1_a_store_that_does_not_sync_is_found_out(mutant: str) -> None:
    if why := powerloss.missing():
        (pytest.fail if os.environ.get("CI") and "install" in why else pytest.skip)(why)
    chance = random.Random(SEED)
    for _ in range(12):
        num_events = len(crash_points.trace("pruning", 0, mutant).events)
        if _alone(f"power/pruning/0/{chance.randint(num_events // 2, num_events)}/{chance.randrange(1 << 30)}", mutant):
            return
    pytest.fail("the campaign would not notice")


def test_I1_objects_that_are_written_in_place_are_found_out() -> None:
    names = [f"failpoint/pruning/0/store.create.part/{nth}" for nth in range(8, 20)]
    assert any(_alone(name, "written in place") for name in names)
    assert not any(_alone(name) for name in names[:3])
