"""Steps that are computed again, held against what the journal recorded of them: each step's samples, loss and fate, and every state root.

A loss tells of the state *before* its step's update, a root of the state after it. So a state whose step has a recorded root is proven by
that root; another one by all losses up to its step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from unbroken.core.errors import Damaged
from unbroken.core.records import BeginRecord, CommitEntry, Generation, JournalLine, RootRecord, StepRecord
from unbroken.core.replay import Parted
from unbroken.store import paths
from unbroken.store.journal import read_journal
from unbroken.store.log import reach
from unbroken.store.repository import Repository

NO_LOSS = "7ff8000000000000"
"""In a journal line: the loop did not tell its loss."""


class Replayable(Struct, frozen=True, kw_only=True):
    """Steps `first` to `last`, of which no checkpoint is stored, between two that are: they can be made again from step `base`.

    `roots` are those of them whose state root is recorded. `problem`: why they cannot be proven, and so not made again; "" if they can.
    """

    base: int
    first: int
    last: int
    roots: list[int]
    lineage: str
    problem: str = ""


class Proof(Struct, frozen=True, kw_only=True):
    """What a replay of the steps after `base` up to `step` is worth: `parted` is where it is not what was recorded, None where it is.

    `steps` were compared, and the `roots` of as many of them. `by_root`: that of `step` itself is recorded, and equal.
    """

    base: int
    step: int
    root: str
    steps: int
    roots: int
    by_root: bool
    parted: Parted | None
    differences: list[str]


class Surviving:
    """What the journals of a lineage say of the surviving steps `after + 1` to `last`, in order: one pass, verified as it is read.

    While it is read, `roots` fills with the state roots of these steps, `differences` with the facts that were not as before at a start.
    Damaged names the journal that is not whole. The lineage's own steps only: `after` is the step of a checkpoint of it.
    """

    def __init__(self, repository: Repository, after: int, last: int) -> None:
        self.roots: dict[int, str] = {}
        self.differences: list[str] = []
        self._repository = repository
        self._after, self._last = after, last
        self._steps = self._read()

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def _read(self) -> Iterator[StepRecord]:
        state = self._repository.log.state
        reached = reach(state)
        at, path = self._after, ""
        for generation in state.generations:
            end = min(reached.get(generation.number, -1), self._last)
            if end <= self._after or generation.base_step >= end:
                continue
            commits = [commit for commit in state.commits if commit.generation == generation.number]
            path = paths.journal(self._repository.lineage, generation.number)
            for line in self._lines(generation, commits, path):
                record = line.record
                if isinstance(record, BeginRecord):
                    self.differences += [f"generation {generation.number}: {text}" for text in record.differences]
                elif isinstance(record, RootRecord) and self._after < record.step <= end:
                    self.roots[record.step] = record.state_root
                elif isinstance(record, StepRecord) and max(self._after, generation.base_step) < record.step <= end:
                    at += 1
                    if record.step != at:
                        raise Damaged(path, f"step {record.step} stands where step {at} must")
                    yield record
        if at != self._last:
            raise Damaged(
                path or paths.journal_folder(self._repository.lineage), f"ends at step {at}, but steps up to {self._last} survive"
            )

    def _lines(self, generation: Generation, commits: Sequence[CommitEntry], path: str) -> Iterator[JournalLine]:
        """A journal's lines, each line that a commit names as its head compared with that."""
        heads = {commit.journal_lines: commit for commit in commits}
        lines = read_journal(self._repository.tier, self._repository.lineage, generation.number, generation.nonce)
        for number, line in enumerate(lines, start=1):
            commit = heads.pop(number, None)
            if commit is not None and commit.journal_head != line.chain:
                raise Damaged(path, f"line {number} is not the head that the commit of step {commit.step} names")
            yield line
        for commit in heads.values():
            raise Damaged(path, f"ends before line {commit.journal_lines}, which the commit of step {commit.step} names")


class Recorded(Struct, frozen=True, kw_only=True):
    """That steps are there to be compared with: the roots that are recorded, by step, and whether any of their losses was told."""

    roots: dict[int, str]
    has_losses: bool
    differences: list[str]


def recorded(repository: Repository, after: int, last: int) -> Recorded:
    """Read what is recorded of the steps `after + 1` to `last`. Damaged where that is not whole. Cost: 5 us per line."""
    told = Surviving(repository, after, last)
    has_losses = False
    for step in told:
        has_losses = has_losses or step.loss != NO_LOSS
    return Recorded(roots=told.roots, has_losses=has_losses, differences=told.differences)


