"""The repository: one run folder, written by one writer and read by anybody. Truth is what its log says; all else is found from there.

Write order: packs, manifest, journal, log entry (I1). A checkpoint becomes visible with its commit entry and with nothing else.
A Repository may be used by several threads. Its log is as new as the last call that read it; `refresh` reads what was added since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from unbroken.core.errors import Damaged, Fenced, ForeignFolder, NoCheckpoint, Permanent, Transient
from unbroken.core.ports import Buffer, Clock, Nonces, SystemNonces, Tier
from unbroken.core.records import (
    CommitEntry,
    CondemnEntry,
    Generation,
    GenerationEntry,
    Keep,
    LogState,
    Manifest,
    ManifestRef,
    RunFacts,
    StoredPiece,
    Writer,
)
from unbroken.store import paths
from unbroken.store.audit import VerifyReport, verify
from unbroken.store.catalog import Catalog
from unbroken.store.collect import Collector
from unbroken.store.deltas import Encoder, Encoding
from unbroken.store.fence import Base, check_base, check_basis, check_borrowed, check_collector, check_writer
from unbroken.store.holds import Hold, Holds
from unbroken.store.journal import durable_head
from unbroken.store.layout import AnyPart, Look, Part
from unbroken.store.lineages import OtherLineages, require_lineage
from unbroken.store.loading import read_pieces
from unbroken.store.log import Key, Log, key_of, newest_generation, newest_number, visible
from unbroken.store.logged import LoggedValues
from unbroken.store.manifests import check_cut, commit_entry, load_manifests
from unbroken.store.packs import Origin
from unbroken.store.retention import Values
from unbroken.store.sealed import read_sealed, seal
from unbroken.store.writing import Share, Writing

__all__ = ["Part", "Repository", "VerifyReport"]

_MANY = 8
"""Manifests of other processes in one commit, from which on their objects are looked for in a listing first."""


@contextmanager
def naming(root: str, lacking: str = "") -> Iterator[None]:
    """What is wrong with a folder is said with its name; where it lacks a checkpoint, `lacking` is said, too."""
    try:
        yield
    except (NoCheckpoint, ForeignFolder) as error:
        more = f" ({lacking})" if lacking and isinstance(error, NoCheckpoint) else ""
        raise type(error)(f"{root}: {error}{more}") from error


class _AlreadyCommitted(Exception):
    """The log holds this commit."""

    def __init__(self, commit: CommitEntry) -> None:
        super().__init__()
        self.commit = commit


class Repository:
    """A run's checkpoints on one tier."""

    def __init__(self, tier: Tier, facts: RunFacts, log: Log, nonces: Nonces | None = None) -> None:
        self.tier = tier
        self.facts = facts
        self.log = log
        self.lineage = log.lineage
        self._catalog = Catalog(tier)
        self.holds = Holds()
        self._lock = threading.RLock()
        self._others = OtherLineages(tier, log.lineage)
        self._writing = Writing(tier, nonces or SystemNonces(), self.holds, self._lock)
        self._opened: int | None = None
        self._basis = newest_number(log.state)
        self._out_of_grace: set[Key] = set()
        self._logged: LoggedValues | None = None

    @staticmethod
    def exists(tier: Tier) -> bool:
        """True when a run lies here, False when nothing does. Raises ForeignFolder, and Damaged for a run without its run.json."""
        with suppress(FileNotFoundError, Permanent):  # a listing walks the whole folder: only where there is no run has one to be made
            tier.size(paths.RUN)
            return True
        found = [path for path in tier.list("") if not path.startswith(".")]
        if paths.RUN in found:
            return True
        if any(map(paths.is_ours, found)):
            raise Damaged(paths.RUN, "missing, though checkpoints of a run lie here: restore it from a copy")
        others = [path for path in found if path != paths.WRITER and not path.endswith(".log")]
        if others:
            raise ForeignFolder(f"holds {len(others)} files such as {others[0]!r} but no run: choose an empty or new folder")
        return False

    @classmethod
    def create(cls, tier: Tier, facts: RunFacts, lineage: str = "main", nonces: Nonces | None = None) -> Repository:
        """Make a new run in an empty place. Raises ForeignFolder; Fenced when a run is there already."""
        try:
            if not cls.exists(tier):
                tier.create(paths.RUN, [seal("run", facts)])
                return cls(tier, facts, Log.open(tier, lineage), nonces)
        except FileExistsError:
            pass
        raise Fenced(f"{paths.RUN}: a run is here already: open it, or choose another folder")

    @classmethod
    def open(cls, tier: Tier, lineage: str = "main", nonces: Nonces | None = None) -> Repository:
        """Read a run's facts and the log of one lineage. NoCheckpoint when nothing is there, ForeignFolder, NewerFormat, Damaged."""
        try:
            facts, _ = read_sealed(tier, paths.RUN, "run", RunFacts)
        except FileNotFoundError:
            cls.exists(tier)
            raise NoCheckpoint("no run here: the folder is missing or empty") from None
        log = Log.open(tier, lineage)
        require_lineage(log)
        return cls(tier, facts, log, nonces)

    def refresh(self) -> None:
        """Read the log entries added since, and act from now on as one who knows the newest generation."""
        with self._lock:
            self.log.refresh()
            self._basis = newest_number(self.log.state)

    def is_there(self) -> bool:
        """False when the folder does not hold the log that was read here: it was put back to an earlier copy, or replaced."""
        with self._lock:
            return self.log.is_there()

    def visible(self) -> tuple[CommitEntry, ...]:
        """The checkpoints that may be used, ascending by step."""
        return visible(self.log.state)

    def manifests(self, commit: CommitEntry) -> list[Manifest]:
        """The commit's manifests, verified. Raises Damaged naming the file."""
        manifests = load_manifests(self.tier, commit)
        self._remember(commit, {ref.path: manifest for ref, manifest in zip(commit.manifests, manifests, strict=True)})
        return manifests

    def read_pieces(self, manifest: Manifest, wanted: Iterable[StoredPiece]) -> Iterator[tuple[StoredPiece, Buffer]]:
        """Pieces with their verified bytes, in the order of their chunks, each chunk read once. Memory: three chunks, two pieces."""
        return read_pieces(self.tier, manifest, wanted)

    def write(
        self,
        *,
        step: int,
        generation: int,
        nonce: str,
        node: int,
        world_size: int,
        logical: Sequence[AnyPart],
        per_rank: Mapping[int, Sequence[AnyPart]],
        look: Look | None = None,
        encoding: Encoding | None = None,
        partial: bool = False,
    ) -> tuple[Manifest, ManifestRef]:
        """Store one node's share of a checkpoint: new chunks in packs, then the manifest, all durable on return; not yet visible.

        Chunks of visible commits are referenced, not written. Cost: one hash pass (6-8 GB/s) and the new bytes' sequential write; memory
        two chunks. With `encoding` chunks are made smaller, as such or against the newest visible checkpoint of an earlier step.
        `partial`: `logical` is only this node's part of the state; then its chunks are cut fine, and compared with its own older ones only.
        After an error everything written here is removed again. Raises StoreError with the OS error as its cause, and Unsound where
        `look` finds faults in logical pieces.
        """
        whose = Share(step, generation, nonce, node, world_size)
        with self._lock:
            index = self._catalog.index(self.log.state, self._condemned_elsewhere, node)
            hold = Hold(step, generation, borrowed=set(index.commits))
            base = next((c for c in reversed(self.visible()) if c.step < step), None) if encoding is not None else None
            hold.borrowed |= {key_of(base)} if base is not None else set()
            self.holds.begin(hold)
        encoder = None if encoding is None else self._encoder(encoding, base)
        origin = self._origin(generation, nonce)
        try:
            written = self._writing.write(
                whose, logical, per_rank, index=index, hold=hold, origin=origin, look=look, encoder=encoder, partial=partial
            )
        finally:
            if partial and self._opened is None:
                self._hand_over()
        with self._lock:
            self._catalog.wrote(written[1].path, written[0])
        return written

    def derive(self, base: Manifest, changed: Sequence[Part], generation: Generation) -> tuple[Manifest, ManifestRef]:
        """Store `base`, another lineage's, as a share of a checkpoint of ours with some logical pieces changed; not yet visible.

        Its chunks are referenced: only the changed pieces are written. Whoever calls has seen to it that nobody deletes them.
        """
        hold = Hold(base.step, generation.number)
        with self._lock:
            self.holds.begin(hold)
        return self._writing.derive(base, changed, generation, hold, self._origin(generation.number, generation.nonce))

    def commit(
        self,
        *,
        manifests: Sequence[tuple[Manifest, ManifestRef]],
        milestone: bool,
        journal_head: str,
        journal_lines: int,
        writer: Writer,
        clock: Clock,
    ) -> CommitEntry:
        """Make a checkpoint visible; durable on return. Asking twice for the same (step, generation) gives the commit that is there.

        Raises Damaged unless the manifests are one consistent cut; Fenced when this generation may write no longer; Transient when chunks
        it wanted to reuse were withdrawn meanwhile: write the snapshot again.
        """
        root = check_cut([manifest for manifest, _ in manifests])
        first = manifests[0][0]
        entry = commit_entry(manifests, root, milestone=milestone, journal_head=journal_head, journal_lines=journal_lines, time=clock.utc())

        def make(state: LogState) -> CommitEntry:
            check_writer(state, first, self._opened)
            there = next((c for c in state.commits if key_of(c) == key_of(entry)), None)
            if there is not None and (there.milestone or not milestone):
                raise _AlreadyCommitted(there)
            check_borrowed(state, first.step, borrowed)
            return entry

        with self._lock:
            there = _listed(self.tier, self.log.state, self.holds, [ref.path for _, ref in manifests])
            borrowed = {key for manifest, ref in manifests for key in self._borrowed(manifest, ref, there)}
            try:
                self.log.propose(make, writer=writer, clock=clock)
            except _AlreadyCommitted as e:
                return e.commit
            self._remember(entry, {ref.path: manifest for manifest, ref in manifests})
            self.holds.committed(entry)
            self._out_of_grace = {key_of(c) for c in self.log.state.condemned}
        return entry

    def open_generation(
        self, *, base_step: int, base_root: str, source: str, nonce: str, world_size: int, writer: Writer, clock: Clock
    ) -> Generation:
        """Open the next generation on a base ("fresh", "memory", "disk", "branch"); from here on all older writers are fenced.

        The entry names the end of the journal before, as far as it is on disk: whoever holds lines of it in memory syncs them first.
        Raises Transient when the base cannot be built on any more: read `visible` again and choose anew.
        """
        with self._lock:
            lowest = self._first_unused_generation()
            base, seen = Base(source, base_step, base_root), self.visible()

            def make(state: LogState) -> GenerationEntry:
                basis, self._basis = self._basis, newest_number(state)
                check_base(state, base, basis, seen)
                newest = newest_generation(state)
                has_parent = newest is not None and source not in ("fresh", "branch")
                generation = Generation(
                    number=max(newest_number(state) + 1, lowest),
                    parent=newest.number if newest is not None and has_parent else None,
                    base_step=base_step,
                    nonce=nonce,
                    world_size=world_size,
                )
                head = "" if newest is None else durable_head(self.tier, self.lineage, newest.number, newest.nonce)
                return GenerationEntry(generation=generation, base_root=base_root, source=source, parent_head=head)

            entry = self.log.propose(make, writer=writer, clock=clock).entry
            assert isinstance(entry, GenerationEntry)
            self._opened = self._basis = entry.generation.number
            return entry.generation

    def condemn(self, step: int, generation: int, objects: Iterable[str], reason: str, *, writer: Writer, clock: Clock) -> None:
        """Withdraw a damaged commit and name its bad objects, whose chunks are never referenced again. Raises Fenced."""
        entry = CondemnEntry(step=step, generation=generation, objects=tuple(sorted(set(objects))), reason=reason)

        def check(state: LogState) -> None:
            check_basis(state, self._basis, f"step {step} is not condemned")

        with self._lock:
            self.log.append(entry, writer=writer, clock=clock, check=check)

    def collect(
        self, keep: Keep, *, writer: Writer, clock: Clock, later: Callable[[Callable[[], list[str]]], None] | None = None
    ) -> list[str]:
        """Keep the milestones and what the rules keep, delete the rest and all leftovers; the paths that went.

        later: is given what deletes, to be called at any time; what goes is no checkpoint any more when this returns.

        Raises Fenced unless this object opened the newest generation. Cost: two LISTs and one delete per object; with `keep.best` what
        the journals have got since the last time is read, some 8 us per step.
        """
        if keep.newest < 1:
            raise ValueError(f"Keep(newest={keep.newest}): at least one checkpoint must be kept")
        values = self._values(keep)
        with self._lock:
            check_collector(self.log.state, self._opened)
            assert self._opened is not None
            in_grace = {key_of(c) for c in self.log.state.condemned} - self._out_of_grace
            collector = Collector(self.tier, self.log, self._catalog, self._others, self.holds, opened=self._opened)
            collector.withdraw(keep, values, in_grace, writer=writer, clock=clock)
            if later is None:
                return self._remove(collector)
        later(lambda: self._remove(collector))
        return []

    def verify(self) -> VerifyReport:
        """Recompute every digest and root of everything that is not condemned from the stored bytes. Cost: reads it all once."""
        return verify(self.tier, self.lineage)

    def _remove(self, collector: Collector) -> list[str]:
        with self._lock:
            return collector.remove()

    def _hand_over(self) -> None:
        """Another process commits what is written here, or gives it up: nothing of it need be held."""
        with self._lock:
            self.holds.let_go()
            self._catalog.forget_others({key_of(c) for c in self.log.state.commits})

    def _values(self, keep: Keep) -> Values:
        """Read outside the lock: the first time it may take seconds, and a start waits for nobody who holds that."""
        if keep.best is None:
            return {}
        if self._logged is None or self._logged.metric != keep.best.metric:
            self._logged = LoggedValues(self.tier, self.lineage, keep.best.metric)
        with self._lock:
            state = self.log.state
        return self._logged.of(state, state.commits)

    def _encoder(self, encoding: Encoding, base: CommitEntry | None) -> Encoder:
        if base is not None:
            with suppress(Damaged):  # safe: then this one is stored whole; who reads that one is told
                return Encoder(encoding, self.tier, key_of(base), self.manifests(base))
        return Encoder(encoding, self.tier, (-1, -1), [])

    def _condemned_elsewhere(self) -> set[str]:
        with self._lock:
            return self._others.condemned()

    def _remember(self, commit: CommitEntry, manifests: Mapping[str, Manifest]) -> None:
        with self._lock:
            self._catalog.put(key_of(commit), manifests)

    def _origin(self, generation: int, nonce: str) -> Origin:
        """Objects carry the generation of their writer: ours, also when what is written was frozen under an older one."""
        with self._lock:
            mine = next((g for g in self.log.state.generations if g.number == self._opened), None)
        return Origin(generation, paths.nonce_hex(nonce)) if mine is None else Origin(mine.number, paths.nonce_hex(mine.nonce))

    def _first_unused_generation(self) -> int:
        """Above every journal's number too: the entry of a generation at the head of the log may have been lost."""
        numbers = [paths.number(path) for path in self.tier.list(paths.journal_folder(self.lineage))]
        return 1 + max((n for n in numbers if n is not None), default=-1)

    def _borrowed(self, manifest: Manifest, ref: ManifestRef, there: set[str]) -> set[Key]:
        """The commits that must still be visible when this manifest's commit is written."""
        hold = self.holds.of(ref.path)
        if hold is not None:
            return hold.borrowed
        if ref.path in self.holds.doomed:
            raise Transient(f"{ref.path}: given up when a later step was committed: write it again")
        return self._catalog.borrowed(manifest, ref, self.log.state, there)


def _listed(tier: Tier, state: LogState, holds: Holds, manifests: Sequence[str]) -> set[str]:
    """What the newest generation has written, if many of these come from other processes: two listings instead of two requests each.

    A listing may still name what has been deleted; but nobody deletes what the newest generation wrote, other than its own rubbish.
    """
    newest = newest_generation(state)
    if newest is None or sum(holds.of(path) is None for path in manifests) < _MANY:
        return set()
    origin = paths.origin(newest.nonce)
    return {path for folder in (paths.MANIFESTS, paths.PACKS) for path in tier.list(folder) if paths.origin_of(path) == origin}
