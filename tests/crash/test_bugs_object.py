"""BUGS B01, B08 and B12 in an object store, through `Store`, `open` and the commands, on a real S3 server.

What does not exist there is left out: empty folders (B01 c), temporaries of ours (B01 d), patched makedirs (B12 c) and locks (B12 d).
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs.stripped import Stripped
from unbroken.core.errors import CheckpointWarning, Damaged, Fenced, ForeignFolder, NoCheckpoint, Permanent, SaveFailed
from unbroken.core.ports import Tier
from unbroken.store import paths
from unbroken.store.catalog import Catalog
from unbroken.store.log import Log, visible
from unbroken.store.tiers.careful import LOWER_LEVEL, CarefulTier, settled
from unbroken.store.tiers.choose import tier_at
from unbroken.store.tiers.memory import MemoryTier

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unbroken[object]'")

from tests.rigs.s3_server import S3Server


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.place()


@pytest.fixture(params=["", "stripped"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the condition of a put as it is, and taken away."""
    if request.param:
        monkeypatch.setattr("unbroken.checkpoints.tier_at", lambda url: Stripped(tier_at(url)))
    return str(request.param)


def state(k: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(k)), "big": torch.full((40_000,), float(k)), "k": k}


def save(url: str, steps: Iterable[int], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with unbroken.Store(url, **options) as store:
            for step in steps:
                store.save(step, state(step), wait=True)


def value_of(found: Any) -> float:
    """k when all of the state is S(k)."""
    values = {*found["w"].tolist(), *found["big"].tolist(), float(found["k"])}
    assert len(values) == 1, f"a mix of {values}"
    return values.pop()


def objects_of(tier: Tier, step: int) -> list[str]:
    """What step `step` alone needs: its log entry, manifest and packs."""
    log = Log.open(tier)
    needs = {c.step: Catalog(tier).packs(c) | {ref.path for ref in c.manifests} for c in visible(log.state)}
    others = set().union(*(found for other, found in needs.items() if other != step))
    return [*sorted(needs[step] - others), paths.log_entry("main", log.head)]


def cut(tier: Tier, path: str) -> None:
    raw = tier.read(path)
    tier.delete(path)
    tier.create(path, [raw[: len(raw) // 2]])


@pytest.mark.parametrize("harm", ["delete", "cut"])
def test_B01_a_b_of_a_newest_checkpoint_that_is_not_whole_the_one_before_is_loaded(url: str, level: str, harm: str) -> None:
    save(url, (10, 20, 30))
    damage: Callable[[Tier, str], None] = (lambda tier, path: tier.delete(path)) if harm == "delete" else cut
    tier = tier_at(url)
    for path in objects_of(tier, 30):
        raw = tier.read(path)
        damage(tier, path)
        store = unbroken.Store(url)
        with pytest.warns(CheckpointWarning, match="step 30|00000003.json") as told:
            found = store.load()
        assert (value_of(found), store.latest()) == (20.0, 20)
        assert len([one for one in told if one.category is CheckpointWarning]) == 1
        if harm == "cut":
            tier.delete(path)
        tier.create(path, [raw])
    assert value_of(unbroken.Store(url).load()) == 30.0


def test_B01_f_where_all_are_damaged_there_is_an_error_and_no_fresh_start(url: str) -> None:
    save(url, (10, 20, 30))
    tier = tier_at(url)
    for path in tier.list(paths.MANIFESTS):
        cut(tier, path)
    for ask in (unbroken.Store(url).load, unbroken.Store(url).latest, unbroken.open(url).load):
        with pytest.raises(NoCheckpoint, match=r"(?s)step 30: .*step 20: .*step 10: ") as told:
            ask()
        assert url in str(told.value)


def test_B08_a_b_numbers_are_compared_as_numbers(url: str) -> None:
    save(url, (9, 999, 1000, 900_000, 1_000_000), keep=9)
    assert unbroken.Store(url).latest() == 1_000_000
    assert [one.step for one in unbroken.open(url).steps()] == [9, 999, 1000, 900_000, 1_000_000]


def test_B08_c_strays_change_nothing(url: str) -> None:
    save(url, (10, 20))
    tier = tier_at(url)
    strays = ["handpicked/x", "step_abc/y", "step_-5/z", "5000", ".step_2000.tmp/a", "manifests/000000005000.json", "packs/ab/x.pack"]
    for path in (*strays, "runs/main/log/9.json", "runs/main/log/5000"):
        tier.create(path, [b"stray"])
    assert unbroken.Store(url).latest() == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value_of(unbroken.Store(url).load()) == 20.0
    assert unbroken.open(url).verify().ok


def test_B08_d_a_step_that_was_asked_for_is_that_step_or_an_error(url: str) -> None:
    save(url, (100, 200))
    assert value_of(unbroken.Store(url).load(100)) == 100.0
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 150; there are 100, 200"):
        unbroken.Store(url).load(150)
    tier = tier_at(url)
    cut(tier, next(path for path in tier.list(paths.MANIFESTS) if "/000000000200-" in path))
    with pytest.raises(Damaged):
        unbroken.open(url).load(200)


def test_B08_e_nothing_there_is_an_error_that_names_the_place(url: str) -> None:
    with pytest.raises(NoCheckpoint, match=f"{url}: no run here"):
        unbroken.open(url)
    with pytest.raises(NoCheckpoint, match=f"{url}: no run here"):
        unbroken.Store(url).load()
    assert unbroken.Store(url).latest() is None
    tier_at(url).create("notes.txt", [b"x"])
    with pytest.raises(ForeignFolder, match=r"notes\.txt"):
        unbroken.open(url)
    with pytest.raises(ForeignFolder):
        save(url, (1,))
    assert tier_at(url).list("") == ["notes.txt"]


def test_B12_a_a_second_store_fences_the_first_and_no_reader_sees_a_mix(url: str) -> None:
    seen: list[float] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen.append(value_of(unbroken.open(url).load()))

    first, second = unbroken.Store(url), unbroken.Store(url)
    first.save(1, state(1.0), wait=True)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        second.save(2, state(2.0), wait=True)
        with pytest.raises((SaveFailed, Fenced), match="generation 1 was opened meanwhile"):
            first.save(3, state(1.0), wait=True)
        second.save(4, state(2.0), wait=True)
    finally:
        stop.set()
        reader.join(30)
    assert set(seen) <= {1.0, 2.0}
    assert value_of(unbroken.open(url).load()) == 2.0
    assert [one.step for one in unbroken.open(url).steps()] == [1, 2, 4]
    assert unbroken.open(url).verify().ok
    second.close()


def test_B12_a_without_put_if_absent_a_later_writer_still_fences_an_earlier_one_and_the_level_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.checkpoints.tier_at", lambda url: Stripped(tier_at(url)))
    first, second = unbroken.Store(url), unbroken.Store(url)
    with pytest.warns(CheckpointWarning, match="see to it that only one writes"):
        first.save(1, state(1.0), wait=True)
    with pytest.warns(CheckpointWarning, match="see to it that only one writes"):
        second.save(2, state(2.0), wait=True)
    journal = paths.journal("main", 0)  # the first writer's own, which it may go on with
    before = {path: tier_at(url).read(path) for path in tier_at(url).list("") if path != journal}
    with pytest.raises((SaveFailed, Fenced), match="generation 1 was opened meanwhile"):
        first.save(3, state(1.0), wait=True)
    now = {path: tier_at(url).read(path) for path in tier_at(url).list("")}
    assert {path: now.get(path) for path in before} == before, "nothing of the newer writer was replaced"
    with pytest.warns(CheckpointWarning, match="passed over: step 3: its log entry is missing"):
        assert value_of(unbroken.open(url).load()) == 2.0
    second.close()


def test_a_store_that_ignores_the_condition_gets_the_lower_level_and_a_broken_one_none() -> None:
    tier, note = settled(Stripped(MemoryTier()))  # type: ignore[arg-type]
    assert isinstance(tier, CarefulTier)
    assert note == LOWER_LEVEL
    tier.create("a", [b"first"])
    with pytest.raises(FileExistsError):
        tier.create("a", [b"second"])
    assert tier.read("a") == b"first"
    assert settled(MemoryTier())[1] == ""

    class Forgetful(MemoryTier):
        def list(self, prefix: str) -> list[str]:
            return []

    with pytest.raises(Permanent, match=r"no run may be kept there: .*listed"):
        settled(Forgetful())


def test_B12_b_saves_of_many_threads_into_one_place_leave_whole_checkpoints(url: str) -> None:
    save(url, (1,))
    gate = threading.Barrier(4)
    won: list[int] = []
    numbers = itertools.count(2)

    def go() -> None:
        store = unbroken.Store(url)
        step = next(numbers)
        gate.wait(30)
        try:
            store.save(step, state(step), wait=True)
            won.append(step)
        except (SaveFailed, Fenced, unbroken.Refused):
            pass

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert won
    archive = unbroken.open(url)
    for one in archive.steps():
        assert value_of(archive.load(one.step)) == one.step
    assert archive.verify().ok