def replayable(repository: Repository) -> list[Replayable]:
    """The steps between the checkpoints of a lineage, oldest first. Reads the log, and the journals of the steps between."""
    found = []
    for base, following in pairwise(repository.visible()):
        if following.step == base.step + 1:
            continue
        problem, roots = "", []
        try:
            told = recorded(repository, base.step, following.step)
            roots = sorted(step for step in told.roots if step < following.step)
            if not told.has_losses and not roots:
                problem = "no loss was told and no state root is recorded: nothing to compare with"
        except Damaged as damaged:
            problem = str(damaged)
        first, last = base.step + 1, following.step - 1
        found.append(
            Replayable(base=base.step, first=first, last=last, roots=roots, lineage=repository.lineage, problem=problem),
        )
    return found


def parted(ours: StepRecord, theirs: StepRecord) -> Parted | None:
    """What is first different in two tellings of a step, `theirs` being the recorded one; None where nothing is."""
    told = (
        ("samples", " ".join(ours.units), " ".join(theirs.units)),
        ("number of samples", str(ours.num_samples), str(theirs.num_samples)),
        ("loss", _loss(ours), _loss(theirs)),
        ("status", ours.status, theirs.status),
    )
    for what, mine, other in told:
        if mine != other:
            return Parted(step=theirs.step, what=what, recorded=other, replayed=mine)
    return None


def _loss(step: StepRecord) -> str:
    """A loss for people, with its bits, which are what counts."""
    try:
        value = struct.unpack(">d", bytes.fromhex(step.loss))[0]
    except (ValueError, struct.error):
        return step.loss
    return "not told" if step.loss == NO_LOSS else f"{value!r} (bits {step.loss})"


def prove(source: Repository, replay: Repository, base: int, commit: CommitEntry) -> Proof:
    """Hold the steps of `replay` after `base`, up to its checkpoint `commit`, against those of `source`. Damaged where one is not whole."""
    theirs, ours = Surviving(source, base, commit.step), Surviving(replay, base, commit.step)
    found: Parted | None = None
    num = 0
    for mine, other in zip(ours, theirs, strict=True):
        num += 1
        found = found or parted(mine, other)
    ours.roots[commit.step] = commit.state_root
    both = sorted(ours.roots.keys() & theirs.roots.keys())
    unequal = [step for step in both if ours.roots[step] != theirs.roots[step]]
    if unequal and (found is None or unequal[0] < found.step):
        step = unequal[0]
        found = Parted(step=step, what="state root", recorded=theirs.roots[step], replayed=ours.roots[step])
    return Proof(
        base=base,
        step=commit.step,
        root=commit.state_root,
        steps=num,
        roots=len(both),
        by_root=commit.step in theirs.roots,
        parted=found,
        differences=[f"when it was trained, {text}" for text in theirs.differences] + [f"now, {text}" for text in ours.differences],
    )


class Check:
    """In the process that computes the steps again: each is held against the record as it is done, before anything of it is kept.

    After `step` or `boundary` has found something, `found` says what. A step that was skipped because of what a later one showed is
    applied first here, too, until the run goes back: then another Check begins.
    """

    def __init__(self, source: Repository, after: int, last: int) -> None:
        self._roots = recorded(source, after, last).roots
        self._steps = iter(Surviving(source, after, last))
        self._last = last
        self._doubt: Parted | None = None
        self.found: Parted | None = None

    def step(self, done: StepRecord) -> bool:
        """Is this step what was recorded of it?"""
        if self._doubt is None:
            theirs = next(self._steps)
            found = parted(done, theirs)
            was_given_up = theirs.status == "skipped" and isinstance(theirs.reason, str) and done.status == "applied"
            if found is not None and found.what in ("loss", "status") and was_given_up:
                self._doubt = found
            else:
                self.found = found
        return self.found is None

    def wants_root(self, step: int) -> bool:
        """Is the state root after this step recorded?"""
        return step in self._roots and self._doubt is None

    def boundary(self, step: int, root: str | None) -> bool:
        """Is the state after this step, from which the run does not go back, what was recorded? `root`: where it is wanted."""
        if step == self._last:
            self.found = self._doubt
        if root is not None and root != self._roots[step]:
            self.found = Parted(step=step, what="state root", recorded=self._roots[step], replayed=root)
        return self.found is None

    def keeps(self, step: int) -> bool:
        """May a checkpoint of this step be kept? Those whose root was found equal, and the last."""
        return self._doubt is None and self.found is None and (step in self._roots or step == self._last)
