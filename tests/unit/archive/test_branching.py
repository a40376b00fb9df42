"""Branches: a history of its own on shared bytes; what is cut off is not there; nobody deletes what another lineage stands on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.store_run import WRITER, StillClock, load, objects_of, start, steps, whole_value
from tests.rigs.synthetic_run import interrupted
from unbroken.archive.branching import Branch, list_lineages, make_branch
from unbroken.core.errors import Damaged, Fenced, NoCheckpoint, Refused
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import BranchEntry
from unbroken.proof.certify import certify
from unbroken.store import paths
from unbroken.store.lease import WriterLease
from unbroken.store.log import Log
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


class Struck(Exception):
    """An error that no code of ours expects."""


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    """A run with the checkpoints 1, 2, 3."""
    made = DiskTier(str(tmp_path / "run"))
    trainer = start(made, nonces=SystemNonces())
    for step in (1, 2, 3):
        trainer.save(step)
    return made


def branch(tier: DiskTier, step: int, name: str, settings: dict[str, Any] | None = None, parent: str = "main") -> Branch:
    return make_branch(Repository.open(tier, parent), tier, step, name, settings or {}, clock=SystemClock(), nonces=SystemNonces())


def names(tier: DiskTier) -> list[str]:
    return [one.name for one in list_lineages(tier)]


def assert_whole(tier: DiskTier, *lineages: str) -> None:
    """Every checkpoint of these lineages reads whole, and nothing else lies in the folder."""
    needed: set[str] = set()
    for lineage in lineages:
        repository = Repository.open(tier, lineage)
        needed |= objects_of(repository, repository.visible())
        assert [whole_value(load(repository, commit)) for commit in repository.visible()] == steps(tier, lineage)
        report = repository.verify()
        assert report.ok, report.bad
    assert needed == {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)}


@pytest.fixture
def strike() -> Any:
    """Arms a failpoint with an action; disarmed at the end."""
    armed: list[str] = []

    def at(place: str, act: Callable[[], None]) -> None:
        armed.append(place)
        arm(place, act)

    yield at
    for place in armed:
        arm(place, None)


def test_a_branch_begins_with_the_very_state_and_no_byte_is_copied(tier: DiskTier) -> None:
    packs, root = tier.list(paths.PACKS), Repository.open(tier).visible()[1].state_root
    made = branch(tier, 2, "hot")
    assert (made.lineage, made.parent, made.step, made.generation, made.root, made.changes) == ("hot", "main", 2, 0, root, [])
    assert tier.list(paths.PACKS) == packs
    assert (steps(tier), steps(tier, "hot")) == ([1, 2, 3], [2])
    assert_whole(tier, "main", "hot")


def test_the_first_entry_names_the_parent(tier: DiskTier) -> None:
    branch(tier, 2, "hot")
    seen: list[Any] = []
    Log.open(tier, "hot").audit(lambda line: seen.append(line.entry))
    assert isinstance(seen[0], BranchEntry)
    assert (seen[0].parent, seen[0].step, seen[0].generation) == ("main", 2, 0)


def test_both_go_on_by_themselves(tier: DiskTier) -> None:
    branch(tier, 2, "hot")
    hot, main = start(tier, nonces=SystemNonces(), lineage="hot"), start(tier, nonces=SystemNonces())
    for step in (3, 4, 5):
        hot.save(step)
        main.save(step + 1)
        hot.collect(2)
        main.collect(2)
    assert (steps(tier), steps(tier, "hot")) == ([5, 6], [4, 5])
    assert_whole(tier, "main", "hot")


def test_B10_I2_what_a_branch_stands_on_outlives_its_lineage_and_goes_with_the_last_that_needs_it(tier: DiskTier) -> None:
    branch(tier, 1, "hot")
    main = start(tier, nonces=SystemNonces())
    for step in (4, 5):
        main.save(step)
        main.collect(1)
    assert (steps(tier), steps(tier, "hot")) == ([5], [1])
    assert_whole(tier, "main", "hot")
    hot = start(tier, nonces=SystemNonces(), lineage="hot")
    hot.save(2)
    hot.collect(1)
    main.collect(1)
    assert_whole(tier, "main", "hot")


def test_a_branch_of_a_branch(tier: DiskTier) -> None:
    branch(tier, 2, "hot")
    hot = start(tier, nonces=SystemNonces(), lineage="hot")
    hot.save(3)
    branch(tier, 3, "hotter", parent="hot")
    hot.save(4)
    hot.collect(1)
    main = start(tier, nonces=SystemNonces())
    main.save(7)
    main.collect(1)
    assert (steps(tier), steps(tier, "hot"), steps(tier, "hotter")) == ([7], [4], [3])
    assert_whole(tier, "main", "hot", "hotter")
    assert [(one.name, one.parent, one.base_step, one.newest) for one in list_lineages(tier)] == [
        ("main", "", 0, 7),
        ("hot", "main", 2, 4),
        ("hotter", "hot", 3, 3),
    ]


@pytest.mark.parametrize("name", ["main", "7", "", "a/b", "../x", ".hidden", "-x", "a" * 65, "a b", "ä"])
def test_a_name_that_no_lineage_may_have_is_refused(tier: DiskTier, name: str) -> None:
    before = tier.list("")
    with pytest.raises(ValueError, match="lineage"):
        branch(tier, 2, name)
    assert tier.list("") == before


def test_a_name_is_used_once(tier: DiskTier) -> None:
    branch(tier, 2, "hot")
    before = tier.list("")
    with pytest.raises(Refused, match="lineage 'hot' exists"):
        branch(tier, 3, "hot")
    assert tier.list("") == before


def test_a_step_that_is_not_there_is_named_with_those_that_are(tier: DiskTier) -> None:
    before = tier.list("")
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 9; there are 1, 2, 3"):
        branch(tier, 9, "hot")
    assert tier.list("") == before


def test_a_damaged_base_is_refused(tier: DiskTier, tmp_path: Path) -> None:
    for path in tier.list(paths.PACKS):
        (tmp_path / "run" / path).unlink()
    with pytest.raises(Damaged, match="missing"):
        branch(tier, 2, "hot")
    assert names(tier) == ["main"]


def test_B12_while_another_process_makes_it_the_name_is_taken(tier: DiskTier) -> None:
    lease = WriterLease.acquire(tier.root, WRITER, "hot")  # of another host, which may still live
    (Path(tier.root) / "runs/hot/writer.json").write_text('{"host":"elsewhere","pid":1,"boot_id":"x","since":"now"}')
    lease._fd = -1
    with pytest.raises(Fenced, match="process 1 on elsewhere"):
        branch(tier, 2, "hot")
    assert names(tier) == ["main"]


PLACES = ["branch.pinned", "store.write.after_packs", "store.write.after_manifest", "store.journal.before_append", "branch.before_commit"]


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_leaves_nothing_visible_and_the_name_free(tier: DiskTier, strike: Any, place: str) -> None:
    def fail() -> None:
        raise Struck

    strike(place, fail)
    with pytest.raises(Struck):
        branch(tier, 2, "hot")
    arm(place, None)
    assert names(tier) == ["main"]
    with pytest.raises(NoCheckpoint, match="lineage 'hot' was cut off while it was made: make it again"):
        Repository.open(tier, "hot")
    assert steps(tier) == [1, 2, 3]
    main = start(tier, nonces=SystemNonces())
    main.save(4)
    main.collect(1)  # the cut-off branch still keeps its base
    branch_base = Log.open(tier, "hot").state.branch
    assert isinstance(branch_base, BranchEntry)
    assert {ref.path for ref in branch_base.manifests} <= set(tier.list(paths.MANIFESTS))
    made = branch(tier, 4, "hot")
    assert (made.step, steps(tier, "hot")) == (4, [4])
    main.save(5)
    main.collect(1)
    start(tier, nonces=SystemNonces(), lineage="hot").collect(1)
    assert_whole(tier, "main", "hot")


def test_I2_a_base_that_is_removed_before_the_branch_is_seen_is_refused(tier: DiskTier, strike: Any) -> None:
    """The collector has withdrawn and looked before the branch entry was there; the branch looks again and sees it."""
    main = start(tier, nonces=SystemNonces())
    main.save(4)
    acts = [lambda: main.collect(1)]
    strike("store.log.before_create", lambda: acts.pop()() if acts else None)
    with pytest.raises(NoCheckpoint, match="the checkpoint of step 2 was removed while it was branched from"):
        branch(tier, 2, "hot")
    assert names(tier) == ["main"]
    assert_whole(tier, "main")


def test_I2_a_branch_that_is_seen_by_the_collector_keeps_its_base(tier: DiskTier, strike: Any) -> None:
    """The branch entry comes between the collector's withdrawal and its look: whoever is second sees the first."""
    main = start(tier, nonces=SystemNonces())
    main.save(4)
    source = Repository.open(tier)
    acts = [lambda: Log.open(tier, "hot").append(_entry(source, 2), writer=WRITER, clock=StillClock(), check=lambda state: None)]
    strike("store.collect.after_prune", lambda: acts.pop()() if acts else None)
    main.collect(1)
    pinned = Log.open(tier, "hot").state.branch
    assert isinstance(pinned, BranchEntry)
    assert steps(tier) == [4]
    for ref in pinned.manifests:
        assert tier.size(ref.path) == ref.size_bytes


