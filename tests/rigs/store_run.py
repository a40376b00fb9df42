"""A run in small, for the store's tests: deterministic nonces and clock, a state that is a function of one number, a writer, a reader."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.ports import Nonces, Tier
from unbroken.core.records import CommitEntry, Generation, GenerationEntry, Keep, LogEntry, Manifest, Piece, RootRecord, RunFacts, Writer
from unbroken.store import paths
from unbroken.store.deltas import Encoding
from unbroken.store.journal import JournalWriter
from unbroken.store.log import Log
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.memory import MemoryTier

WRITER = Writer(host="host", pid=7, boot_id="boot", since="2026-01-01T00:00:00.000Z")
FACTS = RunFacts(run_id="run", created="2026-01-01T00:00:00.000Z", options={"units": 4, "seed": 7})
NUM_FLOATS = 1000
_starts = itertools.count()


class StillClock:
    """A clock that stands still."""

    def monotonic(self) -> float:
        return 1.0

    def utc(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


@dataclass
class CountedNonces:
    """Nonces that are a function of a name and a count."""

    name: str
    count: int = 0

    def nonce(self) -> str:
        self.count += 1
        return text_digest(self.name, str(self.count))[:32]


def part(pointer: str, data: bytes, *, dtype: str = "uint8", scope: str = "logical", role: str = "restored") -> Part:
    """A part of raw bytes."""
    piece = Piece(pointer=pointer, dtype=dtype, shape=(len(data),), scope=scope, role=role)  # type: ignore[arg-type]
    return Part(piece, memoryview(data))


def state(k: int, num_floats: int = NUM_FLOATS) -> list[Part]:
    """S(k): two arrays of which every element is k, and the step itself."""
    w, b = struct.pack("<f", k) * num_floats, struct.pack("<f", k) * 7
    return [part("/model/w", w), part("/model/b", b), part("/step", struct.pack("<q", k), dtype="py:int")]


def drifting(k: int, num_floats: int = 20_000) -> list[Part]:
    """S(k) with one more array, of which a little changes with every k: stored as a small difference where that is allowed."""
    drift = np.random.default_rng(7).standard_normal(num_floats).astype("<f4")
    drift[::50] += k
    piece = Piece(pointer="/model/drift", dtype="float32", shape=(num_floats,))
    return [*state(k), Part(piece, memoryview(drift.tobytes()))]


def rank_state(k: int, rank: int) -> list[Part]:
    """What belongs to one rank alone."""
    return [part("/rng/torch", struct.pack("<qq", k, rank), scope="rank")]


@dataclass
class Trainer:
    """A writer of one generation of a run."""

    repository: Repository
    generation: Generation
    journal: JournalWriter = field(init=False)
    num_floats: int = NUM_FLOATS
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        g = self.generation
        self.journal = JournalWriter(self.repository.tier, self.repository.lineage, g.number, g.nonce)

    def write(self, step: int, value: int | None = None, logical: list[Part] | None = None):  # type: ignore[no-untyped-def]
        """Store a snapshot without committing it."""
        k = step if value is None else value
        size = self.generation.world_size
        return self.repository.write(
            step=step,
            generation=self.generation.number,
            nonce=self.generation.nonce,
            node=0,
            world_size=size,
            logical=state(k, self.num_floats) if logical is None else logical,
            per_rank={rank: rank_state(k, rank) for rank in range(size)},
            encoding=self.encoding,
        )

    def save(self, step: int, value: int | None = None, *, milestone: bool = False, logical: list[Part] | None = None) -> CommitEntry:
        """Write, journal, commit."""
        manifest, ref = self.write(step, value, logical)
        self.journal.add(RootRecord(step=step, state_root=manifest.state_root, rank_roots=manifest.rank_roots))
        self.journal.sync()
        return self.repository.commit(
            manifests=[(manifest, ref)],
            milestone=milestone,
            journal_head=self.journal.head,
            journal_lines=self.journal.num_lines,
            writer=WRITER,
            clock=StillClock(),
        )

    def collect(self, keep_newest: int = 3) -> list[str]:
        return self.repository.collect(Keep(newest=keep_newest), writer=WRITER, clock=StillClock())


def start(
    tier: Tier,
    *,
    nonces: Nonces | None = None,
    world_size: int = 2,
    num_floats: int = NUM_FLOATS,
    lineage: str = "main",
    encoding: Encoding | None = None,
) -> Trainer:
    """Begin a run, or go on from its newest good checkpoint as a new generation, condemning what turns out bad."""
    source = nonces or CountedNonces(f"rig {next(_starts)}")
    if not Repository.exists(tier):
        repository = Repository.create(tier, FACTS, nonces=source)
        return opened(repository, None, source, world_size, num_floats, encoding)
    repository = Repository.open(tier, lineage, nonces=source)
    base, _, passed_over = newest_good(repository)
    for commit, damaged in passed_over:
        repository.condemn(commit.step, commit.generation, [damaged.path], damaged.reason, writer=WRITER, clock=StillClock())
    return opened(repository, base, source, world_size, num_floats, encoding)


def opened(
    repository: Repository,
    base: CommitEntry | None,
    nonces: Nonces,
    world_size: int = 2,
    num_floats: int = NUM_FLOATS,
    encoding: Encoding | None = None,
) -> Trainer:
    """A trainer on a new generation that continues from `base`."""
    generation = repository.open_generation(
        base_step=base.step if base else 0,
        base_root=base.state_root if base else "",
        source="disk" if base else "fresh",
        nonce=nonces.nonce(),
        world_size=world_size,
        writer=WRITER,
        clock=StillClock(),
    )
    return Trainer(repository, generation, num_floats=num_floats, encoding=encoding)


def load(repository: Repository, commit: CommitEntry) -> dict[str, bytes]:
    """All logical pieces of a checkpoint, verified."""
    result: dict[str, bytes] = {}
    for manifest in repository.manifests(commit):
        for stored, data in repository.read_pieces(manifest, manifest.pieces):
            if stored.rank is None:
                result[stored.piece.pointer] = data
    return result


def newest_good(repository: Repository) -> tuple[CommitEntry, dict[str, bytes], list[tuple[CommitEntry, Damaged]]]:
    """The newest checkpoint that reads whole, its pieces, and those passed over; NoCheckpoint lists them when none does."""
    passed_over: list[tuple[CommitEntry, Damaged]] = []
    for commit in reversed(repository.visible()):
        try:
            return commit, load(repository, commit), passed_over
        except Damaged as e:
            passed_over.append((commit, e))
    reasons = [*(f"step {commit.step}: {e}" for commit, e in passed_over), *repository.log.damage]
    raise NoCheckpoint("no usable checkpoint: " + "; ".join(reasons or ["none was committed"]))


def whole_value(pieces: dict[str, bytes]) -> int:
    """k when the pieces are S(k) in every element; AssertionError when they mix two states."""
    k = struct.unpack("<q", pieces["/step"])[0]
    for pointer in ("/model/w", "/model/b"):
        values = set(struct.unpack(f"<{len(pieces[pointer]) // 4}f", pieces[pointer]))
        assert values == {float(k)}, f"{pointer} holds {values} at step {k}"
    return int(k)


def manifest_of(repository: Repository, commit: CommitEntry) -> Manifest:
    """The only manifest of a checkpoint."""
    (manifest,) = repository.manifests(commit)
    return manifest


def objects_of(repository: Repository, commits: Iterable[CommitEntry]) -> set[str]:
    """Every manifest and pack that these commits need."""
    found: set[str] = set()
    for commit in commits:
        for ref, manifest in zip(commit.manifests, repository.manifests(commit), strict=True):
            found |= {ref.path, *(chunk.pack for chunk in manifest.chunks)}
    return found


def steps(tier: Tier, lineage: str = "main") -> list[int]:
    """The steps that a newcomer sees."""
    return [commit.step for commit in Repository.open(tier, lineage).visible()]


def with_objects(tier: MemoryTier, changes: Mapping[str, bytes | None]) -> MemoryTier:
    """A copy in which these objects are replaced, or gone (None)."""
    objects = {**dict(tier.snapshot()), **changes}
    return MemoryTier(tuple((path, data) for path, data in objects.items() if data is not None))


def flipped(tier: MemoryTier, path: str, at: int = 200) -> MemoryTier:
    """A copy in which one bit of one object is another."""
    raw = tier.read(path)
    return with_objects(tier, {path: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]})


def as_of_an_older_writer(tier: Tier) -> None:
    """Make the log one of an older writer, which recorded neither how journals end nor, in commits, when they were made."""
    old: list[LogEntry] = []
    Log.open(tier).audit(old.append)
    for line in old:
        tier.delete(paths.log_entry("main", line.n))
    log = Log.open(tier)
    for line in old:
        entry = line.entry
        if isinstance(entry, GenerationEntry):
            entry = msgspec.structs.replace(entry, parent_head="")
        elif isinstance(entry, CommitEntry):
            entry = msgspec.structs.replace(entry, time="")
        log.append(entry, writer=WRITER, clock=StillClock(), check=lambda state: None)
