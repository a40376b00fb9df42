"""Manifests: what contradicts itself or points elsewhere is refused by name; only a consistent cut is used (I5)."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from tests.rigs.memory import at_most
from tests.rigs.store_run import manifest_of, part, start
from unbroken.core.errors import Damaged
from unbroken.core.limits import CHUNK_BYTES
from unbroken.core.records import Extent, Manifest
from unbroken.store.loading import read_pieces
from unbroken.store.manifests import check_cut, check_manifest
from unbroken.store.tiers.memory import MemoryTier


def a_manifest() -> tuple[MemoryTier, Manifest]:
    tier = MemoryTier()
    trainer = start(tier)
    commit = trainer.save(10, logical=[part("/big", os.urandom(CHUNK_BYTES + 5)), part("/small", b"s"), part("/void", b"")])
    return tier, manifest_of(trainer.repository, commit)


TIER, GOOD = a_manifest()


def replaced(manifest: Manifest, **changes: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **changes)


def with_chunk(**changes: Any) -> Manifest:
    return replaced(GOOD, chunks=(msgspec.structs.replace(GOOD.chunks[0], **changes), *GOOD.chunks[1:]))


def with_piece(**changes: Any) -> Manifest:
    number = next(i for i, s in enumerate(GOOD.pieces) if s.piece.pointer == "/big")
    pieces = list(GOOD.pieces)
    pieces[number] = msgspec.structs.replace(pieces[number], **changes)
    return replaced(GOOD, pieces=tuple(pieces))


def test_a_good_manifest_passes() -> None:
    check_manifest(GOOD, "m")


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (with_chunk(pack="../../x"), "chunk 0 names '../../x'"),
        (with_chunk(pack="packs/../../../etc/passwd"), "not the name of a pack"),
        (with_chunk(pack="run.json"), "not the name of a pack"),
        (with_chunk(offset=17), "offset 17"),
        (with_chunk(offset=0), "offset 0"),
        (with_chunk(raw_bytes=1 << 40), "claims"),
        (with_chunk(stored_bytes=1 << 40), "claims"),
        (with_chunk(raw_bytes=0), "claims"),
        (with_piece(size_bytes=1 << 40), "claims 1099511627776 bytes"),
        (with_piece(extents=(Extent(99, 0, 5),)), "outside its chunks"),
        (with_piece(extents=(Extent(0, CHUNK_BYTES - 1, 2),)), "outside its chunks"),
        (with_piece(extents=(Extent(0, 1 << 40, 1),)), "outside its chunks"),
        (with_piece(digest="0" * 64), "roots do not follow"),
        (with_piece(rank=0), "wrong scope"),
        (replaced(GOOD, pieces=(*GOOD.pieces, GOOD.pieces[0])), "there twice"),
        (replaced(GOOD, state_root="0" * 64), "roots do not follow"),
        (replaced(GOOD, rank_roots=("0" * 64, *GOOD.rank_roots[1:])), "roots do not follow"),
        (replaced(GOOD, rank_roots=()), "rank roots"),
        (replaced(GOOD, ranks=(0, 0)), "do not fit"),
        (replaced(GOOD, ranks=(1, 0)), "do not fit"),
        (replaced(GOOD, ranks=(0, 2)), "do not fit"),
        (replaced(GOOD, world_size=1), "do not fit"),
    ],
)
def test_I3_contradictions_and_escapes_are_refused_by_name(manifest: Manifest, reason: str) -> None:
    with at_most(1 << 20), pytest.raises(Damaged, match=reason) as refused:
        check_manifest(manifest, "manifests/m.json")
    assert refused.value.path == "manifests/m.json"


def test_I5_a_set_of_manifests_that_is_no_consistent_cut_is_refused() -> None:
    half = replaced(GOOD, ranks=(0,), rank_roots=GOOD.rank_roots[:1])
    other = replaced(GOOD, node=1, ranks=(1,), rank_roots=GOOD.rank_roots[1:])
    check_cut([GOOD])
    check_cut([other, half])
    for change in ({"step": 11}, {"generation": 1}, {"nonce": "x"}, {"world_size": 3}, {"state_root": "0" * 64}, {"ranks": (0,)}):
        with pytest.raises(Damaged, match="step 1"):
            check_cut([half, replaced(other, **change)])
    for partial in ([half], [other], [half, half], [GOOD, half]):
        with pytest.raises(Damaged, match=r"each of 0\.\.1 must be there once"):
            check_cut(partial)
    with pytest.raises(Damaged, match="at least one"):
        check_cut([])


def test_each_chunk_is_read_once_though_many_pieces_share_it() -> None:
    reads: list[tuple[str, int]] = []

    class Noting(MemoryTier):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            reads.append((path, offset))
            return super().read(path, offset, length)

    tier = MemoryTier()
    trainer = start(tier)
    zeros = bytes(3 * CHUNK_BYTES)
    parts = (
        [part(f"/{i:03d}", bytes([i])) for i in range(100)]
        + [part(f"/zero/{i}", zeros) for i in range(3)]
        + [part("/w", os.urandom(10_000_000))]
    )
    manifest = manifest_of(trainer.repository, trainer.save(10, logical=parts))
    got = dict((s.piece.pointer, data) for s, data in read_pieces(Noting(tier.snapshot()), manifest, manifest.pieces) if s.rank is None)
    assert got == {p.piece.pointer: bytes(p.data) for p in parts}
    assert len(reads) == len(set(reads)) == len(manifest.chunks)


def test_I3_a_piece_that_does_not_match_its_digest_is_refused() -> None:
    wrong = with_piece(digest="0" * 64)
    stored = next(s for s in wrong.pieces if s.piece.pointer == "/big")
    with pytest.raises(Damaged, match="piece /big does not match its digest") as refused:
        list(read_pieces(TIER, wrong, [stored]))
    assert refused.value.path == GOOD.chunks[0].pack
