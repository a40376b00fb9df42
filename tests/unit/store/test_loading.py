"""Pieces out of packs: every chunk verified, large ones in memory of their own, whatever lies where."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import msgspec
import pytest

from tests.rigs.store_run import manifest_of, part, start
from unbroken.core.errors import Damaged
from unbroken.core.limits import CHUNK_BYTES
from unbroken.core.ports import Tier
from unbroken.core.records import Manifest, StoredPiece
from unbroken.store.loading import AHEAD_BYTES, OWN_PAGES_BYTES, read_pieces
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier

LARGE = os.urandom(2 * CHUNK_BYTES + 4099)
TWICE = bytes(2 * CHUNK_BYTES)
ODD = os.urandom(OWN_PAGES_BYTES + 3)
PARTS = {"/large": LARGE, "/odd": ODD, "/small": b"small", "/twice": TWICE, "/void": b"", "/x": os.urandom(70_001)}


def stored_in(tier: Tier) -> Manifest:
    trainer = start(tier)
    return manifest_of(trainer.repository, trainer.save(10, logical=[part(name, data) for name, data in PARTS.items()]))


def at(manifest: Manifest, pointer: str) -> StoredPiece:
    return next(s for s in manifest.pieces if s.piece.pointer == pointer)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_I3_pieces_of_all_sizes_come_as_they_were(tmp_path: Path, kind: str) -> None:
    tier = DiskTier(str(tmp_path / "run")) if kind == "disk" else MemoryTier()
    manifest = stored_in(tier)
    found = {stored.piece.pointer: data for stored, data in read_pieces(tier, manifest, manifest.pieces) if stored.rank is None}
    assert {pointer: bytes(data) for pointer, data in found.items()} == PARTS
    for pointer in ("/large", "/odd", "/twice"):
        view = found[pointer]
        assert isinstance(view, memoryview)
        assert isinstance(view.obj, mmap.mmap)
        assert not view.readonly
    assert isinstance(found["/small"], bytes)


def test_what_was_read_is_nobody_elses(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    manifest = stored_in(tier)
    for _ in range(2):
        ((_, data),) = read_pieces(tier, manifest, [at(manifest, "/large")])
        assert data == LARGE
        memoryview(data)[:] = bytes(len(LARGE))


@pytest.mark.parametrize("where", ["first byte", "last byte", "between"])
def test_I3_a_damaged_chunk_of_a_large_piece_is_named(tmp_path: Path, where: str) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    manifest = stored_in(tier)
    stored = at(manifest, "/large")
    first, last = manifest.chunks[stored.extents[0].chunk], manifest.chunks[stored.extents[-1].chunk]
    offset = {"first byte": first.offset, "last byte": last.offset + last.raw_bytes - 1, "between": first.offset + CHUNK_BYTES + 17}[where]
    with open(tmp_path / "run" / first.pack, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Damaged, match="does not match its digest") as caught:
        list(read_pieces(tier, manifest, [stored]))
    assert caught.value.path == first.pack


def test_I3_chunks_in_another_order_are_not_the_piece(tmp_path: Path) -> None:
    """Each chunk is right by itself; the piece's own digest says that they are not it."""
    tier = DiskTier(str(tmp_path / "run"))
    manifest = stored_in(tier)
    stored = at(manifest, "/large")
    a, b, c = stored.extents
    with pytest.raises(Damaged, match="piece /large does not match"):
        list(read_pieces(tier, manifest, [msgspec.structs.replace(stored, extents=(b, a, c))]))


@pytest.mark.parametrize("what", ["cut", "gone", "a folder"])
def test_I3_a_pack_that_cannot_be_read_is_named(tmp_path: Path, what: str) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    manifest = stored_in(tier)
    stored = at(manifest, "/large")
    ref = manifest.chunks[stored.extents[-1].chunk]
    path = tmp_path / "run" / ref.pack
    if what == "cut":
        os.truncate(path, ref.offset + ref.raw_bytes - 1)
    else:
        path.unlink()
    if what == "a folder":
        path.mkdir()
    with pytest.raises(Damaged, match={"cut": "cut short", "gone": "missing", "a folder": "cannot be read"}[what]) as caught:
        list(read_pieces(tier, manifest, [stored]))
    assert caught.value.path == ref.pack


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path / "run"))
    trainer = start(tier)
    parts = [part(f"/p{i}", os.urandom(CHUNK_BYTES)) for i in range(AHEAD_BYTES // CHUNK_BYTES + 4)]
    manifest = manifest_of(trainer.repository, trainer.save(10, logical=parts))
    before = threading.active_count()
    pieces = read_pieces(tier, manifest, manifest.pieces)
    next(pieces)
    assert threading.active_count() == before + 1
    pieces.close()
    assert threading.active_count() == before
    assert sum(1 for _ in read_pieces(tier, manifest, manifest.pieces)) == len(manifest.pieces)
