"""Compacting: the same bits in fewer bytes; what it frees is worth it, and what it may not touch stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import unbroken
from tests.rigs.states import s, whole
from tests.rigs.store_run import (
    WRITER,
    CountedNonces,
    StillClock,
    Trainer,
    drifting,
    flipped,
    load,
    objects_of,
    opened,
    part,
    rank_state,
    start,
    state,
    steps,
    whole_value,
)
from unbroken.core.errors import Damaged, Fenced
from unbroken.core.ports import arm
from unbroken.core.records import Keep
from unbroken.store import paths
from unbroken.store.compact import Compactor, Plan, survey
from unbroken.store.deltas import Encoding
from unbroken.store.log import Log
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()
ALL = Keep(newest=1 << 62)


def differences(tier: MemoryTier, *steps: int, keep: int, milestone: int | None = None) -> Trainer:
    """Checkpoints as differences, each from the one before, of which the newest stay."""
    trainer = start(tier, encoding=Encoding(max_depth=9))
    for step in steps:
        trainer.save(step, logical=drifting(step), milestone=step == milestone)
    trainer.collect(keep)
    return trainer


def sharing(tier: MemoryTier, *, kept_floats: int, lost_floats: int) -> Trainer:
    """Step 2 needs `kept_floats` numbers of the pack of step 1, and nobody the rest."""
    trainer = start(tier)
    kept = state(7, kept_floats)[0]
    lost = part("/lost", bytes(state(1, lost_floats)[0].data))
    trainer.save(1, logical=[kept, *state(1)[1:], lost])
    trainer.save(2, logical=[kept, *state(7)[1:]])
    trainer.collect(1)
    return trainer


def compacted(tier: MemoryTier) -> Plan:
    """As `archive.compacting` does it, in memory."""
    repository = Repository.open(tier, nonces=CountedNonces("compact"))
    trainer = opened(repository, repository.visible()[-1], CountedNonces("compact 2"))
    plan = survey(tier, repository.log)
    nonces = CountedNonces("compact 3")
    Compactor(tier, repository.log, repository.holds, trainer.generation, writer=WRITER, clock=CLOCK, nonces=nonces).run(plan)
    repository.collect(ALL, writer=WRITER, clock=CLOCK)
    return plan


def content(tier: MemoryTier) -> dict[int, object]:
    """Everything that a reader gets of every checkpoint, and what the log says of it but for where it lies."""
    repository = Repository.open(tier)
    found: dict[int, object] = {}
    for c in repository.visible():
        ranks = {
            (stored.rank, stored.piece.pointer): data
            for manifest in repository.manifests(c)
            for stored, data in repository.read_pieces(manifest, manifest.pieces)
        }
        found[c.step] = (load(repository, c), ranks, c.state_root, c.milestone, c.journal_head, c.journal_lines, c.time, c.size_bytes)
    return found


def size(tier: MemoryTier) -> int:
    return sum(tier.size(path) for path in (*tier.list(paths.PACKS), *tier.list(paths.MANIFESTS)))


def assert_tidy(tier: MemoryTier) -> None:
    repository = Repository.open(tier)
    assert {*tier.list(paths.PACKS), *tier.list(paths.MANIFESTS)} == objects_of(repository, repository.visible())
    report = repository.verify()
    assert report.ok, report.bad


def test_I2_I3_a_pack_of_which_little_is_needed_is_written_anew_with_the_same_bits() -> None:
    tier = MemoryTier()
    sharing(tier, kept_floats=20_000, lost_floats=100_000)
    before, was = content(tier), size(tier)
    plan = compacted(tier)
    assert (len(plan.packs), len(plan.copied), plan.whole) == (1, 1, {})
    assert content(tier) == before
    assert size(tier) < was - 4 * 90_000
    assert_tidy(tier)
    assert compacted(tier).packs == {}, "there is nothing left to do"


def test_a_pack_of_which_most_is_needed_stays() -> None:
    tier = MemoryTier()
    sharing(tier, kept_floats=100_000, lost_floats=50_000)
    assert survey(tier, Log.open(tier)).packs == {}


def test_I2_I3_a_chain_that_leads_to_what_nobody_needs_otherwise_is_shortened() -> None:
    tier = MemoryTier()
    differences(tier, 1, 2, 3, 4, 5, 6, keep=2)
    assert [c.kind for c in Repository.open(tier).visible()] == ["incremental"] * 2
    before, was = content(tier), size(tier)
    plan = compacted(tier)
    assert len(plan.whole) == 1
    assert content(tier) == before
    assert [(c.step, c.kind) for c in Repository.open(tier).visible()] == [(5, "full"), (6, "incremental")]
    assert was - size(tier) > 4 * 4096
    assert_tidy(tier)
    trainer = start(tier, encoding=Encoding(max_depth=9))
    trainer.save(7, logical=drifting(7))
    assert load(trainer.repository, trainer.repository.visible()[-1])["/model/drift"] == bytes(drifting(7)[-1].data)
    assert [c.kind for c in Repository.open(tier).visible()] == ["full", "incremental", "incremental"]


def test_a_chain_stays_where_what_it_is_built_on_is_a_checkpoint_itself() -> None:
    tier = MemoryTier()
    differences(tier, 1, 2, 3, keep=1, milestone=1)
    assert steps(tier) == [1, 3]
    assert survey(tier, Log.open(tier)).whole == {}, "to store step 3 whole takes more than step 2 does"


def test_two_that_are_built_on_the_same_are_shortened_together_or_not_at_all() -> None:
    tier = MemoryTier()
    first = differences(tier, 1, 2, keep=9)
    first.save(3, logical=drifting(3))
    repository = Repository.open(tier, nonces=CountedNonces("again"))
    again = opened(repository, repository.visible()[1], CountedNonces("again 2"), encoding=Encoding(max_depth=9))
    again.save(4, logical=drifting(4))
    again.save(5, logical=drifting(6), milestone=True)
    again.collect(2)
    before = content(tier)
    plan = compacted(tier)
    assert content(tier) == before == {4: before[4], 5: before[5]}
    assert len(plan.whole) == 1, "step 4, on which step 5 is built"
    assert_tidy(tier)


def test_what_every_rank_has_of_its_own_is_kept() -> None:
    tier = MemoryTier()
    differences(tier, 1, 2, 3, 4, keep=1)
    compacted(tier)
    repository = Repository.open(tier)
    (manifest,) = repository.manifests(repository.visible()[-1])
    got = {one.rank: data for one, data in repository.read_pieces(manifest, manifest.pieces) if one.rank is not None}
    assert got == {rank: bytes(rank_state(4, rank)[0].data) for rank in range(2)}


def test_I3_what_is_damaged_is_not_copied_and_nothing_changes() -> None:
    tier = MemoryTier()
    sharing(tier, kept_floats=20_000, lost_floats=100_000)
    ((_, ref),) = survey(tier, Log.open(tier)).copied.items()
    hurt = flipped(tier, ref.pack, ref.offset + 5)
    before = {*hurt.list(paths.PACKS), *hurt.list(paths.MANIFESTS)}
    with pytest.raises(Damaged):
        compacted(hurt)
    assert {*hurt.list(paths.PACKS), *hurt.list(paths.MANIFESTS)} == before


def test_I6_who_has_been_fenced_commits_nothing_again() -> None:
    tier = MemoryTier()
    differences(tier, 1, 2, 3, keep=1)
    before, commits = content(tier), Log.open(tier).state.commits
    arm("compact.before_commit", lambda: start(tier) and None)
    try:
        with pytest.raises(Fenced, match="generation 2"):
            compacted(tier)
    finally:
        arm("compact.before_commit", None)
    assert content(tier) == before and Log.open(tier).state.commits == commits
    start(tier).collect(9)
    assert_tidy(tier)


def test_a_condemned_pack_is_named_by_no_new_manifest() -> None:
    tier = MemoryTier()
    trainer = differences(tier, 1, 2, 3, 4, keep=2)
    newest = trainer.repository.visible()[-1]
    bad = [*objects_of(trainer.repository, [newest])]
    trainer.repository.condemn(4, newest.generation, bad, "damaged", writer=WRITER, clock=CLOCK)
    assert [one.commit.step for one in survey(tier, Log.open(tier)).held] == []
    assert survey(tier, Log.open(tier)).packs == {}


def test_I2_what_a_branch_needs_stays_where_it_is(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    trainer = start(tier, encoding=Encoding(max_depth=9))
    for step in (1, 2, 3):
        trainer.save(step, logical=drifting(step))
    unbroken.open(tmp_path).branch(2, "hot")
    trainer.save(4, logical=drifting(4))
    trainer.collect(1)
    needed = objects_of(Repository.open(tier, "hot"), Repository.open(tier, "hot").visible())
    made = unbroken.open(tmp_path).compact()
    assert needed <= {*tier.list(paths.PACKS), *tier.list(paths.MANIFESTS)}
    assert made.num_whole == 0, "what it stands on is the branch's, too, so nothing would be freed"
    for lineage, step in (("main", 4), ("hot", 2)):
        repository = Repository.open(tier, lineage)
        assert whole_value(load(repository, repository.visible()[-1])) == step
        assert repository.verify().ok


@pytest.mark.parametrize("read", ["newest", "step"])
def test_B13_c_a_reader_finds_the_bits_in_the_new_files_when_the_old_ones_go_meanwhile(tmp_path: Path, read: str) -> None:
    tier = DiskTier(str(tmp_path))
    trainer = start(tier, encoding=Encoding(max_depth=9))
    for step in (1, 2, 3, 4):
        trainer.save(step, logical=drifting(step))
    trainer.collect(1)
    from unbroken.archive import reading

    repository = Repository.open(tier)
    compact_now: list[Callable[[], object]] = [unbroken.open(tmp_path).compact]

    def use(commit):  # type: ignore[no-untyped-def]
        if compact_now:
            compact_now.pop()()
        return whole_value(load(repository, commit))

    found = reading.newest_good(repository, use) if read == "newest" else reading.exactly(repository, 4, use)
    assert (found.value, found.passed_over, compact_now) == (4, (), [])


def test_a_store_goes_on_after_a_compacting_and_its_folder_certifies_nothing_less(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=2) as store:
        for k in range(1, 5):
            store.save(k, s(k) | {"frozen": bytes(200_000), "large": bytes([k]) * 900_000})
        store.save(5, s(5) | {"frozen": bytes(200_000)})
        store.save(6, s(6) | {"frozen": bytes(200_000)})
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    foreseen = unbroken.open(tmp_path).compact(dry_run=True)
    made = unbroken.open(tmp_path).compact()
    assert (made.num_packs, made.steps) == (foreseen.num_packs, foreseen.steps) == (1, [5, 6])
    assert before - sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 800_000
    assert abs(made.freed_bytes - foreseen.freed_bytes) < 20_000
    assert unbroken.open(tmp_path).compact().num_packs == 0
    with unbroken.Store(tmp_path, keep=2) as store:
        assert whole(store.load()) == 6
        store.save(7, s(7))
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [6, 7]
    assert unbroken.open(tmp_path).verify().ok
