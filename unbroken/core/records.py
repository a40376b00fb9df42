"""The records that rooms exchange and that files hold. Frozen, no logic; decoding validates types and bounds.

Words: a *piece* is one named part of the state (JSON pointer, RFC 6901). A *logical* piece is the same whoever computes it and
enters the state root; a *rank* piece belongs to one rank and enters that rank's rank root. An *extent* is a byte range of a chunk.
Digests are lower-case hex BLAKE3-256.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from unbroken.core.limits import KEEP_NEWEST, MAX_COUNT, MAX_POINTER_CHARS

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Pointer = Annotated[str, Meta(max_length=MAX_POINTER_CHARS)]
Path = Annotated[str, Meta(min_length=1, max_length=MAX_POINTER_CHARS)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

Role = Literal["restored", "compared", "recorded"]
Layer = Literal["hardware", "framework", "scheduling"]
Scope = Literal["logical", "rank"]


MAIN_LINEAGE = "main"
"""The lineage that a run is born with."""


class Piece(Struct, frozen=True, kw_only=True):
    """What a piece is, without its bytes.

    `dtype` is a torch dtype name ("float32", "bfloat16") or a typed scalar or container ("py:int", "py:dict", "alias", ...);
    `shape` counts elements, () for scalars; the bytes are little-endian, contiguous, in logical order.
    A piece with `offsets` is a shard: the box of `shape` that begins there in a tensor of `global_shape`.
    """

    pointer: Pointer
    dtype: str
    shape: tuple[Count, ...] = ()
    scope: Scope = "logical"
    role: Role = "restored"
    layer: Layer = "framework"
    kind: str = "value"
    captured: str = "boundary"
    global_shape: tuple[Count, ...] | UnsetType = UNSET
    offsets: tuple[Count, ...] | UnsetType = UNSET


class Placed(Struct, frozen=True, kw_only=True):
    """A piece and where its bytes lie inside a slot's data area."""

    piece: Piece
    offset: Count
    size_bytes: Count


class SlotIndex(Struct, frozen=True, kw_only=True):
    """The directory of one frozen snapshot of one rank."""

    generation: Count
    step: Count
    rank: Count
    world_size: Count
    milestone: bool
    pieces: tuple[Placed, ...]


class ChunkRef(Struct, frozen=True, kw_only=True):
    """Where a chunk lies: `id` is the digest of its raw bytes, `codec` the registry byte that turns stored into raw bytes.

    `sum` is the digest of the stored bytes where they are not the raw ones. `base` is the number, in the same manifest and lower than
    its own, of the chunk that this one is a difference from.
    """

    id: Digest
    pack: Path
    offset: Count
    stored_bytes: Count
    raw_bytes: Count
    codec: Count = 0
    sum: Digest | UnsetType = UNSET
    base: Count | UnsetType = UNSET


class Extent(Struct, frozen=True, array_like=True):
    """Bytes [offset, offset + length) of chunk number `chunk` of the same manifest."""

    chunk: Count
    offset: Count
    length: Count


class StoredPiece(Struct, frozen=True, kw_only=True):
    """A piece with its digest and its bytes as a concatenation of extents. `rank` is None for a logical piece."""

    piece: Piece
    rank: Count | None = None
    size_bytes: Count
    digest: Digest
    extents: tuple[Extent, ...]


class Manifest(Struct, frozen=True, kw_only=True):
    """All pieces that one node contributes to a checkpoint. Immutable; carries its generation's nonce.

    `state_root` covers the logical restored pieces, `rank_roots[i]` the restored rank pieces of global rank `ranks[i]`.
    `partial`: the logical pieces here are only this node's part of them; those of all nodes together are the state.
    """

    step: Count
    generation: Count
    nonce: str
    node: Count
    world_size: Count
    ranks: tuple[Count, ...]
    state_root: Digest
    rank_roots: tuple[Digest, ...]
    chunks: tuple[ChunkRef, ...]
    pieces: tuple[StoredPiece, ...]
    partial: Literal[True] | UnsetType = UNSET


class ShardRef(Struct, frozen=True, array_like=True):
    """A box of a tensor and the node whose manifest holds it, in one or more pieces; an empty box is held by nobody (-1)."""

    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]
    node: Annotated[int, Meta(ge=-1)]


