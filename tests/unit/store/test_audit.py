"""Verification: one changed byte in any file that counts is found and the file named; what is condemned does not count."""

from __future__ import annotations

import pytest

from tests.rigs.store_run import WRITER, StillClock, as_of_an_older_writer, objects_of, part, start, state
from unbroken.core.errors import Damaged, NewerFormat
from unbroken.core.limits import CHUNK_BYTES
from unbroken.core.records import RootRecord
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


def a_run() -> MemoryTier:
    tier = MemoryTier()
    trainer = start(tier, num_floats=20_000)
    trainer.save(10)
    trainer.save(20)
    again = start(tier, num_floats=20_000)
    again.save(30, milestone=True)
    again.collect(2)
    again.save(40)
    return tier


RUN = a_run()


def with_object(path: str, data: bytes | None) -> MemoryTier:
    objects = dict(RUN.snapshot())
    if data is None:
        del objects[path]
    else:
        objects[path] = data
    return MemoryTier(tuple(objects.items()))


def bad_paths(tier: MemoryTier) -> list[str]:
    try:
        report = Repository.open(tier).verify()
    except Damaged as e:
        return [e.path]
    assert report.ok == (not report.bad)
    return [path for path, _ in report.bad]


def test_a_good_run_verifies_with_its_counts() -> None:
    report = Repository.open(RUN).verify()
    assert (report.ok, report.bad, report.condemned, report.num_checkpoints) == (True, [], [], 3)
    assert report.num_chunks == len({(c.pack, c.offset) for m in _manifests(RUN) for c in m.chunks})


def _manifests(tier: MemoryTier):  # type: ignore[no-untyped-def]
    repository = Repository.open(tier)
    return [m for commit in repository.visible() for m in repository.manifests(commit)]


@pytest.mark.parametrize("path", [path for path, _ in RUN.snapshot()])
def test_I3_one_changed_byte_anywhere_is_found_and_the_file_named(path: str) -> None:
    raw = RUN.read(path)
    stride = 997 if path.startswith("packs") else 23
    for at in {*range(0, len(raw), stride), len(raw) - 1, len(raw) - 40}:
        found = bad_paths(with_object(path, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]))
        assert found == [path], f"byte {at}: {found}"


