"""Fuzz of what people and other processes hand in: settings, places, URLs, pointers, codecs, messages, leases, slots."""

from __future__ import annotations

import os
import re
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.rigs.fuzzing import DEEP, HOSTILE_NUMBERS, HOSTILE_WORDS, bounded, broken, dumped, fuzz, outcome, values
from unbroken.archive.places import parse_place
from unbroken.capture import pointers
from unbroken.codec.planes import NEEDS_BASE, PLANES, decode, encode
from unbroken.config import RUN, parse_interval
from unbroken.core import messages
from unbroken.core.errors import Damaged, Fenced, Refused
from unbroken.core.limits import MAX_MESSAGE_BYTES
from unbroken.core.os import boot_id, hostname, memory_file
from unbroken.core.records import Piece, Placed, SlotIndex, Writer
from unbroken.core.settings import gather, read_file
from unbroken.shm import channel
from unbroken.shm.pulse import PulsePage
from unbroken.shm.slots import HEADER_BYTES, MAGIC, Slot, pick, slot_bytes
from unbroken.store.lease import WriterLease, holder
from unbroken.store.packs import MAX_CHUNK_BYTES
from unbroken.store.tiers.disk import local_path

words = st.text(max_size=60) | st.sampled_from(HOSTILE_WORDS)


# Settings


TOML = b"""# comment
[run]
keep = 3
lose_at_most = "30s"
milestone_every = "1000 steps"

[launch]
max_restarts = 5
"""


def _settings_of(raw: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "unbroken.toml")
        path.write_bytes(raw)
        return outcome(lambda: gather(RUN, {}, read_file(str(path))), ValueError)


@fuzz(100)
@given(broken(TOML))
def test_a_broken_settings_file_is_a_value_error_or_settings(raw: bytes) -> None:
    found = _settings_of(raw)
    if isinstance(found, ValueError):
        assert "unbroken.toml" in str(found)


SETTING_VALUES = st.sampled_from(["-1", "1e400", "nan", "inf", "[" * 2000, "1979-05-27", "0x" + "f" * 200, "9" * 4400, "true", '""', "{}"])


@fuzz(100)
@given(
    st.sampled_from(RUN.names),
    SETTING_VALUES | words.map(lambda word: f"'''{word}'''") | values.map(lambda v: dumped(v).decode(errors="replace")),
)
def test_any_value_of_any_setting_is_a_value_error_or_a_setting(name: str, value: str) -> None:
    found = _settings_of(f"[run]\n{name} = {value}\n".encode(errors="replace"))
    if isinstance(found, ValueError):
        assert "unbroken.toml" in str(found)


@fuzz(150)
@given(words | st.from_regex(r"\s*[0-9]{1,400}(\.[0-9]{1,400})?\s*(s|min|h|steps)", fullmatch=True))
def test_an_interval_is_a_value_error_or_an_interval(text: str) -> None:
    outcome(lambda: parse_interval(text), ValueError)


# Places and URLs


@fuzz(200)
@given(
    words
    | st.builds("{}@{}:{}".format, words, words, words)
    | st.builds("{}@{}".format, words, st.sampled_from(["٣", "²", "9" * 5000, "main:"]))
)
def test_a_place_is_a_value_error_or_a_place(text: str) -> None:
    assume("\0" not in text)
    found = outcome(lambda: parse_place(text), ValueError)
    if not isinstance(found, ValueError):
        assert found.step is None or found.step >= 0
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", found.lineage)


urls = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "s3", "gs", "az", "file", "memory", "http", "S3", "s3s"]),
    st.sampled_from(["://", ":/", ":", "", ":///", "://[", "://user:pw@", "://a?b#c"]),
    words,
    st.sampled_from(["", "/", "/../..", "/%2e%2e/x", "%00", "?x=1", "#y", "//"]),
)


@fuzz(200)
@given(urls)
def test_a_url_is_a_value_error_or_a_place_and_no_secret_is_repeated(url: str) -> None:
    outcome(lambda: local_path(url), ValueError)
    places = pytest.importorskip("unbroken.store.tiers.places", reason="obstore is not installed: pip install 'unbroken[object]'")
    found = outcome(lambda: places.place_of(url, endpoint="http://127.0.0.1:1"), ValueError)
    if isinstance(found, ValueError) and "://user:pw@" in url:
        assert "user:pw" not in str(found)


# JSON pointers


@fuzz(300)
@given(
    words
    | st.from_regex(r"#(int|float|bool|bytes|str|tuple|none|x)?:?.{0,40}", fullmatch=True)
    | st.sampled_from(["#int:" + "9" * 5000, "#int:0x" + "f" * 100_000, "#tuple:" + "[" * 5000, "#tuple:" + DEEP, "#float:1e999"])
)
def test_a_token_is_a_value_error_or_the_one_spelling_of_a_key(text: str) -> None:
    found = outcome(lambda: pointers.key(text), ValueError)
    if not isinstance(found, ValueError):
        assert pointers.token(found) == text


