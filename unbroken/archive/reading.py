"""Which checkpoint to read, and its verified bytes: the newest good one, or the very step that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from unbroken.archive.joining import Joined
from unbroken.core.errors import Damaged, NoCheckpoint, Permanent
from unbroken.core.limits import MAX_MESSAGE_BYTES, SMALL_PIECE_BYTES
from unbroken.core.os import boot_id, hostname, is_alive
from unbroken.core.ports import Buffer, Tier
from unbroken.core.records import CommitEntry, LogEntry, Manifest, Piece, StoredPiece, Writer
from unbroken.store import paths
from unbroken.store.lineages import OtherLineages
from unbroken.store.repository import Repository
from unbroken.store.sealed import read_sealed
from unbroken.store.tiers.disk import DiskTier

Pieces = dict[str, tuple[Piece, Buffer]]
T = TypeVar("T")
Wanted = Callable[[StoredPiece], bool]

_MAX_LISTED = 20
_MAX_TRIES = 16
"""Of a reader that retention outruns: each one begins at the newest checkpoint, which is withdrawn last."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that could not be used: the damaged objects and what is wrong. `generation` is None if the log does not know it."""

    step: int
    generation: int | None
    objects: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What was made of one checkpoint, all verified, and the newer ones that were passed over for it."""

    commit: CommitEntry
    value: T
    passed_over: tuple[PassedOver, ...] = ()


def logical(stored: StoredPiece) -> bool:
    """What makes up the state: restored pieces that are the same on every rank."""
    return stored.rank is None and stored.piece.role == "restored"


def checked_manifests(repository: Repository, commit: CommitEntry) -> list[Manifest]:
    """A commit's manifests, verified, their packs there and long enough; Damaged names the first that is not. Reads no data."""
    manifests = repository.manifests(commit)
    ends: dict[str, int] = {}
    for manifest in manifests:
        for chunk in manifest.chunks:
            ends[chunk.pack] = max(ends.get(chunk.pack, 0), chunk.offset + chunk.stored_bytes)
    for pack, end in ends.items():
        try:
            size = repository.tier.size(pack)
        except FileNotFoundError:
            raise Damaged(pack, "missing") from None
        except Permanent as error:
            raise Damaged(pack, f"cannot be read ({error})") from error
        if size < end:
            raise Damaged(pack, f"cut short: {size} bytes where at least {end} must be")
    return manifests


def read_commit(repository: Repository, commit: CommitEntry, wanted: Wanted = logical) -> Pieces:
    """The wanted pieces by pointer, every chunk and piece digest verified. Damaged names the object. Cost: one read of their bytes."""
    manifests = checked_manifests(repository, commit)
    if commit.kind == "sharded":
        joined = Joined(repository, commit)
        pieces = {pointer: joined.piece(pointer) for pointer in joined}
        return {at: joined[at] for at, piece in pieces.items() if wanted(StoredPiece(piece=piece, size_bytes=0, digest="", extents=()))}
    found: Pieces = {}
    for manifest in manifests:
        selected = [s for s in manifest.pieces if wanted(s) and s.piece.pointer not in found]
        for stored, data in repository.read_pieces(manifest, selected):
            found[stored.piece.pointer] = (stored.piece, data)
    return found


def on_demand(repository: Repository, commit: CommitEntry) -> Mapping[str, tuple[Piece, Buffer]]:
    """The state of a commit by pointer; large pieces are read, and verified, each time they are asked for."""
    if commit.kind != "sharded":
        return OnDemand(repository, commit)
    checked_manifests(repository, commit)
    return Joined(repository, commit)


def read_through(repository: Repository, commit: CommitEntry) -> None:
    """Read a whole checkpoint, the pieces of ranks included, and verify every byte. Damaged names the object. Memory: one piece."""
    for manifest in checked_manifests(repository, commit):
        for _ in repository.read_pieces(manifest, manifest.pieces):
            pass