@pytest.mark.parametrize("path", [path for path, _ in RUN.snapshot()])
def test_I3_a_missing_or_cut_file_is_found_and_named(path: str) -> None:
    raw = RUN.read(path)
    last_entry = RUN.list("runs/main/log")[-1]
    for data in (None, b"", raw[: len(raw) // 2], raw + b"\0"):
        if path == last_entry and data is None:
            continue  # nobody can know of an entry at the head that is gone without trace
        if path.endswith(".jsonl") and data == raw + b"\0":
            continue  # a torn last line
        assert bad_paths(with_object(path, data)) == [path]


def test_a_torn_last_journal_line_is_not_tampering() -> None:
    for path in RUN.list("runs/main/journal"):
        assert bad_paths(with_object(path, RUN.read(path) + b'{"chain":"00')) == []


def test_a_journal_that_was_cut_at_a_line_is_found_by_the_commit_that_counts_it() -> None:
    path = RUN.list("runs/main/journal")[-1]
    lines = RUN.read(path).splitlines(keepends=True)
    assert bad_paths(with_object(path, b"".join(lines[:-1]))) == [path]


def two_journals(*, is_recorded: bool = True) -> tuple[MemoryTier, str]:
    """Generation 1 did two steps that no commit counts, then generation 2 went on from before them; and the path of its journal."""
    tier = MemoryTier()
    start(tier).save(10)
    lost = start(tier)
    for step in (11, 12):
        lost.journal.add(RootRecord(step=step, state_root="0" * 64, rank_roots=()))
    lost.journal.sync()
    newest = start(tier)
    newest.save(20)
    path = paths.journal("main", 1)
    if not is_recorded:
        as_of_an_older_writer(tier)
    return tier, path


def test_I3_lines_cut_off_a_journal_that_no_commit_counts_are_missed_by_the_next_generation() -> None:
    tier, path = two_journals()
    assert bad_paths(tier) == []
    raw = tier.read(path)
    lines = raw.splitlines(keepends=True)
    for number in range(len(lines)):
        tier.delete(path)
        tier.append(path, b"".join(lines[:number]))
        assert bad_paths(tier) == [path]
        ((_, reason),) = Repository.open(tier).verify().bad
        assert reason == f"{'missing' if number < 2 else 'ends after 1 lines'}, without the last one that the next generation found"
    tier.delete(path)
    assert bad_paths(tier) == [path]


def test_I3_a_journal_that_was_never_written_may_be_missing() -> None:
    tier = MemoryTier()
    start(tier).save(10)
    start(tier)  # killed before its journal was durable
    start(tier).save(20)
    start(tier)  # the newest, not written yet
    assert tier.list("runs/main/journal") == [paths.journal("main", n) for n in (0, 2)]
    assert bad_paths(tier) == []


def test_lines_that_came_after_the_next_generation_do_no_harm() -> None:
    tier = MemoryTier()
    old = start(tier)
    old.save(10)
    start(tier).save(20)
    old.journal.add(RootRecord(step=11, state_root="0" * 64, rank_roots=()))
    old.journal.sync()
    assert bad_paths(tier) == []


def test_entries_of_before_that_record_no_end_claim_nothing() -> None:
    tier, path = two_journals(is_recorded=False)
    assert bad_paths(tier) == []
    tier.delete(path)
    assert bad_paths(tier) == []


def test_objects_of_condemned_checkpoints_are_listed_and_do_not_fail() -> None:
    repository = Repository.open(RUN)
    newest, others = repository.visible()[-1], repository.visible()[:-1]
    only = sorted(objects_of(repository, [newest]) - objects_of(repository, others))
    for path in only:
        raw = RUN.read(path)
        tier = with_object(path, raw[:100] + b"\xff" + raw[101:])
        assert bad_paths(tier) == [path]
        Repository.open(tier).condemn(newest.step, newest.generation, [path], "changed", writer=WRITER, clock=CLOCK)
        report = Repository.open(tier).verify()
        assert (report.ok, report.condemned, report.num_checkpoints) == (True, [(newest.step, newest.generation, "changed")], 2)


def test_a_condemned_pack_that_an_uncondemned_checkpoint_needs_counts_where_it_needs_it() -> None:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10, logical=[part("/a", b"a" * 100_000), part("/b", b"b" * 100_000)])
    trainer.save(20, logical=[part("/a", b"a" * 100_000), *state(20)])
    (pack,) = objects_of(trainer.repository, trainer.repository.visible()[:1]) & set(tier.list("packs"))
    raw = tier.read(pack)
    for pattern, is_ok in ((b"b" * 50, True), (b"a" * 50, False)):
        at = raw.index(pattern) + 10
        hurt = MemoryTier(tuple({**dict(tier.snapshot()), pack: raw[:at] + b"x" + raw[at + 1 :]}.items()))
        assert bad_paths(hurt) == [pack]
        Repository.open(hurt).condemn(10, 0, [pack], "changed", writer=WRITER, clock=CLOCK)
        assert bad_paths(hurt) == ([] if is_ok else [pack])


def test_a_damaged_log_entry_that_was_condemned_does_not_count() -> None:
    path = RUN.list("runs/main/log")[2]
    tier = with_object(path, b"garbage")
    assert bad_paths(tier) == [path]
    Repository.open(tier).condemn(20, 0, [path], "changed", writer=WRITER, clock=CLOCK)
    assert bad_paths(tier) == []


def test_every_bad_object_is_named_not_only_the_first() -> None:
    packs = RUN.list("packs")
    objects = dict(RUN.snapshot())
    for path in packs:
        objects[path] = objects[path][:-1]
    assert bad_paths(MemoryTier(tuple(objects.items()))) == packs


def test_a_newer_format_is_an_error_of_its_own() -> None:
    path = RUN.list("manifests")[0]
    newer = RUN.read(path).replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99')
    assert bad_paths(with_object(path, newer)) == [path], "a commit names its manifest's bytes, so this is a change"
    entry = RUN.list("runs/main/log")[0]
    with pytest.raises(NewerFormat):
        bad_paths(with_object(entry, RUN.read(entry).replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99')))


def test_a_run_that_goes_on_meanwhile_is_not_called_bad() -> None:
    class Living(MemoryTier):
        """Prunes the older checkpoints just when verification comes to its first manifest."""

        is_over = False

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path.startswith("manifests/") and not self.is_over:
                self.is_over = True
                trainer.collect(1)
            return super().read(path, offset, length)

    tier = Living()
    trainer = start(tier)
    for step in (10, 20, 30):
        trainer.save(step)
    report = Repository.open(tier).verify()
    assert tier.is_over
    assert (report.ok, report.num_checkpoints) == (True, 1)


def test_large_pieces_are_verified_from_one_read_of_their_packs() -> None:
    class Counting(MemoryTier):
        size_read = 0

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            data = super().read(path, offset, length)
            self.size_read += len(data)
            return data

    tier = MemoryTier()
    trainer = start(tier)
    big = bytes(range(256)) * (3 * CHUNK_BYTES // 256)
    for step in (10, 20, 30):
        trainer.save(step, logical=[part("/big", big + bytes([step])), *state(step)])
    counting = Counting(tier.snapshot())
    assert Repository.open(counting).verify().ok
    stored = sum(len(data) for _, data in tier.snapshot())
    assert counting.size_read < 1.2 * stored + 100_000