class TensorEntry(Struct, frozen=True, kw_only=True, tag="tensor"):
    """One tensor of a sharded state, by the flat name that torch's planner gave it; its pieces lie beneath `/state/<name>`.

    `path` are the keys and list indices that lead to it in the nested state, where that is known. The last four fields are torch's.
    """

    name: Pointer
    path: tuple[str | int, ...] | None
    dtype: str
    shape: tuple[Count, ...]
    shards: tuple[ShardRef, ...]
    layout: str = "strided"
    memory_format: str = "contiguous_format"
    requires_grad: bool = False
    pin_memory: bool = False


class ValueEntry(Struct, frozen=True, kw_only=True, tag="value"):
    """Anything else in a sharded state: the tree of pieces at `/state/<name>` in the manifest of `node`."""

    name: Pointer
    path: tuple[str | int, ...] | None
    node: Count


class StateIndex(Struct, frozen=True, kw_only=True):
    """What a sharded state is made of and who wrote it: the JSON in the piece `/index` of its last manifest. No two steps share one."""

    step: Count
    entries: tuple[TensorEntry | ValueEntry, ...]


class ManifestRef(Struct, frozen=True, kw_only=True):
    """A manifest named by path and by the digest of the whole file."""

    path: Path
    digest: Digest
    size_bytes: Count


class Generation(Struct, frozen=True, kw_only=True):
    """One line of the lineage table. Every start of the run opens one; the first is number 0 and has parent None.

    `base_step` is the step whose state it continues from (0 for a fresh start); commits of an ancestor beyond it do not exist.
    """

    number: Count
    parent: Count | None
    base_step: Count
    nonce: str
    world_size: Annotated[int, Meta(ge=1)]


class Writer(Struct, frozen=True, kw_only=True):
    """Who wrote an entry or holds a run: for people and for the take-over rule."""

    host: str
    pid: Count
    boot_id: str
    since: str


class GenerationEntry(Struct, frozen=True, kw_only=True, tag="generation"):
    """Opens `generation`; from here on older generations are fenced. `base_root` is the state root of its base, "" when fresh.

    `parent_head` anchors the end of the journal before: the chain value of its last durable line, that of the generation opened
    just before this one. "" when there was none, when it could not be read, and in entries of older writers.
    """

    generation: Generation
    base_root: str = ""
    source: str = "fresh"
    parent_head: str = ""


class CommitEntry(Struct, frozen=True, kw_only=True, tag="commit"):
    """Makes a checkpoint visible. But for `time` a pure function of the manifests and of the journal up to it.

    `kind`: "incremental" where something in it is stored as a difference from an older checkpoint; "sharded" where its manifests are
    partial.
    `time` is UTC, for people; "" in entries of older writers. `journal_head` is the chain value of the journal line of `step`;
    `journal_lines` how many lines precede and include it.
    """

    step: Count
    generation: Count
    kind: Literal["full", "incremental", "sharded"] = "full"
    milestone: bool = False
    manifests: tuple[ManifestRef, ...]
    state_root: Digest
    size_bytes: Count
    journal_head: str
    journal_lines: Count
    time: str = ""


class CondemnEntry(Struct, frozen=True, kw_only=True, tag="condemn"):
    """Names damaged objects. The commit (step, generation) stops being visible; chunks of `objects` are never referenced again."""

    step: Count
    generation: Count
    objects: tuple[Path, ...]
    reason: str


class PruneEntry(Struct, frozen=True, kw_only=True, tag="prune"):
    """Withdraws commits before their objects are deleted (I2): `commits` are (step, generation)."""

    commits: tuple[tuple[int, int], ...]
    objects: tuple[Path, ...] = ()


class Change(Struct, frozen=True, kw_only=True):
    """One value of a piece that was changed on purpose, as people write it."""

    pointer: Pointer
    before: str
    after: str


class BranchEntry(Struct, frozen=True, kw_only=True, tag="branch"):
    """First entry of a lineage that another one begets: its base is the commit (step, generation) of the lineage `parent`.

    It makes nothing visible. Until a commit follows, `manifests` (the parent's, and their packs) must not be deleted. `changes` are what
    the base checkpoint of this lineage has other than the parent's; `state_root` is the parent's. `replay`: it is there to make this step
    of the parent again, and goes no further; left out of other branches.
    """

    parent: str
    step: Count
    generation: Count
    state_root: Digest
    manifests: tuple[ManifestRef, ...]
    changes: tuple[Change, ...] = ()
    replay: Count | UnsetType = UNSET


