"""What every tier must do, whatever it stands on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unbroken.core.errors import Permanent
from unbroken.core.ports import Tier
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier

ESCAPES = ["../x", "/etc/x", "", "a//b", "a/./b", "a/../../b", "..", "a\\b", "a\0b", "a/", "/", "x" * 5000, "a\nb"]


@pytest.fixture(params=["disk", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return DiskTier(str(tmp_path / "root")) if request.param == "disk" else MemoryTier()


def test_an_object_is_the_concatenation_of_its_parts(tier: Tier) -> None:
    assert tier.create("a/b", [b"one", bytearray(b"two"), memoryview(b"three")]) == 11
    assert tier.read("a/b") == b"onetwothree"
    assert tier.size("a/b") == 11


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


def test_of_racing_creates_exactly_one_wins_and_stays_whole(tier: Tier) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def put(i: int) -> None:
        gate.wait(timeout=10)
        try:
            tier.create("race/slot", [bytes([i]) * 1000] * 10)
            won.append(i)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert tier.read("race/slot") == bytes([won[0]]) * 10_000
    assert tier.list("race") == ["race/slot"]


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
