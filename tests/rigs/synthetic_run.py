"""A run told to the store directly, without training: generations, steps, snapshots, and whatever is to be wrong with them."""

from __future__ import annotations

import hashlib

from msgspec import UNSET

from unbroken.codec.digest import digest, state_root
from unbroken.core.ports import SystemClock, SystemNonces, Tier
from unbroken.core.records import BeginRecord, CommitEntry, Generation, Piece, RootRecord, RunFacts, StepRecord, Writer
from unbroken.order.ledger import describe, digests
from unbroken.order.units import SampleOrder
from unbroken.store.journal import JournalWriter
from unbroken.store.repository import Part, Repository

WRITER = Writer(host="here", pid=1, boot_id="boot", since="2026-01-01T00:00:00.000Z")
UNITS = 4


class SyntheticRun:
    """One run over `tier`. Losses and states are functions of the step, so that two of them agree unless they are told not to."""

    def __init__(self, tier: Tier, *, kind: str = "batches", piece_bytes: int = 200) -> None:
        self.order = SampleOrder(1000, 8, UNITS, seed=3)
        self.piece_bytes = piece_bytes
        options = {"data": describe(kind, self.order), "units": UNITS, "reduce": "ordered"}
        self.repository = Repository.create(tier, RunFacts(run_id="run", created="2026-01-01T00:00:00.000Z", options=options))
        self.clock = SystemClock()
        self.step = 0
        self.generation: Generation
        self.journal: JournalWriter

    def begin(
        self, base: int = 0, *, world_size: int = 3, source: str = "disk", loaded_root: str | None = None, differences: tuple[str, ...] = ()
    ) -> None:
        """Open a generation that continues from `base`."""
        fresh = not self.repository.log.state.generations
        root = self.root(base) if loaded_root is None else loaded_root
        self.generation = self.repository.open_generation(
            base_step=base,
            base_root="" if fresh else self.root(base),
            source="fresh" if fresh else source,
            nonce=SystemNonces().nonce(),
            world_size=world_size,
            writer=WRITER,
            clock=self.clock,
        )
        self.step = base
        self.journal = JournalWriter(self.repository.tier, "main", self.generation.number, self.generation.nonce)
        self.journal.add(
            BeginRecord(
                generation=self.generation.number,
                base_step=base,
                source="fresh" if fresh else source,
                loaded_root=root,
                world_size=world_size,
                time_s=0.0,
                differences=differences,
            )
        )

    def train(
        self,
        num_steps: int,
        *,
        units: tuple[str, ...] | None = None,
        loss: str | None = None,
        skip: int = 0,
        clock_step: int | None = None,
        not_applied: str | None = None,
    ) -> None:
        """Journal so many steps; the other arguments make them wrong, or steps that were not applied, with this reason."""
        for _ in range(num_steps):
            self.step += 1 + skip
            world_size = self.generation.world_size
            self.journal.add(
                StepRecord(
                    step=self.step,
                    units=units or digests(self.order, self.step),
                    num_samples=8,
                    loss=loss or f"{int.from_bytes(hashlib.sha256(b'%d' % self.step).digest()[:8]):016x}",
                    clock=((self.generation.number, self.step if clock_step is None else clock_step, world_size),),
                    time_s=float(self.step),
                    status="applied" if not_applied is None else "skipped",
                    reason=not_applied or UNSET,
                )
            )

    def save(self, *, head: str | None = None) -> CommitEntry:
        """Write and commit the state of the step just done."""
        lines, chain = self.journal.num_lines, self.journal.head
        written = self.repository.write(
            step=self.step,
            generation=self.generation.number,
            nonce=self.generation.nonce,
            node=0,
            world_size=self.generation.world_size,
            logical=self._parts(self.step),
            per_rank={rank: self._rank_parts(rank) for rank in range(self.generation.world_size)},
        )
        manifest = written[0]
        self.journal.add(RootRecord(step=self.step, state_root=manifest.state_root, rank_roots=manifest.rank_roots))
        self.journal.sync()
        return self.repository.commit(
            manifests=[written], milestone=False, journal_head=head or chain, journal_lines=lines, writer=WRITER, clock=self.clock
        )

    def root(self, step: int) -> str:
        """State root of `step`."""
        return state_root((part.piece, digest(part.data)) for part in self._parts(step))

    def _parts(self, step: int) -> list[Part]:
        whole = -(-self.piece_bytes // 32)
        weights = b"".join(hashlib.sha256(b"%d/%d" % (step, i)).digest() for i in range(whole))[: self.piece_bytes]
        return [
            Part(Piece(pointer="/model/w", dtype="uint8", shape=(self.piece_bytes,)), memoryview(weights)),
            Part(Piece(pointer="/step", dtype="py:int"), memoryview(str(step).encode())),
        ]

    def _rank_parts(self, rank: int) -> list[Part]:
        return [Part(Piece(pointer="/random/torch", dtype="uint8", shape=(4,), scope="rank"), memoryview(b"rng%d" % rank))]


def uninterrupted(tier: Tier, num_steps: int = 12, every: int = 3) -> SyntheticRun:
    """A run of one generation that saves every so many steps."""
    run = SyntheticRun(tier)
    run.begin()
    while run.step < num_steps:
        run.train(every)
        run.save()
    return run


def interrupted(tier: Tier) -> SyntheticRun:
    """The same twelve steps in three generations, the last on two ranks; steps 7, 8 and 10 were done twice."""
    run = SyntheticRun(tier)
    run.begin()
    run.train(3)
    run.save()
    run.train(3)
    run.save()
    run.train(2)
    run.journal.sync()
    run.begin(6, source="memory")
    run.train(3)
    run.save()
    run.train(1)
    run.journal.sync()
    run.begin(9, world_size=2)
    run.train(3)
    run.save()
    return run
