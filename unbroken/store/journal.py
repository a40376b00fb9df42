"""The journal of one generation: a header line, then one line per record, each chained to the one before.

    {"magic":"unbroken/journal","format":1,"min_reader":1,"lineage":"main","generation":3,"nonce":"...","checksum":"..."}
    {"chain":"<BLAKE3(previous chain, 32 bytes || raw record)>","record":{...}}

A last line without its newline is torn by a crash and does not count, nor does what begins with a zero byte: no record holds one, and
blocks of an append that a power loss took away read as zeros. Any other line that fails the chain is damage. Reading takes
bounded memory whatever the length: about 5 us per line.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
from blake3 import blake3
from msgspec import Raw, Struct

from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, Permanent, StoreError
from unbroken.core.limits import MAX_JOURNAL_LINE_BYTES
from unbroken.core.ports import Tier, failpoint
from unbroken.core.records import Digest, JournalLine, Record
from unbroken.store import paths
from unbroken.store.sealed import BROKEN_INPUT, PLAIN_FORMAT, check_format

_MAGIC = "unbroken/journal"
_BLOCK_BYTES = 1 << 20
_MAX_WAITING_BYTES = 64 << 20


class _Header(Struct, frozen=True, kw_only=True):
    magic: str
    format: int
    min_reader: int
    lineage: str
    generation: int
    nonce: str
    checksum: str


class _Line(Struct, frozen=True, kw_only=True):
    chain: Digest
    record: Raw


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_record = msgspec.json.Decoder(Record).decode


def first_chain(generation: int, nonce: str) -> str:
    """Chain value before any line."""
    return text_digest(_MAGIC, str(generation), nonce)


def next_chain(chain: str, record: bytes) -> str:
    """Chain value after one more encoded record."""
    return blake3(bytes.fromhex(chain) + record).hexdigest()


class JournalWriter:
    """The one writer of a generation's journal. `add` is memory only and never waits for a `sync` that another thread has begun."""

    def __init__(self, tier: Tier, lineage: str, generation: int, nonce: str) -> None:
        self.head = first_chain(generation, nonce)
        self.num_lines = 0
        self._tier = tier
        self._path = paths.journal(paths.check_lineage(lineage), generation)
        self._waiting = bytearray(_header_line(lineage, generation, nonce))
        self._adding, self._syncing = threading.Lock(), threading.Lock()
        self._durable_bytes = 0
        self._is_sure = False

    def add(self, record: Record) -> None:
        """Append one record. ValueError when it is longer than a line may be; Permanent when 64 MiB wait because no sync succeeds."""
        raw = msgspec.json.encode(record)
        if len(raw) > MAX_JOURNAL_LINE_BYTES - 128:
            raise ValueError(f"a journal record of {len(raw)} bytes; at most {MAX_JOURNAL_LINE_BYTES - 128}: shorten its facts")
        with self._adding:
            if len(self._waiting) > _MAX_WAITING_BYTES:
                raise Permanent(f"{self._path}: {len(self._waiting)} bytes wait to be written and cannot be")
            self.head = next_chain(self.head, raw)
            self.num_lines += 1
            self._waiting += b'{"chain":"%s","record":%s}\n' % (self.head.encode(), raw)

    def sync(self) -> None:
        """Everything added before is durable on return; one fsync, none when nothing waits. After an error the next call tries again."""
        with self._syncing:
            with self._adding:
                lines, self._waiting = self._waiting, bytearray()
            if not lines:
                return
            try:
                if not self._is_sure:
                    self._compare_size()
                self._is_sure = False
                failpoint("store.journal.before_append")
                self._tier.append(self._path, lines)
            except BaseException:  # raised again below; whatever it was, the lines must not be lost
                with self._adding:
                    self._waiting = lines + self._waiting
                raise
            self._durable_bytes += len(lines)
            self._is_sure = True

    def _compare_size(self) -> None:
        """Lines must join exactly where the last durable one ended: not onto another writer's file, not onto half a line."""
        try:
            there = self._tier.size(self._path)
        except FileNotFoundError:
            there = 0
        if there != self._durable_bytes:
            raise Permanent(f"{self._path}: {there} bytes where {self._durable_bytes} were written: another writer, or half a line")


def read_journal(tier: Tier, lineage: str, generation: int, nonce: str) -> Iterator[JournalLine]:
    """The complete lines in order; none when the file does not exist. Raises Damaged naming file and line, NewerFormat, StoreError."""
    return JournalTail(tier, lineage, generation, nonce).read()


