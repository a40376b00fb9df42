"""`prune`: what the rules no longer keep goes, with a reason; nothing that anybody needs does, and nothing while somebody writes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

import unbroken
from tests.rigs.states import s, whole
from tests.rigs.store_run import CountedNonces, drifting, load, opened, start, whole_value
from unbroken.archive.pruning import Pruning
from unbroken.core.errors import Fenced, NoCheckpoint, Refused
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import SystemNonces
from unbroken.core.records import Writer
from unbroken.store import paths
from unbroken.store.deltas import Encoding
from unbroken.store.lease import WriterLease
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

FLOATS = 20_000


def saved(folder: Path, *steps: int, milestones: tuple[int, ...] = ()) -> DiskTier:
    """Checkpoints as a dead writer left them."""
    tier = DiskTier(str(folder))
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
    for step in steps:
        trainer.save(step, milestone=step in milestones)
    return tier


def held(folder: Path, lineage: str = "main") -> list[int]:
    return [one.step for one in unbroken.open(folder, lineage).steps()]


def steps_of(made: Pruning) -> tuple[list[int], list[int]]:
    return [one.step for one in made.stays], [one.step for one in made.goes]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def stored_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for top in ("packs", "manifests") for p in (folder / top).rglob("*") if p.is_file())


def test_I2_what_no_rule_keeps_goes_and_the_dry_run_has_said_so(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, milestones=(2,))
    before, size = files(tmp_path), stored_bytes(tmp_path)
    foreseen = unbroken.open(tmp_path).prune(keep=2, dry_run=True)
    assert files(tmp_path) == before, "a dry run writes nothing, not even a lock file"
    assert steps_of(foreseen) == ([2, 4, 5], [1, 3])
    assert [one.reasons for one in foreseen.stays] == [["milestone"], ["among the newest 2"], ["among the newest 2"]]
    made = unbroken.open(tmp_path).prune(keep=2)
    assert made == msgspec.structs.replace(foreseen, dry_run=False)
    assert made.freed_bytes == size - stored_bytes(tmp_path) > 2 * 4 * FLOATS
    assert (made.num_files, made.num_leftovers) == (4, 0)
    assert held(tmp_path) == [2, 4, 5]
    repository = Repository.open(DiskTier(str(tmp_path)))
    assert [whole_value(load(repository, commit)) for commit in repository.visible()] == [2, 4, 5]
    assert repository.verify().ok
    again = files(tmp_path)
    assert steps_of(unbroken.open(tmp_path).prune(keep=2)) == ([2, 4, 5], [])
    assert {p: v for p, v in files(tmp_path).items() if p != "writer.json"} == {p: v for p, v in again.items() if p != "writer.json"}


def test_I2_bytes_that_are_shared_are_freed_with_the_last_that_needs_them(tmp_path: Path) -> None:
    """Steps 2 and 3 are stored as differences from step 1, whose packs stay."""
    tier = DiskTier(str(tmp_path))
    trainer = start(tier, nonces=SystemNonces(), encoding=Encoding(max_depth=9))
    for step in (1, 2, 3):
        trainer.save(step, logical=drifting(step))
    packs = set(tier.list(paths.PACKS))
    made = unbroken.open(tmp_path).prune(keep=1)
    assert steps_of(made) == ([3], [1, 2])
    assert set(tier.list(paths.PACKS)) == packs, "the newest is a difference from a difference"
    assert made.num_files == 2, "two manifests"
    assert whole_value(load(Repository.open(tier), Repository.open(tier).visible()[-1])) == 3


def test_I2_a_branch_keeps_what_it_stands_on(tmp_path: Path) -> None:
    tier = saved(tmp_path, 1, 2, 3)
    unbroken.open(tmp_path).branch(1, "hot")
    made = unbroken.open(tmp_path).prune(keep=1)
    assert steps_of(made) == ([3], [1, 2])
    assert held(tmp_path, "hot") == [1]
    hot = Repository.open(tier, "hot")
    assert whole_value(load(hot, hot.visible()[0])) == 1
    assert made.freed_bytes < 2 * 4 * FLOATS, "step 1's pack is the branch's, too"
    assert hot.verify().ok and Repository.open(tier).verify().ok


def test_a_dead_writers_leftovers_go_with_their_bytes_counted(tmp_path: Path) -> None:
    tier = saved(tmp_path, 1)
    dead = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
    dead.write(2)
    temporary = tmp_path / "packs" / DiskTier(str(tmp_path))._temporary("x.pack").replace(f".{os.getpid()}-", ".999999999-")
    temporary.write_bytes(bytes(12345))
    size = stored_bytes(tmp_path)
    made = unbroken.open(tmp_path).prune()
    assert (steps_of(made), made.num_files, made.num_leftovers) == (([1], []), 3, 3)
    assert made.freed_bytes == size - stored_bytes(tmp_path)
    assert not temporary.exists() and len(tier.list(paths.PACKS)) == len(tier.list(paths.MANIFESTS)) == 1


def test_B12_refused_while_a_store_of_this_process_writes(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path) as store:
        for k in (1, 2):
            store.save(k, s(k), wait=True)
        before = files(tmp_path)
        with pytest.raises(Fenced, match="this process itself is writing this run: close its Store first"):
            unbroken.open(tmp_path).prune(keep=1)
        assert files(tmp_path) == before
        assert steps_of(unbroken.open(tmp_path).prune(keep=1, dry_run=True)) == ([2], [1])
        store.save(3, s(3), wait=True)
    assert steps_of(unbroken.open(tmp_path).prune(keep=1)) == ([3], [1, 2])


def test_B12_a_dry_run_beside_a_living_writer_takes_nothing_of_its_for_a_leftover(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    trainer = start(tier, nonces=SystemNonces(), num_floats=FLOATS)
    lease = WriterLease.acquire(str(tmp_path), Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now"))
    trainer.save(1)
    trainer.write(2)
    assert unbroken.open(tmp_path).prune(dry_run=True).num_files == 0
    lease.release()
    assert unbroken.open(tmp_path).prune(dry_run=True).num_files == 2


def test_I2_where_the_newest_is_damaged_nothing_older_goes(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path) as store:
        for k in (1, 2, 3):
            store.save(k, s(k))
    tier = DiskTier(str(tmp_path))
    newest = Repository.open(tier).manifests(Repository.open(tier).visible()[-1])[0].chunks[0]
    raw = bytearray((tmp_path / newest.pack).read_bytes())
    raw[newest.offset] ^= 1
    (tmp_path / newest.pack).write_bytes(raw)
    before = {p: v for p, v in files(tmp_path).items() if p != "writer.json"}
    with pytest.raises(
        Refused, match=r"the newest checkpoint, of step 3, is not whole, and nothing has been removed: .*Go on with the run or Store"
    ):
        unbroken.open(tmp_path).prune(keep=1)
    assert {p: v for p, v in files(tmp_path).items() if p != "writer.json"} == before
    with unbroken.Store(tmp_path) as store:
        with pytest.warns(unbroken.CheckpointWarning):
            assert whole(store.load()) == 2
        store.save(3, s(3))
    assert steps_of(unbroken.open(tmp_path).prune(keep=1))[0] == [3]


def test_where_nothing_is_nothing_goes(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint):
        unbroken.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_goes_on_after_a_pruning_and_takes_its_own_rules_with_it(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=9, keep_best="val_loss") as store:
        for k in range(1, 6):
            store.save(k, s(k), metrics={"val_loss": abs(k - 2)})
    assert steps_of(unbroken.open(tmp_path).prune()) == ([1, 2, 3, 4, 5], []), "its own rules keep all"
    assert steps_of(unbroken.open(tmp_path).prune(keep=1, keep_best="val_loss")) == ([2, 5], [1, 3, 4])
    with unbroken.Store(tmp_path, keep=1, keep_best="val_loss") as store:
        assert whole(store.load()) == 5
        store.save(6, s(6), metrics={"val_loss": 7})
    assert held(tmp_path) == [2, 6]
    made = unbroken.open(tmp_path).prune()
    assert (steps_of(made), made.rules) == (([2, 6], []), "the newest 1, milestones, the best 1 by val_loss (smallest)")
    assert unbroken.open(tmp_path).verify().ok


def test_only_what_is_asked_for_counts(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15, 20, 25, 30)
    made = unbroken.open(tmp_path).prune(keep_every="20 steps", dry_run=True)
    assert steps_of(made) == ([20, 25, 30], [5, 10, 15]), "without keep the newest 3 stay, as in a Run"
    for wrong in ({"keep": 0}, {"keep_every": "1h"}, {"keep_hours": -1}, {"keep_best": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            unbroken.open(tmp_path).prune(**wrong)  # type: ignore[arg-type]
    assert held(tmp_path) == [5, 10, 15, 20, 25, 30]


def test_an_older_history_stays(tmp_path: Path) -> None:
    """As in every collection: whoever starts afresh on purpose has not said that the old one may go."""
    tier = saved(tmp_path, 500, 600)
    trainer = opened(Repository.open(tier, nonces=CountedNonces("anew")), None, CountedNonces("anew 2"))
    for step in (1, 2):
        trainer.save(step)
    made = unbroken.open(tmp_path).prune(keep=1)
    assert [(one.step, one.reasons) for one in made.stays] == [
        (2, ["the newest"]),
        (500, ["a history from before a fresh start"]),
        (600, ["a history from before a fresh start"]),
    ]
    assert len(tier.list(paths.MANIFESTS)) == 3


def test_B12_a_dead_writers_number_that_is_taken_again_stops_nobody(tmp_path: Path) -> None:
    """As in containers, whose processes have the same numbers every time."""
    saved(tmp_path, 1, 2)
    alike = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="long ago")
    (tmp_path / paths.WRITER).write_bytes(msgspec.json.encode(alike))
    assert steps_of(unbroken.open(tmp_path).prune(keep=1)) == ([2], [1])


def test_I2_where_the_log_is_damaged_nothing_goes(tmp_path: Path) -> None:
    """The files of a commit whose entry is lost look like leftovers, and the entry may be had back from a copy."""
    saved(tmp_path, 1, 2, 3, 4)
    entry = tmp_path / paths.log_entry("main", 2)
    whole_entry = entry.read_bytes()
    entry.write_bytes(whole_entry[:-9])
    before = files(tmp_path)
    with pytest.raises(Refused, match="the log is damaged, and nothing has been removed"):
        unbroken.open(tmp_path).prune(keep=1)
    assert {p: v for p, v in files(tmp_path).items() if p != paths.WRITER} == {p: v for p, v in before.items() if p != paths.WRITER}
    entry.write_bytes(whole_entry)
    assert steps_of(unbroken.open(tmp_path).prune(keep=4)) == ([1, 2, 3, 4], [])
