"""Manifests: what one node contributes to a checkpoint, checked the same way right before it is written and right after it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from msgspec import UNSET

from unbroken.codec.digest import digest, rank_root, state_root
from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.planes import IDENTITY, NEEDS_BASE
from unbroken.core.errors import Damaged
from unbroken.core.limits import LEAF_BYTES, MAX_CHAIN, MAX_PIECES
from unbroken.core.ports import Tier
from unbroken.core.records import ChunkRef, CommitEntry, Manifest, ManifestRef, StoredPiece
from unbroken.store import paths
from unbroken.store.packs import ALIGN_BYTES, MAX_CHUNK_BYTES
from unbroken.store.sealed import read_bounded, unseal
from unbroken.store.shards import check_partials, check_shard

_FEW, _READERS = 4, 16


def roots(pieces: Iterable[StoredPiece], ranks: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """The state root and each rank's root, from the pieces' digests."""
    by_rank: dict[int | None, list[StoredPiece]] = {rank: [] for rank in (None, *ranks)}
    for stored in pieces:
        by_rank[stored.rank].append(stored)
    state = state_root((s.piece, s.digest) for s in by_rank[None])
    return state, tuple(rank_root((s.piece, s.digest) for s in by_rank[rank]) for rank in ranks)


def check_manifest(manifest: Manifest, path: str) -> None:
    """Raises Damaged when any part of a manifest contradicts another or points where nothing of ours can be."""
    ranks = manifest.ranks
    if list(ranks) != sorted(set(ranks)) or (ranks and ranks[-1] >= manifest.world_size) or len(ranks) != len(manifest.rank_roots):
        raise Damaged(
            path, f"ranks {list(ranks)[:8]} do not fit world size {manifest.world_size} and {len(manifest.rank_roots)} rank roots"
        )
    if len(manifest.pieces) > MAX_PIECES:
        raise Damaged(path, f"{len(manifest.pieces)} pieces; at most {MAX_PIECES}")
    depths: list[int] = []
    for number, chunk in enumerate(manifest.chunks):
        _check_chunk(number, chunk, path)
        depths.append(0 if chunk.base is UNSET else depths[chunk.base] + 1)
        if depths[-1] > MAX_CHAIN:
            raise Damaged(path, f"chunk {number} is a difference of more than {MAX_CHAIN} differences")
    seen: set[tuple[int | None, str]] = set()
    known = {None, *ranks}
    for stored in manifest.pieces:
        name = (stored.rank, stored.piece.pointer)
        if name in seen or stored.rank not in known or (stored.rank is None) != (stored.piece.scope == "logical"):
            raise Damaged(path, f"piece {stored.piece.pointer!r} of rank {stored.rank} is there twice or has the wrong scope")
        seen.add(name)
        _check_extents(stored, manifest.chunks, path)
        check_shard(stored, path)
    if roots(manifest.pieces, ranks) != (manifest.state_root, manifest.rank_roots):
        raise Damaged(path, "the roots do not follow from the pieces' digests")


def load_written(tier: Tier, ref: ManifestRef, whoever: str) -> Manifest:
    """The manifest that `ref` names, checked in itself only. Raises Damaged, NewerFormat, Transient."""
    if paths.manifest_name(ref.path) is None:
        raise Damaged(ref.path, "is not the name of a manifest")
    try:
        raw = read_bounded(tier, ref.path)
    except FileNotFoundError:
        raise Damaged(ref.path, "missing") from None
    if len(raw) != ref.size_bytes or digest(raw) != ref.digest:
        raise Damaged(ref.path, f"is not the file that {whoever} names")
    manifest = unseal("manifest", raw, Manifest, ref.path)
    check_manifest(manifest, ref.path)
    return manifest


def load_manifest(tier: Tier, ref: ManifestRef, commit: CommitEntry) -> Manifest:
    """The manifest that a commit names, verified. Raises Damaged, NewerFormat, Transient."""
    manifest = load_written(tier, ref, f"the commit of step {commit.step}")
    is_sharded = manifest.partial is not UNSET
    has_root = is_sharded or manifest.state_root == commit.state_root
    if (manifest.step, manifest.generation, is_sharded) != (commit.step, commit.generation, commit.kind == "sharded") or not has_root:
        raise Damaged(ref.path, f"belongs to step {manifest.step} of generation {manifest.generation} or has another state root")
    return manifest


def load_manifests(tier: Tier, commit: CommitEntry) -> list[Manifest]:
    """All manifests of a commit, one consistent cut. Of many nodes they are read side by side: each costs a round trip."""
    if len(commit.manifests) <= _FEW:
        manifests = [load_manifest(tier, ref, commit) for ref in commit.manifests]
    else:
        with ThreadPoolExecutor(_READERS) as readers:
            manifests = list(readers.map(lambda ref: load_manifest(tier, ref, commit), commit.manifests))
    if check_cut(manifests) != commit.state_root:
        raise Damaged(f"checkpoint of step {commit.step}", "its state root does not follow from its manifests")
    return manifests


def check_cut(manifests: Sequence[Manifest]) -> str:
    """The state root of one consistent cut. Raises Damaged unless they are one: same step, generation and root, every rank once (I5).

    Of a sharded state each manifest has a part: then the root is that of all of them together.
    """
    if not manifests:
        raise Damaged("commit", "names no manifest, and needs at least one")
    first = manifests[0]
    name = f"checkpoint of step {first.step}"
    for m in manifests[1:]:
        if (m.step, m.generation, m.nonce, m.world_size) != (first.step, first.generation, first.nonce, first.world_size):
            raise Damaged(name, f"nodes {first.node} and {m.node} froze different steps or generations: not a consistent cut")
        if m.partial != first.partial:
            raise Damaged(name, f"nodes {first.node} and {m.node}: one has all of the state, the other a part of it")
        if m.partial is UNSET and m.state_root != first.state_root:
            raise Damaged(name, f"nodes {first.node} and {m.node} have different state roots")
    ranks = sorted(rank for m in manifests for rank in m.ranks)
    if ranks != list(range(first.world_size)):
        raise Damaged(name, f"snapshots of ranks {ranks[:16]} where each of 0..{first.world_size - 1} must be there once")
    return first.state_root if first.partial is UNSET else check_partials(manifests, name)


def commit_entry(
    manifests: Sequence[tuple[Manifest, ManifestRef]],
    state_root: str,
    *,
    milestone: bool,
    journal_head: str,
    journal_lines: int,
    time: str,
) -> CommitEntry:
    """The commit of a consistent cut: nothing but the manifests, the journal up to it and the time decide what it says."""
    first = manifests[0][0]
    return CommitEntry(
        step=first.step,
        generation=first.generation,
        kind=_kind([manifest for manifest, _ in manifests]),
        milestone=milestone,
        manifests=tuple(ref for _, ref in sorted(manifests, key=lambda pair: pair[0].node)),
        state_root=state_root,
        size_bytes=sum(stored.size_bytes for manifest, _ in manifests for stored in manifest.pieces),
        journal_head=journal_head,
        journal_lines=journal_lines,
        time=time,
    )


def _kind(manifests: Sequence[Manifest]) -> Literal["full", "incremental", "sharded"]:
    if manifests[0].partial is not UNSET:
        return "sharded"
    return "incremental" if any(c.base is not UNSET for manifest in manifests for c in manifest.chunks) else "full"


def is_cut_at_leaves(stored: StoredPiece, chunks: Sequence[ChunkRef]) -> bool:
    """True when the piece is a row of whole chunks, all but the last of whole leaves: then their leaves are the piece's."""
    sizes = [chunks[e.chunk].raw_bytes for e in stored.extents]
    whole = all(e.length == size for e, size in zip(stored.extents, sizes, strict=True))
    return bool(sizes) and whole and all(size % LEAF_BYTES == 0 for size in sizes[:-1])


