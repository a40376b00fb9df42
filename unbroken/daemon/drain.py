"""Makes memory cuts durable, one at a time, in a thread of low priority: hash, compare replicas, write, journal, commit, collect.

What holds NaN never becomes a checkpoint: rank 0's bytes are looked at while they are in the cache to be hashed. Cost: 0.02 s per GB for
that, one BLAKE3 pass over each rank's bytes (6-8 GB/s per core) and one sequential write of what the store does not have yet.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from unbroken.codec.digest import digest
from unbroken.codec.finite import poison
from unbroken.core.errors import CheckFailed, SaveFailed, Transient, UnbrokenError, Unsound, describe
from unbroken.core.os import yield_to_others
from unbroken.core.ports import failpoint
from unbroken.core.records import EventRecord, Manifest, ManifestRef, Piece, RootRecord, SlotIndex
from unbroken.daemon.folder import LiveJournal, RunFolder
from unbroken.daemon.plan import MemoryCut
from unbroken.shm.slots import Slot
from unbroken.store.layout import Part
from unbroken.store.repository import Repository

MAX_WRITES = 3
"""A write is repeated when checkpoints whose chunks it refers to are withdrawn meanwhile."""

IDLE_WAIT_S = 60.0
"""The thread looks around this often although nobody woke it: every wait has an end."""

MAX_NAMED = 8
"""Pieces named in an error; the rest is counted."""


@dataclass(frozen=True)
class Cargo:
    """A held cut, its slots in rank order, where it goes, and the journal of its generation."""

    cut: MemoryCut
    repository: Repository
    slots: tuple[Slot, ...]
    journal: LiveJournal

    @property
    def whole(self) -> bool:
        """True if nobody has overwritten or freed a slot."""
        return all(slot.is_ready and slot.stamp[:2] == (self.cut.generation, self.cut.step) for slot in self.slots)


class Poisoned(CheckFailed):
    """A snapshot holds NaN or infinities where there must be none."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cargo: committed with `state_root`, or `error`; `is_poisoned`: nobody may start from it."""

    cut: MemoryCut
    seconds: float
    state_root: str = ""
    error: str = ""
    is_poisoned: bool = False


class Drainer:
    """The drain thread. `done` is called in it with each outcome; the next cargo is submitted only after that."""

    def __init__(self, folder: RunFolder, done: Callable[[Outcome], None]) -> None:
        self._folder = folder
        self._done = done
        self._turn = threading.Condition()
        self._cargo: Cargo | None = None
        self._unsynced: dict[int, LiveJournal] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="drain", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, cargo: Cargo) -> None:
        """Drain this next."""
        with self._turn:
            assert self._cargo is None, "one cargo at a time"
            self._cargo = cargo
            self._turn.notify()

    def sync(self, journal: LiveJournal) -> None:
        """Make a journal durable when there is time."""
        with self._turn:
            self._unsynced[journal.generation.number] = journal
            self._turn.notify()

    def stop(self, timeout_s: float) -> bool:
        """End once journals are durable; False if the work in progress does not end in time (it then ends with the process)."""
        with self._turn:
            self._ending = True
            self._turn.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        yield_to_others()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._cargo is not None or self._unsynced or self._ending, IDLE_WAIT_S)
                cargo, self._cargo = self._cargo, None
                journals, self._unsynced = list(self._unsynced.values()), {}
            for journal in journals:
                try_sync(journal)
            if cargo is not None:
                self._done(self._drain(cargo))
            elif not journals and self._ending:
                return

    def _drain(self, cargo: Cargo) -> Outcome:
        start_s = self._folder.clock.monotonic()
        try:
            state_root = drain(cargo, self._folder)
        except Exception as error:  # noqa: BLE001  a failed save must not harm the run or end the daemon (I9); it is reported to all
            if not isinstance(error, (OSError, UnbrokenError)):
                traceback.print_exc()
            text, is_poisoned = describe(error), isinstance(error, Poisoned)
            _note(cargo, "poisoned" if is_poisoned else "save_failed", text)
            try_sync(cargo.journal)
            return Outcome(cargo.cut, self._folder.clock.monotonic() - start_s, error=text, is_poisoned=is_poisoned)
        return Outcome(cargo.cut, self._folder.clock.monotonic() - start_s, state_root=state_root)


