"""What every tier must do, whatever it stands on and whatever wraps it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rigs.tiers import KINDS, WRAPPED, Maker, maker, wrapped
from unbroken.core.errors import Permanent, StoreError
from unbroken.core.ports import Tier
from unbroken.store.tiers.into import reading
from unbroken.store.tiers.probe import probe
from unbroken.store.tiers.traits import traits_of

ESCAPES = ["../x", "/etc/x", "", "a//b", "a/./b", "a/../../b", "..", "a\\b", "a\0b", "a/", "/", "x" * 5000, "a\nb"]
ODD = [
    "ü b",
    "a%41",
    "a#b",
    "a?b",
    "a*b",
    "a+b",
    "a&b=c",
    "~x",
    "a:b",
    ".x",
    'a"b<c>',
    "日本",
    "n" * 200,
    "parts-x",
    "%2e%2e",
    "..x",
    "$HOME;x",
]
NUM_RACES = 30
RACES_AT_ONCE = 10


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Makes one more tier on the same place."""
    return maker(request.param, request, tmp_path, monkeypatch)


@pytest.fixture(params=WRAPPED, ids=lambda name: name or "bare")
def tier(request: pytest.FixtureRequest, make: Maker) -> Tier:
    return wrapped(make(), request.param)


def together(acts: list[Callable[[], None]]) -> None:
    """All of them at once, each in a thread of its own; what one raises is raised."""
    gate = threading.Barrier(len(acts))

    def at_once(act: Callable[[], None]) -> None:
        gate.wait(timeout=30)
        act()

    with ThreadPoolExecutor(len(acts)) as pool:
        list(pool.map(at_once, acts))


def test_an_object_is_the_concatenation_of_its_parts(tier: Tier) -> None:
    assert tier.create("a/b", [b"one", bytearray(b"two"), memoryview(b"three")]) == 11
    assert tier.read("a/b") == b"onetwothree"
    assert tier.size("a/b") == 11


def test_an_object_is_read_into_memory_that_is_there(tier: Tier) -> None:
    tier.create("a/b", [b"0123456789"])
    memory = bytearray(16)
    with reading(tier, "a/b") as read_into:
        assert read_into(3, memoryview(memory)[:4]) == 4
        assert read_into(8, memoryview(memory)[4:]) == 2
        assert read_into(10, memoryview(memory)[6:]) == 0
        assert read_into(99, memoryview(memory)[6:]) == 0
    assert memory == b"345689" + bytes(10)
    with pytest.raises(FileNotFoundError), reading(tier, "a/c") as read_into:
        read_into(0, memoryview(memory))


def test_an_object_may_be_empty(tier: Tier) -> None:
    assert tier.create("empty", []) == 0
    assert tier.read("empty") == b""


def test_folders_are_those_directly_beneath(tier: Tier) -> None:
    assert tier.folders("runs") == []
    for path in ("runs/b/log/1", "runs/a/log/1", "runs/a/x", "runs/file", "other/c/1"):
        tier.create(path, [b"x"])
    assert tier.folders("runs") == ["a", "b"]
    assert tier.folders("runs/a") == ["log"]
    assert tier.folders("runs/file") == []
    for path in ESCAPES:
        with pytest.raises(Permanent):
            tier.folders(path)


def test_create_never_replaces(tier: Tier) -> None:
    tier.create("a", [b"first"])
    with pytest.raises(FileExistsError):
        tier.create("a", [b"second"])
    assert tier.read("a") == b"first"


def race(tiers: list[Tier], paths: list[str], parts_of: Callable[[int], list[bytes]]) -> dict[str, list[int]]:
    """All tiers create all paths at once; who won each. Many paths side by side, as a server may let losers wait a second."""
    won: dict[str, list[int]] = {path: [] for path in paths}

    def put(i: int, path: str) -> None:
        try:
            tiers[i].create(path, parts_of(i))
            won[path].append(i)
        except FileExistsError:
            pass

    for start in range(0, len(paths), RACES_AT_ONCE):
        together([lambda i=i, path=path: put(i, path) for path in paths[start : start + RACES_AT_ONCE] for i in range(len(tiers))])  # type: ignore[misc]
    return won


