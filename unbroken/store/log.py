"""The log: entries 0, 1, 2... put if absent, the only truth of a run. Everything a reader believes is a fold of it.

Opening costs one LIST and at most LOG_SUMMARY_EVERY reads. The head is found by LIST *and* by asking for the next entry, because a LIST
may lag. An entry that is missing or unreadable below the head is damage: noted, passed over, never written again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from unbroken.codec.digest import digest
from unbroken.core.errors import Damaged, Transient
from unbroken.core.limits import LOG_SUMMARY_EVERY
from unbroken.core.ports import Clock, Tier, failpoint
from unbroken.core.records import BranchEntry, CommitEntry, CondemnEntry, Entry, Generation, GenerationEntry, LogEntry, LogState, Writer
from unbroken.store import paths
from unbroken.store.sealed import ENCODED_FORMAT, PLAIN_FORMAT, SHARDED_FORMAT, read_bounded, seal, unseal

_MAX_LOST_SLOTS = 1000
_MAX_PRUNED = 1024
_NEVER = 10**17
"""No log has so many entries."""

Key = tuple[int, int]
"""(step, generation): what names a commit."""


def key_of(entry: CommitEntry | CondemnEntry) -> Key:
    """The commit that an entry makes or condemns."""
    return entry.step, entry.generation


def newest_generation(state: LogState) -> Generation | None:
    """The generation that may write."""
    return max(state.generations, key=lambda g: g.number, default=None)


def newest_number(state: LogState) -> int:
    """Its number, -1 when none was opened."""
    newest = newest_generation(state)
    return -1 if newest is None else newest.number


def branch_of(state: LogState) -> BranchEntry | None:
    """Where this lineage comes from; None for one that no other begot."""
    return state.branch if isinstance(state.branch, BranchEntry) else None


def replay_of(state: LogState) -> int | None:
    """The step that this lineage is there to make again; None for one that is there to be trained."""
    branch = branch_of(state)
    return branch.replay if branch is not None and isinstance(branch.replay, int) else None


def reach(state: LogState, newest: int | None = None, limit: int = sys.maxsize) -> dict[int, int]:
    """For each generation of the surviving lineage, the last step that counts: a child's base cuts off what its ancestors did later.

    With `newest` and `limit`, as it was when generation `newest` stood at step `limit`: what a branch taken there descends from.
    """
    by_number = {g.number: g for g in state.generations}
    current = newest_generation(state) if newest is None else by_number.get(newest)
    result: dict[int, int] = {}
    while current is not None and current.number not in result:
        result[current.number] = limit
        limit = min(limit, current.base_step)
        current = None if current.parent is None else by_number.get(current.parent)
    return result


def visible(state: LogState) -> tuple[CommitEntry, ...]:
    """The commits a reader may use, ascending by step: on the surviving lineage, not condemned, not pruned, one per step.

    The order of entries does not matter: a commit of an ancestor up to its child's base counts also when it was written after the child
    was opened. Within one step the newest generation wins.
    """
    gone = {key_of(c) for c in state.condemned} | set(state.pruned)
    limits = reach(state)
    best: dict[int, CommitEntry] = {}
    for commit in state.commits:
        if key_of(commit) in gone or commit.step > limits.get(commit.generation, -1):
            continue
        if commit.step not in best or best[commit.step].generation <= commit.generation:
            best[commit.step] = commit
    return tuple(best[step] for step in sorted(best))


def fold(state: LogState, line: LogEntry) -> LogState:
    """The state after one more entry. The lineage table that each entry carries makes up for lost generation entries."""
    entry = line.entry
    generations = {g.number: g for g in (*line.lineage, *state.generations)}
    commits, condemned, pruned, branch = state.commits, state.condemned, state.pruned, state.branch
    if isinstance(entry, GenerationEntry):
        generations.setdefault(entry.generation.number, entry.generation)
    elif isinstance(entry, CommitEntry):
        step, generation = key_of(entry)  # without a tuple for each: this is done for every entry that is read
        commits = (*[c for c in commits if c.step != step or c.generation != generation], entry)
        pruned = tuple(k for k in pruned if k != key_of(entry))
    elif isinstance(entry, CondemnEntry):
        condemned = (*condemned, entry)
    elif isinstance(entry, BranchEntry):
        branch = entry
    else:
        gone = set(entry.commits)
        commits = tuple(c for c in commits if key_of(c) not in gone)
        pruned = (*pruned, *entry.commits)[-_MAX_PRUNED:]
    table = tuple(generations[number] for number in sorted(generations))
    return LogState(generations=table, commits=commits, condemned=condemned, pruned=pruned, branch=branch)


class Heads:
    """Collects from log entries how each journal ended when the next generation was opened."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    def see(self, line: LogEntry) -> None:
        """Note what one entry says; of several for one generation the first counts."""
        if isinstance(line.entry, GenerationEntry):
            self._found.setdefault(line.entry.generation.number, line.entry.parent_head)

    def by_generation(self, state: LogState) -> dict[int, str]:
        """The end of each journal that has a successor; "" if it is not recorded."""
        numbers = sorted(g.number for g in state.generations)
        return {before: self._found.get(number, "") for before, number in itertools.pairwise(numbers)}


