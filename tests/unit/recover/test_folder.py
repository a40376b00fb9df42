"""The daemon's hold on a folder: what the next generation says of the one before, and a folder that changes under its feet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.core.errors import Permanent
from unbroken.core.messages import Begin, Opened
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import StepRecord
from unbroken.recover.folder import Chronicle, RunFolder
from unbroken.store.journal import first_chain, read_journal

APPEND = "store.journal.before_append"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(str(tmp_path / "run"), SystemClock(), SystemNonces())
    yield made
    made.close()
    arm(APPEND, None)


def open_run(folder: RunFolder) -> Chronicle:
    plan = folder.begin(Begin(world_size=1, resume="auto", options={}), [], witnessed=True, last_applied=None)
    return folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))


def step(k: int, generation: int = 0) -> StepRecord:
    return StepRecord(step=k, units=("00" * 16,), num_samples=4, loss="3ff0000000000000", clock=((generation, k, 1),), time_s=1.0)


def test_I3_the_next_generation_anchors_also_what_was_still_in_memory(folder: RunFolder) -> None:
    first = open_run(folder)
    first.add([step(1), step(2)])
    open_run(folder)
    lines = list(read_journal(folder.repository.tier, "main", 0, first.generation.nonce))
    assert len(lines) == 3
    assert folder.repository.log.journal_heads() == {0: lines[-1].chain}
    assert folder.repository.verify().ok


def test_a_journal_that_cannot_be_written_does_not_stop_a_start(folder: RunFolder) -> None:
    first = open_run(folder)

    def refuse() -> None:
        raise Permanent("no space")

    arm(APPEND, refuse)
    open_run(folder)
    assert folder.repository.log.journal_heads() == {0: first_chain(0, first.generation.nonce)}
    arm(APPEND, None)
    first.sync()
    assert folder.repository.verify().ok, "lines that come later are no problem"
