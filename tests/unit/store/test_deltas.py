"""Checkpoints stored as differences: read exactly, chains bounded, whole without what they do not need, damage found and named."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.rigs.store_run import WRITER, StillClock, Trainer, load, rank_state, start
from unbroken.codec.planes import IDENTITY
from unbroken.core.errors import Damaged, NewerFormat
from unbroken.core.records import CommitEntry, Piece, RootRecord
from unbroken.store import paths, sealed
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.memory import MemoryTier

NUM = 200_000


def state(step: int) -> list[Part]:
    """Weights that move a little each step, a table of which one row changes, a layer that never changes, and something small."""
    w = np.random.default_rng(0).standard_normal(NUM).astype("<f4")
    for k in range(step):
        w += (np.random.default_rng(k + 1).standard_normal(NUM) * 1e-4).astype("<f4")
    rows = np.random.default_rng(7).standard_normal((400, 250)).astype("<f4")
    rows[step % 400] = step
    frozen = np.random.default_rng(9).standard_normal(NUM).astype("<f4")
    arrays = {"/frozen": frozen, "/rows": rows, "/w": w}
    parts = [Part(Piece(pointer=p, dtype="float32", shape=a.shape), memoryview(a).cast("B")) for p, a in arrays.items()]
    return [*parts, Part(Piece(pointer="/step", dtype="py:int"), memoryview(b"%d" % step))]


def save(trainer: Trainer, step: int, encoding: Encoding | None = Encoding(max_depth=3)) -> CommitEntry:  # noqa: B008
    g = trainer.generation
    written = trainer.repository.write(
        step=step,
        generation=g.number,
        nonce=g.nonce,
        node=0,
        world_size=g.world_size,
        logical=state(step),
        per_rank={0: rank_state(step, 0)},
        encoding=encoding,
    )
    trainer.journal.add(RootRecord(step=step, state_root=written[0].state_root, rank_roots=()))
    trainer.journal.sync()
    return trainer.repository.commit(
        manifests=[written], milestone=False, journal_head=trainer.journal.head, journal_lines=trainer.journal.num_lines,
        writer=WRITER, clock=StillClock(),
    )  # fmt: skip


def stored_bytes(tier: MemoryTier) -> int:
    return sum(tier.size(path) for path in tier.list(paths.PACKS))


def expected(step: int) -> dict[str, bytes]:
    return {part.piece.pointer: bytes(part.data) for part in state(step)}


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def test_differences_are_smaller_and_read_exactly() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    save(trainer, 1)
    first = stored_bytes(tier)
    for step in (2, 3):
        save(trainer, step)
    assert stored_bytes(tier) - first < 2 * 0.35 * first, "w as differences, one row, and nothing of the frozen layer"
    reader = Repository.open(tier)
    assert [commit.kind for commit in reader.visible()] == ["full", "incremental", "incremental"]
    for commit in reader.visible():
        assert load(reader, commit) == expected(commit.step)
    report = reader.verify()
    assert report.ok, report.bad


def test_chains_end_at_the_depth_that_is_asked_for() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    depths = []
    for step in range(1, 9):
        save(trainer, step, Encoding(max_depth=3))
        (manifest,) = trainer.repository.manifests(trainer.repository.visible()[-1])
        (w,) = [s for s in manifest.pieces if s.piece.pointer == "/w"]
        chunk, depth = manifest.chunks[w.extents[0].chunk], 0
        while isinstance(chunk.base, int):
            chunk, depth = manifest.chunks[chunk.base], depth + 1
        depths.append(depth)
    assert depths == [0, 1, 2, 3, 0, 1, 2, 3]
    assert load(trainer.repository, trainer.repository.visible()[-1]) == expected(8)


def test_I2_what_a_difference_is_from_stays_when_its_own_checkpoint_goes() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    for step in range(1, 6):
        save(trainer, step, Encoding(max_depth=8))
        trainer.collect(keep_newest=1)
    reader = Repository.open(tier)
    (only,) = reader.visible()
    assert load(reader, only) == expected(5)
    assert reader.verify().ok
    for _ in range(4):
        save(trainer, trainer.repository.visible()[-1].step + 1, None)
        trainer.collect(keep_newest=1)
    (manifest,) = trainer.repository.manifests(trainer.repository.visible()[-1])
    assert set(tier.list(paths.PACKS)) == {chunk.pack for chunk in manifest.chunks}, "nothing is kept that nobody needs"


def test_without_encoding_everything_is_written_as_the_first_version_reads_it() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    commit = save(trainer, 1, None)
    (manifest,) = trainer.repository.manifests(commit)
    assert {chunk.codec for chunk in manifest.chunks} == {IDENTITY}
    assert b'"format":1' in tier.read(commit.manifests[0].path)[:80]
    assert b'"format":1' in tier.read(paths.log_entry("main", 1))[:80]


def test_a_reader_of_the_first_format_refuses_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 4, not a checkpoint that is called damaged and condemned."""
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    save(trainer, 1, None)
    save(trainer, 2)
    monkeypatch.setattr(sealed, "FORMAT", 1)
    with pytest.raises(NewerFormat):
        Repository.open(tier)


def test_a_damaged_base_ends_those_that_need_it_and_no_other() -> None:
    tier = MemoryTier()
    trainer = start(tier, world_size=1)
    save(trainer, 1, None)
    for step in (2, 3):
        save(trainer, step)
    (manifest,) = trainer.repository.manifests(trainer.repository.visible()[1])
    (w,) = [s for s in manifest.pieces if s.piece.pointer == "/w"]
    chunk = manifest.chunks[w.extents[0].chunk]
    tier._objects[chunk.pack] = flipped(tier.read(chunk.pack), chunk.offset + 9)
    reader = Repository.open(tier)
    first, second, third = reader.visible()
    assert load(reader, first) == expected(1)
    for commit in (second, third):
        with pytest.raises(Damaged) as caught:
            load(reader, commit)
        assert caught.value.path == chunk.pack
    assert [path for path, _ in reader.verify().bad] == [chunk.pack]
    save(trainer, 4)
    assert load(reader, trainer.repository.visible()[-1]) == expected(4), "what cannot be read is no base"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": 99}, "names chunk 99 as its base"),
        ({"base": msgspec.UNSET}, "a difference, but from nothing"),
        ({"codec": 0}, "has a digest of its stored bytes"),
        ({"sum": msgspec.UNSET}, "lacks a digest of its stored bytes"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    from unbroken.store.manifests import check_manifest

    trainer = start(MemoryTier(), world_size=1)
    save(trainer, 1)
    (manifest,) = trainer.repository.manifests(save(trainer, 2))
    number = next(n for n, chunk in enumerate(manifest.chunks) if chunk.base is not msgspec.UNSET)
    table = list(manifest.chunks)
    table[number] = msgspec.structs.replace(table[number], **change)
    with pytest.raises(Damaged, match=words):
        check_manifest(msgspec.structs.replace(manifest, chunks=tuple(table)), "manifest")
