"""Checkpoints from one place to another, either way: a run's copy in a second tier, and back. Pure store: it knows two logs, no daemon.

The copy is a run of its own: same names, same bytes, and a log of its own numbering in which the same generations were opened and some of
the same checkpoints committed. So whatever holds in a run's folder holds there: only an entry makes a checkpoint visible, after all it
names is durable (I1), and who has not opened the newest generation there can change nothing (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from unbroken.core.errors import Damaged, Fenced, ForeignFolder, Permanent, Refused
from unbroken.core.ports import Buffer, Clock, Tier, failpoint
from unbroken.core.records import CommitEntry, Generation, GenerationEntry, Keep, LogEntry, LogState, Manifest, RunFacts, Writer
from unbroken.store import paths
from unbroken.store.catalog import Catalog
from unbroken.store.collect import Collector
from unbroken.store.fence import check_collector
from unbroken.store.holds import Holds
from unbroken.store.journal import read_journal
from unbroken.store.lineages import OtherLineages
from unbroken.store.log import Log, key_of, newest_number, reach, visible
from unbroken.store.manifests import check_cut, load_manifest
from unbroken.store.packs import PackParts, packed
from unbroken.store.sealed import read_bounded, read_sealed
from unbroken.store.tiers.choose import name_of

_TAIL_BYTES = 2 << 20
"""Of a journal: what two copies of it must have in common. A line is at most half of it, and its chain covers all lines before."""

_BLOCK_BYTES = 8 << 20


class Passed(Exception):
    """There is nothing to copy any more: the checkpoint is there already, or its history has been left behind."""


@dataclass(frozen=True)
class Cadence:
    """How often a checkpoint is copied: all of them as far as it keeps up, or after so many steps, or seconds between their commits."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, commit: CommitEntry, last: CommitEntry | None) -> bool:
        """Is it time to copy `commit`, when `last` is the newest there?"""
        if last is None or (self.steps is None and self.seconds is None):
            return True
        if self.steps is not None:
            return commit.step // self.steps > last.step // self.steps
        try:
            age_s = (datetime.fromisoformat(commit.time) - datetime.fromisoformat(last.time)).total_seconds()
        except ValueError:  # an older writer told no time
            return True
        return self.seconds is None or not 0 <= age_s < self.seconds


def next_to_copy(source: LogState, there: LogState, cadence: Cadence, *, at_once: bool = False) -> CommitEntry | None:
    """The checkpoint to copy next: the newest if it is due, else the newest milestone that is missing there. None: nothing.

    What a newer one has overtaken is not copied any more. `at_once`: the newest is due whatever the cadence says.
    """
    commits = visible(source)
    done = {key_of(commit): commit.milestone for commit in there.commits}
    missing = [commit for commit in commits if done.get(key_of(commit)) is None or (commit.milestone and not done[key_of(commit)])]
    if not missing:
        return None
    last = next((commit for commit in reversed(visible(there)) if commit.step <= commits[-1].step), None)
    if missing[-1] == commits[-1] and (at_once or commits[-1].milestone or cadence.is_due(commits[-1], last)):
        return commits[-1]
    return next((commit for commit in reversed(missing) if commit.milestone), None)


def facts_at(tier: Tier) -> RunFacts | None:
    """The facts of the run that lies there, None where nothing does. ForeignFolder; Damaged where run.json is, NewerFormat."""
    try:
        return read_sealed(tier, paths.RUN, "run", RunFacts)[0]
    except FileNotFoundError:
        pass
    found = [path for path in tier.list("") if not path.startswith(".") and path.rpartition("/")[2] != paths.WRITER]
    if found and not any(map(paths.is_ours, found)):
        raise ForeignFolder(f"{name_of(tier)} holds {len(found)} objects such as {found[0]!r} but no run: give another place")
    return None