class Log:
    """The log of one lineage, as far as it has been read. `head` is the last entry's number, -1 when there is none."""

    def __init__(self, tier: Tier, lineage: str = "main") -> None:
        self.tier = tier
        self.lineage = paths.check_lineage(lineage)
        self.state = LogState()
        self.head = -1
        self.damage: list[str] = []
        self._previous = ""
        self._strays: dict[str, str] = {}

    @classmethod
    def open(cls, tier: Tier, lineage: str = "main") -> Log:
        """Read the log from its newest readable summary on. Raises NewerFormat, Transient."""
        log = cls(tier, lineage)
        log._read(log._spans(log._listed()))
        log.refresh()
        return log

    def refresh(self) -> None:
        """Read the entries that were added since; one read when there are none. Raises Permanent where the store refuses all."""
        while True:
            try:
                self._take(self._load(self.head + 1))
            except FileNotFoundError:
                return
            except Damaged as e:
                with suppress(FileNotFoundError):  # where the store refuses everything, every number would be damaged, without end
                    self.tier.size(self._path(_NEVER))
                self._pass_over(e)

    def is_there(self) -> bool:
        """False when the newest entry read is not in the folder any more, or is another: the log was put back to an earlier copy."""
        if not self._previous:
            return True
        try:
            return digest(read_bounded(self.tier, self._path(self.head))) == self._previous
        except (FileNotFoundError, Damaged):
            return False

    def append(self, entry: Entry, *, writer: Writer, clock: Clock, check: Callable[[LogState], None]) -> LogEntry:
        """Write `entry` after `check` has agreed to it; it is durable on return.

        A slot lost to another writer is read, and `check` (raises Fenced when the entry may no longer be written) is asked again.
        """

        def make(state: LogState) -> Entry:
            check(state)
            return entry

        return self.propose(make, writer=writer, clock=clock)

    def propose(self, make: Callable[[LogState], Entry], *, writer: Writer, clock: Clock) -> LogEntry:
        """Write what `make` says for the state just read; after each lost slot it is asked anew. It raises to stop."""
        for _ in range(_MAX_LOST_SLOTS):
            line = self._line(make(self.state), writer, clock)
            raw = seal("log", line, _format_of(line))
            failpoint("store.log.before_create")
            try:
                self.tier.create(self._path(line.n), [raw])
            except FileExistsError:
                self._reread()
                continue
            failpoint("store.log.after_create")
            self._take((line, raw))
            return line
        raise Transient(f"{self._path(self.head + 1)}: lost {_MAX_LOST_SLOTS} slots to other writers")

    def audit(self, see: Callable[[LogEntry], None] = lambda line: None) -> list[tuple[str, str]]:
        """Read every entry and compare each with what its successor says of it: (path, what is wrong). `see` gets the whole ones."""
        bad: dict[str, str] = {}
        before: str | None = None
        for n in self._numbers(bad):
            path, before_path = self._path(n), self._path(n - 1)
            try:
                line, raw = self._load(n)
            except FileNotFoundError:
                before = None
                bad.setdefault(path, "missing")
            except Damaged as e:
                bad[path], before = e.reason, None
            else:
                if before is not None and line.previous not in ("", before):
                    bad[before_path] = "not the file that its successor was written after"
                before = digest(raw)
                see(line)
        return sorted(bad.items())

    def _numbers(self, bad: dict[str, str]) -> Iterator[int]:
        """What to read up to the head. Of a gap too wide to be asked for the first is yielded; `bad` gets its width, and the strays."""
        spans = self._spans([*(n for n in self._listed() if n <= self.head), self.head])
        bad |= self._strays
        following = 0
        for span in spans:
            if span.start > following:
                bad[self._path(following)] = f"missing, as are all up to entry {span.start - 1}"
                yield following
            yield from span
            following = span.stop

    def journal_heads(self) -> dict[int, str]:
        """For each generation but the newest, the end of its journal as the next one found it; "" if that is not recorded. Reads all."""
        heads = Heads()
        self.audit(heads.see)
        return heads.by_generation(self.state)

    def _line(self, entry: Entry, writer: Writer, clock: Clock) -> LogEntry:
        n = self.head + 1
        line = LogEntry(
            n=n,
            previous=self._previous,
            time=clock.utc(),
            writer=writer,
            lineage=self.state.generations,
            entry=entry,
            summary=self.state if n > 0 and n % LOG_SUMMARY_EVERY == 0 else None,
        )
        if isinstance(entry, GenerationEntry):
            return _with_lineage(line, (*self.state.generations, entry.generation))
        return line

    def _reread(self) -> None:
        head = self.head
        self.refresh()
        if self.head == head:
            raise Transient(f"{self._path(head + 1)}: taken by another writer but not readable yet")

    def _listed(self) -> list[int]:
        numbers = [paths.number(path) for path in self.tier.list(paths.log_folder(self.lineage)) if path.endswith(".json")]
        return sorted(n for n in numbers if n is not None)

    def _spans(self, numbers: Iterable[int]) -> list[range]:
        """What to read: runs of numbers between which more than LOG_SUMMARY_EVERY are missing. So reading is bounded by what is listed.

        A run far beyond the others of which no file is the entry of its number is not ours: it is named as damage and not followed.
        """
        spans = [range(0)]
        for n in numbers:
            if n - spans[-1].stop > LOG_SUMMARY_EVERY:
                spans.append(range(n, n))
            spans[-1] = range(spans[-1].start, n + 1)
        return [spans[0], *(span for span in spans[1:] if self._is_ours(span))]

    def _is_ours(self, span: range) -> bool:
        strays: dict[str, str] = {}
        for n in span:
            try:
                self._load(n)
            except FileNotFoundError:
                continue
            except Damaged as e:
                strays[e.path] = f"{e.reason}, and far beyond the other entries: not followed, remove it"
            else:
                return True
        self.damage += [f"{path}: {reason}" for path, reason in strays.items() if path not in self._strays]
        self._strays |= strays
        return False

    def _read(self, spans: list[range]) -> None:
        self._start(spans)
        for span in spans:
            if span.start > self.head + 1:
                self._pass_over(Damaged(self._path(self.head + 1), f"missing, as are all up to entry {span.start - 1}"))
                self.head = span.start - 1
            for n in range(self.head + 1, span.stop):
                try:
                    self._take(self._load(n))
                except FileNotFoundError:
                    self._pass_over(Damaged(self._path(n), "missing"))
                except Damaged as e:
                    self._pass_over(e)

    def _start(self, spans: list[range]) -> None:
        """Begin at the newest entry whose summary can be read; what precedes it is not read."""
        for span in reversed(spans):
            head = span.stop - 1
            for n in range(head - head % LOG_SUMMARY_EVERY, max(span.start - 1, 0), -LOG_SUMMARY_EVERY):
                try:
                    line, _ = self._load(n)
                except (FileNotFoundError, Damaged):
                    continue
                if line.summary is not None:
                    self.state, self.head = line.summary, n - 1
                    return

    def _load(self, n: int) -> tuple[LogEntry, bytes]:
        path = self._path(n)
        raw = read_bounded(self.tier, path)
        line = unseal("log", raw, LogEntry, path)
        _check_line(line, n, path)
        return line, raw

    def _take(self, loaded: tuple[LogEntry, bytes]) -> None:
        line, raw = loaded
        self.state = fold(self.state, line)
        self.head = line.n
        self._previous = digest(raw)

    def _pass_over(self, damaged: Damaged) -> None:
        self.damage.append(str(damaged))
        self.head += 1
        self._previous = ""

    def _path(self, n: int) -> str:
        return paths.log_entry(self.lineage, n)


def _format_of(line: LogEntry) -> int:
    """A commit of a kind that the first version does not know makes its entry, and any summary it is in, unreadable to that one."""
    commits = (line.summary.commits if line.summary is not None else ()) + ((line.entry,) if isinstance(line.entry, CommitEntry) else ())
    formats = {"full": PLAIN_FORMAT, "incremental": ENCODED_FORMAT, "sharded": SHARDED_FORMAT}
    return max((formats[commit.kind] for commit in commits), default=PLAIN_FORMAT)


def _with_lineage(line: LogEntry, lineage: tuple[Generation, ...]) -> LogEntry:
    return LogEntry(
        n=line.n, previous=line.previous, time=line.time, writer=line.writer, lineage=lineage, entry=line.entry, summary=line.summary
    )


def _check_line(line: LogEntry, n: int, path: str) -> None:
    if line.n != n:
        raise Damaged(path, f"is entry {line.n}, stored under another number")
    for generation in line.lineage:
        if generation.parent is not None and generation.parent >= generation.number:
            raise Damaged(path, f"generation {generation.number} cannot descend from {generation.parent}")
