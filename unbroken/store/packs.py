"""Packs: many chunks in one file, so that a checkpoint costs a handful of fsyncs.

    0      header, 64 bytes: magic 16, format u32, min_reader u32, generation u64, nonce 16, zeros
    4096k  chunks, each at a multiple of 4096, zeros between
           footer: JSON list of [id, offset, stored_bytes, raw_bytes, codec]
    -64    trailer: footer offset u64, footer length u64, digest of header and footer 32, zeros 8, magic 8

Numbers are little-endian. Every byte is covered: the header and footer by the trailer's digest, chunks by the digests in the footer, the
rest is zero. The id of a chunk in the footer is the digest of its bytes there: only a chunk stored as it is has the id of a manifest.
Generation and nonce are those of the generation that wrote the pack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct

from unbroken.codec.digest import join_leaves, leaf_digest, text_digest
from unbroken.codec.planes import IDENTITY, NEEDS_BASE, decode
from unbroken.core.errors import Damaged, Permanent
from unbroken.core.limits import LEAF_BYTES, PACK_BYTES
from unbroken.core.ports import Buffer, Tier
from unbroken.core.records import ChunkRef, Count, Digest, Piece
from unbroken.store.paths import nonce_hex, pack_origin
from unbroken.store.sealed import BROKEN_INPUT, PLAIN_FORMAT, check_format

ALIGN_BYTES = 4096
MAX_CHUNK_BYTES = 32 << 20
"""No chunk is larger, in memory or stored: a lying size must not make us allocate."""

_MAGIC = b"unbroken/pack\0\0\0"
_END = b"unbr/end"
_HEADER = struct.Struct("<16sIIQ16s16x")
_TRAILER = struct.Struct("<QQ32s8x8s")
_MAX_FOOTER_BYTES = 64 << 20


class Place(NamedTuple):
    """Where a chunk belongs: the `nth` of a piece of one rank, or of all (None)."""

    rank: int | None
    piece: Piece
    nth: int


class Chunk(NamedTuple):
    """Bytes on their way into a pack. `number` is the chunk's place in its manifest; `place` None: small pieces share it.

    `stored` is what is written in place of `data`, by `codec`; None: `data` itself. `raw_bytes`: size of `data` where that is not at hand.
    """

    number: int
    id: str
    data: Buffer
    place: Place | None = None
    codec: int = IDENTITY
    stored: Buffer | None = None
    raw_bytes: int = -1

    @property
    def num_raw(self) -> int:
        """Size before encoding."""
        return len(self.data) if self.raw_bytes < 0 else self.raw_bytes


class Origin(NamedTuple):
    """The generation that writes, or wrote, a pack."""

    generation: int
    nonce: str


class Packed(Struct, frozen=True, array_like=True):
    """One line of a pack's footer. `id` is the digest of the stored bytes."""

    id: Digest
    offset: Count
    stored_bytes: Count
    raw_bytes: Count
    codec: Count


class Read(NamedTuple):
    """A verified chunk and the digests of its leaves, which also serve the piece it belongs to."""

    data: Buffer
    leaves: list[bytes]


def chunk_leaves(data: Buffer) -> list[bytes]:
    """Leaf digests of a chunk; `join_leaves` makes its id of them."""
    view = memoryview(data).cast("B")
    return [leaf_digest(view[i : i + LEAF_BYTES]) for i in range(0, max(1, len(view)), LEAF_BYTES)]


def write_packs(
    tier: Tier, chunks: Iterator[Chunk], origin: Origin, new_path: Callable[[], str], number: int = PLAIN_FORMAT
) -> dict[int, ChunkRef]:
    """Store all chunks, in packs of about PACK_BYTES, durable on return; where each lies, by number. Memory: one chunk at a time.

    `number`: the format of the packs; encoded chunks need sealed.ENCODED_FORMAT.
    """
    refs: dict[int, ChunkRef] = {}
    waiting = next(chunks, None)
    while waiting is not None:
        body = _Body(new_path(), origin, waiting, chunks, number)
        tier.create(body.path, body.parts())
        refs.update(body.refs)
        waiting = body.left_over
    return refs