def test_B12_of_racing_creates_exactly_one_wins_and_stays_whole(tier: Tier, request: pytest.FixtureRequest) -> None:
    is_slow = "s3" in request.node.callspec.id and "bare" not in request.node.callspec.id
    paths = [f"race/{n:02d}" for n in range(5 if is_slow else NUM_RACES)]
    for path, winners in race([tier] * 8, paths, lambda i: [bytes([i]) * 1000] * 10).items():
        assert len(winners) == 1
        assert tier.read(path) == bytes([winners[0]]) * 10_000
    assert tier.list("race") == paths


def test_B12_of_racing_creates_with_equal_bytes_exactly_one_wins(make: Maker) -> None:
    won = race([make() for _ in range(8)], [f"race/{n}" for n in range(5)], lambda i: [b"the same"])
    assert [len(winners) for winners in won.values()] == [1] * 5


def test_what_was_created_is_read_and_listed_at_once_by_another(make: Maker) -> None:
    writer, reader = make(), make()
    for i in range(20):
        writer.create(f"a/{i:02d}", [b"%d" % i])
        assert reader.read(f"a/{i:02d}") == b"%d" % i
        assert len(reader.list("a")) == i + 1


def test_a_create_that_fails_on_the_way_leaves_nothing(tier: Tier) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise KeyError("the source broke")

    with pytest.raises(KeyError):
        tier.create("a/b", parts())
    assert tier.list("") == []
    tier.create("a/b", [b"whole"])
    assert tier.read("a/b") == b"whole"


def test_reads_end_where_the_object_does(tier: Tier) -> None:
    tier.create("a", [b"0123456789"])
    assert tier.read("a", 3, 4) == b"3456"
    assert tier.read("a", 8, 100) == b"89"
    assert tier.read("a", 8) == b"89"
    assert tier.read("a", 10, 1) == b""
    assert tier.read("a", 1 << 62, 1 << 62) == b""
    assert tier.read("a", 0, 1 << 62) == b"0123456789"


@pytest.mark.parametrize("call", ["read", "size"])
def test_what_is_not_there_is_said_so(tier: Tier, call: str) -> None:
    tier.create("a", [b"x"])
    for path in ("b", "c/d", "a/below-a-file"):
        with pytest.raises(FileNotFoundError):
            getattr(tier, call)(path)


def test_delete_removes_and_does_not_mind_absence(tier: Tier) -> None:
    tier.create("a/b", [b"x"])
    tier.delete("a/b")
    tier.delete("a/b")
    tier.delete("never/was")
    assert tier.list("") == []
    tier.create("a/b", [b"again"])


def test_append_adds_at_the_end_and_makes_the_object(tier: Tier) -> None:
    tier.append("j/one", b"a\n")
    tier.append("j/one", bytearray(b"b\n"))
    assert tier.read("j/one") == b"a\nb\n"


def test_an_append_without_data_makes_an_empty_object_and_changes_none(tier: Tier) -> None:
    tier.append("j/one", b"")
    assert (tier.read("j/one"), tier.size("j/one"), tier.list("j")) == (b"", 0, ["j/one"])
    tier.append("j/one", b"a")
    tier.append("j/one", b"")
    assert (tier.read("j/one"), tier.size("j/one"), tier.list("j")) == (b"a", 1, ["j/one"])


def test_an_appended_object_is_one_object_in_every_call(tier: Tier) -> None:
    for data in (b"", b"abc", b"d", b"efghijk"):
        tier.append("runs/j.jsonl", data)
    whole = b"abcdefghijk"
    assert tier.size("runs/j.jsonl") == len(whole)
    assert (tier.list(""), tier.list("runs"), tier.folders("runs")) == (["runs/j.jsonl"], ["runs/j.jsonl"], [])
    for offset in range(len(whole) + 2):
        assert tier.read("runs/j.jsonl", offset) == whole[offset:]
        for length in range(len(whole) + 2):
            assert tier.read("runs/j.jsonl", offset, length) == whole[offset : offset + length]
    with pytest.raises(FileExistsError):
        tier.create("runs/j.jsonl", [b"x"])
    tier.delete("runs/j.jsonl")
    assert tier.list("") == []
    with pytest.raises(FileNotFoundError):
        tier.size("runs/j.jsonl")
    tier.append("runs/j.jsonl", b"new")
    assert tier.read("runs/j.jsonl") == b"new"


