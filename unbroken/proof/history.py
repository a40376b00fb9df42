"""What a run's log and journals say happened, read in one streaming pass.

A step *survives* if the newest visible checkpoint descends from it: generation g answers for the steps after its base up to where its
child continued, the newest generation for those up to the newest checkpoint. Steps beyond are *superseded* attempts: a replay follows.
Memory: 8 bytes per step and one root per snapshot, so that a million steps need some ten megabytes.

A lineage that was branched off begins with the history of its parent, as far as the checkpoint that it was branched from descends from it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.records import BeginRecord, BranchEntry, CommitEntry, Generation, JournalLine, RootRecord, StepRecord
from unbroken.store import paths
from unbroken.store.journal import first_chain, read_journal
from unbroken.store.log import branch_of, reach
from unbroken.store.repository import Repository

Units = Callable[[int], Sequence[str]]
"""Step -> the digest of the sample ids of each of its units, as they must be."""

MAX_PROBLEMS = 100


@dataclass
class Attempt:
    """One generation: what it started from, its steps in order, and how far they survive.

    `losses[i]` holds the bits of the loss of step `generation.base_step + 1 + i`. The first `num_continued` of its steps were not computed
    in it: the daemon had died, and they were journalled again. `skipped`: its steps that were not applied, and why; "" for an overflow.
    """

    generation: Generation
    end: int
    begin: BeginRecord | None = None
    losses: array[int] = field(default_factory=lambda: array("Q"))
    roots: dict[int, str] = field(default_factory=dict)
    num_continued: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return self.generation.base_step

    @property
    def last(self) -> int:
        """The last step this generation's journal speaks of."""
        return self.base + len(self.losses)

    def superseded(self) -> Iterator[tuple[int, int]]:
        """(step, loss bits) of each step that was done but does not survive."""
        first = max(self.base, self.end) + 1
        return zip(range(first, self.last + 1), self.losses[first - self.base - 1 :], strict=False)


@dataclass
class History:
    """A whole run. `problems` name the object each; `samples_as_ordered` is None where the order could not be computed.

    `own` are the generations of this lineage, `branch` says where it comes from, and `inherited` is the story up to there.
    """

    lineage: str
    own: list[Attempt]
    final: CommitEntry | None
    until: int = 0
    branch: BranchEntry | None = None
    inherited: History | None = None
    num_rollbacks: int = 0
    problems: list[str] = field(default_factory=list)
    samples_as_ordered: bool | None = None

    @property
    def final_step(self) -> int:
        return self.final.step if self.final else self.until

    @property
    def attempts(self) -> list[Attempt]:
        """All generations, those of the lineages that this one descends from first."""
        return [*(self.inherited.attempts if self.inherited else ()), *self.own]

    def chain(self) -> list[History]:
        """The histories that make up this one, the oldest first."""
        return [*(self.inherited.chain() if self.inherited else ()), self]

    def losses(self) -> array[int]:
        """Bits of the loss of the surviving steps 1, 2, ...; stops at the first that is missing."""
        out = self.inherited.losses()[: self.inherited.until] if self.inherited else array("Q")
        for attempt in self.own:
            if attempt.base == len(out) and attempt.end > attempt.base:
                out.extend(attempt.losses[: attempt.end - attempt.base])
        return out

    def skipped(self) -> dict[int, str]:
        """Surviving steps that were not applied, ascending, and why; "" after an overflow of the loss scale."""
        return {step: reason for a in self.attempts for step, reason in a.skipped.items() if a.base < step <= a.end}

    def roots(self) -> dict[int, str]:
        """State roots of surviving steps, by step."""
        known = self.inherited.roots() if self.inherited else {}
        known |= {step: root for a in self.own for step, root in a.roots.items() if a.base < step <= a.end}
        if self.final is not None:
            known[self.final.step] = self.final.state_root
        return known


