"""The daemon's hold on a folder: what the next generation says of the one before, and a folder that changes under its feet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.core.errors import Permanent, Refused
from unbroken.core.messages import Begin, Opened
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import StepRecord
from unbroken.daemon.folder import LiveJournal, RunFolder
from unbroken.store.journal import first_chain, read_journal

APPEND = "store.journal.before_append"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(str(tmp_path / "run"), SystemClock(), SystemNonces())
    yield made
    made.close()
    arm(APPEND, None)


def open_run(folder: RunFolder) -> LiveJournal:
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


def put_back(folder: RunFolder, copy: str) -> None:
    shutil.rmtree(folder.directory)
    shutil.copytree(copy, folder.directory)


def test_a_folder_put_back_to_an_earlier_copy_is_forgotten_and_that_is_said(folder: RunFolder, tmp_path: Path) -> None:
    open_run(folder)
    shutil.copytree(folder.directory, tmp_path / "copy")
    open_run(folder)
    assert not folder.changed()
    put_back(folder, str(tmp_path / "copy"))
    assert folder.changed()
    plan = folder.begin(Begin(world_size=1, resume="auto", options={}), [], witnessed=True, last_applied=None)
    assert plan.generation == 1, "generation 1 is not in the folder any more"
    assert any("put back to an earlier copy" in note for note in plan.notes)
    folder.opened(Opened(generation=1, step=0, loaded_root=""))
    assert folder.repository.verify().ok
    assert not folder.changed()


def test_a_folder_whose_newest_entry_is_another_is_forgotten(folder: RunFolder, tmp_path: Path) -> None:
    open_run(folder)
    shutil.copytree(folder.directory, tmp_path / "copy")
    open_run(folder)
    folder.close()
    other = RunFolder(str(tmp_path / "copy"), SystemClock(), SystemNonces())
    open_run(other)
    other.close()
    put_back(folder, str(tmp_path / "copy"))
    assert folder.changed()


def test_a_run_that_never_made_a_checkpoint_is_born_again_from_the_same_state_only(folder: RunFolder) -> None:
    def born_from(origin: dict[str, str]) -> None:
        plan = folder.begin(Begin(world_size=1, resume="auto", options={"units": 1}), [], witnessed=True, last_applied=None)
        folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root, origin=origin))

    born_from({"source": "a.pt"})
    assert folder.repository.facts.options == {"units": 1, "started_from": {"source": "a.pt"}}
    born_from({"source": "a.pt"})
    for other in ({"source": "b.pt"}, {}):
        with pytest.raises(Refused, match=r"start_from=a\.pt then, (b\.pt|nothing) now"):
            born_from(other)
