"""Files of format 1 as they were first written: they must stay readable, and are still written the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.rigs.golden_run import FACTS, write
from tests.rigs.store_run import load, start, whole_value
from unbroken.core.records import BeginRecord, EventRecord, RootRecord, StepRecord
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

OLD = Path(__file__).parent / "v1" / "run"
"""As format 1 was first written: entries without the fields that came later."""

RUN = Path(__file__).parent / "v1b" / "run"
"""As this version writes it."""

BOTH = pytest.mark.parametrize("run", [OLD, RUN], ids=["v1", "v1b"])
ROOTS = {
    (2, 0): "a1d29554b3b0d452e0aa656369931bbbe1c024cbc3e030c615683751a8d1ce74",
    (3, 1): "a5570e17cdbed4d52c115a26ae8daf758408413dfffd8c1b0c2527490e36ca04",
}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@BOTH
def test_the_golden_run_reads_with_its_exact_roots(run: Path) -> None:
    repository = Repository.open(DiskTier(str(run)))
    assert repository.facts == FACTS
    assert {(c.step, c.generation): c.state_root for c in repository.visible()} == ROOTS
    assert [whole_value(load(repository, c)) for c in repository.visible()] == [2, 3]
    assert [c.milestone for c in repository.visible()] == [True, False]
    assert [(c.step, c.generation, c.reason) for c in repository.log.state.condemned] == [(3, 0, "a golden example")]
    assert repository.log.state.pruned == ((1, 0),)


@BOTH
def test_the_golden_run_verifies(run: Path) -> None:
    report = Repository.open(DiskTier(str(run))).verify()
    assert (report.ok, report.bad, report.num_checkpoints, report.num_chunks) == (True, [], 2, 2)


@BOTH
def test_the_golden_journals_read_in_order(run: Path) -> None:
    tier = DiskTier(str(run))
    kinds = [
        [type(line.record) for line in read_journal(tier, "main", g.number, g.nonce)] for g in Repository.open(tier).log.state.generations
    ]
    assert kinds == [[StepRecord, RootRecord] * 3, [BeginRecord, EventRecord, RootRecord]]


def test_this_version_writes_the_same_bytes(tmp_path: Path) -> None:
    write(str(tmp_path / "run"))
    written, golden = tree(tmp_path / "run"), tree(RUN)
    assert written.keys() == golden.keys()
    assert [path for path in golden if written[path] != golden[path]] == []


@BOTH
def test_a_golden_run_can_be_gone_on_with(tmp_path: Path, run: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    tier = DiskTier(str(tmp_path / "run"))
    trainer = start(tier)
    trainer.save(4)
    trainer.collect(3)
    assert [c.step for c in Repository.open(tier).visible()] == [2, 3, 4]
    assert Repository.open(tier).verify().ok


@BOTH
def test_the_golden_files_are_small(run: Path) -> None:
    assert [path for path, raw in tree(run).items() if len(raw) >= 10_000] == []
    assert tree(run).keys() == tree(RUN).keys()
