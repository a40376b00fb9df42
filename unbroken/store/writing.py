"""Writing one node's share of a checkpoint: what the store lacks into packs, then the manifest. Visible it becomes by a commit only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from unbroken.codec.digest import digest
from unbroken.codec.planes import IDENTITY
from unbroken.core.errors import Permanent, Unsound
from unbroken.core.ports import Nonces, Tier, failpoint
from unbroken.core.records import ChunkRef, Extent, Generation, Manifest, ManifestRef, StoredPiece
from unbroken.store import paths
from unbroken.store.ahead import ahead
from unbroken.store.catalog import Index
from unbroken.store.chains import Located, tabulate
from unbroken.store.deltas import Encoder
from unbroken.store.holds import Hold, Holds
from unbroken.store.layout import FINE, AnyPart, Layout, Look, Part
from unbroken.store.log import Key
from unbroken.store.manifests import check_manifest, roots
from unbroken.store.packs import Chunk, Origin, write_packs
from unbroken.store.sealed import ENCODED_FORMAT, PLAIN_FORMAT, SHARDED_FORMAT, seal

AHEAD_BYTES = 16 << 20
"""From this size on chunks are hashed and encoded in one thread and written in another."""


class Share(NamedTuple):
    """Which part of which checkpoint is written."""

    step: int
    generation: int
    nonce: str
    node: int
    world_size: int


class Writing:
    """The writing half of a repository. Each call ends the hold that it is given, which the repository has begun."""

    def __init__(self, tier: Tier, nonces: Nonces, holds: Holds, lock: threading.RLock) -> None:
        self._tier = tier
        self._nonces = nonces
        self._holds = holds
        self._lock = lock

    def write(
        self,
        whose: Share,
        logical: Sequence[AnyPart],
        per_rank: Mapping[int, Sequence[AnyPart]],
        *,
        index: Index | None,
        hold: Hold,
        origin: Origin,
        look: Look | None = None,
        encoder: Encoder | None = None,
        partial: bool = False,
    ) -> tuple[Manifest, ManifestRef]:
        """Parts of which `index` knows chunks already are referenced there. Unsound, with nothing kept, where `look` found faults."""

        def make() -> Manifest:
            layout = Layout(logical, per_rank, look, FINE if partial else None)
            chunks = self._store_chunks(layout, index, hold, origin, encoder)
            if layout.faults:
                raise Unsound(list(layout.faults))
            table, first = tabulate(chunks)
            return _manifest(whose, tuple(sorted(per_rank)), table, [_moved(stored, first) for stored in layout.pieces], partial)

        return self._keep(make, hold, origin)

    def derive(
        self, base: Manifest, changed: Sequence[Part], generation: Generation, hold: Hold, origin: Origin
    ) -> tuple[Manifest, ManifestRef]:
        """The share that `base` is, under another generation, with the `changed` logical pieces in place of its own."""

        def make() -> Manifest:
            layout = Layout(changed, {})
            new = tuple(chunk.ref for chunk in self._store_chunks(layout, None, hold, origin))
            replaced = {stored.piece.pointer: _moved(stored, len(base.chunks)) for stored in layout.pieces}
            pieces = [replaced.get(s.piece.pointer, s) if s.rank is None else s for s in base.pieces]
            whose = Share(base.step, generation.number, generation.nonce, base.node, base.world_size)
            return _manifest(whose, base.ranks, (*base.chunks, *new), pieces)

        return self._keep(make, hold, origin)

    def store(self, chunks: Iterator[Chunk], origin: Origin, number: int) -> dict[int, ChunkRef]:
        """Put chunks of checkpoints there are into packs of their own, durable on return; after an error nothing of it stays."""
        hold = Hold(0, origin.generation)
        try:
            return write_packs(self._tier, chunks, origin, lambda: self._new_pack(hold, origin), number)
        except BaseException:  # raised again: whatever it was, what no commit will ever name must not stay
            self._undo(hold)
            raise

    def rename(self, manifest: Manifest, origin: Origin) -> ManifestRef:
        """Store a manifest of a checkpoint there is under a name of its own, durable on return; not yet named by a commit."""
        return self._store_manifest(manifest, Hold(manifest.step, manifest.generation), origin)

    def _new_pack(self, hold: Hold, origin: Origin) -> str:
        path = paths.pack(self._name(origin))
        with self._lock:
            hold.own.add(path)
        return path

    def _keep(self, make: Callable[[], Manifest], hold: Hold, origin: Origin) -> tuple[Manifest, ManifestRef]:
        written = None
        try:
            manifest = make()
            ref = self._store_manifest(manifest, hold, origin)
            written = ref.path
            return manifest, ref
        except FileExistsError as e:
            hold.own.clear()
            raise Permanent(f"{e}: this name was used before, so the source of nonces repeats itself") from e
        finally:
            with self._lock:
                self._holds.end(hold, written)
            if written is None:
                self._undo(hold)

    def _store_chunks(
        self, layout: Layout, index: Index | None, hold: Hold, origin: Origin, encoder: Encoder | None = None
    ) -> tuple[Located, ...]:
        found: dict[int, Located] = {}
        bases: dict[int, Located] = {}
        used: set[Key] = set()

        def unknown() -> Iterator[Chunk]:
            for chunk in layout:
                known = None if index is None else index.get(chunk.id)
                if known is not None:
                    found[chunk.number] = known.chunk
                    used.add(known.key)
                elif encoder is None:
                    yield chunk
                else:
                    encoded, base = encoder(chunk)
                    if base is not None:
                        bases[chunk.number] = base
                    yield encoded

        chunks = unknown() if layout.size_bytes < AHEAD_BYTES else ahead(unknown())
        written = write_packs(
            self._tier, chunks, origin, lambda: self._new_pack(hold, origin), PLAIN_FORMAT if encoder is None else ENCODED_FORMAT
        )
        failpoint("store.write.after_packs")
        found |= {number: Located(ref, bases.get(number)) for number, ref in written.items()}
        if bases and encoder is not None:
            used.add(encoder.key)
        with self._lock:
            hold.borrowed = used
        return tuple(found[number] for number in range(layout.num_chunks))

    def _store_manifest(self, manifest: Manifest, hold: Hold, origin: Origin) -> ManifestRef:
        path = paths.manifest(manifest.step, manifest.generation, self._name(origin), manifest.node)
        check_manifest(manifest, path)
        raw = seal("manifest", manifest, _format_of(manifest))
        with self._lock:
            hold.own.add(path)
        self._tier.create(path, [raw])
        failpoint("store.write.after_manifest")
        return ManifestRef(path=path, digest=digest(raw), size_bytes=len(raw))

    def _undo(self, hold: Hold) -> None:
        for path in hold.own:
            with suppress(Exception):  # safe: the write's own error is on its way up, and what stays is doomed
                self._tier.delete(path)

    def _name(self, origin: Origin) -> str:
        return paths.origin(origin.nonce) + self._nonces.nonce()[:16]


def _format_of(manifest: Manifest) -> int:
    if manifest.partial is not UNSET:
        return SHARDED_FORMAT
    return PLAIN_FORMAT if all(chunk.codec == IDENTITY for chunk in manifest.chunks) else ENCODED_FORMAT


def _manifest(
    whose: Share, ranks: tuple[int, ...], chunks: tuple[ChunkRef, ...], pieces: Sequence[StoredPiece], partial: bool = False
) -> Manifest:
    state_root, rank_roots = roots(pieces, ranks)
    return Manifest(
        step=whose.step,
        generation=whose.generation,
        nonce=whose.nonce,
        node=whose.node,
        world_size=whose.world_size,
        ranks=ranks,
        state_root=state_root,
        rank_roots=rank_roots,
        chunks=chunks,
        pieces=tuple(pieces),
        partial=True if partial else UNSET,
    )


def _moved(stored: StoredPiece, by: int) -> StoredPiece:
    """The same piece where its chunks have numbers that are greater by `by`."""
    if not by:
        return stored
    return msgspec.structs.replace(stored, extents=tuple(Extent(e.chunk + by, e.offset, e.length) for e in stored.extents))