def require_same_run(facts: RunFacts | None, run_id: str, where: str) -> None:
    """Refused where another run than `run_id` lies; None: none does."""
    if facts is not None and facts.run_id != run_id:
        raise Refused(f"{where} holds the run {facts.run_id}, and this is the run {run_id}: give each run a place of its own")


def check_histories(a: LogState, b: LogState, where: str) -> None:
    """Fenced where two logs have other generations of one number: two starts have gone on by themselves from one history."""
    known = {g.number: g.nonce for g in a.generations}
    clash = [g.number for g in b.generations if known.get(g.number, g.nonce) != g.nonce]
    if clash:
        raise Fenced(f"{where} has another history of this run from generation {min(clash)} on: two starts went on from one checkpoint")


def check_ahead(source: LogState, there: LogState, where: str) -> None:
    """May the writer of `source` write there? Fenced where somebody has opened a generation that it does not know."""
    check_histories(source, there, where)
    if newest_number(there) > newest_number(source):
        raise Fenced(f"{where}: generation {newest_number(there)} was opened there by another start of this run, which has gone on from it")


@dataclass
class Carrier:
    """Carries checkpoints from the log `source` to the log `there`, each verified while it is read. `sent_bytes` counts what was written.

    `notes` name what was carried although it is bad: journals, which no start reads.

    `is_back`: `there` may have gone further than `source` and may hold damaged objects, which are replaced; else objects that are there
    are taken to be whole, and nothing is written where `there` knows a generation that `source` does not.
    """

    source: Log
    there: Log
    writer: Writer
    clock: Clock
    is_back: bool = False
    sent_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    pause: Callable[[], None] = field(default=lambda: None)

    def put_facts(self) -> None:
        """run.json, as it is in the source; Refused where that of another run is."""
        mine, raw = read_sealed(self.source.tier, paths.RUN, "run", RunFacts)
        if self.is_back:
            self.carry_file(paths.RUN, raw)
            return
        with suppress(FileExistsError):
            self.there.tier.create(paths.RUN, [raw])
        require_same_run(facts_at(self.there.tier), mine.run_id, name_of(self.there.tier))

    def follow(self) -> None:
        """Open there every generation that the source knows, after the journals before: then older writers are fenced there, too."""
        missing = self._missing_generations()
        if not missing:
            return
        entries, newest = self._entries(), newest_number(self.there.state)
        for generation in self.source.state.generations:
            if generation in missing:
                # An entry that the source's log has lost lives on in its table of generations, which is all that is known then.
                entry = entries.get(generation.number) or GenerationEntry(
                    generation=generation, source="disk" if generation.number else "fresh"
                )
                self._propose(lambda state, entry=entry: self._new_generation(state, entry))  # type: ignore[misc]
                failpoint("copying.followed")
            if newest <= generation.number < missing[-1].number:
                self.carry_journal(generation)

    def carry(self, commit: CommitEntry) -> None:
        """Make a checkpoint visible there: packs, manifests, generations, journal, entry. Passed where that is not to be done any more.

        Damaged names what is bad in the source, or there where that is not replaced.
        """
        if not self.is_back:
            self.follow()
            self._check(self.there.state, commit)
        self.carry_objects(commit)
        failpoint("copying.objects")
        self.follow()
        for generation in self.source.state.generations:
            if generation.number in (commit.generation, newest_number(self.source.state)):
                self.carry_journal(generation)
        failpoint("copying.before_commit")
        self._propose(lambda state: self._check(state, commit))
        failpoint("copying.committed")

    def carry_objects(self, commit: CommitEntry) -> list[str]:
        """Packs and manifests of a checkpoint, as far as they are not there; those that were written."""
        manifests = [load_manifest(self.source.tier, ref, commit) for ref in commit.manifests]
        check_cut(manifests)
        written = []
        for pack in sorted({chunk.pack for manifest in manifests for chunk in manifest.chunks}):
            written += [pack] * self.carry_pack(pack, manifests)
            failpoint("copying.pack")
        for ref in commit.manifests:
            written += [ref.path] * self.carry_file(ref.path, read_bounded(self.source.tier, ref.path))
        return written

    def carry_pack(self, path: str, manifests: Iterable[Manifest]) -> bool:
        """One pack, if it is not there; was it written? Damaged unless it holds what the manifests expect of it."""
        tier, size = self.there.tier, _size(self.there.tier, path)
        if size is not None and not self.is_back:
            if size != self.source.tier.size(path):
                raise _bad_there(tier, path)
            return False
        if size is not None and not fault_of_pack(tier, path, manifests):
            return False
        parts = PackParts(self.source.tier, path)
        _require_chunks(parts, path, manifests)
        if size is not None:
            _read_through(parts)  # the bad one goes only when there is a good one
            tier.delete(path)
        self._create(path, _Paced(parts, self.pause))
        return True

    def carry_file(self, path: str, raw: bytes) -> bool:
        """One small file, if it is not there; was it written? One that is there and another is replaced on the way back."""
        tier = self.there.tier
        size = _size(tier, path)
        if size is not None:
            if size == len(raw) and (not self.is_back or tier.read(path) == raw):
                return False
            if not self.is_back:
                raise _bad_there(tier, path)
            tier.delete(path)
        self._create(path, [raw])
        return True

    def carry_journal(self, generation: Generation) -> None:
        """What a journal there lacks of the source's, whole lines only. Damaged where the two are not one."""
        path = paths.journal(self.source.lineage, generation.number)
        size, done = _size(self.source.tier, path), _size(self.there.tier, path) or 0
        if size is None:
            return
        common = min(size, done)
        start = max(0, common - _TAIL_BYTES)
        if common and self.source.tier.read(path, start, common - start) != self.there.tier.read(path, start, common - start):
            raise Damaged(path, f"is not the same in {name_of(self.source.tier)} and {name_of(self.there.tier)}")
        if self.is_back and done < size:
            self._check_journal(generation)
        while done < size:
            block = self.source.tier.read(path, done, min(_BLOCK_BYTES, size - done))
            whole = block.rfind(b"\n") + 1
            if not whole:  # torn by a crash, or just being written
                return
            self.there.tier.append(path, block[:whole])
            self.sent_bytes += whole
            done += whole

    def _check_journal(self, generation: Generation) -> None:
        try:
            for _ in read_journal(self.source.tier, self.source.lineage, generation.number, generation.nonce):
                pass
        except Damaged as error:  # told, not refused: the state does not depend on it, and `verify` finds it here as well as there
            self.notes.append(f"{error.path} is damaged in {name_of(self.source.tier)}: {error.reason}")

    def _create(self, path: str, parts: Iterable[Buffer]) -> None:
        with suppress(FileExistsError):  # names are never used twice: whoever else made it has made the same
            self.sent_bytes += self.there.tier.create(path, parts)

    def _missing_generations(self) -> list[Generation]:
        known = {g.number for g in self.there.state.generations}
        self._check_histories(self.there.state)
        return [g for g in self.source.state.generations if g.number not in known]

    def _check_histories(self, state: LogState) -> None:
        check = check_histories if self.is_back else check_ahead
        check(self.source.state, state, name_of(self.source.tier if self.is_back else self.there.tier))

    def _entries(self) -> dict[int, GenerationEntry]:
        found: dict[int, GenerationEntry] = {}

        def see(line: LogEntry) -> None:
            if isinstance(line.entry, GenerationEntry):
                found.setdefault(line.entry.generation.number, line.entry)

        self.source.audit(see)
        return found

    def _new_generation(self, state: LogState, entry: GenerationEntry) -> GenerationEntry:
        self._check_histories(state)
        if any(g.number == entry.generation.number for g in state.generations):
            raise Passed
        return entry

    def _check(self, state: LogState, commit: CommitEntry) -> CommitEntry:
        self._check_histories(state)
        if commit.step > reach(state).get(commit.generation, -1):
            raise Passed
        known = next((c for c in state.commits if key_of(c) == key_of(commit)), None)
        is_known = known is not None and (known.milestone or not commit.milestone)
        if is_known or key_of(commit) in {key_of(condemned) for condemned in state.condemned}:
            raise Passed
        return commit

    def _propose(self, make: Callable[[LogState], GenerationEntry | CommitEntry]) -> None:
        with suppress(Passed):
            self.there.propose(make, writer=self.writer, clock=self.clock)


