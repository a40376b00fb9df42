"""Storing again, more tightly, what checkpoints still need of files that hold mostly what nobody needs.

A pack of which less than half is needed is rewritten: the needed chunks are copied, as they are stored, into new packs. A chunk whose chain
of differences leads down to ones that no checkpoint needs for themselves is stored whole, where that frees space. Then each checkpoint
concerned is committed again, the same (step, generation) and state root with new manifests: the log says that such an entry replaces the
one before (docs/decisions/0012). So at any moment every checkpoint is whole in the old files or in the new ones. What no commit names any
more is left to the collection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.planes import IDENTITY, encode
from unbroken.core.errors import Damaged, Fenced
from unbroken.core.ports import Clock, Nonces, Tier, failpoint
from unbroken.core.records import ChunkRef, CommitEntry, Extent, Generation, LogState, Manifest, StoredPiece, Writer
from unbroken.store import paths
from unbroken.store.catalog import condemned_objects
from unbroken.store.chains import Located, locate, tabulate
from unbroken.store.fence import check_collector
from unbroken.store.holds import Holds
from unbroken.store.lineages import OtherLineages
from unbroken.store.loading import Chunks
from unbroken.store.log import Log, key_of, reach
from unbroken.store.manifests import check_cut, load_manifest
from unbroken.store.packs import ALIGN_BYTES, Chunk, Origin, read_stored
from unbroken.store.sealed import ENCODED_FORMAT, PLAIN_FORMAT
from unbroken.store.writing import Writing

Place = tuple[str, int]
"""Where a chunk lies: pack and offset."""


@dataclass(frozen=True)
class Held:
    """A checkpoint that may be committed again, and what it is made of."""

    commit: CommitEntry
    manifests: tuple[Manifest, ...]


@dataclass
class Plan:
    """What to copy as it is stored, what to store whole, and what that is about to free.

    `written_bytes` come before the first file goes; of what is stored whole they are an estimate.
    """

    held: tuple[Held, ...]
    copied: dict[Place, ChunkRef] = field(default_factory=dict)
    whole: dict[Place, tuple[Manifest, int, int]] = field(default_factory=dict)
    packs: dict[str, int] = field(default_factory=dict)
    written_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """Of the packs that go, less what is written in their place."""
        return sum(self.packs.values()) - self.written_bytes

    @property
    def concerned(self) -> list[Held]:
        """The checkpoints that are committed again."""
        return [one for one in self.held if any(self._moves(chunk) for manifest in one.manifests for chunk in manifest.chunks)]

    def _moves(self, chunk: ChunkRef) -> bool:
        return chunk.pack in self.packs or _place(chunk) in self.whole


def survey(tier: Tier, log: Log) -> Plan:
    """What is worth storing again. Reads manifests, and the sizes of packs. Raises Damaged, Transient."""
    state, limits = log.state, reach(log.state)
    others = OtherLineages(tier, log.lineage)
    bad, condemned = condemned_objects(state) | others.condemned(), {key_of(entry) for entry in state.condemned}
    held, pinned = [], set(others.needed())
    for commit in sorted(state.commits, key=key_of):
        try:
            manifests = tuple(load_manifest(tier, ref, commit) for ref in commit.manifests)
        except Damaged:
            if key_of(commit) not in condemned:
                raise
            continue
        packs = {chunk.pack for manifest in manifests for chunk in manifest.chunks}
        if (
            commit.step <= limits.get(commit.generation, -1)
            and key_of(commit) not in condemned
            and commit.kind != "sharded"
            and not packs & bad
        ):
            held.append(Held(commit, manifests))
        else:  # it may not be committed again: what it needs stays where it is
            pinned |= packs
    surveyor = _Surveyor(tier, tuple(held), pinned)
    return max(surveyor.plan(shorten=False), surveyor.plan(shorten=True), key=lambda plan: plan.freed_bytes)


class _Surveyor:
    """Every chunk that the held checkpoints need, by place, and which of them they need for themselves."""

    def __init__(self, tier: Tier, held: tuple[Held, ...], pinned: set[str]) -> None:
        self._held = held
        self._chunks: dict[Place, Located] = {}
        self._tops: dict[Place, tuple[Manifest, int, int]] = {}
        for manifest in (manifest for one in held for manifest in one.manifests):
            located = locate(manifest.chunks)
            for stored in manifest.pieces:
                for extent in stored.extents:
                    for one in located[extent.chunk].chain():
                        self._chunks.setdefault(_place(one.ref), one)
                    self._tops.setdefault(_place(located[extent.chunk].ref), (manifest, extent.chunk, _width(stored)))
        self._sizes = {pack: tier.size(pack) for pack in {pack for pack, _ in self._chunks}}
        self._pinned = pinned

    def plan(self, *, shorten: bool) -> Plan:
        """Without anything that is not worth it: {} where nothing is."""
        plan = Plan(self._held)
        plan.whole = self._shortened() if shorten else {}
        needed = {_place(one.ref) for top in self._tops for one in self._upto(top, plan.whole)} - plan.whole.keys()
        by_pack: dict[str, list[Place]] = {pack: [] for pack in self._sizes if pack not in self._pinned}
        for place in sorted(needed):
            if place[0] in by_pack:
                by_pack[place[0]].append(place)
        for pack, places in by_pack.items():
            kept = sum(map(self._stored, places))
            if 2 * kept < self._sizes[pack] - ALIGN_BYTES:  # which is the header
                plan.packs[pack] = self._sizes[pack]
                plan.copied |= {place: self._chunks[place].ref for place in places}
                plan.written_bytes += kept
        plan.written_bytes += sum(_aligned(self._bottom(place).stored_bytes) for place in plan.whole)
        return plan if plan.freed_bytes > 0 else Plan(self._held)

    def _upto(self, top: Place, whole: Iterable[Place]) -> Iterator[Located]:
        """A chunk and what it is built on, down to what is stored whole."""
        for one in self._chunks[top].chain():
            yield one
            if _place(one.ref) in whole:
                return

    def _shortened(self) -> dict[Place, tuple[Manifest, int, int]]:
        """Chunks to be stored whole: together those above the same ones that nobody needs otherwise, where that takes less.

        What it takes is known from the end of the chain: that is the same place of the same piece, stored whole, some steps earlier.
        """
        dead = {top: self._dead_below(top) for top in self._tops}
        above: dict[Place, set[Place]] = {}
        for top, links in dead.items():
            for link in links:
                above.setdefault(link, set()).add(top)
        chosen: dict[Place, tuple[Manifest, int, int]] = {}
        for tops in _joined(above.values()):
            freed = sum(self._stored(one) for one in tops.union(*(dead[top] for top in tops)) if one[0] not in self._pinned)
            if sum(_aligned(self._bottom(top).stored_bytes) for top in tops) < freed:
                chosen |= {top: self._tops[top] for top in tops}
        return chosen

    def _dead_below(self, top: Place) -> list[Place]:
        links: list[Place] = []
        for one in [*self._chunks[top].chain()][1:]:
            if _place(one.ref) in self._tops:
                break
            links.append(_place(one.ref))
        return links

    def _bottom(self, place: Place) -> ChunkRef:
        return [*self._chunks[place].chain()][-1].ref

    def _stored(self, place: Place) -> int:
        return _aligned(self._chunks[place].ref.stored_bytes)


class Compactor:
    """Carries a plan out, as the process that opened `generation`; what nobody needs after that is doomed in `holds`.

    A defect or a kill leaves nothing but files that no commit names.
    """

    def __init__(self, tier: Tier, log: Log, holds: Holds, generation: Generation, *, writer: Writer, clock: Clock, nonces: Nonces) -> None:
        self._tier = tier
        self._log = log
        self._generation = generation
        self._writer = writer
        self._clock = clock
        self._holds = holds
        self._writing = Writing(tier, nonces, holds, threading.RLock())

    def run(self, plan: Plan) -> int:
        """Copy, then commit again, the oldest first; bytes written. Damaged, with nothing changed, where what it copies is not whole."""
        origin = Origin(self._generation.number, paths.nonce_hex(self._generation.nonce))
        new = self._writing.store(self._chunks(plan), origin, ENCODED_FORMAT if _has_codecs(plan) else PLAIN_FORMAT)
        failpoint("compact.copied")
        places = [*plan.copied, *plan.whole]
        moved = {places[number]: ref for number, ref in new.items()}
        for one in plan.concerned:
            self._commit(one, moved, plan, origin)
        return sum(self._tier.size(pack) for pack in {ref.pack for ref in new.values()})

    def _chunks(self, plan: Plan) -> Iterator[Chunk]:
        for number, ref in enumerate(plan.copied.values()):
            stored = read_stored(self._tier, ref)
            yield Chunk(number, ref.id, b"", codec=ref.codec, stored=stored, raw_bytes=ref.raw_bytes)
        for number, (manifest, chunk, width) in enumerate(plan.whole.values(), len(plan.copied)):
            data = Chunks(self._tier, manifest).get(chunk).data
            encoded = encode(data, width, None)
            yield Chunk(number, manifest.chunks[chunk].id, data, codec=encoded.codec, stored=encoded.data if encoded.codec else None)

    def _commit(self, one: Held, moved: dict[Place, ChunkRef], plan: Plan, origin: Origin) -> None:
        manifests = [_rewritten(manifest, moved, plan) for manifest in one.manifests]
        check_cut(manifests)
        refs = tuple(self._writing.rename(manifest, origin) for manifest in manifests)
        is_incremental = any(chunk.base is not UNSET for manifest in manifests for chunk in manifest.chunks)
        entry = replace(one.commit, manifests=refs, kind="incremental" if is_incremental else "full")

        def make(state: LogState) -> CommitEntry:
            check_collector(state, self._generation.number)
            if one.commit not in state.commits:
                raise Fenced(f"step {entry.step} is not the checkpoint any more that was to be stored again")
            return entry

        failpoint("compact.before_commit")
        self._log.propose(make, writer=self._writer, clock=self._clock)
        self._holds.doomed |= {ref.path for ref in one.commit.manifests} | plan.packs.keys()  # which another lineage may have written
        failpoint("compact.committed")


def _rewritten(manifest: Manifest, moved: dict[Place, ChunkRef], plan: Plan) -> Manifest:
    """The same manifest with its chunks where they are now."""

    def now(one: Located) -> Located:
        place = _place(one.ref)
        base = None if one.base is None or place in plan.whole else now(one.base)
        return Located(moved.get(place, one.ref), base)

    located = locate(manifest.chunks)
    wanted = sorted({extent.chunk for stored in manifest.pieces for extent in stored.extents})
    table, first = tabulate(now(located[number]) for number in wanted)
    numbers = {number: first + i for i, number in enumerate(wanted)}
    pieces = tuple(
        replace(stored, extents=tuple(Extent(numbers[e.chunk], e.offset, e.length) for e in stored.extents)) for stored in manifest.pieces
    )
    return replace(manifest, chunks=table, pieces=pieces)


def _joined(sets: Iterable[set[Place]]) -> list[set[Place]]:
    """Sets with something in common as one."""
    group_of: dict[Place, set[Place]] = {}
    for one in sets:
        group = max((group_of.get(place, {place}) for place in one), key=len)
        for place in one:
            other = group_of.get(place, {place})
            if other is not group:
                group |= other
                group_of |= dict.fromkeys(other, group)
        group_of |= dict.fromkeys(one, group)
    return list({id(group): group for group in group_of.values()}.values())


def _has_codecs(plan: Plan) -> bool:
    return bool(plan.whole) or any(ref.codec != IDENTITY for ref in plan.copied.values())


def _place(ref: ChunkRef) -> Place:
    return ref.pack, ref.offset


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGN_BYTES


def _width(stored: StoredPiece) -> int:
    """Bytes of one number of a piece, for the encoding."""
    width = min(8, ITEM_BYTES.get(stored.piece.dtype, 1))
    return width // 2 if stored.piece.dtype.startswith("complex") else width
