"""A run's life for the crash campaigns: saves, collections, branches, condemned checkpoints, restarts, all drawn from a seed.

What is said before and after each of them goes into a `Book`, which knows what must be visible, what may be, and what must not.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from tests.rigs.store_run import CountedNonces, StillClock, Trainer, opened, part, rank_state, start
from unbroken.archive.branching import make_branch
from unbroken.codec.digest import text_digest
from unbroken.core.errors import NoCheckpoint, StoreError, UnbrokenError
from unbroken.core.ports import Nonces, Tier
from unbroken.core.records import CommitEntry, EventRecord
from unbroken.store.deltas import Encoding, is_full_due
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.disk import DiskTier

FLOATS = 20_000
"""80 kB: arrays with chunks of their own."""

HISTORIES = ("whole", "incremental", "pruning", "incremental+pruning")
FULL_EVERY = 4
BRANCH = "hot"
NUM_OPS = 10

Say = Callable[[str], None]


def state_of(step: int) -> list[Part]:
    """A weight whose low bits change from step to step, one that never does, small pieces."""
    base, noise = _noise()
    weight = base + (noise * np.uint32(step)) % np.uint32(251)
    return [
        part("/model/w", weight.tobytes(), dtype="uint8"),
        part("/model/frozen", base.tobytes()),
        part("/model/b", struct.pack("<f", step) * 7),
        part("/step", struct.pack("<q", step), dtype="py:int"),
    ]


@cache
def _noise() -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(7)
    return chance.integers(0, 1 << 31, FLOATS, np.uint32), chance.integers(0, 251, FLOATS, np.uint32)


def expected(step: int) -> dict[tuple[int | None, str], bytes]:
    """Every byte of the checkpoint of `step`, by rank and pointer."""
    found: dict[tuple[int | None, str], bytes] = {(None, p.piece.pointer): bytes(p.data) for p in state_of(step)}
    for rank in range(2):
        found |= {(rank, p.piece.pointer): bytes(p.data) for p in rank_state(step, rank)}
    return found


@dataclass(frozen=True)
class Op:
    """save, milestone, collect, restart, hurt (the newest checkpoint is damaged, then a restart), branch, or save and collect there."""

    kind: str
    keep: int = 0


def ops_of(history: str, seed: int, on_disk: bool = True) -> list[Op]:
    """What the life is made of; the first op is a save."""
    chance = random.Random(f"ops {history} {seed}")
    prunes = history.endswith("pruning")
    found = [Op("save")]
    kinds = ["save"] * 6 + ["milestone", "restart", "restart"] + (["hurt", "branch", "branch save"] if on_disk else [])
    while len(found) < NUM_OPS:
        op = Op(chance.choice(kinds))
        found.append(op)
        if prunes and "save" in op.kind:
            found.append(Op("branch collect" if op.kind.startswith("branch") else "collect", chance.choice((1, 2, 2, 3))))
    return [*found, Op("save"), Op("collect", chance.choice((1, 2)) if prunes else 50)]


class Life:
    """One process's part of it."""

    def __init__(self, tier: Tier, history: str, seed: int, number: int, say: Say) -> None:
        self.tier = tier
        self.say = say
        self._encodes = history.startswith("incremental")
        self._nonces: Nonces = CountedNonces(f"life {history} {seed} {number}")
        self._trainers: dict[str, Trainer] = {}

    def run(self, ops: list[Op]) -> None:
        """All of them, or until an error."""
        for op in ops:
            self.do(op)

    def do(self, op: Op) -> None:
        """One op. Those that make no sense now are passed over."""
        lineage, _, kind = op.kind.rpartition(" ")
        if lineage and not is_there(self.tier, BRANCH):
            return
        lineage = BRANCH if lineage else "main"
        if kind in ("save", "milestone"):
            self._save(lineage, kind == "milestone")
        elif kind == "collect":
            self.say(f"begin collect {lineage} {op.keep}")
            self.trainer(lineage).collect(op.keep)
            self.say(f"end collect {lineage} {op.keep}")
        elif kind == "branch":
            self._branch()
        elif kind == "hurt":
            self._hurt()
            self.restart()
        else:
            self.restart()

    def trainer(self, lineage: str) -> Trainer:
        """The writer of a lineage, started when it is first needed."""
        if lineage not in self._trainers:
            self._trainers[lineage] = begun(self.tier, self._nonces, lineage)
        return self._trainers[lineage]

    def restart(self) -> None:
        """As after a kill: nothing that was in memory counts."""
        self._trainers.clear()
        self.trainer("main")

    def _save(self, lineage: str, milestone: bool) -> None:
        trainer = self.trainer(lineage)
        seen = trainer.repository.visible()
        step = (seen[-1].step if seen else trainer.generation.base_step) + 1
        if self._encodes:
            whole = milestone or is_full_due(seen, step, StillClock().utc(), FULL_EVERY, None)
            trainer.encoding = Encoding(max_depth=0 if whole else 3)
        words = f"save {lineage} {step}{' milestone' if milestone else ''}"
        for number in range(step % 3):  # what a save adds to the journal may be more than a disk writes at once
            trainer.journal.add(EventRecord(name="note", step=step, facts={"words": f"{number}" * 5000}))
        self.say(f"begin {words}")
        trainer.save(step, milestone=milestone, logical=state_of(step))
        self.say(f"end {words}")

    def _branch(self) -> None:
        if not isinstance(self.tier, DiskTier) or not is_there(self.tier, "main") or is_there(self.tier, BRANCH):
            return
        source = Repository.open(self.tier)
        step = source.visible()[-1].step
        self.say(f"begin branch {BRANCH} {step}")
        make_branch(source, self.tier, step, BRANCH, {}, clock=StillClock(), nonces=self._nonces)
        self.say(f"end branch {BRANCH} {step}")

    def _hurt(self) -> None:
        """One byte of the newest checkpoint's own pack is changed on disk."""
        repository = self.trainer("main").repository
        seen = repository.visible()
        if not isinstance(self.tier, DiskTier) or len(seen) < 2:
            return
        others = {pack for commit in seen[:-1] for pack in packs_of(repository, commit)}
        if is_there(self.tier, BRANCH):
            branch = Repository.open(self.tier, BRANCH)
            others |= {pack for commit in branch.log.state.commits for pack in packs_of(branch, commit)}
        own = sorted(packs_of(repository, seen[-1]) - others)
        if not own:
            return
        self.say(f"begin hurt main {seen[-1].step}")
        with open(Path(self.tier.root, own[0]), "r+b", buffering=0) as file:
            file.seek(4096 + 100)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
            os.fsync(file.fileno())
        self.say(f"end hurt main {seen[-1].step}")


