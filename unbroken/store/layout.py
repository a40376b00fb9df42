"""Layout: which bytes of which piece go into which chunk. One pass over the data, no copy of it beyond one shared chunk.

A piece above SMALL_PIECE_BYTES is cut into chunks of CHUNK_BYTES of its own; smaller ones lie one after another, in pointer order, in
shared chunks. Leaves are hashed once and serve the chunk's id as well as the piece's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unbroken.codec.digest import digest, join_leaves, leaf_digest
from unbroken.core.limits import CHUNK_BYTES, LEAF_BYTES, MAX_PIECES, SMALL_PIECE_BYTES
from unbroken.core.ports import Buffer
from unbroken.core.records import Extent, Piece, StoredPiece
from unbroken.store.packs import Chunk, Place, chunk_leaves


@dataclass(frozen=True)
class Part:
    """A piece and its bytes, little-endian and contiguous, which must not change while they are written.

    `ready` returns when they are there, or raises; None: they are.
    """

    piece: Piece
    data: memoryview
    ready: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class LatePart:
    """A part whose bytes, as many as `size_bytes`, are asked for when their turn has come, and forgotten once they are written."""

    piece: Piece
    size_bytes: int
    read: Callable[[], memoryview]

    @property
    def data(self) -> memoryview:
        """The bytes; made anew each time."""
        data = self.read()
        assert len(data) == self.size_bytes, f"{self.piece.pointer}: {len(data)} bytes where {self.size_bytes} were announced"
        return data


class Grain(NamedTuple):
    """How fine bytes are cut: a large piece into chunks of `least` to `most`, about `num` of them; `shared` is what small pieces share.

    The bounds are powers of two.
    """

    least_bytes: int = CHUNK_BYTES
    most_bytes: int = CHUNK_BYTES
    num: int = 1
    shared_bytes: int = CHUNK_BYTES

    def own_bytes(self, size: int) -> int:
        """Size of the chunks of a piece of `size` bytes: a power of two."""
        return max(self.least_bytes, min(self.most_bytes, 1 << (-(-size // self.num) - 1).bit_length()))


FINE = Grain(SMALL_PIECE_BYTES, LEAF_BYTES, 32, 2 * SMALL_PIECE_BYTES)
"""For shards: a rank of another mesh needs some rows of them, and can verify nothing smaller than a chunk. Metadata: 0.02-0.4 %."""


AnyPart = Part | LatePart

Look = Callable[[Piece, Buffer], str]
"""What is wrong with some elements of a logical piece, "" if nothing: asked of each leaf while it is in the cache to be hashed."""


class Layout:
    """Iterating yields each distinct chunk once, in order; afterwards `pieces` tells where every piece went.

    `faults` are then the findings of `look`, each once.
    """

    def __init__(
        self,
        logical: Sequence[AnyPart],
        per_rank: Mapping[int, Sequence[AnyPart]],
        look: Look | None = None,
        grain: Grain | None = None,
    ) -> None:
        self._grain = grain or Grain()
        self.faults: dict[str, None] = {}
        self._look = look
        self.pieces: list[StoredPiece] = []
        self.num_chunks = 0
        self.size_bytes = sum(part.size_bytes for parts in (logical, *per_rank.values()) for part in parts)
        self._parts = list(_in_order(logical, per_rank))
        self._numbers: dict[str, int] = {}
        self._shared = bytearray()
        self._sharing: list[tuple[int | None, Piece, int, int, str]] = []

    def __iter__(self) -> Iterator[Chunk]:
        for rank, part in self._parts:
            if isinstance(part, Part) and part.ready is not None:
                part.ready()
            data = memoryview(part.data).cast("B")
            if len(data) == 0:
                self._add(rank, part.piece, 0, digest(b""), ())
            elif len(data) > SMALL_PIECE_BYTES:
                yield from self._own_chunks(rank, part.piece, data)
            else:
                if len(self._shared) + len(data) > self._grain.shared_bytes:
                    yield from self._close_shared()
                self._inspect(rank, part.piece, data)
                self._sharing.append((rank, part.piece, len(self._shared), len(data), digest(data)))
                self._shared += data
        yield from self._close_shared()

    def _own_chunks(self, rank: int | None, piece: Piece, data: memoryview) -> Iterator[Chunk]:
        extents, leaves = [], []
        size = self._grain.own_bytes(len(data))
        for start in range(0, len(data), size):
            view = data[start : start + size]
            of_chunk = []
            for at in range(0, len(view), LEAF_BYTES):
                leaf = view[at : at + LEAF_BYTES]
                self._inspect(rank, piece, leaf)
                of_chunk.append(leaf_digest(leaf))
            number = yield from self._chunk(join_leaves(of_chunk), view, Place(rank, piece, start // size))
            extents.append(Extent(number, 0, len(view)))
            leaves += of_chunk
        value = join_leaves(leaves) if size % LEAF_BYTES == 0 or len(extents) == 1 else digest(data)
        self._add(rank, piece, len(data), value, tuple(extents))

    def _inspect(self, rank: int | None, piece: Piece, data: memoryview) -> None:
        if self._look is not None and rank is None and (fault := self._look(piece, data)):
            self.faults[fault] = None

    def _close_shared(self) -> Iterator[Chunk]:
        if not self._sharing:
            return
        data = bytes(self._shared)
        number = yield from self._chunk(join_leaves(chunk_leaves(data)), data)
        for rank, piece, offset, size, value in self._sharing:
            self._add(rank, piece, size, value, (Extent(number, offset, size),))
        self._shared.clear()
        self._sharing.clear()

    def _chunk(self, chunk_id: str, data: Buffer, place: Place | None = None) -> Generator[Chunk, None, int]:
        if chunk_id not in self._numbers:
            self._numbers[chunk_id] = self.num_chunks
            self.num_chunks += 1
            yield Chunk(self._numbers[chunk_id], chunk_id, data, place)
        return self._numbers[chunk_id]

    def _add(self, rank: int | None, piece: Piece, size: int, value: str, extents: tuple[Extent, ...]) -> None:
        self.pieces.append(StoredPiece(piece=piece, rank=rank, size_bytes=size, digest=value, extents=extents))


def _in_order(logical: Sequence[AnyPart], per_rank: Mapping[int, Sequence[AnyPart]]) -> Iterator[tuple[int | None, AnyPart]]:
    groups: list[tuple[int | None, Sequence[AnyPart]]] = [(None, logical), *sorted(per_rank.items())]
    num_pieces = sum(len(parts) for _, parts in groups)
    if num_pieces > MAX_PIECES:
        raise ValueError(f"{num_pieces} pieces in one checkpoint; at most {MAX_PIECES}: put small values into one array")
    for rank, parts in groups:
        scope = "logical" if rank is None else "rank"
        before = None
        for part in sorted(parts, key=lambda part: part.piece.pointer):
            assert part.piece.scope == scope, f"{part.piece.pointer}: scope {part.piece.scope!r} among the {scope} pieces"
            assert part.piece.pointer != before, f"{part.piece.pointer}: two pieces of this name"
            before = part.piece.pointer
            yield rank, part