def _entry(source: Repository, step: int) -> BranchEntry:
    base = next(c for c in source.visible() if c.step == step)
    return BranchEntry(parent="main", step=step, generation=base.generation, state_root=base.state_root, manifests=base.manifests)


def test_I2_where_another_log_cannot_be_read_nothing_is_deleted(tier: DiskTier, tmp_path: Path) -> None:
    branch(tier, 1, "hot")
    entry = tmp_path / "run" / paths.log_entry("hot", 1)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-40])
    main = start(tier, nonces=SystemNonces())
    main.save(4)
    before = {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)}
    with pytest.raises(Damaged, match=r"lineage hot: it may need what would be deleted, and its log cannot be read: .*00000001.json"):
        main.collect(1)
    assert {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)} == before
    assert steps(tier) == [4], "withdrawn it is"
    entry.write_bytes(whole)
    main.collect(1)
    assert_whole(tier, "main", "hot")


def test_I3_a_pack_condemned_in_one_lineage_is_not_used_again_in_another(tier: DiskTier) -> None:
    branch(tier, 3, "hot")
    main, hot = start(tier, nonces=SystemNonces()), start(tier, nonces=SystemNonces(), lineage="hot")
    last = Repository.open(tier).visible()[-1]
    packs = objects_of(main.repository, [last]) - {ref.path for ref in last.manifests}
    main.repository.condemn(last.step, last.generation, packs, "a test", writer=WRITER, clock=StillClock())
    hot.save(4, value=3)
    used = objects_of(hot.repository, [c for c in hot.repository.visible() if c.step == 4])
    assert not used & packs


