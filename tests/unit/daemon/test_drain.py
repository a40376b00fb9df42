"""The drain itself, on a real folder: replicas, withdrawn chunks, a removed folder, and what a start in progress puts off."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.rigs.fake_trainer import pieces_of
from unbroken.core.errors import CheckFailed, Damaged, SaveFailed, Transient, describe
from unbroken.core.messages import Begin, Failed, Opened, Rules, SlotSource
from unbroken.core.os import memory_file
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import Keep, RootRecord, SlotIndex, StepRecord
from unbroken.daemon.drain import Cargo, Poisoned, drain
from unbroken.daemon.folder import LiveJournal, RunFolder
from unbroken.daemon.plan import MemoryCut
from unbroken.shm.channel import encode
from unbroken.shm.slots import Slot, slot_bytes
from unbroken.store.journal import read_journal


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(str(tmp_path / "run"), SystemClock(), SystemNonces())
    yield made
    made.close()
    for name in ("drain.written", "drain.before_commit", "store.delete"):
        arm(name, None)


def open_run(folder: RunFolder, **options: int) -> LiveJournal:
    plan = folder.begin(Begin(world_size=2, resume="auto", options=dict(options)), [], witnessed=False, last_applied=None)
    return folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))


def slot_of(rank: int, step: int, logical: dict[str, bytes]) -> Slot:
    placed, data = pieces_of(logical, {"/rng": b"%d" % rank})
    index = SlotIndex(generation=0, step=step, rank=rank, world_size=2, milestone=False, pieces=placed)
    slot = Slot(memory_file("test", slot_bytes(index)), slot_bytes(index))
    view = slot.begin(index)
    view[:] = data
    view.release()
    slot.finish()
    return slot


def cargo_of(folder: RunFolder, live: LiveJournal, step: int, *states: dict[str, bytes]) -> Cargo:
    sources = tuple(SlotSource(rank=rank, slot=rank) for rank in range(2))
    cut = MemoryCut(generation=0, step=step, world_size=2, slots=sources)
    slots = tuple(slot_of(rank, step, state) for rank, state in enumerate(states))
    return Cargo(cut, folder.repository, slots, live)


def steps(folder: RunFolder) -> list[int]:
    return [commit.step for commit in folder.repository.visible()]


def test_ranks_without_logical_pieces_are_no_divergence(folder: RunFolder) -> None:
    drain(cargo_of(folder, open_run(folder), 0, {"/w": b"1"}, {}), folder)
    assert steps(folder) == [0]


@pytest.mark.parametrize("other", [{"/w": b"2"}, {"/w": b"11"}, {"/w": b"1", "/more": b"x"}, {"/less": b"1"}])
def test_every_difference_between_replicas_is_named(folder: RunFolder, other: dict[str, bytes]) -> None:
    with pytest.raises(CheckFailed, match=r"diverged at step 0.*/\w+ \(ranks 1\)"):
        drain(cargo_of(folder, open_run(folder), 0, {"/w": b"1"}, other), folder)
    assert steps(folder) == []


def weights(value: float) -> dict[str, bytes]:
    return {"/model/parameters/w": np.array([1.0, value], dtype="<f4").tobytes()}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_B38_what_is_poisoned_is_not_committed_and_named(folder: RunFolder, value: float) -> None:
    live = open_run(folder)
    cargo = cargo_of(folder, live, 0, weights(value), weights(value))
    with pytest.raises(Poisoned, match=rf"state of step 0 is poisoned: /model/parameters/w holds {'NaN' if value != value else 'inf'}"):
        drain(cargo, folder)
    assert steps(folder) == []
    drain(cargo_of(folder, live, 0, weights(0.0), weights(0.0)), folder)
    assert steps(folder) == [0]


def test_B38_who_asks_for_it_gets_poisoned_checkpoints(folder: RunFolder) -> None:
    folder.begin(Begin(world_size=2, resume="auto", rules=Rules(allow_nonfinite=True)), [], witnessed=False, last_applied=None)
    live = folder.opened(Opened(generation=0, step=0, loaded_root=""))
    drain(cargo_of(folder, live, 0, weights(math.nan), weights(math.nan)), folder)
    assert steps(folder) == [0]


def test_I4_a_slot_overwritten_during_the_drain_voids_it(folder: RunFolder) -> None:
    cargo = cargo_of(folder, open_run(folder), 0, {"/w": b"1"}, {"/w": b"1"})
    arm("drain.written", cargo.slots[1].free)
    with pytest.raises(SaveFailed, match="given up"):
        drain(cargo, folder)
    assert steps(folder) == []


def test_I3_a_slot_whose_index_is_damaged_is_not_committed(folder: RunFolder) -> None:
    cargo = cargo_of(folder, open_run(folder), 0, {"/w": b"1"}, {"/w": b"1"})
    with open(f"/proc/self/fd/{cargo.slots[0].fd}", "r+b") as file:
        file.seek(4096 + 5)
        file.write(b"#")
    with pytest.raises(Damaged, match="rank 0, generation 0, step 0"):
        drain(cargo, folder)
    assert steps(folder) == []


def test_chunks_withdrawn_during_a_write_are_written_anew(folder: RunFolder) -> None:
    live = open_run(folder)
    state = {"/w": b"w" * 200_000}
    drain(cargo_of(folder, live, 0, state, state), folder)
    repository = folder.repository
    pack = repository.manifests(repository.visible()[0])[0].chunks[0].pack

    def condemn() -> None:
        arm("drain.written", None)
        repository.condemn(0, 0, [pack], "bit rot", writer=folder.writer, clock=folder.clock)

    live.add([StepRecord(step=1, units=(), num_samples=0, loss="0" * 16, clock=(), time_s=0.0)])
    arm("drain.written", condemn)
    drain(cargo_of(folder, live, 1, state, state), folder)
    assert steps(folder) == [1]
    assert pack not in {chunk.pack for chunk in repository.manifests(repository.visible()[0])[0].chunks}
    records = [line.record for line in read_journal(repository.tier, "main", 0, live.generation.nonce)]
    assert len([record for record in records if isinstance(record, RootRecord)]) == 2
    assert repository.verify().ok


def test_a_write_that_never_gets_through_fails_in_the_end(folder: RunFolder) -> None:
    def strike() -> None:
        raise Transient("try again")

    arm("drain.before_commit", strike)
    with pytest.raises(Transient):
        drain(cargo_of(folder, open_run(folder), 0, {}, {}), folder)
    assert steps(folder) == []


def test_nothing_is_written_into_a_removed_run_folder(folder: RunFolder) -> None:
    cargo = cargo_of(folder, open_run(folder), 0, {"/w": b"1"}, {"/w": b"1"})
    shutil.rmtree(folder.directory)
    with pytest.raises(SaveFailed, match="removed"):
        drain(cargo, folder)
    assert not Path(folder.directory).exists()


def test_I2_nothing_is_removed_while_a_start_is_in_progress(folder: RunFolder) -> None:
    live = open_run(folder, keep=1)
    for step in (0, 1):
        drain(cargo_of(folder, live, step, {"/w": b"%d" % step}, {"/w": b"%d" % step}), folder)
    assert steps(folder) == [1]
    plan = folder.begin(Begin(world_size=2, resume="auto"), [], witnessed=False, last_applied=1)
    drain(cargo_of(folder, live, 2, {"/w": b"2"}, {"/w": b"2"}), folder)
    assert steps(folder) == [1, 2]
    folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))
    assert steps(folder) == [1]


@pytest.mark.alone
def test_I11_a_start_does_not_wait_for_a_long_collection(folder: RunFolder) -> None:
    live = open_run(folder, keep=100)
    for step in range(8):
        drain(cargo_of(folder, live, step, {"/w": b"%d" % step}, {"/w": b"%d" % step}), folder)
    removing = threading.Event()

    def slow() -> None:
        removing.set()
        time.sleep(0.2)

    folder.rules = Rules(keep=Keep(newest=1))
    arm("store.delete", slow)
    collecting = threading.Thread(target=folder.collect, args=(folder.repository,))
    collecting.start()
    assert removing.wait(10.0)
    began = time.monotonic()
    plan = folder.begin(Begin(world_size=2, resume="auto", options={"keep": 1}), [], witnessed=False, last_applied=7)
    assert time.monotonic() - began < 1.0, "7 manifests and 7 packs take 2.8 s"
    collecting.join()
    left = len(folder.repository.tier.list("packs"))
    assert left > 1
    arm("store.delete", None)
    folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))
    folder.collect(folder.repository)
    assert len(folder.repository.tier.list("packs")) == 1, "what was put off is made up for"
    assert folder.repository.verify().ok


def test_an_error_of_any_length_fits_into_a_message() -> None:
    error = ValueError("\0" * 1_000_000)
    error.__cause__ = OSError("\1" * 1_000_000)
    text = describe(error)
    assert text.startswith("ValueError: \0") and "caused by OSError: \1" in text
    encode(Failed(step=0, generation=0, text=text))
