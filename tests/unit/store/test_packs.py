"""Packs: laid out as documented, every byte covered, nothing believed that a footer or a reference says."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.memory import at_most
from unbroken.codec.digest import digest, text_digest
from unbroken.core.errors import Damaged, NewerFormat, UnbrokenError
from unbroken.core.records import ChunkRef
from unbroken.store import packs
from unbroken.store.packs import Chunk, Origin, audit_pack, packed, read_chunk, write_packs
from unbroken.store.paths import origin, pack
from unbroken.store.tiers.memory import MemoryTier

NONCE = "0f" * 16
PATH = pack(origin(NONCE) + "1" * 16)


def chunks(*datas: bytes) -> Iterator[Chunk]:
    return iter([Chunk(number, digest(data), data) for number, data in enumerate(datas)])


def one_pack(*datas: bytes) -> tuple[MemoryTier, dict[int, ChunkRef]]:
    tier = MemoryTier()
    return tier, write_packs(tier, chunks(*datas), Origin(3, NONCE), lambda: PATH)


def with_bytes(raw: bytes) -> MemoryTier:
    return MemoryTier(((PATH, raw),))


def sealed_pack(footer: bytes, chunk_area: bytes = b"", length: int | None = None) -> MemoryTier:
    """A pack whose digests fit whatever the footer claims."""
    header = struct.pack("<16sIIQ16s16x", b"unbroken/pack\0\0\0", 1, 1, 3, bytes.fromhex(NONCE))
    offset = len(header) + len(chunk_area)
    trailer = struct.pack("<QQ32s8x8s", offset, length or len(footer), bytes.fromhex(text_digest(header, footer)), b"unbr/end")
    return with_bytes(header + chunk_area + footer + trailer)


def test_chunks_come_back_and_lie_at_multiples_of_4096() -> None:
    datas = [b"a", b"b" * 4096, b"c" * 5000]
    tier, refs = one_pack(*datas)
    assert [refs[i].offset for i in range(3)] == [4096, 8192, 12288]
    assert [read_chunk(tier, refs[i]).data for i in range(3)] == datas
    assert list(audit_pack(tier, PATH)) == [packed(refs[i]) for i in range(3)]
    assert tier.read(PATH, 0, 13) == b"unbroken/pack"


def test_a_pack_is_closed_at_its_size_and_no_chunk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 20_000)
    tier, names = MemoryTier(), iter(pack(f"{i:032x}") for i in range(100))
    datas = [bytes([i]) * 6000 for i in range(10)] + [b"large" * 10_000]
    refs = write_packs(tier, chunks(*datas), Origin(0, NONCE), lambda: next(names))
    assert [read_chunk(tier, refs[i]).data for i in range(11)] == datas
    assert len(tier.list("packs")) == 6
    assert all(tier.size(path) < 30_000 for path in tier.list("packs")[:-1])


def test_no_chunks_make_no_pack() -> None:
    tier, refs = one_pack()
    assert (refs, tier.snapshot()) == ({}, ())


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_I3_every_changed_byte_of_a_pack_is_found(mask: int) -> None:
    tier, _ = one_pack(os.urandom(300), b"x" * 5000)
    raw = tier.read(PATH)
    for at in range(len(raw)):
        with pytest.raises((Damaged, NewerFormat)) as found:
            audit_pack(with_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]), PATH)
        assert PATH in str(found.value)


def test_I3_every_truncation_and_addition_is_found() -> None:
    tier, _ = one_pack(b"abc")
    raw = tier.read(PATH)
    for cut in range(len(raw)):
        with pytest.raises(Damaged):
            audit_pack(with_bytes(raw[:cut]), PATH)
    with pytest.raises(Damaged):
        audit_pack(with_bytes(raw + b"\0"), PATH)


def test_I3_a_changed_chunk_is_never_returned() -> None:
    tier, refs = one_pack(b"abc" * 1000)
    raw = bytearray(tier.read(PATH))
    raw[5000] ^= 1
    with pytest.raises(Damaged, match=f"{PATH}: chunk at 4096 does not match"):
        read_chunk(with_bytes(bytes(raw)), refs[0])


def test_a_missing_and_a_short_pack_are_named() -> None:
    tier, refs = one_pack(b"abc" * 1000)
    with pytest.raises(Damaged, match=f"{PATH}: missing"):
        read_chunk(MemoryTier(), refs[0])
    with pytest.raises(Damaged, match="cut short: 904 of 3000"):
        read_chunk(with_bytes(tier.read(PATH, 0, 5000)), refs[0])


@pytest.mark.parametrize(
    ("stored", "raw", "codec", "reason"),
    [(1 << 40, 1 << 40, 0, "claims"), (3, 1 << 40, 0, "claims"), (0, 0, 0, "claims"), (3, 3, 7, "unknown codec 7")],
)
def test_references_that_lie_about_sizes_allocate_nothing(stored: int, raw: int, codec: int, reason: str) -> None:
    tier, _ = one_pack(b"abc")
    ref = ChunkRef(id=digest(b"abc"), pack=PATH, offset=4096, stored_bytes=stored, raw_bytes=raw, codec=codec)
    with at_most(1 << 20), pytest.raises(Damaged, match=reason):
        read_chunk(tier, ref)


@pytest.mark.parametrize(
    "footer",
    [
        b"[]x",
        b'[["zz",4096,3,3,0]]',
        b'[["%s",-1,3,3,0]]' % (b"0" * 64),
        b'[["%s",4096,1099511627776,1099511627776,0]]' % (b"0" * 64),
        b'[["%s",1099511627776,3,3,0]]' % (b"0" * 64),
        b'[["%s",64,3,3,0]]' % (b"0" * 64),
        b'{"a":1}',
        b"[" * 10_000,
    ],
)
def test_footers_that_lie_are_refused_in_little_memory(footer: bytes) -> None:
    with at_most(1 << 20), pytest.raises(Damaged, match=PATH):
        audit_pack(sealed_pack(footer), PATH)


def test_bytes_that_belong_to_no_chunk_are_refused() -> None:
    with pytest.raises(Damaged, match="belong to no chunk"):
        audit_pack(sealed_pack(b"[]", chunk_area=b"hidden"), PATH)
    assert audit_pack(sealed_pack(b"[]"), PATH) == {}


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1, 3])
def test_trailers_that_lie_are_refused_in_little_memory(length: int) -> None:
    with at_most(1 << 20), pytest.raises(Damaged, match="trailer"):
        audit_pack(sealed_pack(b"[]", length=length), PATH)


def test_a_pack_under_another_generations_name_is_refused() -> None:
    tier, _ = one_pack(b"abc")
    other = pack("1" * 32)
    with pytest.raises(Damaged, match="another generation"):
        audit_pack(MemoryTier(((other, tier.read(PATH)),)), other)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 4300), st.integers(0, 300), st.booleans())
def test_fuzz_packs_raise_our_errors_only(data: bytes, at: int, drop: int, as_footer: bool) -> None:
    raw = one_pack(b"abc")[0].read(PATH)
    tier = sealed_pack(data) if as_footer else with_bytes(raw[:at] + data + raw[at + drop :])
    try:
        audit_pack(tier, PATH)
    except UnbrokenError:
        return
    assert tier.read(PATH) == raw or msgspec.json.decode(data) == []