class _Body:
    """The parts of one pack, made while they are written."""

    def __init__(self, path: str, origin: Origin, first: Chunk, others: Iterator[Chunk], number: int) -> None:
        self.path = path
        self.refs: dict[int, ChunkRef] = {}
        self.left_over: Chunk | None = first
        self._others = others
        self._header = _HEADER.pack(_MAGIC, number, number, origin.generation, bytes.fromhex(nonce_hex(origin.nonce)))

    def parts(self) -> Iterator[Buffer]:
        yield self._header
        offset = len(self._header)
        footer: list[Packed] = []
        while self.left_over is not None and (not footer or offset + self.left_over.num_raw <= PACK_BYTES):
            chunk = self.left_over
            gap = -offset % ALIGN_BYTES
            offset += gap
            data = chunk.data if chunk.stored is None else chunk.stored
            ref = ChunkRef(
                id=chunk.id, pack=self.path, offset=offset, stored_bytes=len(data), raw_bytes=chunk.num_raw, codec=chunk.codec,
                sum=UNSET if chunk.codec == IDENTITY else join_leaves(chunk_leaves(data)),
            )  # fmt: skip
            footer.append(packed(ref))
            self.refs[chunk.number] = ref
            yield bytes(gap)
            yield data
            offset += len(data)
            self.left_over = next(self._others, None)
        raw = msgspec.json.encode(footer)
        yield raw
        yield _TRAILER.pack(offset, len(raw), _digest(self._header, raw), _END)


def read_chunk(tier: Tier, ref: ChunkRef, base: Buffer | None = None) -> Read:
    """A chunk's raw bytes, verified; `base` are those of the chunk that it is a difference from.

    Raises Damaged naming the pack; Transient when trying again may help.
    """
    if not (0 < ref.raw_bytes <= MAX_CHUNK_BYTES and 0 < ref.stored_bytes <= MAX_CHUNK_BYTES):
        raise Damaged(ref.pack, f"chunk at {ref.offset} claims {ref.stored_bytes} stored and {ref.raw_bytes} raw bytes")
    if (ref.codec in NEEDS_BASE) != (base is not None):
        raise Damaged(ref.pack, f"chunk at {ref.offset} has codec {ref.codec} and {'no' if base is None else 'a'} base")
    stored = _read(tier, ref.pack, ref.offset, ref.stored_bytes)
    try:
        data = decode(ref.codec, stored, ref.raw_bytes, base)
    except ValueError as error:
        raise Damaged(ref.pack, f"chunk at {ref.offset} cannot be decoded: {error}") from error
    leaves = chunk_leaves(data)
    if join_leaves(leaves) != ref.id:
        raise Damaged(ref.pack, f"chunk at {ref.offset} does not match its digest {ref.id[:16]}")
    return Read(data, leaves)


def read_stored(tier: Tier, ref: ChunkRef) -> Buffer:
    """A chunk's bytes as they are stored, verified. Raises as `read_chunk` does."""
    sum_ = ref.id if ref.sum is UNSET else ref.sum
    return read_chunk(
        tier, ChunkRef(id=sum_, pack=ref.pack, offset=ref.offset, stored_bytes=ref.stored_bytes, raw_bytes=ref.stored_bytes)
    ).data


def audit_pack(tier: Tier, path: str) -> dict[Packed, list[bytes]]:
    """Verify every byte of a pack; its chunks and the leaf digests of their stored bytes. Raises Damaged at the first fault."""
    frame = _Frame(tier, path)
    return {line: read.leaves for line, read in _verified(tier, path, frame)}


class PackParts:
    """The bytes of a pack in order, as often as one iterates, each verified before it is given. Damaged at the first fault.

    Every fault of header or footer is found before the first byte is given. Memory: one chunk. `lines` are those of the footer.
    """

    def __init__(self, tier: Tier, path: str) -> None:
        self._tier = tier
        self._path = path
        self._frame = _Frame(tier, path)
        self.lines = frozenset(self._frame.lines)
        self.size_bytes = self._frame.end + len(self._frame.tail)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._frame.header
        at = len(self._frame.header)
        for line, read in _verified(self._tier, self._path, self._frame):
            yield bytes(line.offset - at)
            yield read.data
            at = line.offset + line.stored_bytes
        yield self._frame.tail