def read_history(repository: Repository, expected: Units | None, at: tuple[int, int] | None = None) -> History:
    """Read every generation's journal once, checking each line against the log, the clock and `expected`. A million steps: ~10 s.

    `at`: only what a branch taken from (generation, step) descends from.
    """
    state = repository.log.state
    visible = repository.visible() if at is None else ()
    reached = reach(state) if at is None else reach(state, *at)
    branch = branch_of(state)
    history = History(repository.lineage, [], visible[-1] if visible else None, until=at[1] if at else 0, branch=branch)
    history.samples_as_ordered = None if expected is None else True
    if branch is not None:
        _inherit(history, branch, repository, expected)
    for generation in state.generations:
        if at is not None and generation.number not in reached:
            continue
        end = min(reached.get(generation.number, 0), history.final_step)
        stop = at[1] if at is not None and generation.number == at[0] else sys.maxsize
        attempt = Attempt(generation, max(end, generation.base_step))
        commits = [commit for commit in state.commits if commit.generation == generation.number and commit.step <= stop]
        history.own.append(attempt)
        _Reader(repository, attempt, commits, expected, history, stop=stop).read()
    _check_bases(history)
    return history


def _inherit(history: History, branch: BranchEntry, repository: Repository, expected: Units | None) -> None:
    """Read what the lineage was branched from; what is wrong there is wrong here."""
    try:
        parent = Repository.open(repository.tier, branch.parent)
    except (Damaged, NoCheckpoint) as error:
        history.problems.append(f"lineage {branch.parent}, from which {repository.lineage} was branched: {error}")
        return
    inherited = read_history(parent, expected, (branch.generation, branch.step))
    inherited.problems += [text for text in parent.log.damage if text not in inherited.problems]
    history.inherited = inherited
    history.problems += [f"lineage {parent.lineage}: {text}" for text in inherited.problems]
    history.samples_as_ordered = inherited.samples_as_ordered
    saved = inherited.roots().get(branch.step)
    if saved != branch.state_root:
        text = "is not the root saved there" if saved else "is compared with no root stored there"
        history.problems.append(f"lineage {history.lineage}: the root that it was branched from at step {branch.step} {text}")