def _check_chunk(number: int, chunk: ChunkRef, path: str) -> None:
    if paths.pack_origin(chunk.pack) is None:
        raise Damaged(path, f"chunk {number} names {chunk.pack[:200]!r}, which is not the name of a pack")
    if chunk.offset < ALIGN_BYTES or chunk.offset % ALIGN_BYTES:
        raise Damaged(path, f"chunk {number} at offset {chunk.offset}, where no chunk can be")
    if not (0 < chunk.raw_bytes <= MAX_CHUNK_BYTES and 0 < chunk.stored_bytes <= MAX_CHUNK_BYTES):
        raise Damaged(path, f"chunk {number} claims {chunk.stored_bytes} stored and {chunk.raw_bytes} raw bytes; at most {MAX_CHUNK_BYTES}")
    if (chunk.sum is UNSET) != (chunk.codec == IDENTITY):
        raise Damaged(path, f"chunk {number} of codec {chunk.codec} {'lacks' if chunk.codec else 'has'} a digest of its stored bytes")
    if chunk.base is not UNSET and (chunk.base >= number or chunk.codec not in NEEDS_BASE):
        raise Damaged(path, f"chunk {number} of codec {chunk.codec} names chunk {chunk.base} as its base")
    if chunk.base is UNSET and chunk.codec in NEEDS_BASE:
        raise Damaged(path, f"chunk {number} is a difference, but from nothing")


def _check_extents(stored: StoredPiece, chunks: Sequence[ChunkRef], path: str) -> None:
    total = 0
    for extent in stored.extents:
        if extent.chunk >= len(chunks) or extent.length == 0 or extent.offset + extent.length > chunks[extent.chunk].raw_bytes:
            raise Damaged(path, f"piece {stored.piece.pointer!r} has bytes outside its chunks")
        total += extent.length
    if total != stored.size_bytes:
        raise Damaged(path, f"piece {stored.piece.pointer!r} claims {stored.size_bytes} bytes, its extents hold {total}")
    item = ITEM_BYTES.get(stored.piece.dtype)
    if item is not None and math.prod(stored.piece.shape) * item != total:
        raise Damaged(path, f"piece {stored.piece.pointer!r} holds {total} bytes, which is not its dtype and shape")
