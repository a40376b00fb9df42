"""A forger: changes a manifest of a run and makes everything that names it fit again, checksums and digests included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from unbroken.codec.digest import digest
from unbroken.core.records import CommitEntry, LogEntry, Manifest, ManifestRef
from unbroken.store import paths
from unbroken.store.log import Log
from unbroken.store.manifests import roots
from unbroken.store.sealed import seal, unseal
from unbroken.store.tiers.disk import DiskTier


def forge(root: Path, change: Callable[[Manifest], Manifest], ref: Callable[[ManifestRef], ManifestRef] = lambda ref: ref) -> int:
    """Forge the newest checkpoint's manifest (roots follow), and the log entries after it; its step."""
    log = Log.open(DiskTier(str(root)))
    lines: list[LogEntry] = []
    log.audit(lines.append)
    newest = max(line.n for line in lines if isinstance(line.entry, CommitEntry))
    previous = ""
    step = -1
    for line in lines:
        entry = line.entry
        if line.n == newest:
            assert isinstance(entry, CommitEntry)
            step = entry.step
            entry = _forged(root, entry, change, ref)
        raw = seal("log", msgspec.structs.replace(line, entry=entry, previous=previous))
        (root / paths.log_entry("main", line.n)).write_bytes(raw)
        previous = digest(raw)
    return step


def _forged(
    root: Path, entry: CommitEntry, change: Callable[[Manifest], Manifest], ref: Callable[[ManifestRef], ManifestRef]
) -> CommitEntry:
    path = root / entry.manifests[0].path
    manifest = change(unseal("manifest", path.read_bytes(), Manifest, entry.manifests[0].path))
    state_root, rank_roots = roots(manifest.pieces, manifest.ranks)
    manifest = msgspec.structs.replace(manifest, state_root=state_root, rank_roots=rank_roots)
    raw = seal("manifest", manifest)
    path.write_bytes(raw)
    forged = msgspec.structs.replace(entry.manifests[0], digest=digest(raw), size_bytes=len(raw))
    return msgspec.structs.replace(entry, manifests=(ref(forged),), state_root=state_root)
