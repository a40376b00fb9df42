"""What the known commits hold: their manifests' chunks, read once, and the index that lets a new checkpoint reuse them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from unbroken.core.errors import Damaged, Transient
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry, LogState, Manifest, ManifestRef
from unbroken.store import paths
from unbroken.store.chains import Located, locate
from unbroken.store.log import Key, key_of, visible
from unbroken.store.manifests import load_manifest
from unbroken.store.paths import manifest_name


class Known(NamedTuple):
    """A chunk that need not be written again, and the newest visible commit that holds it."""

    chunk: Located
    key: Key


class Catalog:
    """Chunk tables by commit. About 300 bytes per chunk and kept commit."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._chunks: dict[Key, tuple[tuple[ManifestRef, ...], tuple[Located, ...]]] = {}
        self._of_node: dict[tuple[Key, int], tuple[Located, ...]] = {}

    def put(self, commit: CommitEntry, manifests: Iterable[Manifest]) -> None:
        """Remember a commit just made, so that its manifests need not be read back."""
        self._chunks[key_of(commit)] = commit.manifests, tuple(chunk for manifest in manifests for chunk in locate(manifest.chunks))

    def forget_others(self, keys: Collection[Key]) -> None:
        """Drop what belongs to none of these commits."""
        self._chunks = {key: chunks for key, chunks in self._chunks.items() if key in keys}
        self._of_node = {name: chunks for name, chunks in self._of_node.items() if name[0] in keys}

    def chunks(self, commit: CommitEntry) -> tuple[Located, ...]:
        """All chunks of a commit, bases too. Raises Damaged when one of its manifests is."""
        known, chunks = self._chunks.get(key_of(commit), ((), ()))
        if not known or known != commit.manifests:  # the same checkpoint may have been committed again with other manifests
            self.put(commit, (load_manifest(self._tier, ref, commit) for ref in commit.manifests))
            _, chunks = self._chunks[key_of(commit)]
        return chunks

    def _own_chunks(self, commit: CommitEntry, node: int) -> tuple[Located, ...]:
        """Those of the manifest that this node wrote, none if it wrote none."""
        name = (key_of(commit), node)
        if name not in self._of_node:
            refs = [ref for ref in commit.manifests if (of := manifest_name(ref.path)) is not None and of.node == node]
            manifests = [load_manifest(self._tier, ref, commit) for ref in refs]
            self._of_node[name] = tuple(chunk for manifest in manifests for chunk in locate(manifest.chunks))
        return self._of_node[name]

    def packs(self, commit: CommitEntry) -> set[str]:
        """The packs that a commit needs. Raises Damaged when one of its manifests is."""
        return {chunk.ref.pack for chunk in self.chunks(commit)}

    def index(self, state: LogState, elsewhere: Collection[str] = (), node: int | None = None) -> dict[str, Known]:
        """By id, the chunks of visible commits that lie whole in packs never condemned, here or `elsewhere`. One size call per pack.

        Of several that hold the same bytes the one that is read with the fewest others counts. With `node` only what this node wrote:
        many nodes that save together must not each read the manifests of all.
        """
        condemned = condemned_objects(state) | set(elsewhere)
        sizes: dict[str, int] = {}

        def is_sound(chunk: Located) -> bool:
            return all(
                one.ref.pack not in condemned and one.ref.offset + one.ref.stored_bytes <= self._size(one.ref.pack, sizes)
                for one in chunk.chain()
            )

        result: dict[str, Known] = {}
        for commit in visible(state):
            try:
                chunks = self.chunks(commit) if node is None else self._own_chunks(commit, node)
            except Damaged:  # safe: its chunks are only written anew; whoever reads this commit gets the error
                continue
            for chunk in chunks:
                there = result.get(chunk.ref.id)
                if (there is None or chunk.depth <= there.chunk.depth) and is_sound(chunk):
                    result[chunk.ref.id] = Known(chunk, key_of(commit))
        return result

    def borrowed(self, manifest: Manifest, ref: ManifestRef, state: LogState) -> set[Key]:
        """For a manifest that another process wrote: the commits that must still be visible when it is committed.

        Its packs are its generation's own or those of visible commits. Raises Transient when an object is neither, or gone.
        """
        try:
            for path in (ref.path, *{chunk.pack for chunk in manifest.chunks}):
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

    def _size(self, pack: str, sizes: dict[str, int]) -> int:
        if pack not in sizes:
            try:
                sizes[pack] = self._tier.size(pack)
            except FileNotFoundError:
                sizes[pack] = -1
        return sizes[pack]


def condemned_objects(state: LogState) -> set[str]:
    """Paths that must never be referenced again."""
    return {path for entry in state.condemned for path in entry.objects}