class Thinner:
    """Retention of a copy: its own, by the one who has opened the newest generation there. Milestones stay."""

    def __init__(self, there: Log) -> None:
        self._there = there
        self._catalog = Catalog(there.tier)
        self._others = OtherLineages(there.tier, there.lineage)
        self._holds = Holds()

    def run(self, keep_newest: int, opened: int, *, writer: Writer, clock: Clock) -> list[str]:
        """Withdraw and delete; the paths that went. `opened`: the newest generation that we know. Fenced where a newer one is there."""
        check_collector(self._there.state, opened)
        collector = Collector(self._there.tier, self._there, self._catalog, self._others, self._holds, opened=opened)
        collector.withdraw(Keep(newest=keep_newest), {}, set(), writer=writer, clock=clock)
        return collector.remove()


def candidates(local: LogState, copy: LogState) -> list[CommitEntry]:
    """Checkpoints of the copy that a start may go on from, newest first: visible in the folder once it has the copy's history, too."""
    merged = LogState(
        generations=tuple({g.number: g for g in (*copy.generations, *local.generations)}.values()),
        commits=(*local.commits, *copy.commits),
        condemned=local.condemned,
    )
    there = {key_of(commit) for commit in visible(copy)}
    return [commit for commit in reversed(visible(merged)) if key_of(commit) in there]


