"""What must hold after any crash: nothing acknowledged is lost, nothing half is seen, a new writer goes on, no rubbish stays (I1 I2 I3)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.rigs.crash_life import BRANCH, Book, Pages, begun, expected, is_there, state_of
from tests.rigs.store_run import StillClock, Trainer, objects_of, start
from unbroken.archive.branching import make_branch
from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.os import is_alive
from unbroken.core.ports import SystemNonces, Tier
from unbroken.core.records import CommitEntry
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

Maker = Callable[[], Tier]


class Loss(AssertionError):
    """What should never be."""


def judge(make: Maker, book: Book) -> None:
    """Raises Loss. The place is written to: a new writer goes on in it. Each `make()` is the tier of another process."""
    for lineage, pages in book.lineages.items():
        _reader(make(), lineage, pages)
    _writer(make())


def _reader(tier: Tier, lineage: str, pages: Pages) -> None:
    """Just what is visible must be, and each of it is whole, to the bit."""
    try:
        repository = Repository.open(tier, lineage)
    except NoCheckpoint as error:
        if pages.sure:
            raise Loss(f"{lineage}: steps {sorted(pages.sure)} were acknowledged, and now: {error}") from error
        return
    seen = {commit.step: commit for commit in repository.visible()}
    if lost := set(pages.sure) - set(seen):
        raise Loss(f"{lineage}: steps {sorted(lost)} were acknowledged and are not visible; there are {sorted(seen)}")
    if odd := set(seen) - set(pages.sure) - pages.maybe:
        raise Loss(f"{lineage}: steps {sorted(odd)} are visible and must not be")
    for step, commit in seen.items():
        try:
            _compare(repository, commit)
        except Damaged as error:
            if step not in pages.hurt:
                raise Loss(f"{lineage}: step {step} is visible and not whole: {error}") from error


def _compare(repository: Repository, commit: CommitEntry) -> None:
    found: dict[tuple[int | None, str], bytes] = {}
    for manifest in repository.manifests(commit):
        for stored, data in repository.read_pieces(manifest, manifest.pieces):
            found[stored.rank, stored.piece.pointer] = bytes(data)
    if found != expected(commit.step):
        differing = [name for name, data in expected(commit.step).items() if found.get(name) != data]
        raise Loss(f"step {commit.step} was loaded with other bytes than were saved: {differing or 'more pieces'}")


def _writer(tier: Tier) -> None:
    """A good run goes on from the newest, in every lineage; then nothing is left that none of them needs."""
    trainers = [begun(tier, SystemNonces())]
    _step(trainers[0])
    if isinstance(tier, DiskTier) and BRANCH in tier.folders(paths.RUNS):
        if not is_there(tier, BRANCH):  # cut off while it was made: it is made again
            newest = trainers[0].repository.visible()[-1].step
            make_branch(Repository.open(tier), tier, newest, BRANCH, {}, clock=StillClock(), nonces=SystemNonces())
        trainers.append(start(tier, nonces=SystemNonces(), lineage=BRANCH))
        _step(trainers[1])
    for trainer in trainers * 2:  # what one lineage withdraws may have been another's to delete
        trainer.collect(1)
    needed: set[str] = set()
    for trainer in trainers:
        seen = trainer.repository.visible()
        needed |= objects_of(trainer.repository, seen)
        report = trainer.repository.verify()
        if not report.ok:
            raise Loss(f"{trainer.repository.lineage}: verify after recovery: {report.bad}")
    there = {*tier.list(paths.MANIFESTS), *tier.list(paths.PACKS)}
    if there != needed:
        raise Loss(f"left over: {sorted(there - needed)[:4]}, missing: {sorted(needed - there)[:4]}")
    if isinstance(tier, DiskTier) and (left := _temporaries(tier.root)):
        raise Loss(f"temporaries are left: {left[:4]}")


def _temporaries(root: str) -> list[str]:
    """Those whose process has ended: another one may have its number meanwhile."""
    names = [path.name for path in Path(root).rglob(".*") if ".tmp-" in path.name]
    return [name for name in names if (match := re.search(r"\.(\d+)-[0-9a-f]{8}-[0-9a-f]{8}\.tmp-", name)) and not is_alive(int(match[1]))]


def _step(trainer: Trainer) -> None:
    step = trainer.generation.base_step + 1
    trainer.save(step, logical=state_of(step))
    seen = trainer.repository.visible()
    if seen[-1].step != step:
        raise Loss(f"{trainer.repository.lineage}: step {step} was saved after recovery, and the newest is {seen[-1].step}")
    _compare(trainer.repository, seen[-1])