class OnDemand(Mapping[str, tuple[Piece, Buffer]]):
    """The state of a commit by pointer, as `read_commit` gives it, but large pieces are read, and verified, each time they are asked for.

    Memory: the small pieces and one large one, so that a state can be loaded that fits into memory once.
    """

    def __init__(self, repository: Repository, commit: CommitEntry, wanted: Wanted = logical) -> None:
        self._repository = repository
        self._small: Pieces = {}
        self._large: dict[str, tuple[Manifest, StoredPiece]] = {}
        self._last: tuple[str, tuple[Piece, Buffer]] | None = None
        for manifest in checked_manifests(repository, commit):
            new = [s for s in manifest.pieces if wanted(s) and s.piece.pointer not in self._small and s.piece.pointer not in self._large]
            self._large |= {s.piece.pointer: (manifest, s) for s in new if s.size_bytes > SMALL_PIECE_BYTES}
            small = [s for s in new if s.size_bytes <= SMALL_PIECE_BYTES]
            self._small |= {s.piece.pointer: (s.piece, data) for s, data in repository.read_pieces(manifest, small)}

    def __getitem__(self, pointer: str) -> tuple[Piece, Buffer]:
        if pointer in self._small:
            return self._small[pointer]
        if self._last is None or self._last[0] != pointer:
            manifest, stored = self._large[pointer]
            self._last = None
            ((_, data),) = self._repository.read_pieces(manifest, [stored])
            self._last = pointer, (stored.piece, data)
        return self._last[1]

    def __contains__(self, pointer: object) -> bool:
        return pointer in self._small or pointer in self._large

    def __iter__(self) -> Iterator[str]:
        yield from self._small
        yield from self._large

    def __len__(self) -> int:
        return len(self._small) + len(self._large)


def _listed(commits: tuple[CommitEntry, ...]) -> str:
    steps = [str(commit.step) for commit in commits]
    shown = ", ".join(steps[-_MAX_LISTED:])
    return f"there are {'..., ' if len(steps) > _MAX_LISTED else ''}{shown}" if steps else "there are none"


def commit_of(repository: Repository, step: int) -> CommitEntry:
    """The visible commit of exactly this step; NoCheckpoint lists those there are."""
    commits = repository.visible()
    for commit in commits:
        if commit.step == step:
            return commit
    condemned = [entry.reason for entry in repository.log.state.condemned if entry.step == step]
    why = f" (it was condemned: {condemned[-1]})" if condemned else ""
    raise NoCheckpoint(f"no checkpoint of step {step}{why}; {_listed(commits)}")


def exactly(repository: Repository, step: int, use: Callable[[CommitEntry], T]) -> Found[T]:
    """The checkpoint of this step; Damaged if it is not whole, NoCheckpoint if there is none, also if it was withdrawn meanwhile."""
    for _ in range(_MAX_TRIES):
        commit = commit_of(repository, step)  # at a second try it says what there is now, or finds what was stored anew
        try:
            return Found(commit, use(commit))
        except Damaged as error:
            damage = error
            if not _is_withdrawn(repository, commit):
                break
    raise damage


def _is_withdrawn(repository: Repository, commit: CommitEntry) -> bool:
    """True if the log, read again, does not hold this very commit any more: then its objects may go at any time."""
    repository.refresh()
    return commit not in repository.log.state.commits


def newest_good(repository: Repository, use: Callable[[CommitEntry], T]) -> Found[T]:
    """The newest checkpoint that `use` finds whole; where it raises Damaged an older one is tried. NoCheckpoint lists all reasons.

    A checkpoint that was withdrawn while it was read (retention) was not damaged: the choice is made anew from the log as it is then.
    """
    passed: list[PassedOver] = []
    for _ in range(_MAX_TRIES):
        passed.clear()
        for commit in reversed(repository.visible()):
            try:
                return Found(commit, use(commit), (*_uncommitted(repository, commit.step), *passed))
            except Damaged as error:
                passed.append(PassedOver(commit.step, commit.generation, (error.path,), str(error)))
                if _is_withdrawn(repository, commit):
                    break
        else:
            break
    reasons = [*map(str, passed), *map(str, _uncommitted(repository, -1)), *repository.log.damage[:_MAX_LISTED]]
    reasons += [f"step {c.step}: condemned ({c.reason})" for c in repository.log.state.condemned[-_MAX_LISTED:]]
    if reasons:
        raise NoCheckpoint("no usable checkpoint:\n  " + "\n  ".join(reasons))
    raise NoCheckpoint("no checkpoint has been committed here yet")


