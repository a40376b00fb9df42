"""What the known commits hold: their manifests' chunks, read once, and the index that lets a new checkpoint reuse them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from unbroken.core.errors import Damaged, Transient
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry, LogState, Manifest, ManifestRef
from unbroken.store import paths
from unbroken.store.chains import Located, locate
from unbroken.store.log import Key, key_of, visible
from unbroken.store.manifests import load_manifest

_WAITING = 4
"""Manifests that were written here and may be committed by another process."""


class Known(NamedTuple):
    """A chunk that need not be written again, and the newest visible commit that holds it."""

    chunk: Located
    key: Key


class Index:
    """Chunks of visible commits by id. Whether one may be used is found out when it is asked for: who reuses nothing asks the tier nothing.

    It may not where a pack of its chain is condemned in another lineage or is not whole. Cost: one size call per pack that is used.
    """

    def __init__(self, tier: Tier, found: dict[str, Known], elsewhere: Callable[[], Collection[str]]) -> None:
        self.commits = {known.key for known in found.values()}
        self._tier = tier
        self._found = found
        self._elsewhere = elsewhere
        self._condemned: Collection[str] | None = None
        self._sizes: dict[str, int] = {}

    def get(self, chunk_id: str) -> Known | None:
        """The chunk with these bytes, None where it has to be written."""
        known = self._found.get(chunk_id)
        return known if known is not None and all(map(self._is_sound, known.chunk.chain())) else None

    def _is_sound(self, one: Located) -> bool:
        if self._condemned is None:
            self._condemned = self._elsewhere()
        pack = one.ref.pack
        if pack not in self._sizes:
            try:
                self._sizes[pack] = self._tier.size(pack)
            except FileNotFoundError:
                self._sizes[pack] = -1
        return pack not in self._condemned and one.ref.offset + one.ref.stored_bytes <= self._sizes[pack]


class Catalog:
    """Chunk tables by commit and manifest. About 300 bytes per chunk and kept commit."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._tables: dict[Key, dict[str, tuple[Located, ...]]] = {}
        self._written: dict[str, tuple[Located, ...]] = {}

    def put(self, key: Key, manifests: Mapping[str, Manifest]) -> None:
        """Remember a commit's manifests by path, so that they need not be read back."""
        self._tables.setdefault(key, {}).update({path: locate(manifest.chunks) for path, manifest in manifests.items()})

    def wrote(self, path: str, manifest: Manifest) -> None:
        """Remember a manifest that was written here, before anybody commits it; the last few are kept."""
        self._written[path] = locate(manifest.chunks)
        while len(self._written) > _WAITING:
            del self._written[next(iter(self._written))]

    def forget_others(self, keys: Collection[Key]) -> None:
        """Drop what belongs to none of these commits."""
        self._tables = {key: tables for key, tables in self._tables.items() if key in keys}

    def chunks(self, commit: CommitEntry) -> tuple[Located, ...]:
        """All chunks of a commit, bases too. Raises Damaged when one of its manifests is."""
        return tuple(chunk for ref in commit.manifests for chunk in self._table(commit, ref))

    def packs(self, commit: CommitEntry) -> set[str]:
        """The packs that a commit needs. Raises Damaged when one of its manifests is."""
        return {chunk.ref.pack for chunk in self.chunks(commit)}

    def index(self, state: LogState, elsewhere: Callable[[], Collection[str]] = tuple, node: int = 0) -> Index:
        """By id, the chunks of visible commits in packs that this log does not condemn: those that `node` has written itself.

        Of several that hold the same bytes the one that is read with the fewest others counts. Nodes do not read each other's
        manifests: with n of them that would be n times n requests. `elsewhere` tells what other lineages have condemned.
        """
        condemned = condemned_objects(state)
        result: dict[str, Known] = {}
        for commit in visible(state):
            own = [ref for ref in commit.manifests if len(commit.manifests) == 1 or paths.manifest_node(ref.path) == node]
            try:
                chunks = [chunk for ref in own for chunk in self._table(commit, ref)]
            except Damaged:  # safe: its chunks are only written anew; whoever reads this commit gets the error
                continue
            for chunk in chunks:
                there = result.get(chunk.ref.id)
                if (there is None or chunk.depth <= there.chunk.depth) and condemned.isdisjoint(chunk.packs):
                    result[chunk.ref.id] = Known(chunk, key_of(commit))
        return Index(self._tier, result, elsewhere)

    def _table(self, commit: CommitEntry, ref: ManifestRef) -> tuple[Located, ...]:
        tables = self._tables.setdefault(key_of(commit), {})
        if ref.path not in tables:
            written = self._written.get(ref.path)
            tables[ref.path] = locate(load_manifest(self._tier, ref, commit).chunks) if written is None else written
        return tables[ref.path]

    def borrowed(self, manifest: Manifest, ref: ManifestRef, state: LogState, there: Collection[str] = ()) -> set[Key]:
        """For a manifest that another process wrote: the commits that must still be visible when it is committed.

        Its packs are its generation's own or those of visible commits. Raises Transient when an object is neither, or gone. `there` are
        objects that a listing has named: no listing proves that one is not there, so the others are asked for.
        """
        try:
            for path in {ref.path, *(chunk.pack for chunk in manifest.chunks)}.difference(there):
                self._tier.size(path)
        except FileNotFoundError as e:
            raise Transient(f"step {manifest.step} needs {e}, which is gone: write it again") from e
        own = {paths.origin(g.nonce) for g in state.generations if g.number >= manifest.generation}
        foreign = {chunk.pack for chunk in manifest.chunks if paths.pack_origin(chunk.pack) not in own}
        keys: set[Key] = set()
        for commit in reversed(visible(state)):
            shared = foreign & self.packs(commit) if foreign else set()
            if shared:
                keys.add(key_of(commit))
                foreign -= shared
        if foreign:
            raise Transient(f"step {manifest.step} reuses {min(foreign)}, which no visible checkpoint holds: write it again")
        return keys


def condemned_objects(state: LogState) -> set[str]:
    """Paths that must never be referenced again."""
    return {path for entry in state.condemned for path in entry.objects}