def drain(cargo: Cargo, folder: RunFolder) -> str:
    """Write and commit one cut; its state root. Raises OSError or UnbrokenError, and nothing of the cut is visible then."""
    failpoint("drain.begin")
    indexes = [slot.index() for slot in cargo.slots]
    for attempt in range(1, MAX_WRITES + 1):
        cargo.journal.check_folder()
        manifest, ref = _write(cargo, indexes, folder)
        failpoint("drain.written")
        _compare_replicas(cargo, indexes, manifest)
        if not cargo.whole:
            raise SaveFailed("the snapshot was given up while it was being written: a newer start took its place")
        try:
            _commit(cargo, indexes[0].milestone, manifest, ref, folder)
            break
        except Transient:
            if attempt == MAX_WRITES:
                raise
    failpoint("drain.committed")
    _collect(cargo, folder)
    failpoint("drain.collected")
    return manifest.state_root


def try_sync(journal: LiveJournal) -> None:
    """Make a journal durable if that can be done."""
    try:
        journal.sync()
    except (OSError, UnbrokenError) as error:
        # Safe: the lines stay in memory and the next commit syncs or fails aloud.
        print(f"journal of generation {journal.generation.number} could not be synced: {describe(error)}", flush=True)


def _note(cargo: Cargo, name: str, reason: str) -> None:
    # Safe to go on without: whoever waits is told by message as well, and a journal that takes no more lines has said so itself.
    with contextlib.suppress(UnbrokenError):
        cargo.journal.add([EventRecord(name=name, step=cargo.cut.step, facts={"reason": reason})])


def _parts(slot: Slot, index: SlotIndex, scope: str) -> list[Part]:
    data = slot.data()
    return [
        Part(placed.piece, data[placed.offset : placed.offset + placed.size_bytes])
        for placed in index.pieces
        if placed.piece.scope == scope
    ]


def _write(cargo: Cargo, indexes: list[SlotIndex], folder: RunFolder) -> tuple[Manifest, ManifestRef]:
    """Poisoned, with the first pieces by name, where any is. Rank 0's are looked at: other ranks' must have the same bytes."""
    try:
        return cargo.repository.write(
            step=cargo.cut.step,
            generation=cargo.cut.generation,
            nonce=cargo.journal.generation.nonce,
            node=0,
            world_size=cargo.cut.world_size,
            logical=_parts(cargo.slots[0], indexes[0], "logical"),
            per_rank={rank: _parts(slot, index, "rank") for rank, (slot, index) in enumerate(zip(cargo.slots, indexes, strict=True))},
            look=None if folder.rules.allow_nonfinite else poison,
            encoding=folder.encoding(cargo.repository, cargo.cut.step, milestone=indexes[0].milestone),
        )
    except Unsound as error:
        found = error.faults
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise Poisoned(f"the state of step {cargo.cut.step} is poisoned: {'; '.join(found[:MAX_NAMED])}{more}") from None


def _compare_replicas(cargo: Cargo, indexes: list[SlotIndex], manifest: Manifest) -> None:
    """Every logical piece must have the same bytes on every rank that has logical pieces at all; CheckFailed names those that do not."""
    first: dict[str, tuple[Piece, str]] = {p.piece.pointer: (p.piece, p.digest) for p in manifest.pieces if p.rank is None}
    differing: dict[str, list[int]] = {}
    for rank in range(1, cargo.cut.world_size):
        here = {part.piece.pointer: (part.piece, digest(part.data)) for part in _parts(cargo.slots[rank], indexes[rank], "logical")}
        if here:
            for pointer in sorted(p for p in first.keys() | here.keys() if first.get(p) != here.get(p)):
                differing.setdefault(pointer, []).append(rank)
    if differing:
        named = [f"{pointer} (ranks {', '.join(map(str, ranks))})" for pointer, ranks in list(differing.items())[:MAX_NAMED]]
        more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise CheckFailed(f"replicas have diverged at step {cargo.cut.step}: not the same as on rank 0: {'; '.join(named)}{more}")


def _commit(cargo: Cargo, milestone: bool, manifest: Manifest, ref: ManifestRef, folder: RunFolder) -> None:
    """Journal first, then the log entry that counts its lines."""
    roots = RootRecord(step=cargo.cut.step, state_root=manifest.state_root, rank_roots=manifest.rank_roots)
    head, num_lines = cargo.journal.mark(roots)
    cargo.journal.sync()
    failpoint("drain.before_commit")
    cargo.repository.commit(
        manifests=[(manifest, ref)],
        milestone=milestone,
        journal_head=head,
        journal_lines=num_lines,
        writer=folder.writer,
        clock=folder.clock,
    )


def _collect(cargo: Cargo, folder: RunFolder) -> None:
    try:
        folder.collect(cargo.repository)
    except (OSError, UnbrokenError) as error:
        # Safe: what could not be removed is removed by a later collection; the checkpoint itself is committed.
        _note(cargo, "collect_failed", describe(error))
        print(f"old checkpoints could not be removed: {describe(error)}", flush=True)
