"""The writing side of a Store: the lease on a folder, its open generation, and one save after another into it. Synchronous, no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from unbroken.archive.reading import PassedOver
from unbroken.codec import metrics
from unbroken.codec.metrics import Value
from unbroken.core.errors import Fenced, Refused, SaveFailed
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import Clock, Nonces, Tier, failpoint
from unbroken.core.records import (
    BeginRecord,
    CommitEntry,
    EventRecord,
    Generation,
    Keep,
    Manifest,
    ManifestRef,
    RootRecord,
    RunFacts,
    Writer,
)
from unbroken.store import paths
from unbroken.store.deltas import FullEvery
from unbroken.store.journal import JournalWriter
from unbroken.store.lease import WriterLease
from unbroken.store.lineages import require_log
from unbroken.store.logged import event_of
from unbroken.store.manifests import check_cut
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.careful import settled
from unbroken.store.tiers.choose import name_of
from unbroken.store.tiers.disk import DiskTier

_WRITERS = {"store": "a Store", "dcp": "torch.distributed.checkpoint"}


def _foreign(root: str, there: str, kind: str) -> str:
    """Why a folder that others write is not written."""
    if there:
        return f"{root} is written by {_WRITERS.get(there, repr(there))}, not by {_WRITERS[kind]}: use another folder for it"
    return f"{root} holds a training run, whose history {_WRITERS[kind]} would fork: use another folder for it"


class DiskSaveFailed(SaveFailed, OSError):
    """A save failed because the operating system said so; `errno` is what it said."""

    def __str__(self) -> str:
        return str(self.strerror)


def save_failed(step: int, cause: Exception) -> SaveFailed:
    """The error of a failed save, to be raised from its cause: it keeps the cause's type and text, and its errno if there is one."""
    text = f"step {step} was not saved: {type(cause).__name__}: {cause}"
    link: BaseException | None = cause
    for _ in range(16):
        if isinstance(link, OSError) and link.errno is not None:
            return DiskSaveFailed(link.errno, text)
        link = link.__cause__ or link.__context__ if link is not None else None
    return SaveFailed(text)