keys = st.recursive(
    st.text(max_size=9)
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.none()
    | st.binary(max_size=9)
    | st.sampled_from(HOSTILE_WORDS[:6]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@fuzz(200)
@given(keys)
def test_every_key_comes_back_from_its_token(key: Any) -> None:
    again = pointers.key(pointers.token(key))
    assert repr(again) == repr(key)


@fuzz(100)
@given(st.lists(words).map("/".join))
def test_any_pointer_can_be_shown(pointer: str) -> None:
    assert isinstance(pointers.spell(pointers.split(pointer)), str)


# Codecs


@fuzz(60)
@given(st.data(), st.sampled_from((1, 2, 4, 8)), st.sampled_from((0, 1, 2, 3, 4, 255)))
def test_I3_broken_chunks_of_every_codec_are_value_errors_or_of_the_right_size(data: st.DataObject, width: int, codec: int) -> None:
    raw = bytes(range(64)) * 40 + bytes(data.draw(st.integers(0, 9)))
    base = bytes(reversed(raw)) if codec in NEEDS_BASE else None
    stored = data.draw(broken(bytes(encode(raw, width, base).data)) | st.binary(max_size=300))
    size = data.draw(st.sampled_from((len(raw), 0, 1, MAX_CHUNK_BYTES)))
    with bounded():
        found = outcome(lambda: decode(codec, stored, size, base), ValueError)
    assert isinstance(found, ValueError) or len(found) == size


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_I3_a_small_chunk_that_claims_the_largest_size_costs_no_memory_before_it_is_found_out(width: int) -> None:
    import zstandard

    count = MAX_CHUNK_BYTES // width
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(count))
    for plane in (frame[:-4], frame, frame[:9] + b"\xff" * 20):
        stored = bytes([width]) + struct.pack("<BI", 1, len(plane)) + plane
        with bounded(), pytest.raises(ValueError):
            decode(PLANES, stored + b"x" * 9, MAX_CHUNK_BYTES)


# Messages of the local socket


EXAMPLES = [
    messages.Welcome(pid=1, directory="/run"),
    messages.Begin(world_size=2, resume="auto", options={"units": 4}),
    messages.Opened(generation=1, step=2, loaded_root="0" * 64),
    messages.Bye(),
]
TAGS = sorted({kind.__struct_config__.tag for kind in messages.Message.__args__})


@fuzz(150)
@given(st.sampled_from(EXAMPLES).flatmap(lambda message: broken(channel.encode(message))) | st.binary(max_size=100))
def test_a_broken_packet_is_damage_or_a_message(raw: bytes) -> None:
    outcome(lambda: channel.decode(raw), Damaged)


@fuzz(150)
@given(
    st.sampled_from(TAGS),
    st.dictionaries(
        st.sampled_from(["world_size", "resume", "options", "generation", "step", "slots", "pid"]) | st.text(max_size=6), values
    ),
)
def test_a_made_up_packet_is_damage_or_a_message(tag: str, fields: dict[str, Any]) -> None:
    raw = dumped({**fields, "type": tag})
    outcome(lambda: channel.decode(raw), Damaged)


@pytest.mark.parametrize(
    "text", [f'{{"type":"bye","x":{DEEP}}}', f'{{"type":"begin","world_size":1,"resume":"auto","options":{DEEP}}}', "[" * MAX_MESSAGE_BYTES]
)
def test_depth_without_end_in_a_packet_is_damage(text: str) -> None:
    with pytest.raises(Damaged):
        channel.decode(text.encode()[:MAX_MESSAGE_BYTES])


def test_whatever_a_peer_sends_the_channel_says_damage_and_lives() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading = channel.Channel(ours)
    for raw in (b"x", b"\0" * 5, b"[" * 50_000, f'{{"type":"bye","x":{DEEP}}}'.encode(), b"x" * (MAX_MESSAGE_BYTES + 1)):
        theirs.send(raw)
        with pytest.raises(Damaged):
            reading.receive(5)
    theirs.send(channel.encode(messages.Bye()))
    assert reading.receive(5)[0] == messages.Bye()
    theirs.close()
    reading.close()


# Lease files


WRITER = Writer(host=hostname(), pid=1, boot_id="another", since="now")


@fuzz(60)
@given(broken(msgspec.json.encode(WRITER)) | values.map(dumped) | st.sampled_from([DEEP.encode(), b"[" * 70_000]))
def test_a_broken_lease_file_names_a_holder_or_is_taken_over(raw: bytes) -> None:
    me = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "writer.json").write_bytes(raw)
        outcome(lambda: holder(folder), Refused)
        lease = outcome(lambda: WriterLease.acquire(folder, me), Fenced)
        if not isinstance(lease, Fenced):
            assert holder(folder) == me
            lease.release()