def newest_plausible(repository: Repository) -> CommitEntry | None:
    """The newest commit whose manifests verify and whose packs are there; the bytes in the packs are verified when they are read.

    None if nothing has ever been committed; NoCheckpoint with the reasons if nothing that was can be used: that is no fresh start.
    """

    def use(commit: CommitEntry) -> None:
        checked_manifests(repository, commit)

    state = repository.log.state
    if not repository.visible() and not state.condemned and not repository.log.damage:
        return None
    return newest_good(repository, use).commit


def _uncommitted(repository: Repository, newer_than: int) -> Iterator[PassedOver]:
    """Newer steps of which a manifest lies here but no log entry speaks: the commit was cut off, or its entry has been lost."""
    if _is_being_written(repository.tier, repository.lineage):
        return
    manifests = repository.tier.list(paths.MANIFESTS)
    repository.refresh()  # after the listing: an entry that was written since we read the log is neither damaged nor lost
    state = repository.log.state
    known = {ref.path for commit in state.commits for ref in commit.manifests}
    gone = set(state.pruned) | {(c.step, c.generation) for c in state.condemned}
    damage = [text for text in repository.log.damage if text]
    seen: set[int] = set()
    elsewhere: set[str] | None = None
    for path in manifests:
        name = paths.manifest_name(path)
        if name is None or path in known or name.step <= newer_than or name.step in seen or (name.step, name.generation) in gone:
            continue
        if elsewhere is None:
            elsewhere = OtherLineages(repository.tier, repository.lineage).origins()
        if name.origin in elsewhere:
            continue
        seen.add(name.step)
        reason = (
            f"its log entry is damaged or lost ({damage[-1]})"
            if damage
            else "its log entry is missing: the save was cut off, or the entry lost"
        )
        yield PassedOver(name.step, None, (path,), reason)


def _is_being_written(tier: Tier, lineage: str) -> bool:
    """True if another process may be between a manifest and its log entry right now."""
    try:
        writer = msgspec.json.decode(tier.read(paths.writer(lineage), 0, MAX_MESSAGE_BYTES), type=Writer)
    except (FileNotFoundError, Permanent, msgspec.MsgspecError, ValueError, RecursionError):
        return False
    if writer.host != hostname():
        return True
    return writer.pid != os.getpid() and writer.boot_id == boot_id() and is_alive(writer.pid)


def sizes(tier: Tier) -> Iterator[int]:
    """Bytes of every object of ours; what is removed meanwhile is passed over."""
    for path in tier.list(""):
        if paths.is_ours(path):
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(tier.root, path)).st_size if isinstance(tier, DiskTier) else tier.size(path)


def commit_times(tier: Tier, lineage: str, head: int, commits: tuple[CommitEntry, ...]) -> Mapping[tuple[int, int], str]:
    """When each commit was made, by (step, generation). Reads nothing but for commits of older writers, whose entries do not say it.

    For those it reads the log backwards until all are found, or as many as can be.
    """
    times = {(commit.step, commit.generation): commit.time for commit in commits if commit.time}
    wanted = {(commit.step, commit.generation) for commit in commits} - times.keys()
    for n in range(head, -1, -1):
        if not wanted:
            break
        try:
            line, _ = read_sealed(tier, paths.log_entry(lineage, n), "log", LogEntry)
        except (FileNotFoundError, Damaged):
            continue  # safe: a time is only shown to people; the damage is in log.damage
        if isinstance(line.entry, CommitEntry) and (line.entry.step, line.entry.generation) in wanted:
            times[line.entry.step, line.entry.generation] = line.time
            wanted.remove((line.entry.step, line.entry.generation))
    return times