def is_plausible(tier: Tier, commit: CommitEntry) -> bool:
    """Do the manifests verify, and are the packs there and long enough? Reads no data."""
    try:
        manifests = [load_manifest(tier, ref, commit) for ref in commit.manifests]
        check_cut(manifests)
        for manifest in manifests:
            for pack in {chunk.pack for chunk in manifest.chunks}:
                end = max(chunk.offset + chunk.stored_bytes for chunk in manifest.chunks if chunk.pack == pack)
                if tier.size(pack) < end:
                    return False
    except (Damaged, FileNotFoundError, Permanent):
        return False
    return True


def fault_of_pack(tier: Tier, path: str, manifests: Iterable[Manifest]) -> str:
    """What is wrong with a pack or with what manifests expect of it, "" if nothing. Cost: one read of it."""
    try:
        parts = PackParts(tier, path)
        _require_chunks(parts, path, manifests)
        _read_through(parts)
    except Damaged as error:
        return error.reason
    return ""


def _require_chunks(parts: PackParts, path: str, manifests: Iterable[Manifest]) -> None:
    for manifest in manifests:
        for chunk in manifest.chunks:
            if chunk.pack == path and packed(chunk) not in parts.lines:
                raise Damaged(path, f"holds no chunk {chunk.id[:16]} at {chunk.offset}, where a manifest expects it")


def _read_through(parts: Iterable[Buffer]) -> None:
    for _ in parts:
        pass


class _Paced:
    """Parts that may be asked for again, with a look at the world between them."""

    def __init__(self, parts: PackParts, pause: Callable[[], None]) -> None:
        self._parts = parts
        self._pause = pause

    def __iter__(self) -> Iterator[Buffer]:
        for part in self._parts:
            self._pause()
            yield part


def _bad_there(tier: Tier, path: str) -> Damaged:
    return Damaged(path, f"is another object in {name_of(tier)}: `unbroken repair` replaces it from the run's folder")


def _size(tier: Tier, path: str) -> int | None:
    try:
        return tier.size(path)
    except FileNotFoundError:
        return None