def test_the_manifests_of_another_lineage_are_no_lost_commits(tier: DiskTier) -> None:
    from unbroken.archive.reading import newest_good

    branch(tier, 2, "hot")
    hot = start(tier, nonces=SystemNonces(), lineage="hot")
    hot.save(9)
    main = Repository.open(tier)
    assert newest_good(main, lambda commit: whole_value(load(main, commit))).passed_over == ()
    hot.write(10)  # and one that nobody commits is told where it belongs only
    assert newest_good(main, lambda commit: 0).passed_over == ()
    mine = Repository.open(tier, "hot")
    assert [bad.step for bad in newest_good(mine, lambda commit: 0).passed_over] == [10]


def test_the_certificate_tells_the_branch_and_proves_the_steps_before_it(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    run = interrupted(tier)
    assert run.step == 12
    branch(tier, 9, "again")
    found = certify(tier, "again")
    assert (found.certified, found.problems, found.final_step, found.steps) == (True, [], 9, 9)
    assert [(b.lineage, b.parent, b.step, b.generation, b.changes) for b in found.branches] == [("again", "main", 9, 1, [])]
    against = certify(tier, "again", against=tier)
    assert against.grade == "exact", against.problems


def test_I3_a_branch_on_a_root_that_its_parent_never_had_is_not_certified(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    interrupted(tier)
    branch(tier, 9, "again")
    journal = Path(tmp_path) / paths.journal("main", 1)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]))
    found = certify(tier, "again")
    assert not found.certified
    assert any("lineage main" in problem for problem in found.problems)
