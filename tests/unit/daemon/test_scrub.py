"""The scrub: finds what is damaged in stored checkpoints, once, and only while somebody needs it; changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.store_run import FACTS, WRITER, StillClock, Trainer, opened, start
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.core.records import Keep
from unbroken.daemon import scrub
from unbroken.daemon.scrub import BYTES_PER_S, Finding, Scrub
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

FLOATS = 20_000


class Rig:
    """A run, and the scrub over it; `look` waits until it has gone through once more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer = start(DiskTier(str(folder)), nonces=SystemNonces(), num_floats=FLOATS)
        for step in (1, 2, 3):
            self.trainer.save(step)
        self.woken = threading.Event()
        self.scrub = Scrub(SystemClock(), SystemNonces(), self.woken.set)

    def packs(self, *steps: int) -> set[str]:
        repository = self.trainer.repository
        return {c.pack for one in repository.visible() if one.step in steps for m in repository.manifests(one) for c in m.chunks}

    def flip(self, path: str) -> None:
        raw = bytearray((self.folder / path).read_bytes())
        raw[5000] ^= 1
        (self.folder / path).write_bytes(raw)

    def look(self) -> list[Finding]:
        """What one pass finds."""
        self.scrub._read_all(self.trainer.repository, DiskTier(str(self.folder)), threading.Event())
        return self.scrub.take()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "run")
    yield made
    made.scrub.stop()


def test_I3_what_is_whole_gives_no_finding_and_nothing_is_written(rig: Rig) -> None:
    before = {p: p.stat().st_mtime_ns for p in rig.folder.rglob("*")}
    assert rig.look() == []
    assert {p: p.stat().st_mtime_ns for p in rig.folder.rglob("*")} == before


def test_I3_a_damaged_pack_is_told_once_with_the_checkpoints_that_need_it(rig: Rig) -> None:
    (pack,) = rig.packs(2)
    rig.flip(pack)
    (found,) = rig.look()
    assert (found.path, found.steps) == (pack, (2,))
    assert str(found).startswith(f"{pack}: ") and str(found).endswith("needed by the checkpoints of steps 2")
    assert rig.woken.is_set()
    assert found.event(7).facts == {"path": pack, "reason": found.reason, "steps": [2]}
    assert rig.look() == [], "it is known"
    assert [c.step for c in rig.trainer.repository.visible()] == [1, 2, 3], "who condemns is the next start"


def test_I3_damaged_manifests_and_missing_packs_are_found_too(rig: Rig) -> None:
    manifest = rig.trainer.repository.visible()[0].manifests[0].path
    rig.flip(manifest) if (rig.folder / manifest).stat().st_size > 5000 else (rig.folder / manifest).write_bytes(b"{}")
    (gone,) = rig.packs(3)
    (rig.folder / gone).unlink()
    rig.trainer.repository = Repository.open(DiskTier(str(rig.folder)))
    found = {one.path: one.steps for one in rig.look()}
    assert found == {manifest: (1,), gone: (3,)}


def test_what_retention_removes_meanwhile_is_no_damage(rig: Rig) -> None:
    visible = rig.trainer.repository.visible
    seen = visible()
    rig.trainer.repository.collect(Keep(newest=1), writer=WRITER, clock=StillClock())
    answers = [seen]
    rig.trainer.repository.visible = lambda: answers.pop() if answers else visible()  # type: ignore[method-assign]
    assert rig.look() == [], "read from the log before the pruning, looked for after it"


def test_a_folder_that_was_replaced_is_no_damage(rig: Rig, tmp_path: Path) -> None:
    rig.folder.rename(tmp_path / "elsewhere")
    Repository.create(DiskTier(str(rig.folder)), FACTS)
    assert rig.look() == []


def test_it_reads_no_faster_than_it_may(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(StillClock):
        slept_s = 0.0

        def sleep(self, seconds: float) -> None:
            self.slept_s += seconds

    clock = Counting()
    monkeypatch.setattr(scrub, "BYTES_PER_S", 1000)
    rig.scrub = Scrub(clock, SystemNonces(), lambda: None)
    assert rig.look() == []
    assert clock.slept_s >= 3 * 4 * FLOATS / 1000 - 1.0, "all but the first second's share was waited for"
    assert BYTES_PER_S == 32 << 20, "as the documents say"


def test_passes_come_so_often_and_end_with_the_run(rig: Rig) -> None:
    (pack,) = rig.packs(1)
    rig.flip(pack)
    rig.scrub.begin(rig.trainer.repository, str(rig.folder), None)
    assert rig.scrub._thread is None, "off unless asked for"
    rig.scrub.begin(rig.trainer.repository, str(rig.folder), 0.01)
    assert rig.woken.wait(20.0)
    assert [one.steps for one in rig.scrub.take()] == [(1,)]
    rig.scrub.stop()
    assert rig.scrub._thread is not None
    rig.scrub._thread.join(20.0)
    assert not rig.scrub._thread.is_alive()


def test_another_start_is_looked_after_in_place_of_the_one_before(rig: Rig) -> None:
    rig.scrub.begin(rig.trainer.repository, str(rig.folder), 3600.0)
    first = rig.scrub._thread
    repository = Repository.open(DiskTier(str(rig.folder)))
    again = opened(repository, repository.visible()[-1], SystemNonces())
    rig.scrub.begin(again.repository, str(rig.folder), 3600.0)
    assert first is not None and first is not rig.scrub._thread
    first.join(20.0)
    assert not first.is_alive()