Entry = GenerationEntry | CommitEntry | CondemnEntry | PruneEntry | BranchEntry


class LogState(Struct, frozen=True, kw_only=True):
    """The fold of all entries so far: what every 256th entry carries as its summary. `branch` is left out where there is none."""

    generations: tuple[Generation, ...] = ()
    commits: tuple[CommitEntry, ...] = ()
    condemned: tuple[CondemnEntry, ...] = ()
    pruned: tuple[tuple[int, int], ...] = ()
    branch: BranchEntry | UnsetType = UNSET


class LogEntry(Struct, frozen=True, kw_only=True):
    """Body of `log/<n>.json`. `previous` is the digest of the file of entry n-1 ("" for 0, or when that one is damaged)."""

    n: Count
    previous: str
    time: str
    writer: Writer
    lineage: tuple[Generation, ...]
    entry: Entry
    summary: LogState | None = None


class Best(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `num` checkpoints whose steps have logged the smallest, or the `largest`, values of a metric."""

    metric: str
    largest: bool = False
    num: Annotated[int, Meta(ge=1)] = 1


class Keep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints stay besides milestones: all that one of the rules keeps.

    newest: the newest so many. every_steps: the first at or after each multiple. hours: the newest of each of the newest so many hours
    that have one. best: the best by a metric. reach_back: the newest one that is so many steps older than the newest of all.
    """

    newest: Annotated[int, Meta(ge=1)] = KEEP_NEWEST
    every_steps: Annotated[int, Meta(ge=1)] | None = None
    hours: Count = 0
    best: Best | None = None
    reach_back: Count = 0


class RunFacts(Struct, frozen=True, kw_only=True):
    """Body of `run.json`: what was fixed at the run's birth. `options` are the birth facts of the trainer (units, seed, threads, order)."""

    run_id: str
    created: str
    authority: str = "self"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class StepRecord(Struct, frozen=True, kw_only=True, tag="step"):
    """Journal: one step applied by all ranks.

    `units` holds, per unit, the digest (32 hex) of the sample ids that came out of the loader on the computing rank;
    `loss` the bits of the step's float64 loss as 16 hex digits, `clock` each rank's (generation, step) as [generation, step, count]
    runs; `root` the state root where a snapshot was taken; `status` "applied" or "skipped": weights untouched, its data used up.
    `reason`: why an anomaly's step was skipped; left out of other lines, as older writers did.
    """

    step: Count
    attempt: Count = 0
    units: tuple[str, ...]
    num_samples: Count
    loss: str
    clock: tuple[tuple[int, int, int], ...]
    status: Literal["applied", "skipped"] = "applied"
    reason: str | UnsetType = UNSET
    time_s: float


class RootRecord(Struct, frozen=True, kw_only=True, tag="root"):
    """Journal: the roots of a snapshot, written when it has been hashed, before its commit entry."""

    step: Count
    state_root: Digest
    rank_roots: tuple[Digest, ...]


class BeginRecord(Struct, frozen=True, kw_only=True, tag="begin"):
    """Journal: first line of a generation: where it starts, from which source, the root that was loaded and found equal."""

    generation: Count
    base_step: Count
    source: str
    loaded_root: str
    world_size: Count
    time_s: float
    differences: tuple[str, ...] = ()


class EventRecord(Struct, frozen=True, kw_only=True, tag="event"):
    """Journal: anything else worth keeping: recovery phases, a failed or skipped save, a refused attempt, a signal.

    `at` are named moments in seconds of the host's monotonic clock; `facts` are numbers and words.
    """

    name: str
    step: Count
    at: dict[str, float] = msgspec.field(default_factory=dict)
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


Record = StepRecord | RootRecord | BeginRecord | EventRecord


class JournalLine(Struct, frozen=True, kw_only=True):
    """One line of `journal/<generation>.jsonl`: `chain` = BLAKE3(previous chain || encoded record). The first previous is the nonce."""

    chain: Digest
    record: Record