class JournalTail:
    """Reads a journal that may still be written: each `read` gives the complete lines that came since the one before."""

    def __init__(self, tier: Tier, lineage: str, generation: int, nonce: str) -> None:
        self._tier = tier
        self._identity = lineage, generation, nonce
        self._path = paths.journal(lineage, generation)
        self._chain = first_chain(generation, nonce)
        self._offset = self._number = 0

    def read(self) -> Iterator[JournalLine]:
        """Lines in order, as `read_journal`; who leaves early goes on behind the last line given."""
        for raw in _complete_lines(self._tier, self._path, self._offset, self._number):
            if self._number == 0:
                _check_header(raw, self._path, *self._identity)
            line = self._line(raw) if self._number else None
            self._number += 1
            self._offset += len(raw) + 1
            if line is not None:
                yield line

    def _line(self, raw: bytes) -> JournalLine:
        try:
            line = _decode_line(raw)
            chain = next_chain(self._chain, bytes(line.record))
            if chain != line.chain:
                raise Damaged(self._path, f"line {self._number} does not continue the chain")
            record = _decode_record(line.record)
        except BROKEN_INPUT as e:
            raise Damaged(self._path, f"line {self._number} is no journal line ({e})") from e
        self._chain = chain
        return JournalLine(chain=chain, record=record)


def durable_head(tier: Tier, lineage: str, generation: int, nonce: str) -> str:
    """Chain value of the last complete line, durable on return; `first_chain` when there is none, "" when it cannot be read.

    Whoever names the value elsewhere must not remember more than a power loss leaves: lines of a killed writer may be in caches only.
    Cost: a read of as much as may have been on its way to the disk, at most 66 MiB, one fsync.
    """
    path = paths.journal(lineage, generation)
    try:
        size_bytes = tier.size(path)
        tier.append(path, b"")
        end = _before_zeros(tier, path, size_bytes)
        start = max(0, end - 2 * (MAX_JOURNAL_LINE_BYTES + 1))
        lines = tier.read(path, start, end - start).split(b"\n")[:-1]  # what follows the last newline is torn
        if not start and len(lines) < 2:  # the header alone
            return first_chain(generation, nonce)
        return _decode_line(lines[-1]).chain
    except FileNotFoundError:
        return first_chain(generation, nonce)
    except (StoreError, IndexError, *BROKEN_INPUT):
        return ""  # safe: a journal in which no line can be read is damage that every check names


def _before_zeros(tier: Tier, path: str, size_bytes: int) -> int:
    """Where the first zero byte lies in what the last append may have written; the size where there is none."""
    for offset in range(max(0, size_bytes - _MAX_WAITING_BYTES - 2 * MAX_JOURNAL_LINE_BYTES), size_bytes, _BLOCK_BYTES):
        found = tier.read(path, offset, min(_BLOCK_BYTES, size_bytes - offset)).find(b"\0")
        if found >= 0:
            return offset + found
    return size_bytes


def _header_line(lineage: str, generation: int, nonce: str) -> bytes:
    checksum = _header_checksum(PLAIN_FORMAT, PLAIN_FORMAT, lineage, generation, nonce)
    header = _Header(
        magic=_MAGIC,
        format=PLAIN_FORMAT,
        min_reader=PLAIN_FORMAT,
        lineage=lineage,
        generation=generation,
        nonce=nonce,
        checksum=checksum,
    )
    return msgspec.json.encode(header) + b"\n"


def _header_checksum(number: int, min_reader: int, lineage: str, generation: int, nonce: str) -> str:
    return text_digest(_MAGIC, str(number), str(min_reader), lineage, str(generation), nonce)


def _check_header(raw: bytes, path: str, lineage: str, generation: int, nonce: str) -> None:
    try:
        header = msgspec.json.decode(raw, type=_Header)
    except BROKEN_INPUT as e:
        raise Damaged(path, f"the header is not one of a journal ({e})") from e
    check_format(header.format, header.min_reader, path)
    expected = _header_checksum(header.format, header.min_reader, header.lineage, header.generation, header.nonce)
    if header.magic != _MAGIC or header.checksum != expected:
        raise Damaged(path, "the header does not match its checksum")
    if (header.lineage, header.generation, header.nonce) != (lineage, generation, nonce):
        raise Damaged(path, f"belongs to generation {header.generation} of {header.lineage!r}, nonce {header.nonce[:40]!r}")


def _complete_lines(tier: Tier, path: str, offset: int, number: int) -> Iterator[bytes]:
    """Lines from `offset` on, where line `number` begins."""
    rest = b""
    while True:
        try:
            block = tier.read(path, offset, _BLOCK_BYTES)
        except FileNotFoundError:
            if offset == 0:
                return
            raise Damaged(path, "went away while it was read") from None
        except Permanent as e:
            raise Damaged(path, f"cannot be read ({e})") from e
        offset += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if b"\0" in line:
                return
            _check_length(line, number, path)
            yield line
            number += 1
        if not block or b"\0" in rest:
            return
        _check_length(rest, number, path)


def _check_length(line: bytes, number: int, path: str) -> None:
    if len(line) > MAX_JOURNAL_LINE_BYTES:
        raise Damaged(path, f"line {number} is longer than {MAX_JOURNAL_LINE_BYTES} bytes")
