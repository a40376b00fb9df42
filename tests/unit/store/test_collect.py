"""Retention and collection: nothing reachable goes, everything else does, in the reverse of write order (I2)."""

from __future__ import annotations

import pytest

from tests.rigs.store_run import (
    WRITER,
    CountedNonces,
    StillClock,
    Trainer,
    load,
    newest_good,
    objects_of,
    opened,
    rank_state,
    start,
    state,
    steps,
    whole_value,
)
from unbroken.core.errors import Fenced, Transient
from unbroken.core.records import CommitEntry, Generation, Keep, LogState
from unbroken.store import paths
from unbroken.store.collect import withdrawn
from unbroken.store.layout import Part
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


class Noting(MemoryTier):
    """Keeps the order of what changed; `fail` makes deletes of these paths fail once each."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.fail: set[str] = set()

    def create(self, path: str, parts):  # type: ignore[no-untyped-def]
        size = super().create(path, parts)
        self.order.append(f"create {path}")
        return size

    def delete(self, path: str) -> None:
        if path in self.fail:
            self.fail.remove(path)
            raise Transient(f"{path}: busy")
        super().delete(path)
        self.order.append(f"delete {path}")


def stored(tier: MemoryTier) -> set[str]:
    return {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)}


def assert_tidy(tier: MemoryTier) -> None:
    """Every stored object is needed by a visible checkpoint, every visible checkpoint is whole, and the run verifies."""
    repository = Repository.open(tier)
    assert stored(tier) == objects_of(repository, repository.visible())
    for commit in repository.visible():
        whole_value(load(repository, commit))
    report = repository.verify()
    assert report.ok, report.bad


def test_the_newest_are_kept_after_every_save() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    counts = []
    for step in range(10, 70, 10):
        trainer.save(step)
        trainer.collect(3)
        counts.append(len(steps(tier)))
        assert_tidy(tier)
    assert (counts, steps(tier)) == ([1, 2, 3, 3, 3, 3], [40, 50, 60])


@pytest.mark.parametrize(
    ("keep", "reach_back", "kept"),
    [
        (1, 0, {50}),
        (1, 10, {40, 50}),
        (1, 15, {30, 50}),
        (1, 40, {10, 50}),
        (1, 99, {10, 50}),
        (3, 10, {30, 40, 50}),
        (3, 30, {20, 30, 40, 50}),
    ],
)
def test_B38_one_that_a_rollback_may_need_is_kept_besides(keep: int, reach_back: int, kept: set[int]) -> None:
    tier = MemoryTier()
    trainer = start(tier)
    for step in range(10, 60, 10):
        trainer.save(step)
    state = trainer.repository.log.state
    gone = withdrawn(state, Keep(newest=keep, reach_back=reach_back), {}, {})
    assert {commit.step for commit in state.commits} - {commit.step for commit in gone} == kept


def test_milestones_are_kept_besides() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    for step in range(10, 70, 10):
        trainer.save(step, milestone=step == 20)
    gone = trainer.collect(2)
    assert steps(tier) == [20, 50, 60]
    assert len(gone) == 6
    assert_tidy(tier)


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int) -> None:
    trainer = start(MemoryTier())
    with pytest.raises(ValueError, match="at least one"):
        trainer.collect(keep)


def test_I2_the_order_is_prune_entry_then_manifests_then_packs() -> None:
    tier = Noting()
    trainer = start(tier)
    for step in (10, 20, 30):
        trainer.save(step)
    tier.order.clear()
    trainer.collect(1)
    kinds = [line.split("/")[0] for line in tier.order]
    assert kinds == ["create runs", "delete manifests", "delete manifests", "delete packs", "delete packs"]


def test_I2_a_pack_stays_while_a_kept_checkpoint_shares_a_chunk_of_it() -> None:
    tier = MemoryTier()
    trainer = start(tier, num_floats=50_000)
    trainer.save(10)
    trainer.save(20, logical=[state(10, 50_000)[0], *state(20)[1:]])
    trainer.collect(1)
    assert len(tier.list(paths.PACKS)) == 2
    (commit,) = Repository.open(tier).visible()
    assert commit.step == 20
    load(Repository.open(tier), commit)
    assert Repository.open(tier).verify().ok


def test_I2_a_written_snapshot_that_waits_for_its_commit_is_kept_with_all_it_borrows() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    waiting = trainer.write(30, value=10)
    trainer.collect(1)
    assert steps(tier) == [10, 20]
    commit = trainer.repository.commit(
        manifests=[waiting],
        milestone=False,
        journal_head=trainer.journal.head,
        journal_lines=trainer.journal.num_lines,
        writer=WRITER,
        clock=CLOCK,
    )
    trainer.collect(1)
    assert steps(tier) == [30]
    assert whole_value(load(Repository.open(tier), commit)) == 10
    assert_tidy(tier)


def test_a_snapshot_that_a_later_commit_passed_over_is_removed_and_refused() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    waiting = trainer.write(10)
    trainer.save(20)
    trainer.collect(1)
    assert_tidy(tier)
    with pytest.raises(Transient):
        trainer.repository.commit(manifests=[waiting], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=CLOCK)


def test_I2_during_a_write_in_another_thread_nothing_it_may_borrow_goes() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)

    class Parts(list[Part]):
        """A state that is asked for in the middle of the write."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            trainer.collect(1)
            return super().__iter__()

    written = trainer.write(30, logical=Parts(state(10)))
    assert steps(tier) == [10, 20]
    trainer.repository.commit(
        manifests=[written],
        milestone=False,
        journal_head=trainer.journal.head,
        journal_lines=trainer.journal.num_lines,
        writer=WRITER,
        clock=CLOCK,
    )
    trainer.collect(1)
    assert_tidy(tier)


