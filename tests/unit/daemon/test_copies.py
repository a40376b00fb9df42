"""The thread that copies: one failure is told once, a store without put-if-absent once, and nothing is copied that nobody wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.fake_trainer import until
from tests.rigs.store_run import Trainer
from tests.rigs.stripped import Stripped
from unbroken.core.errors import Permanent
from unbroken.core.messages import Begin, Opened, Rules
from unbroken.core.ports import SystemClock, SystemNonces, Tier
from unbroken.core.records import EventRecord
from unbroken.daemon import copies
from unbroken.daemon.copies import Copier
from unbroken.daemon.folder import RunFolder
from unbroken.store.log import Log, visible
from unbroken.store.tiers.memory import MemoryTier


class Switched(MemoryTier):
    """A place that can be switched off."""

    is_off = False

    def _refuse(self) -> None:
        if self.is_off:
            raise Permanent("off")

    def list(self, prefix: str) -> list[str]:
        self._refuse()
        return super().list(prefix)

    def size(self, path: str) -> int:
        self._refuse()
        return super().size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._refuse()
        return super().read(path, offset, length)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(str(tmp_path / "run"), SystemClock(), SystemNonces())
    yield made
    made.close()


@pytest.fixture
def make(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tier], tuple[Trainer, Copier]]]:
    made: list[Copier] = []

    def act(tier: Tier) -> tuple[Trainer, Copier]:
        monkeypatch.setattr(copies, "tier_at", lambda url, retry_s: tier)
        monkeypatch.setattr(copies, "FIRST_PAUSE_S", 0.05)
        monkeypatch.setattr(copies, "MAX_PAUSE_S", 0.05)
        plan = folder.begin(
            Begin(world_size=2, resume="auto", rules=Rules(copy_to="s3://bucket/run")), [], witnessed=True, last_applied=None
        )
        journal = folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))
        trainer = Trainer(folder.repository, journal.generation)
        trainer.journal = journal._writer
        made.append(Copier(folder))
        made[0].begin()
        return trainer, made[0]

    yield act
    made[0].stop(10)


def newest(tier: Tier) -> int | None:
    commits = visible(Log.open(tier).state)
    return commits[-1].step if commits else None


def test_I9_a_place_that_is_off_is_told_once_and_used_again_when_it_is_on(make: Callable[[Tier], tuple[Trainer, Copier]]) -> None:
    tier = Switched()
    trainer, copier = make(tier)
    trainer.save(1)
    copier.go_on()
    until(lambda: newest(tier) == 1, "step 1 is copied")
    until(lambda: not copier.is_wanted, "all is copied")
    tier.is_off = True
    trainer.save(2)
    copier.go_on()
    until(lambda: copier.facts()["failing_s"] > 0.3, "several tries")
    assert (copier.is_wanted, copier.facts()["error"]) == (False, "Permanent: off")
    tier.is_off = False
    until(lambda: copier.facts()["last_step"] == 2 and not copier.facts()["error"], "step 2 is copied")
    events = copier.take_events()
    assert [event.name for event in events] == ["copied", "copy_failed", "copied"]
    assert events[2].facts["failed_for_s"] > 0.2
    assert copier.take_events() == []


def test_B12_a_store_without_put_if_absent_is_told_once_and_copied_to(make: Callable[[Tier], tuple[Trainer, Copier]]) -> None:
    tier = MemoryTier()
    trainer, copier = make(Stripped(tier))  # type: ignore[arg-type]
    events: list[EventRecord] = []
    for step in (1, 2):
        trainer.save(step)
        copier.go_on()
        until(lambda step=step: newest(tier) == step, "copied")
        until(lambda: not copier.is_wanted, "settled")
        events += copier.take_events()
    assert [event.name for event in events] == ["copy_lower_level", "copied", "copied"]
    assert "see to it that only one writes" in events[0].facts["reason"]


def test_what_nobody_wants_copied_is_not_copied(make: Callable[[Tier], tuple[Trainer, Copier]], folder: RunFolder) -> None:
    tier = MemoryTier()
    trainer, copier = make(tier)
    until(lambda: not copier.is_wanted, "nothing to do")
    folder.rules = Rules()
    trainer.save(1)
    copier.go_on()
    copier.finish()
    assert not copier.is_wanted
    copier.stop(10)
    assert newest(tier) is None