class _Frame:
    """Header, footer and trailer of a pack, verified: `end` is where the chunks end and `tail`, footer and trailer, begins."""

    def __init__(self, tier: Tier, path: str) -> None:
        self.header = _read(tier, path, 0, _HEADER.size)
        if _parse_header(self.header, path).nonce[:16] != pack_origin(path):
            raise Damaged(path, "was written by another generation than its name says")
        self.end, self.tail, self.lines = _read_footer(tier, path, self.header)


def _verified(tier: Tier, path: str, frame: _Frame) -> Iterator[tuple[Packed, Read]]:
    """Each chunk as it is stored, and what lies between them is zero."""
    end = _HEADER.size
    for packed in frame.lines:
        if packed.offset % ALIGN_BYTES or not end <= packed.offset < end + ALIGN_BYTES or packed.offset + packed.stored_bytes > frame.end:
            raise Damaged(path, f"the footer places a chunk at {packed.offset}, where none can be")
        if packed.offset > end and any(_read(tier, path, end, packed.offset - end)):
            raise Damaged(path, f"bytes between chunks at {end} are not zero")
        if packed.codec == IDENTITY and packed.raw_bytes != packed.stored_bytes:
            raise Damaged(path, f"the footer claims {packed.raw_bytes} bytes for a chunk of {packed.stored_bytes} that is stored as it is")
        as_stored = ChunkRef(id=packed.id, pack=path, offset=packed.offset, stored_bytes=packed.stored_bytes, raw_bytes=packed.stored_bytes)
        yield packed, read_chunk(tier, as_stored)
        end = packed.offset + packed.stored_bytes
    if end != frame.end:
        raise Damaged(path, f"{frame.end - end} bytes before the footer belong to no chunk")


def packed(ref: ChunkRef) -> Packed:
    """The footer line that a reference expects."""
    return Packed(ref.id if ref.sum is UNSET else ref.sum, ref.offset, ref.stored_bytes, ref.raw_bytes, ref.codec)


def _read_footer(tier: Tier, path: str, header: bytes) -> tuple[int, bytes, list[Packed]]:
    size = _size(tier, path)
    trailer = _read(tier, path, max(0, size - _TRAILER.size), _TRAILER.size)
    offset, length, digest, end = _TRAILER.unpack(trailer)
    if end != _END or any(trailer[48:56]) or length > _MAX_FOOTER_BYTES or offset + length + _TRAILER.size != size:
        raise Damaged(path, "the end of the file is not a pack's trailer")
    raw = _read(tier, path, offset, length)
    if _digest(header, raw) != digest:
        raise Damaged(path, "header and footer do not match the digest in the trailer")
    try:
        return offset, raw + trailer, msgspec.json.decode(raw, type=list[Packed])
    except BROKEN_INPUT as e:
        raise Damaged(path, f"the footer cannot be read ({e})") from e


def _parse_header(raw: bytes, path: str) -> Origin:
    magic, number, min_reader, generation, nonce = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise Damaged(path, "is not a pack: wrong magic")
    check_format(number, min_reader, path)
    return Origin(generation, nonce.hex())


def _read(tier: Tier, path: str, offset: int, length: int) -> bytes:
    try:
        data = tier.read(path, offset, length)
    except FileNotFoundError:
        raise Damaged(path, "missing") from None
    except Permanent as e:
        raise Damaged(path, f"cannot be read ({e})") from e
    if len(data) != length:
        raise Damaged(path, f"cut short: {len(data)} of {length} bytes at {offset}")
    return data


def _size(tier: Tier, path: str) -> int:
    try:
        return tier.size(path)
    except FileNotFoundError:
        raise Damaged(path, "missing") from None
    except Permanent as e:
        raise Damaged(path, f"cannot be read ({e})") from e


def _digest(header: bytes, footer: bytes) -> bytes:
    return bytes.fromhex(text_digest(header, footer))