def test_the_base_of_a_new_generation_stays_until_it_has_checkpoints_of_its_own() -> None:
    tier = MemoryTier()
    first = start(tier)
    for step in (10, 20, 30):
        first.save(step)
    repository = Repository.open(tier, nonces=CountedNonces("again"))
    trainer = opened(repository, repository.visible()[0], CountedNonces("again 2"))
    trainer.collect(1)
    assert steps(tier) == [10]
    assert_tidy(tier)
    trainer.save(15)
    trainer.collect(1)
    assert steps(tier) == [15]


def test_what_a_dead_generation_left_unfinished_goes() -> None:
    tier = MemoryTier()
    dead = start(tier)
    dead.save(10)
    dead.write(20)
    trainer = start(tier)
    assert len(trainer.collect(3)) == 2
    assert_tidy(tier)


def test_I2_what_a_lost_log_entry_named_is_not_taken_for_a_leftover() -> None:
    """Put the entry back and the checkpoint is there again."""
    tier = MemoryTier()
    first = start(tier)
    for step in (10, 20):
        first.save(step)
    entry = paths.log_entry("main", first.repository.log.head)
    raw = tier.read(entry)
    first.save(30)
    tier.delete(entry)
    second = start(tier)
    assert second.repository.log.damage
    for step in range(40, 80, 10):
        second.save(step)
        second.collect(keep_newest=2)
    tier.create(entry, [raw])
    repository = Repository.open(tier)
    assert [commit.step for commit in repository.log.state.commits] == [20, 60, 70]
    assert repository.verify().ok


def test_I6_what_a_newer_writer_is_writing_is_not_touched() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    node = Trainer(Repository.open(tier, nonces=CountedNonces("node")), trainer.generation)
    written = node.write(30)
    trainer.collect(1)
    assert steps(tier) == [20]
    node.repository.commit(manifests=[written], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=CLOCK)
    assert steps(tier) == [20, 30]
    assert whole_value(load(Repository.open(tier), Repository.open(tier).visible()[-1])) == 30


def test_I6_only_the_writer_of_the_newest_generation_collects() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    with pytest.raises(Fenced, match="has opened no generation"):
        Repository.open(tier).collect(Keep(newest=1), writer=WRITER, clock=CLOCK)
    start(tier)
    before = tier.snapshot()
    with pytest.raises(Fenced, match="opened generation 0"):
        trainer.collect(1)
    assert tier.snapshot() == before


def test_another_history_before_a_fresh_start_is_left_alone() -> None:
    tier = MemoryTier()
    other = start(tier)
    for step in (500, 600, 700):
        other.save(step)
    repository = Repository.open(tier, nonces=CountedNonces("anew"))
    trainer = opened(repository, None, CountedNonces("anew 2"))
    for step in (100, 200, 300, 400):
        trainer.save(step)
        assert steps(tier)[-1] == step
        trainer.collect(3)
    assert steps(tier) == [200, 300, 400]
    assert newest_good(Repository.open(tier))[0].step == 400
    assert len(tier.list(paths.MANIFESTS)) == 6
    assert Repository.open(tier).verify().ok