class _Reader:
    """Reads one generation's journal into its attempt."""

    def __init__(
        self,
        repository: Repository,
        attempt: Attempt,
        commits: Sequence[CommitEntry],
        expected: Units | None,
        history: History,
        *,
        stop: int,
    ):
        self._repository = repository
        self._stop = stop
        self._attempt = attempt
        self._heads: dict[int, list[CommitEntry]] = {}
        for commit in commits:
            self._heads.setdefault(commit.journal_lines, []).append(commit)
            attempt.roots[commit.step] = commit.state_root
        self._expected = expected
        self._history = history
        self._path = paths.journal(repository.lineage, attempt.generation.number)

    def read(self) -> None:
        generation = self._attempt.generation
        lines = read_journal(self._repository.tier, self._repository.lineage, generation.number, generation.nonce)
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                self._take(number, line)
        except Damaged as damaged:
            self._problem(f"{damaged.path}: {damaged.reason}")
            if self._history.samples_as_ordered:
                self._history.samples_as_ordered = None  # what cannot be read has not been checked
            return
        self._check_end(number)

    def _take(self, number: int, line: JournalLine) -> None:
        record = line.record
        if isinstance(record, StepRecord):
            self._take_step(number, record)
        elif isinstance(record, RootRecord):
            self._take_root(number, record)
        elif isinstance(record, BeginRecord):
            self._take_begin(number, record)
        elif record.name == "rollback":
            self._history.num_rollbacks += 1
        elif record.name == "continued" and isinstance(steps := record.facts.get("steps"), int):
            self._attempt.num_continued = steps
        for commit in self._heads.pop(number, ()):
            if commit.journal_head != line.chain:
                self._problem(f"{self._path} line {number}: not the head that the commit of step {commit.step} names")
            elif self._attempt.last < commit.step:
                self._problem(f"{self._path} line {number}: the commit of step {commit.step} stands before that step's line")

    def _take_begin(self, number: int, record: BeginRecord) -> None:
        generation = self._attempt.generation
        stated = (record.generation, record.base_step, record.world_size)
        if number != 1 or stated != (generation.number, generation.base_step, generation.world_size):
            self._problem(f"{self._path} line {number}: begins (generation, base, world size) {stated}, which the log does not say")
        self._attempt.begin = record

    def _take_root(self, number: int, record: RootRecord) -> None:
        known = self._attempt.roots.setdefault(record.step, record.state_root)
        if known != record.state_root:
            self._problem(f"{self._path} line {number}: root of step {record.step} is not the one that was committed")

    def _take_step(self, number: int, record: StepRecord) -> None:
        attempt = self._attempt
        generation = attempt.generation
        if record.step > self._stop:  # the parent's future, which a branch does not share
            return
        if record.step != attempt.last + 1:
            self._problem(f"{self._path} line {number}: step {record.step} where {attempt.last + 1} must follow")
            return
        try:
            attempt.losses.append(int(record.loss, 16))
        except (ValueError, OverflowError):
            attempt.losses.append(0)
            self._problem(f"{self._path} line {number}: {record.loss!r} are not the bits of a loss")
        if record.status == "skipped":
            attempt.skipped[record.step] = record.reason or ""
        clock = record.clock
        if len(clock) != 1 or clock[0] != (generation.number, record.step, generation.world_size):
            self._problem(f"{self._path} line {number}: the ranks' clock {clock} is no cut of all ranks at step {record.step}")
        if record.step <= attempt.end and self._expected is not None:
            wanted = self._expected(record.step)
            if tuple(wanted) != record.units:
                self._history.samples_as_ordered = False
                units = [i for i in range(max(len(wanted), len(record.units))) if wanted[i : i + 1] != record.units[i : i + 1]]
                self._problem(f"{self._path} line {number}: step {record.step} did not compute the samples of its units {units}")

    def _check_end(self, lines: int) -> None:
        attempt = self._attempt
        if not lines and self._must_exist():
            self._problem(f"{self._path}: missing, though a later generation was opened after it")
        if lines and attempt.begin is None:
            self._problem(f"{self._path} line 1: is not the begin of generation {attempt.generation.number}")
        if attempt.last < attempt.end:
            self._problem(f"{self._path}: ends at step {attempt.last}, but steps up to {attempt.end} survive")
        for commits in self._heads.values():
            for commit in commits:
                self._problem(f"{self._path}: ends before line {commit.journal_lines}, which the commit of step {commit.step} names")

    def _must_exist(self) -> bool:
        """Whether lines are missing: a later generation has ended this one, and did not find that it had never got as far as a line."""
        generation = self._attempt.generation
        empty = first_chain(generation.number, generation.nonce)
        return self._repository.log.journal_heads().get(generation.number, empty) != empty

    def _problem(self, text: str) -> None:
        if len(self._history.problems) < MAX_PROBLEMS:
            self._history.problems.append(text)


def _check_bases(history: History) -> None:
    """State loaded == state saved: the root each generation found after loading is the one its ancestor stored at that step."""
    by_number = {attempt.generation.number: attempt for attempt in history.own}
    for attempt in history.own:
        begin = attempt.begin
        if begin is None or attempt.generation.parent is None or begin.source == "fresh":
            continue
        saved = _saved_root(attempt, by_number)
        where = f"generation {attempt.generation.number}, continued at step {attempt.base} from {begin.source}"
        if saved is None:
            history.problems.append(f"{where}: no root of that step is stored to compare with the one loaded")
        elif saved != begin.loaded_root:
            history.problems.append(f"{where}: the root loaded is not the root saved")


def _saved_root(attempt: Attempt, by_number: Mapping[int, Attempt]) -> str | None:
    """Root of `attempt`'s base step as its ancestors stored it, or as the one that started there had found it."""
    number = attempt.generation.parent
    while number is not None and number in by_number and number < attempt.generation.number:
        ancestor = by_number[number]
        if ancestor.base < attempt.base or attempt.base in ancestor.roots:
            return ancestor.roots.get(attempt.base)
        if ancestor.generation.parent is None and ancestor.begin is not None and ancestor.base == attempt.base:
            return ancestor.begin.loaded_root or None
        number = ancestor.generation.parent
    return None