class Saving:
    """This process's hold on a folder as its writer; in an object store there is no lease, and who opened the newest generation writes.

    `last` is the newest checkpoint a reader would find; `notes` wait to be shown; `full_every` may be set: how `save` stores.
    """

    def __init__(
        self, repository: Repository, lease: WriterLease | None, writer: Writer, keep: Keep, *, clock: Clock, nonces: Nonces
    ) -> None:
        self.repository = repository
        self.notes: list[str] = []
        self.full_every = FullEvery()
        self._lease = lease
        self._is_released = False
        self._writer = writer
        self._keep = keep
        self._clock = clock
        self._nonces = nonces
        self._generation: Generation | None = None
        self._journal: JournalWriter | None = None
        if lease is not None and lease.took_over is not None and "of this process" not in lease.took_over:
            self.notes.append(f"{repository.facts.run_id}: took the folder over from {lease.took_over}, which is gone")

    @classmethod
    def open(
        cls,
        tier: Tier,
        clock: Clock,
        nonces: Nonces,
        lineage: str = paths.MAIN,
        *,
        kind: str = "store",
        facts: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
    ) -> Saving:
        """Take the lease and open or create the run, which is born with `facts`. `keep`: what `collect` keeps.

        Raises Fenced naming the holder, ForeignFolder, NewerFormat, OSError.

        NoCheckpoint where the log has lost the checkpoints that lie here. `kind` stands among the facts of birth: who writes such a folder.
        """
        Repository.exists(tier)  # a foreign folder must not get so much as a lock file from us
        if lineage != paths.MAIN:
            Repository.open(tier, lineage)  # nor a lineage that was never begun
        writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since=clock.utc())
        tier, note = (tier, "") if isinstance(tier, DiskTier) else settled(tier, nonces)
        lease = WriterLease.acquire(tier.root, writer, lineage) if isinstance(tier, DiskTier) else None
        try:
            if Repository.exists(tier):
                repository = Repository.open(tier, lineage)
                if repository.facts.options.get("writer") != kind:
                    raise Refused(_foreign(name_of(tier), str(repository.facts.options.get("writer", "")), kind))
                require_log(repository.log)
            else:
                options = {"writer": kind, **(facts or {})}
                repository = Repository.create(tier, RunFacts(run_id=nonces.nonce(), created=clock.utc(), options=options))
        except BaseException:  # raised again: whatever it was, the folder must not stay taken
            if lease is not None:
                lease.release()
            raise
        saving = cls(repository, lease, writer, keep or Keep(), clock=clock, nonces=nonces)
        saving.notes += [f"{name_of(tier)}: {note}"] * bool(note)
        return saving

    @property
    def last(self) -> CommitEntry | None:
        """The newest visible checkpoint."""
        commits = self.repository.visible()
        return commits[-1] if commits else None

    def check(self) -> None:
        """Raises Fenced if another Store of this process has taken the folder over."""
        if self._lease is not None and not self._lease.is_held:
            raise Fenced(f"{self._lease.path}: another Store of this process writes this folder now: use that one")

    def save(
        self,
        step: int,
        parts: Sequence[Part],
        milestone: bool,
        base: CommitEntry | None,
        loaded_root: str,
        *,
        logged: Mapping[str, Value] | None = None,
    ) -> None:
        """Write and commit one checkpoint. With `base` the steps beyond it are left behind. After an error a new generation is begun.

        `logged`: what was measured of it.
        """
        try:
            generation = self.prepare(step, base, loaded_root)
            written = self.repository.write(
                step=step,
                generation=generation.number,
                nonce=generation.nonce,
                node=0,
                world_size=1,
                logical=parts,
                per_rank={0: ()},
                encoding=self.full_every.encoding(self.repository.visible(), step, self._clock.utc(), milestone=milestone),
            )
            if logged and self._journal is not None:
                self._journal.add(EventRecord(name=metrics.EVENT, step=step, facts=metrics.encode(logged)))
            self.publish(step, [written], milestone)
        except BaseException:  # raised again: the next save must not go on in a journal of which nobody knows what it holds
            self.give_up()
            raise

    def prepare(self, step: int, base: CommitEntry | None, loaded_root: str, world_size: int = 1) -> Generation:
        """The generation to write this step in: the open one, or a new one after an error, on another base or for other ranks."""
        is_fit = self._generation is not None and self._generation.world_size == world_size
        if base is not None or self._journal is None or not is_fit:
            last = base or self.last
            if last is not None and last.step > step:
                raise Refused(f"step {step} does not follow step {last.step}: the save that was to go back before it has failed")
            self._begin(last, loaded_root, world_size)
        assert self._generation is not None
        return self._generation

    def publish(self, step: int, manifests: Sequence[tuple[Manifest, ManifestRef]], milestone: bool) -> CommitEntry:
        """Make one checkpoint of what has been written in the open generation."""
        assert self._journal is not None, "nothing is prepared"
        rank_roots = {rank: root for manifest, _ in manifests for rank, root in zip(manifest.ranks, manifest.rank_roots, strict=True)}
        state_root = check_cut([manifest for manifest, _ in manifests])
        self._journal.add(RootRecord(step=step, state_root=state_root, rank_roots=tuple(rank_roots[rank] for rank in sorted(rank_roots))))
        self._journal.sync()
        failpoint("saving.before_commit")
        return self.repository.commit(
            manifests=manifests,
            milestone=milestone,
            journal_head=self._journal.head,
            journal_lines=self._journal.num_lines,
            writer=self._writer,
            clock=self._clock,
        )

    def give_up(self) -> None:
        """What was begun has failed: the next save begins a new generation, and what lies there of this one is rubbish."""
        self._journal = None

    def collect(self, keep: Keep | None = None, later: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Remove what retention no longer keeps. A failure is a note: what stays is removed by a later collection.

        later: is given what removes the files; what goes is no checkpoint any more when this returns.
        """

        def put_off(remove: Callable[[], list[str]]) -> None:
            assert later is not None
            later(lambda: self._remove(remove))

        with self._noting():
            self.repository.collect(keep or self._keep, writer=self._writer, clock=self._clock, later=None if later is None else put_off)

    def _remove(self, remove: Callable[[], list[str]]) -> None:
        with self._noting():
            remove()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (safe: the checkpoint is committed; what stays is removed later, and it is said)
            self.notes.append(f"old checkpoints could not be removed ({type(error).__name__}: {error}); the next save tries again")

    def condemn(self, passed_over: Iterable[PassedOver]) -> None:
        """Withdraw damaged checkpoints in the log, so that nothing builds on their chunks. The next save begins a new generation."""
        self.repository.refresh()
        known = {(c.step, c.generation) for c in self.repository.log.state.condemned}
        for bad in passed_over:
            if bad.generation is None or (bad.step, bad.generation) in known:
                continue
            self.repository.condemn(bad.step, bad.generation, bad.objects, bad.reason, writer=self._writer, clock=self._clock)
            self._journal = None

    def release(self) -> None:
        """Let the folder go."""
        self._is_released = True
        if self._lease is not None:
            self._lease.release()

    @property
    def is_held(self) -> bool:
        """False once this process has let the folder go."""
        return not self._is_released and (self._lease is None or self._lease.is_held)

    def _begin(self, base: CommitEntry | None, loaded_root: str, world_size: int) -> None:
        generation = self.repository.open_generation(
            base_step=base.step if base is not None else 0,
            base_root=base.state_root if base is not None else "",
            source="disk" if base is not None else "fresh",
            nonce=self._nonces.nonce(),
            world_size=world_size,
            writer=self._writer,
            clock=self._clock,
        )
        journal = JournalWriter(self.repository.tier, self.repository.lineage, generation.number, generation.nonce)
        begin = BeginRecord(
            generation=generation.number,
            base_step=generation.base_step,
            source="disk" if base is not None else "fresh",
            loaded_root=loaded_root if base is not None and loaded_root == base.state_root else "",
            world_size=world_size,
            time_s=self._clock.monotonic(),
        )
        journal.add(begin)
        for event in event_of(self._keep, generation.base_step, self.repository.facts):
            journal.add(event)
        self._generation, self._journal = generation, journal
