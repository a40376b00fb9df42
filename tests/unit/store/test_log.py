"""The log: head by LIST and by asking, damage passed over, slots lost and re-checked, the lineage rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.store_run import WRITER, StillClock
from unbroken.core.errors import Fenced, NewerFormat, Permanent, Transient
from unbroken.core.limits import LOG_SUMMARY_EVERY
from unbroken.core.ports import Buffer
from unbroken.core.records import CommitEntry, CondemnEntry, Entry, Generation, GenerationEntry, LogEntry, LogState, PruneEntry
from unbroken.store import paths
from unbroken.store.log import Log, fold, newest_generation, reach, visible
from unbroken.store.sealed import seal
from unbroken.store.tiers.memory import MemoryTier

CLOCK = StillClock()


def gen(number: int, parent: int | None, base_step: int) -> Generation:
    return Generation(number=number, parent=parent, base_step=base_step, nonce=f"{number:032x}", world_size=1)


def opens(number: int, parent: int | None = None, base_step: int = 0) -> GenerationEntry:
    return GenerationEntry(generation=gen(number, parent, base_step))


def commit(step: int, generation: int = 0) -> CommitEntry:
    return CommitEntry(
        step=step, generation=generation, manifests=(), state_root=f"{step:064x}", size_bytes=1, journal_head="", journal_lines=0
    )


def condemn(step: int, generation: int = 0) -> CondemnEntry:
    return CondemnEntry(step=step, generation=generation, objects=("packs/x",), reason="bad")


def prune(*keys: tuple[int, int]) -> PruneEntry:
    return PruneEntry(commits=keys)


def agree(state: LogState) -> None:
    pass


def put(log: Log, *entries: Entry) -> None:
    for entry in entries:
        log.append(entry, writer=WRITER, clock=CLOCK, check=agree)


def log_of(*entries: Entry) -> tuple[MemoryTier, Log]:
    tier = MemoryTier()
    log = Log.open(tier)
    put(log, *entries)
    return tier, log


def steps(log: Log) -> list[tuple[int, int]]:
    return [(c.step, c.generation) for c in visible(log.state)]


def without(tier: MemoryTier, n: int) -> MemoryTier:
    return MemoryTier(tuple(item for item in tier.snapshot() if item[0] != paths.log_entry("main", n)))


def changed(tier: MemoryTier, n: int, at: int = 200, mask: int = 1) -> MemoryTier:
    path = paths.log_entry("main", n)
    objects = dict(tier.snapshot())
    raw = objects[path]
    objects[path] = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
    return MemoryTier(tuple(objects.items()))


def visible_after(entries: Iterable[Entry]) -> list[tuple[int, int]]:
    return steps(log_of(*entries)[1])


class Lagging(MemoryTier):
    """LIST shows only the first `shown` objects."""

    shown = 0

    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[: self.shown]


class Counting(MemoryTier):
    """Counts reads."""

    reads = 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return super().read(path, offset, length)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], []),
        ([opens(0)], []),
        ([opens(0), commit(20), commit(10)], [(10, 0), (20, 0)]),
        ([opens(0), commit(10), commit(20), opens(1, 0, 10)], [(10, 0)]),
        ([opens(0), commit(10), opens(1, 0, 10), commit(20, 0)], [(10, 0)]),
        ([opens(0), commit(10), opens(1, 0, 17), commit(17, 0)], [(10, 0), (17, 0)]),
        ([opens(0), commit(10), commit(20), opens(1, 0, 20), opens(2, 1, 10)], [(10, 0)]),
        ([opens(0), commit(10), commit(20), opens(1, 0, 10), commit(20, 1), opens(2, 1, 20)], [(10, 0), (20, 1)]),
        ([opens(0), commit(10), opens(1, 0, 10), commit(10, 1)], [(10, 1)]),
        ([opens(0), commit(10), opens(1, 0, 10), commit(10, 1), condemn(10, 1)], [(10, 0)]),
        ([opens(0), commit(10), commit(20), condemn(20)], [(10, 0)]),
        ([opens(0), commit(10), commit(20), prune((10, 0))], [(20, 0)]),
        ([opens(0), commit(10), prune((10, 0)), commit(10)], [(10, 0)]),
        ([opens(0), commit(10), opens(1, None, 0), commit(5, 1)], [(5, 1)]),
        ([opens(0), commit(0), opens(1, None, 0)], []),
    ],
)
def test_visible_is_the_lineage_rule(entries: list[Entry], expected: list[tuple[int, int]]) -> None:
    assert visible_after(entries) == expected


def test_B08_a_b_newest_is_by_number_not_by_name() -> None:
    assert visible_after([opens(0), commit(9), commit(999), commit(1000), commit(100000), commit(900000)])[-1] == (900000, 0)


def test_reach_says_how_far_each_generation_counts() -> None:
    state = log_of(opens(0), opens(1, 0, 50), opens(2, 1, 70), opens(3, 2, 60))[1].state
    limits = reach(state)
    assert {g: limits[g] for g in (2, 1, 0)} == {2: 60, 1: 60, 0: 50}
    assert limits[3] > 10**12


@settings(max_examples=100, deadline=None)
@given(st.permutations([commit(10), commit(20), commit(30), commit(20, 1), commit(40, 1), condemn(30), condemn(40, 1)]))
def test_what_is_visible_does_not_depend_on_the_order_of_commits_and_condemnations(entries: list[Entry]) -> None:
    assert visible_after([opens(0), opens(1, 0, 25), *entries]) == [(10, 0), (20, 1)]


def test_generations_that_descend_from_one_another_in_a_circle_end() -> None:
    state = LogState(generations=(gen(0, 1, 0), gen(1, 0, 10)), commits=(commit(5, 1), commit(5, 0)))
    assert [(c.step, c.generation) for c in visible(state)] == [(5, 1)]


def test_the_head_is_found_though_list_lags() -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20))
    for shown in range(4):
        lagging = Lagging(tier.snapshot())
        lagging.shown = shown
        log = Log.open(lagging)
        assert (log.head, steps(log), log.damage) == (2, [(10, 0), (20, 0)], [])


def test_B08_c_strays_in_the_folder_are_ignored() -> None:
    tier, _ = log_of(opens(0), commit(10))
    for name in (
        "5000.json",
        "00000007.json.bak",
        "step_abc.json",
        "-0000005.json",
        "000000009.json",
        "00000009.jsonl",
        "handpicked/00000009.json",
    ):
        tier.create(f"runs/main/log/{name}", [b"stray"])
    log = Log.open(MemoryTier(tuple(i for i in tier.snapshot() if "handpicked" not in i[0])))
    assert (log.head, log.damage) == (1, [])


def test_B01_a_a_hole_below_the_head_is_damage_and_stays_a_hole() -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20), commit(30))
    holed = without(tier, 2)
    log = Log.open(holed)
    assert steps(log) == [(10, 0), (30, 0)]
    assert log.damage == ["runs/main/log/00000002.json: missing"]
    put(log, commit(40))
    assert log.head == 4
    assert "runs/main/log/00000002.json" not in dict(holed.snapshot())


def test_B01_b_an_unreadable_entry_is_passed_over_and_never_rewritten() -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20))
    bad = changed(tier, 2)
    before = dict(bad.snapshot())
    log = Log.open(bad)
    assert (steps(log), log.head) == ([(10, 0)], 2)
    assert "00000002.json: checksum" in log.damage[0]
    put(log, commit(20, 0))
    assert before.items() <= dict(bad.snapshot()).items()
    assert steps(Log.open(bad)) == [(10, 0), (20, 0)]


def test_a_lost_generation_entry_is_known_from_any_later_entry() -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20), opens(1, 0, 10), commit(15, 1))
    log = Log.open(without(tier, 3))
    assert newest_generation(log.state) == gen(1, 0, 10)
    assert steps(log) == [(10, 0), (15, 1)]


def test_an_entry_stored_under_another_number_is_damage() -> None:
    tier, _ = log_of(opens(0), commit(10))
    objects = dict(tier.snapshot())
    objects[paths.log_entry("main", 2)] = objects[paths.log_entry("main", 1)]
    assert "stored under another number" in Log.open(MemoryTier(tuple(objects.items()))).damage[0]


def test_a_newer_entry_is_refused_not_passed_over() -> None:
    tier, _ = log_of(opens(0), commit(10))
    path = paths.log_entry("main", 1)
    objects = dict(tier.snapshot())
    objects[path] = objects[path].replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99')
    with pytest.raises(NewerFormat):
        Log.open(MemoryTier(tuple(objects.items())))


@pytest.mark.parametrize("mask", [0x01, 0x20])
def test_I3_a_changed_byte_of_any_entry_is_found_by_the_audit(mask: int) -> None:
    tier, _ = log_of(opens(0), commit(10), condemn(10), prune((10, 0)))
    for n in range(4):
        path = paths.log_entry("main", n)
        for at in range(0, tier.size(path)):
            found = dict(Log.open(changed(tier, n, at, mask)).audit())
            assert list(found) == [path], f"byte {at} of entry {n}"


def test_I3_an_exchanged_entry_is_found_by_its_successor() -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20))
    other, _ = log_of(opens(0), commit(11))
    path = paths.log_entry("main", 1)
    objects = dict(tier.snapshot())
    objects[path] = dict(other.snapshot())[path]
    assert Log.open(MemoryTier(tuple(objects.items()))).audit() == [(path, "not the file that its successor was written after")]


def test_a_damaged_predecessor_is_written_down_as_such() -> None:
    tier, _ = log_of(opens(0), commit(10))
    bad = changed(tier, 1)
    log = Log.open(bad)
    put(log, commit(20))
    assert [path for path, _ in Log.open(bad).audit()] == [paths.log_entry("main", 1)]


def long_log(length: int) -> MemoryTier:
    tier, log = log_of(opens(0))
    put(log, *(commit(k) if k % 2 else prune((k - 1, 0)) for k in range(1, length)))
    return tier


def test_opening_a_long_log_costs_one_list_and_at_most_256_reads() -> None:
    for length in (LOG_SUMMARY_EVERY - 1, LOG_SUMMARY_EVERY, 2 * LOG_SUMMARY_EVERY, 2 * LOG_SUMMARY_EVERY + 100):
        tier = Counting(long_log(length).snapshot())
        log = Log.open(tier)
        assert tier.reads <= LOG_SUMMARY_EVERY + 2
        whole = Log(tier)
        whole.refresh()
        assert (log.state, log.head) == (whole.state, whole.head)


def test_a_lost_summary_is_made_up_for_by_the_one_before() -> None:
    tier = long_log(2 * LOG_SUMMARY_EVERY + 3)
    expected = Log.open(tier).state
    log = Log.open(changed(tier, 2 * LOG_SUMMARY_EVERY))
    assert log.damage != []
    assert set(log.state.commits) >= set(expected.commits)


def test_I6_after_a_lost_slot_the_check_is_asked_again_and_may_refuse() -> None:
    tier, zombie = log_of(opens(0), commit(10))
    put(Log.open(tier), opens(1, 0, 10))
    asked: list[int] = []

    def check(state: LogState) -> None:
        newest = newest_generation(state)
        assert newest is not None
        asked.append(newest.number)
        if newest.number != 0:
            raise Fenced("a newer generation")

    with pytest.raises(Fenced):
        zombie.append(commit(20), writer=WRITER, clock=CLOCK, check=check)
    assert asked == [0, 1]
    assert steps(Log.open(tier)) == [(10, 0)]


def test_two_writers_of_one_log_lose_slots_and_no_entries() -> None:
    tier = MemoryTier()
    logs = [Log.open(tier) for _ in range(3)]
    put(logs[0], opens(0))
    for k, log in zip(range(1, 31), itertools.cycle(logs), strict=False):
        put(log, commit(k))
    assert [step for step, _ in steps(Log.open(tier))] == list(range(1, 31))
    assert Log.open(tier).audit() == []


class Taken(MemoryTier):
    """Every slot is taken, by something that cannot be read yet."""

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        raise FileExistsError(path)


def test_I11_a_slot_that_is_taken_and_not_readable_ends_with_an_error() -> None:
    with pytest.raises(Transient, match="not readable yet"):
        put(Log.open(Taken()), opens(0))


def test_an_entry_whose_generation_descends_from_a_later_one_is_damage() -> None:
    tier, _ = log_of(opens(0), opens(1, 5, 0))
    assert "cannot descend from 5" in Log.open(tier).damage[0]


def test_a_fold_keeps_the_generation_it_knew_first() -> None:
    _, log = log_of(opens(0))
    line = log.append(opens(1, 0, 5), writer=WRITER, clock=CLOCK, check=agree)
    assert fold(log.state, line).generations == (gen(0, None, 0), gen(1, 0, 5))


def with_objects(tier: MemoryTier, objects: dict[str, bytes | None]) -> Counting:
    """A copy with these objects put in, or taken away (None)."""
    merged = {**dict(tier.snapshot()), **objects}
    return Counting(tuple((path, data) for path, data in merged.items() if data is not None))


FAR = 999_999_999_999


@pytest.mark.parametrize("number", [LOG_SUMMARY_EVERY + 4, 50_000, FAR, 10**18 - 1])
@pytest.mark.parametrize("content", ["a copy", "garbage"])
def test_I11_a_stray_far_beyond_the_other_entries_is_named_and_not_followed(number: int, content: str) -> None:
    tier, _ = log_of(opens(0), commit(10), commit(20))
    stray = paths.log_entry("main", number)
    hurt = with_objects(tier, {stray: tier.read(paths.log_entry("main", 1)) if content == "a copy" else b"garbage"})
    log = Log.open(hurt)
    assert (log.head, steps(log)) == (2, [(10, 0), (20, 0)])
    assert hurt.reads < 20
    (text,) = log.damage
    assert text.startswith(f"{stray}: ")
    assert "far beyond the other entries: not followed, remove it" in text
    assert [path for path, _ in log.audit()] == [stray]
    assert len(log.damage) == 1
    put(log, commit(30))
    assert steps(Log.open(hurt)) == [(10, 0), (20, 0), (30, 0)]


def test_a_gap_of_as_many_entries_as_lie_between_summaries_is_still_asked_for() -> None:
    tier, _ = log_of(opens(0), commit(10))
    hurt = with_objects(tier, {paths.log_entry("main", LOG_SUMMARY_EVERY + 2): b"garbage"})
    log = Log.open(hurt)
    assert log.head == LOG_SUMMARY_EVERY + 2
    assert len(log.damage) == LOG_SUMMARY_EVERY + 1


@pytest.mark.parametrize("first", [0, 1, 5])
def test_entries_beyond_a_wide_gap_that_are_real_still_count(first: int) -> None:
    tier = long_log(3 * LOG_SUMMARY_EVERY + 10)
    last = 2 * LOG_SUMMARY_EVERY + 5
    hurt = with_objects(tier, {paths.log_entry("main", n): None for n in range(first, last)})
    log = Log.open(hurt)
    assert (log.head, log.state) == (Log.open(tier).head, Log.open(tier).state)
    assert log.audit() == [(paths.log_entry("main", first), f"missing, as are all up to entry {last - 1}")]
    put(log, commit(10**6))
    assert Log.open(hurt).head == log.head


class Refusing(MemoryTier):
    """A place that nobody may look into."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        raise Permanent("403")

    def size(self, path: str) -> int:
        raise Permanent("403")


