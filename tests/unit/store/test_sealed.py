"""Sealed files: every changed byte is found, every hostile input gets one of our errors and no memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tests.rigs.memory import at_most
from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, NewerFormat, UnbrokenError
from unbroken.core.limits import MAX_JSON_BYTES
from unbroken.core.records import LogEntry, Manifest, RunFacts
from unbroken.store.sealed import read_sealed, seal, unseal
from unbroken.store.tiers.memory import MemoryTier

FACTS = RunFacts(run_id="r1", created="2026-01-01T00:00:00.000Z", options={"units": 4, "name": 'quo"te\\'})
RAW = seal("run", FACTS)


def sealed_by(number: int, min_reader: int, body: bytes, magic: str = "unbroken/run") -> bytes:
    checksum = text_digest(magic, str(number), str(min_reader), body)
    head = f'{{"magic":"{magic}","format":{number},"min_reader":{min_reader},"checksum":"{checksum}","body":'
    return head.encode() + body + b"}"


def test_what_was_sealed_comes_back() -> None:
    assert unseal("run", RAW, RunFacts, "run.json") == FACTS


@pytest.mark.parametrize("mask", [0x01, 0x02, 0x20, 0x80, 0xFF])
def test_I3_every_changed_byte_is_found_and_the_file_named(mask: int) -> None:
    for i in range(len(RAW)):
        changed = RAW[:i] + bytes([RAW[i] ^ mask]) + RAW[i + 1 :]
        with pytest.raises(Damaged, match=r"^run\.json: "):
            unseal("run", changed, RunFacts, "run.json")


def test_B01_b_every_truncation_and_every_addition_is_found() -> None:
    for i in range(len(RAW)):
        with pytest.raises(Damaged):
            unseal("run", RAW[:i], RunFacts, "run.json")
    for extra in (b" ", b"\n", b"\0", b"}", RAW):
        with pytest.raises(Damaged):
            unseal("run", RAW + extra, RunFacts, "run.json")


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(Damaged, match="unbroken/log"):
        unseal("log", RAW, LogEntry, "x")


def test_unknown_fields_are_passed_over_in_envelope_and_body() -> None:
    body = b'{"run_id":"r1","created":"now","color":"blue"}'
    plain = sealed_by(1, 1, body)
    assert unseal("run", plain, RunFacts, "x").run_id == "r1"
    assert unseal("run", plain[:-1] + b',"signature":"abc"}', RunFacts, "x").run_id == "r1"


def test_a_newer_file_is_refused_with_both_versions_and_the_remedy() -> None:
    with pytest.raises(NewerFormat, match=r"run\.json: .*format 9, this reads <= 3.*upgrade unbroken"):
        unseal("run", sealed_by(9, 9, b'{"new":"shape"}'), RunFacts, "run.json")
    with pytest.raises(NewerFormat):
        unseal("run", RAW.replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99'), RunFacts, "run.json")


def test_a_newer_file_that_this_version_may_read_is_read() -> None:
    assert unseal("run", sealed_by(9, 1, b'{"run_id":"r1","created":"now"}'), RunFacts, "x").run_id == "r1"


@pytest.mark.parametrize(
    "body",
    [
        b'{"run_id":7,"created":"now"}',
        b'{"run_id":"r"}',
        b"[]",
        b"null",
        b'{"run_id":"r","created":"now","options":[]}',
        b'{"run_id":"r","created":"now","options":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
        b'{"run_id":"r","created":"now","options":{"a":' + b"9" * 6_000 + b'},"authority":5}',
    ],
)
def test_a_body_of_the_wrong_shape_is_damage_though_its_checksum_fits(body: bytes) -> None:
    with pytest.raises(Damaged):
        unseal("run", sealed_by(1, 1, body), RunFacts, "run.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 1.5),
        ("step", "7"),
        ("world_size", None),
        ("chunks", [{"id": "zz"}]),
        ("state_root", "A" * 64),
        ("ranks", [-3]),
    ],
)
def test_manifest_fields_out_of_bounds_are_named(field: str, value: object) -> None:
    digest = "0" * 64
    manifest = Manifest(
        step=1, generation=0, nonce="n", node=0, world_size=1, ranks=(0,), state_root=digest, rank_roots=(digest,), chunks=(), pieces=()
    )
    body = msgspec.json.decode(msgspec.json.encode(manifest))
    body[field] = value
    raw = sealed_by(1, 1, msgspec.json.encode(body), magic="unbroken/manifest")
    with pytest.raises(Damaged, match=rf"m\.json: .*{field}"):
        unseal("manifest", raw, Manifest, "m.json")


class _Huge(MemoryTier):
    """Says that it has more than it was given."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        assert length == MAX_JSON_BYTES + 1, "never more than the limit may be asked for"
        return super().read(path, offset, length)


def test_never_more_than_the_limit_is_read() -> None:
    tier = _Huge((("run.json", RAW),))
    assert read_sealed(tier, "run.json", "run", RunFacts)[0] == FACTS


class _Any(Struct):
    x: dict[str, int] = msgspec.field(default_factory=dict)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(lambda a, b, c: RAW[:a] + b + RAW[a + c :], st.integers(0, 200), st.binary(max_size=9), st.integers(0, 9)),
    )
)
def test_fuzz_unseal_raises_our_errors_only(raw: bytes) -> None:
    with at_most(50 << 20):
        try:
            unseal("run", raw, RunFacts, "x")
        except UnbrokenError:
            return
    assert raw == RAW


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_fuzz_bodies_with_a_right_checksum_raise_our_errors_only(body: bytes) -> None:
    for type_ in (RunFacts, LogEntry, Manifest, _Any):
        try:
            unseal("run", sealed_by(1, 1, body), type_, "x")
        except UnbrokenError:
            continue
