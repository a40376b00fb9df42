"""Verification of a whole run: every digest and root recomputed from the stored bytes, every bad object named by its path."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from unbroken.codec.digest import join_leaves
from unbroken.codec.planes import IDENTITY
from unbroken.core.errors import Damaged
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry, Generation, LogState, Manifest, RunFacts
from unbroken.store import paths
from unbroken.store.catalog import condemned_objects
from unbroken.store.journal import first_chain, read_journal
from unbroken.store.lineages import unlogged
from unbroken.store.loading import read_pieces
from unbroken.store.log import Heads, Key, Log, key_of, visible
from unbroken.store.manifests import check_cut, is_cut_at_leaves, load_manifest
from unbroken.store.packs import Packed, audit_pack, packed
from unbroken.store.sealed import read_sealed


class VerifyReport(Struct, frozen=True, kw_only=True):
    """`bad` lists (path, what is wrong); `condemned` (step, generation, reason) of commits known to be damaged, which do not count.

    `num_chunks` is the number of distinct chunks of uncondemned checkpoints that were read and found right.
    """

    ok: bool
    num_checkpoints: int
    num_chunks: int
    bad: list[tuple[str, str]]
    condemned: list[tuple[int, int, str]]


def verify(tier: Tier, lineage: str) -> VerifyReport:
    """Read everything reachable from uncondemned commits once, and all log entries and journals. A living run may go on meanwhile."""
    audit = _Audit(tier, lineage)
    audit.facts()
    log = audit.log()
    audit.journals(log.state)
    for commit in log.state.commits:
        audit.commit(commit)
    now = Log.open(tier, lineage).state if audit.by_commit else log.state
    bad = audit.result(now)
    return VerifyReport(
        ok=not bad,
        num_checkpoints=len(visible(now)),
        num_chunks=audit.num_chunks,
        bad=bad,
        condemned=[(c.step, c.generation, c.reason) for c in now.condemned],
    )


class _Audit:
    """Findings so far. Those about a commit's objects count only while the commit is in the log: it may be pruned meanwhile."""

    def __init__(self, tier: Tier, lineage: str) -> None:
        self.by_commit: dict[Key, tuple[CommitEntry, dict[str, str]]] = {}
        self._tier = tier
        self._lineage = lineage
        self._lasting: dict[str, str] = {}
        self._known_bad: set[str] = set()
        self._condemned: set[Key] = set()
        self._may_lack_prunes = False
        self._heads: dict[int, str] = {}
        self._packs: dict[str, dict[Packed, list[bytes]] | None] = {}
        self._reasons: dict[str, str] = {}
        self._chunks: set[tuple[str, int]] = set()
        self._pieces_seen: set[tuple[object, ...]] = set()

    @property
    def num_chunks(self) -> int:
        """Distinct chunks met."""
        return len(self._chunks)

    def facts(self) -> None:
        try:
            read_sealed(self._tier, paths.RUN, "run", RunFacts)
        except FileNotFoundError:
            self._lasting[paths.RUN] = "missing"
        except Damaged as e:
            self._lasting[e.path] = e.reason

    def log(self) -> Log:
        log = Log.open(self._tier, self._lineage)
        heads = Heads()
        damage = dict(log.audit(heads.see))
        self._heads = heads.by_generation(log.state)
        self._lasting |= damage
        if path := unlogged(log):
            self._lasting[paths.log_folder(self._lineage)] = f"entries are missing: it does not know the generation that wrote {path}"
        self._may_lack_prunes = bool(damage)
        self._known_bad = condemned_objects(log.state)
        self._condemned = {key_of(c) for c in log.state.condemned}
        return log

    def journals(self, state: LogState) -> None:
        """Each generation's chain from its nonce on, the place of every commit in it, and the end that the next generation found."""
        for generation in state.generations:
            commits = [c for c in state.commits if c.generation == generation.number and key_of(c) not in self._condemned]
            try:
                self._journal(generation, commits)
            except Damaged as e:
                self._lasting[e.path] = e.reason

    def commit(self, commit: CommitEntry) -> None:
        """One commit's manifests, packs, pieces and roots."""
        if key_of(commit) in self._condemned or self._was_pruned(commit):
            return
        found: dict[str, str] = {}
        manifests: list[Manifest] = []
        for ref in commit.manifests:
            try:
                manifests.append(load_manifest(self._tier, ref, commit))
            except Damaged as e:
                found[e.path] = e.reason
        for manifest in manifests:
            found |= self._manifest(manifest)
        if not found:
            try:
                if check_cut(manifests) != commit.state_root:
                    found[commit.manifests[0].path] = "with the other manifests it does not give the state root of their commit"
            except Damaged as e:
                found[e.path] = e.reason
        if found:
            self.by_commit[key_of(commit)] = commit, found

    def result(self, now: LogState) -> list[tuple[str, str]]:
        """Everything bad that is not condemned, sorted by path."""
        condemned = {key_of(c) for c in now.condemned}
        bad = {path: reason for path, reason in self._lasting.items() if path not in condemned_objects(now)}
        for key, (commit, found) in self.by_commit.items():
            if key not in condemned and commit in now.commits:
                bad |= found
        return sorted(bad.items())

    def _was_pruned(self, commit: CommitEntry) -> bool:
        """An entry that cannot be read may have withdrawn a commit of which no manifest is left."""
        if not self._may_lack_prunes:
            return False
        for ref in commit.manifests:
            try:
                self._tier.size(ref.path)
            except FileNotFoundError:
                continue
            return False
        return True

    def _journal(self, generation: Generation, commits: Iterable[CommitEntry]) -> None:
        path = paths.journal(self._lineage, generation.number)
        wanted: dict[int, list[CommitEntry]] = {}
        for c in commits:
            wanted.setdefault(c.journal_lines, []).append(c)
        chain, count = first_chain(generation.number, generation.nonce), 0
        end = self._heads.get(generation.number, "")
        has_end = not end
        lines = read_journal(self._tier, self._lineage, generation.number, generation.nonce)
        while True:
            has_end = has_end or chain == end
            for commit in wanted.pop(count, ()):
                if commit.journal_head != chain:
                    raise Damaged(path, f"after {count} lines the chain is not the one that the commit of step {commit.step} names")
            line = next(lines, None)
            if line is None:
                break
            chain, count = line.chain, count + 1
        if wanted:
            raise Damaged(path, f"ends after {count} lines where a commit counts {max(wanted)}")
        if not has_end:
            raise Damaged(
                path, f"{f'ends after {count} lines' if count else 'missing'}, without the last one that the next generation found"
            )

    def _manifest(self, manifest: Manifest) -> dict[str, str]:
        found: dict[str, str] = {}
        for chunk in manifest.chunks:
            table = self._pack(chunk.pack)
            if table is not None and packed(chunk) not in table:
                found[chunk.pack] = f"holds no chunk {chunk.id[:16]} at {chunk.offset}, where a manifest expects it"
            elif table is None and chunk.pack not in self._known_bad:
                found[chunk.pack] = self._reasons[chunk.pack]
            self._chunks.add((chunk.pack, chunk.offset))
        if found:
            return found
        try:
            self._pieces(manifest)
        except Damaged as e:
            found[e.path] = e.reason
        return found

    def _pieces(self, manifest: Manifest) -> None:
        """Each piece from the leaves of its verified chunks; it is read when it shares a chunk or lies in a condemned pack."""
        to_read = []
        for stored in manifest.pieces:
            chunks = [manifest.chunks[e.chunk] for e in stored.extents]
            place = (stored.digest, *((c.pack, c.offset, e.offset, e.length) for c, e in zip(chunks, stored.extents, strict=True)))
            if place in self._pieces_seen:
                continue
            self._pieces_seen.add(place)
            tables = [table for c in chunks if (table := self._pack(c.pack)) is not None]
            is_encoded = any(c.codec != IDENTITY for c in chunks)
            if is_encoded or len(tables) < len(chunks) or not is_cut_at_leaves(stored, manifest.chunks):
                to_read.append(stored)
            elif join_leaves([leaf for c, table in zip(chunks, tables, strict=True) for leaf in table[packed(c)]]) != stored.digest:
                raise Damaged(chunks[0].pack, f"piece {stored.piece.pointer} does not match its digest")
        for _ in read_pieces(self._tier, manifest, to_read):
            pass

    def _pack(self, path: str) -> dict[Packed, list[bytes]] | None:
        """The chunks of a pack verified byte by byte; None when it is bad."""
        if path not in self._packs:
            try:
                self._packs[path] = audit_pack(self._tier, path)
            except Damaged as e:
                self._packs[path] = None
                self._reasons[path] = e.reason
        return self._packs[path]