# Memory slots and pulse pages


PIECES = tuple(Placed(piece=Piece(pointer=f"/{i}", dtype="uint8", shape=(100,)), offset=128 * i, size_bytes=100) for i in range(4))
INDEX = SlotIndex(generation=1, step=7, rank=0, world_size=1, milestone=False, pieces=PIECES)


def _slot_bytes() -> bytes:
    slot = Slot(memory_file("fuzz", slot_bytes(INDEX)), slot_bytes(INDEX))
    slot.begin(INDEX)[:] = bytes(484)
    slot.finish()
    raw = os.pread(slot.fd, slot_bytes(INDEX), 0)
    slot.close()
    return raw


def _use_slot(raw: bytes, size: int) -> None:
    fd = memory_file("fuzz", len(raw))
    os.pwrite(fd, raw, 0)
    slot = outcome(lambda: Slot(fd, size), Damaged)
    if isinstance(slot, Damaged):
        os.close(fd)
        return
    index = outcome(slot.index, Damaged)
    data = outcome(slot.data, Damaged)
    if isinstance(index, SlotIndex) and not isinstance(data, Damaged):
        assert all(placed.offset + placed.size_bytes <= len(data) for placed in index.pieces)
        data.release()
    outcome(lambda: (slot.state, slot.step, slot.stamp, slot.milestone, pick([slot])), Damaged)
    slot.close()


@fuzz(80)
@given(st.data())
def test_I3_I4_a_broken_slot_is_damage_or_whole(data: st.DataObject) -> None:
    raw = _slot_bytes()
    head = data.draw(broken(raw[:200]))
    rest = raw[len(head) : HEADER_BYTES] + data.draw(broken(raw[HEADER_BYTES : HEADER_BYTES + 600]))
    changed_raw = (head + rest).ljust(len(raw), b"\0")
    _use_slot(changed_raw, data.draw(st.sampled_from((len(raw), 0, HEADER_BYTES, len(changed_raw), 1 << 40))))


@fuzz(80)
@given(values, st.lists(st.sampled_from([n for n in HOSTILE_NUMBERS if isinstance(n, int) and 0 <= n < 2**64]), min_size=7, max_size=7))
def test_I3_a_forged_slot_with_a_right_digest_is_damage_or_within_bounds(body: Any, numbers: list[int]) -> None:
    from blake3 import blake3

    raw = dumped(body) if not isinstance(body, bool) else f'{{"x":{DEEP}}}'.encode()
    numbers[4] = len(raw)
    head = bytearray(HEADER_BYTES)
    head[: len(MAGIC)] = MAGIC
    head[len(MAGIC) : len(MAGIC) + 4] = struct.pack("<I", 1)
    head[20:24] = struct.pack("<I", 2)
    head[32 : 32 + 88] = struct.pack("<QQQQQQQ32s", *numbers, blake3(raw).digest())
    _use_slot((bytes(head) + raw).ljust(1 << 16, b"\0"), 1 << 16)


@fuzz(80)
@given(
    st.binary(min_size=0, max_size=512) | st.lists(st.floats(), max_size=64).map(lambda numbers: struct.pack(f"<{len(numbers)}d", *numbers))
)
def test_a_broken_pulse_page_can_be_read(raw: bytes) -> None:
    page = PulsePage(0)
    os.pwrite(page.fd, raw, 0)
    page.read()
    page.close()


# What fuzzing has found, each once more


@pytest.mark.parametrize("value", ["9" * 4400, "-1", "[1, 2]"])
def test_a_setting_that_python_or_a_sink_refuses_is_named_with_its_file(value: str) -> None:
    found = _settings_of(f"[run]\nlog_to = {value}\n".encode())
    assert isinstance(found, ValueError)
    assert "unbroken.toml" in str(found)


def test_an_interval_beyond_all_floats_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="lose_at_most"):
        parse_interval("9" * 400 + " steps")


def test_I3_a_slot_whose_index_is_too_deep_is_damage() -> None:
    from blake3 import blake3

    raw = f'{{"x":{DEEP}}}'.encode()
    head = bytearray(HEADER_BYTES)
    head[:20] = MAGIC + struct.pack("<I", 1)
    head[20:24] = struct.pack("<I", 2)
    offset = HEADER_BYTES + -(-len(raw) // 4096) * 4096
    head[32 : 32 + 88] = struct.pack("<QQQQQQQ32s", 0, 0, 0, 1, len(raw), offset, 0, blake3(raw).digest())
    fd = memory_file("fuzz", 1 << 16)
    os.pwrite(fd, bytes(head) + raw, 0)
    slot = Slot(fd, 1 << 16)
    with pytest.raises(Damaged, match="no SlotIndex"):
        slot.index()
    slot.close()