@pytest.mark.timeout(30)
def test_I11_a_log_that_nobody_may_read_is_an_error_and_no_endless_row_of_damaged_entries() -> None:
    with pytest.raises(Permanent, match="403"):
        Log.open(Refusing())


def test_I11_a_wide_gap_without_a_summary_after_it_is_passed_over_as_a_whole() -> None:
    tier = long_log(2 * LOG_SUMMARY_EVERY)
    gone = range(5, 2 * LOG_SUMMARY_EVERY - 5)
    hurt = with_objects(tier, {paths.log_entry("main", n): None for n in gone})
    log = Log.open(hurt)
    assert log.head == 2 * LOG_SUMMARY_EVERY - 1
    assert log.damage == [f"{paths.log_entry('main', 5)}: missing, as are all up to entry {gone[-1]}"]
    assert hurt.reads < 40


def test_I11_a_forged_entry_far_away_costs_no_walk_over_all_numbers() -> None:
    tier, log = log_of(opens(0), commit(10))
    line = LogEntry(n=FAR, previous="", time="", writer=WRITER, lineage=log.state.generations, entry=commit(20))
    hurt = with_objects(tier, {paths.log_entry("main", FAR): seal("log", line)})
    log = Log.open(hurt)
    assert (log.head, steps(log)) == (FAR, [(10, 0), (20, 0)])
    assert [path for path, _ in log.audit()] == [paths.log_entry("main", 2)]
    assert hurt.reads < 20
