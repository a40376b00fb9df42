"""Layout: pieces to chunks, digests by the one rule, each leaf hashed once."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.memory import at_most
from tests.rigs.store_run import part
from unbroken.codec.digest import digest
from unbroken.core.limits import CHUNK_BYTES, LEAF_BYTES, SMALL_PIECE_BYTES
from unbroken.core.ports import Buffer
from unbroken.core.records import Piece
from unbroken.store import layout
from unbroken.store.layout import Layout, Part


def laid_out(logical: list[Part], per_rank: dict[int, list[Part]] | None = None) -> tuple[Layout, list[bytes]]:
    made = Layout(logical, per_rank or {})
    chunks = []
    for number, chunk in enumerate(made):
        assert (chunk.number, chunk.id) == (number, digest(chunk.data))
        chunks.append(bytes(chunk.data))
    assert made.num_chunks == len(chunks)
    return made, chunks


def bytes_of(made: Layout, chunks: list[bytes]) -> dict[tuple[int | None, str], bytes]:
    result = {}
    for stored in made.pieces:
        data = b"".join(chunks[e.chunk][e.offset : e.offset + e.length] for e in stored.extents)
        assert (stored.size_bytes, stored.digest) == (len(data), digest(data))
        result[stored.rank, stored.piece.pointer] = data
    return result


SIZES = [
    0,
    1,
    SMALL_PIECE_BYTES,
    SMALL_PIECE_BYTES + 1,
    LEAF_BYTES,
    LEAF_BYTES + 1,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    2 * CHUNK_BYTES + LEAF_BYTES + 5,
]


@pytest.mark.parametrize("size", SIZES)
def test_a_piece_of_any_size_comes_back_with_its_digest(size: int) -> None:
    data = os.urandom(size)
    made, chunks = laid_out([part("/w", data)])
    assert bytes_of(made, chunks) == {(None, "/w"): data}
    assert len(chunks) == -(-size // CHUNK_BYTES)


def test_a_chunk_that_holds_a_whole_piece_has_its_digest_and_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = layout.leaf_digest
    monkeypatch.setattr(layout, "leaf_digest", lambda data: hashed.append(len(data)) or real(data))
    monkeypatch.setattr(layout, "digest", lambda data: pytest.fail("the piece was hashed a second time"))
    made = Layout([part("/w", os.urandom(3 * LEAF_BYTES))], {})
    (chunk,) = list(made)
    assert chunk.id == made.pieces[0].digest
    assert hashed == [LEAF_BYTES] * 3


def test_small_pieces_share_chunks_in_pointer_order() -> None:
    parts = [part(f"/p/{i:04d}", bytes([i % 251]) * 1000) for i in range(5000)]
    made, chunks = laid_out(parts[::-1])
    assert len(chunks) == 2
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert [s.piece.pointer for s in made.pieces] == sorted(p.piece.pointer for p in parts)
    assert bytes_of(made, chunks) == {(None, p.piece.pointer): bytes(p.data) for p in parts}


def test_equal_content_is_one_chunk() -> None:
    zeros = bytes(3 * CHUNK_BYTES)
    made, chunks = laid_out([part("/a", zeros), part("/b", zeros)])
    assert len(chunks) == 1
    assert bytes_of(made, chunks) == {(None, "/a"): zeros, (None, "/b"): zeros}


def test_pieces_of_ranks_keep_their_rank() -> None:
    per_rank = {rank: [part("/rng", bytes([rank]) * 10, scope="rank")] for rank in (2, 0, 1)}
    made, chunks = laid_out([part("/w", b"w")], per_rank)
    assert bytes_of(made, chunks) == {(None, "/w"): b"w", (0, "/rng"): b"\0" * 10, (1, "/rng"): b"\1" * 10, (2, "/rng"): b"\2" * 10}


def test_arrays_of_any_shape_and_type_are_taken_as_bytes() -> None:
    data = memoryview(bytes(range(24))).cast("I", (2, 3))
    made, chunks = laid_out([Part(part("/w", b"").piece, data)])
    assert bytes_of(made, chunks)[None, "/w"] == bytes(range(24))


def test_two_pieces_of_one_name_and_a_wrong_scope_are_bugs() -> None:
    with pytest.raises(AssertionError, match="two pieces"):
        Layout([part("/w", b"1"), part("/w", b"2")], {})
    with pytest.raises(AssertionError, match="scope"):
        Layout([part("/w", b"1", scope="rank")], {})


def test_too_many_pieces_are_refused_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_PIECES", 3)
    with pytest.raises(ValueError, match="4 pieces in one checkpoint; at most 3"):
        Layout([part(f"/{i}", b"") for i in range(4)], {})


def test_the_state_is_not_copied() -> None:
    data = bytearray(os.urandom(CHUNK_BYTES)) * 16
    parts = [part(f"/w{i}", b"") for i in range(4)]
    views = [Part(p.piece, memoryview(data)[i * 4 * CHUNK_BYTES :]) for i, p in enumerate(parts)]
    with at_most(CHUNK_BYTES):
        for _ in Layout(views, {}):
            pass


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 3)), max_size=30))
def test_any_mixture_comes_back(sizes: list[tuple[int, int]]) -> None:
    parts = [part(f"/{i}", bytes([fill]) * size) for i, (size, fill) in enumerate(sizes)]
    made, chunks = laid_out(parts)
    assert bytes_of(made, chunks) == {(None, p.piece.pointer): bytes(p.data) for p in parts}
    assert len(set(chunks)) == len(chunks)


def test_logical_pieces_are_looked_at_leaf_by_leaf_and_what_is_wrong_is_told_once() -> None:
    seen: list[tuple[str, int]] = []

    def look(piece: Piece, data: Buffer) -> str:
        seen.append((piece.pointer, len(data)))
        return f"{piece.pointer} is odd" if piece.pointer != "/small" else ""

    made = Layout([part("/big", bytes(CHUNK_BYTES + 5)), part("/small", b"1")], {0: [part("/own", b"2", scope="rank")]}, look)
    for _ in made:
        pass
    assert seen == [("/big", LEAF_BYTES)] * (CHUNK_BYTES // LEAF_BYTES) + [("/big", 5), ("/small", 1)]
    assert list(made.faults) == ["/big is odd"]