def begun(tier: Tier, nonces: Nonces, lineage: str = "main") -> Trainer:
    """The next start, as a new process makes it; also where the one before ended before its first checkpoint."""
    try:
        return start(tier, nonces=nonces, lineage=lineage)
    except NoCheckpoint:
        repository = Repository.open(tier, lineage, nonces=nonces)
        if repository.visible() or lineage != "main":
            raise
        return opened(repository, None, nonces)


def is_there(tier: Tier, lineage: str) -> bool:
    """Has this lineage a checkpoint?"""
    try:
        return bool(Repository.open(tier, lineage).visible())
    except NoCheckpoint:
        return False


def packs_of(repository: Repository, commit: CommitEntry) -> set[str]:
    """All packs that a checkpoint needs."""
    return {chunk.pack for manifest in repository.manifests(commit) for chunk in manifest.chunks}


def go_on(life: Life, ops: list[Op]) -> Iterator[tuple[Op, BaseException | None]]:
    """All ops, going on after errors as training does; each with what came of it."""
    for op in ops:
        try:
            life.do(op)
        except (OSError, UnbrokenError) as error:
            life.say(f"failed {op.kind}")
            yield op, error
            if not isinstance(error, (StoreError, OSError)):
                return
        else:
            yield op, None


@dataclass
class Pages:
    """What one lineage was told. `sure`: acknowledged, and whether it is a milestone. `maybe`: may be visible. `gone`: may not."""

    sure: dict[int, bool] = field(default_factory=dict)
    maybe: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    hurt: set[int] = field(default_factory=set)
    milestones: set[int] = field(default_factory=set)
    is_begun: bool = False
    is_unsure: bool = False


class Book:
    """What must be so after the words that were said."""

    def __init__(self) -> None:
        self.lineages = {"main": Pages(is_begun=True)}

    def read(self, lines: list[str]) -> Book:
        """Take down more words; others than ours are passed over."""
        for line in lines:
            words = line.split()
            if words[:1] == ["failed"]:
                for pages in self.lineages.values():
                    pages.is_unsure = True
            elif words[:1] in (["begin"], ["end"]):
                pages = self.lineages.setdefault(words[2], Pages())
                getattr(self, f"_{words[0]}_{words[1]}")(pages, int(words[3]), words[4:] == ["milestone"])
        return self

    def _begin_save(self, pages: Pages, step: int, milestone: bool) -> None:
        pages.maybe.add(step)
        pages.gone.discard(step)
        if milestone:
            pages.milestones.add(step)  # one that was not acknowledged may be there all the same, and stays then

    def _end_save(self, pages: Pages, step: int, milestone: bool) -> None:
        pages.sure[step] = milestone
        pages.maybe.discard(step)
        pages.hurt.discard(step)
        pages.is_unsure = False

    def _begin_collect(self, pages: Pages, keep: int, milestone: bool) -> None:
        newest = sorted({*pages.sure, *pages.maybe})[-keep:]
        for step in [s for s, is_milestone in pages.sure.items() if not is_milestone and s not in newest]:
            pages.maybe.add(step)
            del pages.sure[step]

    def _end_collect(self, pages: Pages, keep: int, milestone: bool) -> None:
        if pages.is_unsure:
            return
        newer = sorted(pages.sure)[-keep:]
        for step in [s for s in pages.maybe - pages.milestones if len(newer) == keep and s < newer[0]]:
            pages.gone.add(step)
            pages.maybe.discard(step)

    def _begin_branch(self, pages: Pages, step: int, milestone: bool) -> None:
        pages.maybe = {step}

    def _end_branch(self, pages: Pages, step: int, milestone: bool) -> None:
        pages.maybe, pages.sure, pages.is_begun = set(), {step: False}, True

    def _begin_hurt(self, pages: Pages, step: int, milestone: bool) -> None:
        pages.sure.pop(step, None)
        pages.maybe.add(step)
        pages.hurt.add(step)

    def _end_hurt(self, pages: Pages, step: int, milestone: bool) -> None:
        return


def seed_of(*words: object) -> int:
    """A number that only these words give."""
    return int(text_digest(*map(str, words))[:12], 16)