def test_a_condemned_checkpoint_stays_for_a_grace_and_then_goes() -> None:
    tier = MemoryTier()
    first = start(tier)
    for step in (10, 20):
        first.save(step)
    bad = Repository.open(tier).visible()[-1]
    repository = Repository.open(tier, nonces=CountedNonces("again"))
    doomed = objects_of(repository, [bad]) - objects_of(repository, repository.visible()[:1])
    repository.condemn(20, 0, doomed, "damaged", writer=WRITER, clock=CLOCK)
    trainer = opened(repository, repository.visible()[-1], CountedNonces("again 2"))
    assert trainer.collect(3) == []
    trainer.save(20)
    assert set(trainer.collect(3)) == doomed
    assert_tidy(tier)
    assert [(c.step, c.generation) for c in Repository.open(tier).log.state.condemned] == [(20, 0)]


def test_a_delete_that_fails_is_tried_again_and_training_goes_on() -> None:
    tier = Noting()
    trainer = start(tier)
    trainer.save(10)
    tier.fail = stored(tier)
    trainer.save(20)
    assert trainer.collect(1) == []
    assert steps(tier) == [20]
    trainer.collect(1)
    assert_tidy(tier)


def test_a_prune_that_was_not_followed_by_deletes_is_completed_by_the_next_generation() -> None:
    tier = Noting()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    tier.fail = stored(tier) - objects_of(trainer.repository, trainer.repository.visible()[-1:])
    assert trainer.collect(1) == []
    start(tier).collect(1)
    assert_tidy(tier)


def test_I2_while_a_kept_manifest_cannot_be_read_no_pack_goes() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10, milestone=True)
    trainer.save(20)
    trainer.save(30)
    milestone = trainer.repository.visible()[0]
    packs = set(tier.list(paths.PACKS))
    tier.delete(milestone.manifests[0].path)
    again = start(tier)
    gone = again.collect(1)
    assert gone != []
    assert set(tier.list(paths.PACKS)) == packs


def test_paths_that_lead_elsewhere_are_never_deleted() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.repository.condemn(10, 0, ["run.json", "runs/main/log/00000000.json", "../../x"], "hostile", writer=WRITER, clock=CLOCK)
    trainer.save(20)
    trainer.collect(1)
    assert_tidy(tier)


def test_two_nodes_of_a_generation_do_not_lose_a_commit_that_shares_what_is_pruned() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    node = Trainer(Repository.open(tier, nonces=CountedNonces("node")), trainer.generation)
    written = node.write(30, value=10, logical=state(10))
    trainer.collect(1)
    with pytest.raises(Transient, match="reuses chunks of step 10"):
        node.repository.commit(manifests=[written], milestone=False, journal_head="", journal_lines=0, writer=WRITER, clock=CLOCK)
    assert steps(tier) == [20]


def test_withdrawn_says_what_goes() -> None:
    def commit(step: int, generation: int, milestone: bool = False) -> CommitEntry:
        return CommitEntry(
            step=step,
            generation=generation,
            milestone=milestone,
            manifests=(),
            state_root="0" * 64,
            size_bytes=0,
            journal_head="",
            journal_lines=0,
        )

    def generation(number: int, parent: int | None, base_step: int) -> Generation:
        return Generation(number=number, parent=parent, base_step=base_step, nonce=str(number), world_size=1)

    log = LogState(
        generations=(generation(0, None, 0), generation(1, None, 0), generation(2, 1, 20)),
        commits=(commit(5, 0), commit(10, 1, True), commit(20, 1), commit(30, 1), commit(30, 2), commit(40, 2)),
    )

    def going(keep: int, borrowed: set[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(c.step, c.generation) for c in withdrawn(log, Keep(newest=keep), {}, dict.fromkeys(borrowed, "needed"))]

    assert going(1, set()) == [(20, 1), (30, 1), (30, 2)]
    assert going(2, {(20, 1)}) == [(30, 1)]
    assert going(9, set()) == [(30, 1)]


def test_the_state_of_ranks_goes_and_stays_with_its_checkpoint() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20)
    trainer.collect(1)
    repository = Repository.open(tier)
    (manifest,) = repository.manifests(repository.visible()[-1])
    got = {s.rank: data for s, data in repository.read_pieces(manifest, manifest.pieces) if s.rank is not None}
    assert got == {rank: bytes(rank_state(20, rank)[0].data) for rank in range(2)}
