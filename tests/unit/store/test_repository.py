"""The repository: what is visible, when, and who may change it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from tests.rigs.growth import assert_grows
from tests.rigs.memory import at_most
from tests.rigs.store_run import (
    FACTS,
    WRITER,
    CountedNonces,
    StillClock,
    Trainer,
    flipped,
    load,
    manifest_of,
    newest_good,
    objects_of,
    opened,
    part,
    rank_state,
    start,
    state,
    steps,
    whole_value,
    with_objects,
)
from unbroken.core.errors import Damaged, Fenced, ForeignFolder, NewerFormat, NoCheckpoint, Permanent, Transient
from unbroken.core.ports import Buffer, arm
from unbroken.core.records import CommitEntry, Manifest, ManifestRef
from unbroken.store.journal import first_chain
from unbroken.store.repository import Repository
from unbroken.store.sealed import seal
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


def new_packs(repository: Repository, newer: CommitEntry, older: CommitEntry) -> list[str]:
    return sorted(p for p in objects_of(repository, [newer]) - objects_of(repository, [older]) if p.startswith("packs/"))


def test_an_empty_place_holds_no_run() -> None:
    tier = MemoryTier()
    assert Repository.exists(tier) is False
    with pytest.raises(NoCheckpoint, match="missing or empty"):
        Repository.open(tier)


def test_a_new_run_is_found_again_with_its_facts() -> None:
    tier = MemoryTier()
    Repository.create(tier, FACTS)
    assert Repository.exists(tier) is True
    repository = Repository.open(tier)
    assert (repository.facts, repository.visible(), repository.lineage) == (FACTS, (), "main")


def test_whether_a_run_is_here_costs_no_walk_over_its_folder(tmp_path: Path) -> None:
    class Unlisted(DiskTier):
        def list(self, prefix: str) -> list[str]:
            raise AssertionError("run.json says it all")

    Repository.create(DiskTier(str(tmp_path)), FACTS)
    assert Repository.exists(Unlisted(str(tmp_path))) is True


def test_what_a_writer_leaves_before_the_run_exists_is_not_foreign() -> None:
    assert Repository.exists(MemoryTier((("writer.json", b"{}"), ("agent.log", b""), (".gitkeep", b"")))) is False


def test_a_foreign_folder_is_refused() -> None:
    tier = MemoryTier((("thesis.tex", b"x"),))
    for act in (lambda: Repository.exists(tier), lambda: Repository.open(tier), lambda: Repository.create(tier, FACTS)):
        with pytest.raises(ForeignFolder, match=r"thesis\.tex"):
            act()
    assert len(tier.snapshot()) == 1


def test_I10_a_run_that_lost_its_run_json_is_damaged_not_new() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    lost = with_objects(tier, {"run.json": None})
    for act in (lambda: Repository.exists(lost), lambda: Repository.open(lost), lambda: Repository.create(lost, FACTS)):
        with pytest.raises(Damaged, match=r"run\.json: missing"):
            act()


def test_a_second_create_is_refused_and_changes_nothing() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    before = tier.snapshot()
    with pytest.raises(Fenced, match="a run is here already"):
        Repository.create(tier, msgspec.structs.replace(FACTS, run_id="other"))
    assert tier.snapshot() == before


def test_damaged_and_newer_facts_are_said_so() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    with pytest.raises(Damaged, match=r"run\.json"):
        Repository.open(flipped(tier, "run.json", 150))
    newer = seal("run", FACTS).replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99')
    with pytest.raises(NewerFormat):
        Repository.open(with_objects(tier, {"run.json": newer}))


def test_a_commit_reads_back_whole_with_its_roots() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    commit = trainer.save(10, milestone=True)
    repository = Repository.open(tier)
    assert repository.visible() == (commit,)
    manifest = manifest_of(repository, commit)
    assert whole_value(load(repository, commit)) == 10
    assert {s.rank: data for s, data in repository.read_pieces(manifest, manifest.pieces) if s.rank is not None} == {
        rank: bytes(rank_state(10, rank)[0].data) for rank in range(2)
    }
    assert (commit.milestone, commit.state_root, commit.journal_lines) == (True, manifest.state_root, 1)
    assert commit.size_bytes == sum(s.size_bytes for s in manifest.pieces) == 4 * 1007 + 8 + 2 * 16


def test_I1_nothing_is_visible_before_the_log_entry_whatever_was_written() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.write(20)
    assert steps(tier) == [10]
    assert len(tier.list("manifests")) == 2


def test_I1_everything_a_commit_names_was_created_before_it() -> None:
    order: list[str] = []

    class Noting(MemoryTier):
        def create(self, path: str, parts: Iterable[Buffer]) -> int:
            size = super().create(path, parts)
            order.append(path)
            return size

        def append(self, path: str, data: Buffer) -> None:
            super().append(path, data)
            order.append(path)

    trainer = start(Noting())
    order.clear()
    commit = trainer.save(10)
    kinds = [path.split("/")[0] if not path.startswith("runs") else path.split("/")[2] for path in order]
    assert kinds == ["packs", "manifests", "journal", "log"]
    assert set(order[:2]) == objects_of(trainer.repository, [commit])


def test_I1_the_roots_are_those_of_the_pieces_whatever_the_order_and_the_ranks() -> None:
    one = start(MemoryTier(), world_size=2).save(10)
    other = start(MemoryTier(), world_size=3).save(10, logical=state(10)[::-1])
    assert one.state_root == other.state_root
    assert start(MemoryTier()).save(11).state_root != one.state_root


def test_unchanged_chunks_are_not_written_again() -> None:
    tier = MemoryTier()
    trainer = start(tier, num_floats=100_000)
    first = trainer.save(10)
    size = sum(tier.size(path) for path in tier.list("packs"))
    second = trainer.save(20, logical=[*state(10, 100000), part("/more", b"x")])
    assert sum(tier.size(path) for path in tier.list("packs")) - size < 20_000
    assert whole_value(load(trainer.repository, second)) == 10
    assert len(new_packs(trainer.repository, second, first)) == 1


def test_chunks_are_reused_after_a_restart_too() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    again = start(tier)
    before = tier.list("packs")
    again.save(20, value=10, logical=state(10))
    assert tier.list("packs") == before


def test_chunks_of_a_pack_that_is_gone_are_written_anew() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    for path in tier.list("packs"):
        tier.delete(path)
    repository = Repository.open(tier)
    trainer = opened(repository, repository.visible()[-1], CountedNonces("later"))
    commit = trainer.save(20, value=10, logical=state(10))
    assert whole_value(load(Repository.open(tier), commit)) == 10


def test_uncommitted_chunks_are_not_reused() -> None:
    trainer = start(MemoryTier())
    first, _ = trainer.write(10)
    second, _ = trainer.write(11, value=10)
    assert {c.id for c in first.chunks} == {c.id for c in second.chunks}
    assert not {c.pack for c in first.chunks} & {c.pack for c in second.chunks}


def test_B12_b_all_ranks_may_commit_the_same_checkpoint() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    for step in range(1, 51):
        written = trainer.write(step)
        gate = threading.Barrier(4)
        got: list[CommitEntry] = []

        def act(repository: Repository, gate: threading.Barrier, got: list[CommitEntry], written: tuple[Manifest, ManifestRef]) -> None:
            gate.wait(timeout=10)
            got.append(_commit(repository, written))

        others = [Repository.open(tier) for _ in range(3)]
        threads = [threading.Thread(target=act, args=(r, gate, got, written)) for r in (trainer.repository, *others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [got[0]] * 4
    assert steps(tier) == list(range(1, 51))
    assert len(tier.list("runs/main/log")) == 51
    assert Repository.open(tier).verify().ok


def _commit(repository: Repository, written: tuple[Manifest, ManifestRef], milestone: bool = False) -> CommitEntry:
    return repository.commit(
        manifests=[written],
        milestone=milestone,
        journal_head=first_chain(written[0].generation, written[0].nonce),
        journal_lines=0,
        writer=WRITER,
        clock=CLOCK,
    )


def test_a_checkpoint_may_become_a_milestone_later_but_not_cease_to_be_one() -> None:
    trainer = start(MemoryTier())
    assert not _commit(trainer.repository, trainer.write(10)).milestone
    assert _commit(trainer.repository, trainer.write(10), milestone=True).milestone
    assert _commit(trainer.repository, trainer.write(10)).milestone
    assert len(trainer.repository.visible()) == 1


def test_I5_a_commit_without_all_ranks_is_refused_and_nothing_is_visible() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    g = trainer.generation
    written = trainer.repository.write(
        step=10, generation=0, nonce=g.nonce, node=0, world_size=2, logical=state(10), per_rank={0: rank_state(10, 0)}
    )
    with pytest.raises(Damaged, match=r"each of 0\.\.1"):
        _commit(trainer.repository, written)
    assert steps(tier) == []


def test_I5_two_nodes_commit_together() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=4)
    g = trainer.generation
    halves = [
        trainer.repository.write(
            step=10,
            generation=0,
            nonce=g.nonce,
            node=node,
            world_size=4,
            logical=state(10),
            per_rank={r: rank_state(10, r) for r in (2 * node, 2 * node + 1)},
        )
        for node in (1, 0)
    ]
    commit = trainer.repository.commit(
        manifests=halves, milestone=False, journal_head=first_chain(0, g.nonce), journal_lines=0, writer=WRITER, clock=CLOCK
    )
    assert [m.node for m in Repository.open(tier).manifests(commit)] == [0, 1]
    assert Repository.open(tier).verify().ok


class Failing(MemoryTier):
    """The `fail_at`-th create or append from now on raises."""

    fail_at = -1

    def _count(self) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise Permanent("No space left on device") from OSError(28, "No space left on device")

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        self._count()
        return super().create(path, parts)

    def append(self, path: str, data: Buffer) -> None:
        self._count()
        super().append(path, data)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_I9_a_save_that_fails_anywhere_leaves_the_older_checkpoint_and_the_next_save_works(at: int) -> None:
    tier = Failing()
    trainer = start(tier)
    trainer.save(10)
    trainer.collect(1)
    before = dict(tier.snapshot())
    for _ in range(2):
        tier.fail_at = at
        with pytest.raises(Permanent) as failed:
            trainer.save(20)
        assert isinstance(failed.value.__cause__, OSError)
        assert all(tier.read(path).startswith(data) for path, data in before.items())
        commit, pieces, _ = newest_good(Repository.open(tier))
        assert (commit.step, whole_value(pieces)) == (10, 10)
    if at <= 2:
        assert len(tier.list("manifests")) == len(tier.list("packs")) == 1, "what a failed write wrote is removed at once"
    tier.fail_at = -1
    trainer.save(30)
    trainer.collect(1)
    assert steps(tier) == [30]
    assert {*tier.list("manifests"), *tier.list("packs")} == objects_of(trainer.repository, trainer.repository.visible())
    assert Repository.open(tier).verify().ok


def test_I2_nonces_that_repeat_are_refused_and_the_objects_of_that_name_stay() -> None:
    tier = MemoryTier()
    start(tier, nonces=CountedNonces("same")).save(10)
    before = dict(tier.snapshot())
    with pytest.raises(Permanent, match="repeats itself"):
        start(tier, nonces=CountedNonces("same")).save(20)
    assert before.items() <= dict(tier.snapshot()).items()
    assert Repository.open(tier).verify().ok


@pytest.mark.parametrize("name", ["store.write.after_packs", "store.write.after_manifest", "store.log.before_create"])
def test_I1_an_error_between_any_two_writes_leaves_nothing_visible(name: str) -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)

    def strike() -> None:
        raise KeyboardInterrupt

    arm(name, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.save(20)
    finally:
        arm(name, None)
    assert steps(tier) == [10]
    assert whole_value(load(Repository.open(tier), trainer.save(30))) == 30


def three() -> MemoryTier:
    tier = MemoryTier()
    trainer = start(tier)
    for step in (10, 20, 30):
        trainer.save(step)
    return tier


def of_step(tier: MemoryTier, step: int) -> list[str]:
    repository = Repository.open(tier)
    commits = {c.step: c for c in repository.visible()}
    mine = objects_of(repository, [commits[step]])
    entry = tier.list("runs/main/log")[-1 - (30 - step) // 10]
    return [*sorted(mine - objects_of(repository, [c for s, c in commits.items() if s != step])), entry]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("harm", ["gone", "half", "empty", "flipped"])
def test_B01_a_b_c_a_harmed_file_of_the_newest_makes_the_next_older_the_newest(kind: int, harm: str) -> None:
    tier = three()
    path = of_step(tier, 30)[kind]
    raw = tier.read(path)
    bad = {
        "gone": lambda: with_objects(tier, {path: None}),
        "half": lambda: with_objects(tier, {path: raw[: len(raw) // 2]}),
        "empty": lambda: with_objects(tier, {path: b""}),
        "flipped": lambda: flipped(tier, path, len(raw) // 2 if path.endswith("json") else 4100),
    }[harm]()
    repository = Repository.open(bad)
    commit, pieces, passed_over = newest_good(repository)
    assert (commit.step, whole_value(pieces)) == (20, 20)
    if "log" not in path:
        ((failed, damaged),) = passed_over
        assert (failed.step, damaged.path) == (30, path)
    elif harm != "gone":
        assert path in repository.log.damage[0]


def test_B01_f_when_all_are_damaged_each_is_listed_with_its_reason() -> None:
    good = tier = three()
    for step in (10, 20, 30):
        tier = flipped(tier, next(p for p in of_step(good, step) if p.startswith("packs")), 4100)
    with pytest.raises(NoCheckpoint, match=r"step 30: packs/.*step 20: packs/.*step 10: packs/"):
        start(tier)


def test_B08_a_c_the_newest_is_by_number_and_strays_change_nothing() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    for step in (9, 999, 1000):
        trainer.save(step)
    for stray in ("manifests/step_abc.json", "manifests/5000", "packs/handpicked/x", "runs/main/log/5000.json", ".step_2000.tmp/x"):
        tier.create(stray, [b"stray"])
    assert newest_good(Repository.open(tier))[0].step == 1000
    start(tier).collect(1)
    assert len([p for p in tier.list("") if dict(tier.snapshot())[p] == b"stray"]) == 5


def test_chunks_of_condemned_packs_are_written_anew() -> None:
    tier = three()
    (pack,) = [p for p in of_step(tier, 30) if p.startswith("packs")]
    bad = flipped(tier, pack, 4100)
    trainer = start(bad)
    assert (trainer.generation.base_step, trainer.repository.log.state.condemned[0].objects) == (20, (pack,))
    commit = trainer.save(30)
    assert pack not in objects_of(Repository.open(bad), [commit])
    assert whole_value(load(Repository.open(bad), commit)) == 30
    report = Repository.open(bad).verify()
    assert (report.ok, report.num_checkpoints) == (True, 3)
    assert [(s, g) for s, g, _ in report.condemned] == [(30, 0)]


def test_a_condemned_shared_pack_is_not_referenced_again_though_an_older_checkpoint_needs_it() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20, value=10, logical=state(10))
    shared = tier.list("packs")
    trainer.repository.condemn(20, 0, shared, "suspect", writer=WRITER, clock=CLOCK)
    commit = trainer.save(30, value=10, logical=state(10))
    assert not objects_of(trainer.repository, [commit]) & set(shared)
    assert whole_value(load(trainer.repository, trainer.repository.visible()[0])) == 10


def test_a_write_that_borrowed_from_a_commit_condemned_meanwhile_is_refused() -> None:
    trainer = start(MemoryTier())
    trainer.save(10)
    written = trainer.write(20, value=10)
    trainer.repository.condemn(10, 0, ["packs/x"], "bad", writer=WRITER, clock=CLOCK)
    with pytest.raises(Transient, match="reuses chunks of step 10"):
        _commit(trainer.repository, written)
    assert whole_value(load(trainer.repository, trainer.save(21))) == 21


def test_a_manifest_that_another_process_wrote_on_withdrawn_chunks_is_refused() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    again = start(tier)
    node = Trainer(Repository.open(tier), again.generation)
    written = node.write(20, value=10, logical=state(10))
    again.repository.condemn(10, 0, ["packs/x"], "bad", writer=WRITER, clock=CLOCK)
    with pytest.raises(Transient, match="no visible checkpoint holds"):
        _commit(again.repository, written)


def test_many_small_pieces_take_time_in_proportion() -> None:
    def save_and_load(num: int) -> None:
        tier = MemoryTier()
        commit = start(tier).save(1, logical=[part(f"/model/layer.{i}.weight", b"0123456789abcdef") for i in range(num)])
        load(Repository.open(tier), commit)
        assert len(tier.list("")) <= 10

    assert_grows(save_and_load, 2_000, 20_000, at_most=25)


def test_a_run_that_was_moved_loads_and_holds_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = start(DiskTier("before"))
    trainer.save(10)
    trainer.save(20)
    os.rename(tmp_path / "before", tmp_path / "after")
    monkeypatch.chdir("/")
    moved = Repository.open(DiskTier(str(tmp_path / "after")))
    assert [whole_value(load(moved, c)) for c in moved.visible()] == [10, 20]
    assert moved.verify().ok
    for path in (tmp_path / "after").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes()


def test_reading_and_verifying_write_nothing() -> None:
    tier = three()
    before = tier.snapshot()
    repository = Repository.open(tier)
    newest_good(repository)
    repository.verify()
    repository.refresh()
    assert tier.snapshot() == before


def test_a_large_state_is_written_and_read_in_little_more_memory_than_one_piece(tmp_path: Path) -> None:
    size = 16 << 20
    big = [part(f"/w{i}", os.urandom(size)) for i in range(4)]
    tier = DiskTier(str(tmp_path / "run"))
    trainer = start(tier)
    with at_most(12 << 20):
        commit = trainer.save(10, logical=big)
    repository = Repository.open(tier)
    manifest = manifest_of(repository, commit)
    with at_most(size + (17 << 20)):
        for stored, data in repository.read_pieces(manifest, manifest.pieces):
            assert len(data) == stored.size_bytes
            del data
    with at_most(12 << 20):
        assert repository.verify().ok