def test_appends_of_many_threads_are_all_there_and_whole(tier: Tier) -> None:
    lines = [b"%d " % i * 100 + b"\n" for i in range(16)]
    together([lambda line=line: tier.append("j", line) for line in lines])  # type: ignore[misc]
    assert sorted(tier.read("j").splitlines(keepends=True)) == sorted(lines)


def test_I6_of_two_writers_of_one_object_nothing_that_returned_is_lost(make: Maker) -> None:
    done: list[list[bytes]] = [[], []]

    def write(i: int) -> None:
        tier = make()
        for n in range(20):
            line = b"writer %d line %d\n" % (i, n)
            try:
                tier.append("j", line)
            except StoreError:
                continue
            done[i].append(line)

    together([lambda: write(0), lambda: write(1)])
    there = make().read("j").splitlines(keepends=True)
    assert [line for line in there if line.startswith(b"writer 0")] == done[0]
    assert [line for line in there if line.startswith(b"writer 1")] == done[1]
    assert done[0] or done[1]


def test_a_reader_follows_a_writer(make: Maker) -> None:
    writer, reader = make(), make()
    whole = b""
    for n in range(30):
        writer.append("j", b"line %d\n" % n)
        whole += b"line %d\n" % n
        assert reader.size("j") == len(whole)
        assert reader.read("j", len(whole) - 7) == whole[-7:]
    assert make().read("j") == whole


def test_ranges_of_a_large_object(make: Maker) -> None:
    chance = random.Random(7)
    data = chance.randbytes(1 << 20)
    tier = make()
    tier.create("a", [data])
    for _ in range(30):
        offset, length = chance.randrange(len(data) + 10), chance.randrange(1 << 18)
        assert tier.read("a", offset, length) == data[offset : offset + length]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_kept(make: Maker, name: str) -> None:
    tier = make()
    tier.create(f"o/{name}/{name}", [b"1"])
    tier.append(f"o/{name}/j-{name}", b"2")
    assert tier.read(f"o/{name}/{name}") + tier.read(f"o/{name}/j-{name}") == b"12"
    assert tier.list("o") == sorted([f"o/{name}/{name}", f"o/{name}/j-{name}"])
    assert tier.folders("o") == [name]
    assert tier.folders(f"o/{name}") == []
    tier.delete(f"o/{name}/{name}")
    tier.delete(f"o/{name}/j-{name}")
    assert tier.list("") == []


def test_a_probe_finds_nothing_wrong_and_leaves_nothing(tier: Tier) -> None:
    found = probe(tier)
    assert (found.faults, found.conditional_put) == ((), True)
    assert traits_of(tier).conditional_put
    assert tier.list("") == []


def test_list_is_sorted_recursive_and_by_folder(tier: Tier) -> None:
    for path in ("p/b", "p/a/x", "p2/c", "p.d", "q"):
        tier.create(path, [b""])
    assert tier.list("p") == ["p/a/x", "p/b"]
    assert tier.list("") == ["p.d", "p/a/x", "p/b", "p2/c", "q"]
    assert tier.list("absent") == []


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leaves_the_root(tier: Tier, path: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"outside")
    calls: list[Callable[[], object]] = [
        lambda: tier.create(path, [b"evil"]),
        lambda: tier.append(path, b"evil"),
        lambda: tier.read(path),
        lambda: tier.size(path),
        lambda: tier.delete(path),
    ]
    for call in calls:
        with pytest.raises(Permanent, match="not a path inside"):
            call()
    assert (tmp_path / "x").read_bytes() == b"outside"


def test_a_sweep_with_nothing_left_behind_removes_nothing(tier: Tier) -> None:
    tier.create("a", [b"x"])
    assert tier.sweep() == []
    assert tier.list("") == ["a"]
