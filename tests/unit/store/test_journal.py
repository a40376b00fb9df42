"""The journal: chained lines, a torn last one is not tampering, everything else is."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.memory import at_most
from unbroken.core.errors import Damaged, NewerFormat, Permanent, UnbrokenError
from unbroken.core.limits import MAX_JOURNAL_LINE_BYTES
from unbroken.core.ports import Buffer
from unbroken.core.records import BeginRecord, EventRecord, Record, StepRecord
from unbroken.store import journal
from unbroken.store.journal import JournalWriter, durable_head, first_chain, read_journal
from unbroken.store.tiers.memory import MemoryTier

PATH = "runs/main/journal/00000002.jsonl"
NONCE = "ab" * 16


def step(k: int) -> StepRecord:
    return StepRecord(step=k, units=("00" * 16,), num_samples=4, loss="3ff0000000000000", clock=((2, k, 1),), time_s=1.0)


def records(n: int) -> list[Record]:
    begin = BeginRecord(generation=2, base_step=0, source="fresh", loaded_root="", world_size=1, time_s=0.0)
    return [begin, *(step(k) for k in range(1, n))]


def written(n: int) -> tuple[MemoryTier, JournalWriter]:
    tier = MemoryTier()
    writer = JournalWriter(tier, "main", 2, NONCE)
    for record in records(n):
        writer.add(record)
    writer.sync()
    return tier, writer


def read(tier: MemoryTier) -> list[Record]:
    return [line.record for line in read_journal(tier, "main", 2, NONCE)]


def test_lines_come_back_in_order_and_end_at_the_writers_head() -> None:
    tier, writer = written(5)
    lines = list(read_journal(tier, "main", 2, NONCE))
    assert [line.record for line in lines] == records(5)
    assert (lines[-1].chain, len(lines)) == (writer.head, writer.num_lines)


def test_adding_writes_nothing_and_syncing_writes_once() -> None:
    tier = MemoryTier()
    writer = JournalWriter(tier, "main", 2, NONCE)
    writer.add(step(1))
    assert tier.snapshot() == ()
    writer.sync()
    before = tier.snapshot()
    writer.sync()
    assert tier.snapshot() == before
    writer.add(step(2))
    writer.sync()
    assert read(tier) == [step(1), step(2)]


def test_a_journal_that_was_never_written_has_no_lines() -> None:
    assert read(MemoryTier()) == []


def test_a_torn_last_line_is_not_tampering_wherever_it_is_torn() -> None:
    tier, _ = written(3)
    raw = tier.read(PATH)
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    for cut in range(len(raw)):
        torn = MemoryTier(((PATH, raw[:cut]),))
        whole = sum(end <= cut for end in ends) - 1
        assert read(torn) == records(3)[: max(0, whole)]


@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_I3_a_changed_byte_of_any_complete_line_is_found_and_the_line_named(mask: int) -> None:
    tier, _ = written(3)
    raw = tier.read(PATH)
    for i in range(len(raw)):
        changed = MemoryTier(((PATH, raw[:i] + bytes([raw[i] ^ mask]) + raw[i + 1 :]),))
        if i == len(raw) - 1:
            assert read(changed) == records(3)[:-1], "without its newline the last line is torn"
            continue
        with pytest.raises(Damaged, match=r"00000002\.jsonl: (line \d+|the header)"):
            read(changed)


def test_swapped_and_dropped_lines_are_found() -> None:
    tier, _ = written(4)
    head, a, b, c, d = tier.read(PATH).splitlines(keepends=True)
    for lines in ([head, b, a, c, d], [head, a, c, d], [head, a, a, b, c, d], [a, b, c, d]):
        with pytest.raises(Damaged):
            read(MemoryTier(((PATH, b"".join(lines)),)))


def test_another_generations_journal_is_refused() -> None:
    tier, _ = written(2)
    with pytest.raises(Damaged, match="belongs to generation 2"):
        list(read_journal(tier, "main", 2, "cd" * 16))


def test_a_newer_journal_is_refused_as_newer() -> None:
    tier, _ = written(1)
    raw = tier.read(PATH).replace(b'"format":1,"min_reader":1', b'"format":4,"min_reader":4')
    with pytest.raises(NewerFormat, match="format 4"):
        read(MemoryTier(((PATH, raw),)))


class Failing(MemoryTier):
    """Fails so many appends; `half` leaves half of each behind."""

    def __init__(self, times: int, half: bool = False) -> None:
        super().__init__()
        self.times = times
        self.half = half

    def append(self, path: str, data: Buffer) -> None:
        if self.times:
            self.times -= 1
            if self.half:
                super().append(path, bytes(data)[: len(data) // 2])
            raise Permanent("disk full")
        super().append(path, data)


def test_I9_lines_that_could_not_be_written_are_written_by_the_next_sync() -> None:
    tier = Failing(2)
    writer = JournalWriter(tier, "main", 2, NONCE)
    for k in (1, 2):
        writer.add(step(k))
        with pytest.raises(Permanent):
            writer.sync()
    writer.add(step(3))
    writer.sync()
    assert read(tier) == [step(1), step(2), step(3)]


def test_I9_nothing_is_glued_onto_half_a_line() -> None:
    tier = Failing(1, half=True)
    writer = JournalWriter(tier, "main", 2, NONCE)
    writer.add(step(1))
    for _ in range(2):
        with pytest.raises(Permanent):
            writer.sync()
    assert read(tier) == []


def test_B12_a_second_writer_of_a_journal_is_refused_before_it_writes() -> None:
    tier, _ = written(2)
    before = tier.snapshot()
    second = JournalWriter(tier, "main", 2, NONCE)
    second.add(step(9))
    with pytest.raises(Permanent, match="another writer"):
        second.sync()
    assert tier.snapshot() == before


def test_I11_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MAX_WAITING_BYTES", 1000)
    writer = JournalWriter(MemoryTier(), "main", 2, NONCE)
    with pytest.raises(Permanent, match="wait to be written"):
        for k in range(100):
            writer.add(step(k))


def test_a_record_longer_than_a_line_is_refused_before_it_enters_the_chain() -> None:
    writer = JournalWriter(MemoryTier(), "main", 2, NONCE)
    before = writer.head
    with pytest.raises(ValueError, match="shorten"):
        writer.add(EventRecord(name="x" * MAX_JOURNAL_LINE_BYTES, step=1))
    assert (writer.head, writer.num_lines) == (before, 0)


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_a_line_without_end_is_refused_in_bounded_memory(newline: bytes) -> None:
    tier, _ = written(1)
    endless = MemoryTier(((PATH, tier.read(PATH) + b"x" * (20 * MAX_JOURNAL_LINE_BYTES) + newline),))
    with at_most(8 << 20), pytest.raises(Damaged, match="longer than"):
        read(endless)


def test_a_long_journal_is_read_in_memory_that_does_not_depend_on_its_length() -> None:
    tier = MemoryTier()
    writer = JournalWriter(tier, "main", 2, NONCE)
    for k in range(70_000):
        writer.add(step(k))
    writer.sync()
    assert tier.size(PATH) > 16 << 20
    with at_most(6 << 20):
        assert sum(1 for _ in read_journal(tier, "main", 2, NONCE)) == 70_000


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_fuzz_journals_raise_our_errors_only(data: bytes, with_header: bool) -> None:
    tier, _ = written(1)
    raw = tier.read(PATH) + data if with_header else data
    with contextlib.suppress(UnbrokenError):
        assert len(read(MemoryTier(((PATH, raw),)))) <= 1


def test_the_durable_head_is_that_of_the_last_complete_line() -> None:
    tier, writer = written(5)
    assert durable_head(tier, "main", 2, NONCE) == writer.head
    tier.append(PATH, b'{"chain":"00')
    assert durable_head(tier, "main", 2, NONCE) == writer.head, "what follows the last newline is torn"


def test_the_durable_head_of_a_journal_without_a_line_is_the_first_chain() -> None:
    tier = MemoryTier()
    assert durable_head(tier, "main", 2, NONCE) == first_chain(2, NONCE)
    assert tier.list("") == [], "asking makes no file"
    JournalWriter(tier, "main", 2, NONCE).sync()
    assert durable_head(tier, "main", 2, NONCE) == first_chain(2, NONCE)


def test_the_durable_head_of_long_lines_is_read_from_the_end_alone() -> None:
    tier, writer = written(2)
    for _ in range(4):
        writer.add(EventRecord(name="long", step=1, facts={"text": "x" * (MAX_JOURNAL_LINE_BYTES - 1000)}))
    writer.sync()
    tier.append(PATH, b"y" * (MAX_JOURNAL_LINE_BYTES - 1))
    assert durable_head(tier, "main", 2, NONCE) == writer.head


def test_a_journal_whose_end_cannot_be_read_has_no_durable_head() -> None:
    class Broken(MemoryTier):
        def append(self, path: str, data: Buffer) -> None:
            raise Permanent("the disk says no")

    tier, _ = written(3)
    assert durable_head(Broken(tier.snapshot()), "main", 2, NONCE) == ""
    tier.append(PATH, b"garbage\n")
    assert durable_head(tier, "main", 2, NONCE) == ""
    tier.append(PATH, b"z" * (3 * MAX_JOURNAL_LINE_BYTES))
    assert durable_head(tier, "main", 2, NONCE) == ""


def test_B01_what_a_power_loss_left_of_an_append_does_not_count() -> None:
    """A block of it reads as zeros, a later one is there, whole lines and all."""
    tier, writer = written(5)
    durable, head = tier.read(PATH), writer.head
    for k in range(5, 105):
        writer.add(step(k))
    writer.sync()
    added = tier.read(PATH)[len(durable) :]
    torn = MemoryTier(((PATH, durable + bytes(4096) + added[4096:]),))
    assert read(torn) == records(5)
    assert durable_head(torn, "main", 2, NONCE) == head
    late = MemoryTier(((PATH, durable + added[:8192] + bytes(4096) + added[12288:]),))
    found = list(read_journal(late, "main", 2, NONCE))
    assert 10 < len(found) < 100
    assert durable_head(late, "main", 2, NONCE) == found[-1].chain
    assert read(MemoryTier(((PATH, bytes(4096) + added),))) == []
    assert durable_head(MemoryTier(((PATH, bytes(4096) + added),)), "main", 2, NONCE) == first_chain(2, NONCE)
