"""Repair: damaged or missing packs and manifests of checkpoints that count, replaced by those of the same name in a copy of the run.

Names are never used twice and every byte is verified before it takes the place of another: what is put back is what was written. Log
entries and journals are never touched.
"""

from __future__ import annotations

from msgspec import Struct

from unbroken.core.errors import Damaged, StoreError
from unbroken.core.ports import Clock, Tier
from unbroken.core.records import CommitEntry, Manifest, ManifestRef, Writer
from unbroken.store import paths
from unbroken.store.audit import verify
from unbroken.store.copying import Carrier, facts_at, fault_of_pack, require_same_run
from unbroken.store.log import Log, key_of
from unbroken.store.manifests import load_manifest
from unbroken.store.sealed import read_bounded
from unbroken.store.tiers.choose import name_of


class Fault(Struct, frozen=True, kw_only=True):
    """A damaged or missing object, and what is wrong with it. `why` it could not be repaired, "" if it was or, in a dry run, would be."""

    path: str
    reason: str
    why: str = ""


class RepairReport(Struct, frozen=True, kw_only=True):
    """`ok`: all that counts is whole now (in a dry run: would be). `bad` is what `verify` finds afterwards: (path, what is wrong)."""

    ok: bool
    dry_run: bool
    faults: list[Fault]
    bad: list[tuple[str, str]]
    written_bytes: int


class Repair:
    """Repairs what lies in `tier` from `other`, another place of the same run. Who writes must have seen to it that nobody else does."""

    def __init__(self, tier: Tier, other: Tier, lineage: str, writer: Writer, clock: Clock, *, dry_run: bool = False) -> None:
        self.faults: dict[str, Fault] = {}
        self._tier = tier
        self._other = other
        self._dry_run = dry_run
        self._is_whole: set[str] = set()
        source, there = Log(other, lineage), Log(tier, lineage)  # objects only: neither log is read or written
        self._carrier = Carrier(source=source, there=there, writer=writer, clock=clock, is_back=True)

    @property
    def written_bytes(self) -> int:
        """Bytes put back so far."""
        return self._carrier.sent_bytes

    def mend(self, commit: CommitEntry) -> bool:
        """Look at one checkpoint's manifests and packs, and put back those that are bad. Is it whole now? Cost: one read of it."""
        found = [self._manifest(ref, commit) for ref in commit.manifests]
        manifests = [manifest for manifest in found if manifest is not None]
        packs = sorted({chunk.pack for manifest in manifests for chunk in manifest.chunks})
        return all([self._pack(pack, manifests) for pack in packs]) and len(manifests) == len(found)

    def _manifest(self, ref: ManifestRef, commit: CommitEntry) -> Manifest | None:
        """The manifest, whole by now; None where there is none. In a dry run that of the copy stands for it."""
        try:
            return load_manifest(self._tier, ref, commit)
        except Damaged as error:
            reason = error.reason
        try:
            manifest = load_manifest(self._other, ref, commit)
            if not self._dry_run:
                self._carrier.carry_file(ref.path, read_bounded(self._other, ref.path))
        except (Damaged, StoreError, OSError) as error:
            self._note(ref.path, reason, error)
            return None
        self._note(ref.path, reason)
        return manifest

    def _pack(self, path: str, manifests: list[Manifest]) -> bool:
        if path in self._is_whole:
            return True
        reason = fault_of_pack(self._tier, path, manifests)
        if reason:
            try:
                fault = fault_of_pack(self._other, path, manifests) if self._dry_run else ""
                if fault:
                    raise Damaged(path, fault)
                if not self._dry_run:
                    self._carrier.carry_pack(path, manifests)
            except (Damaged, StoreError, OSError) as error:
                self._note(path, reason, error)
                return False
            self._note(path, reason)
        self._is_whole.add(path)
        return True

    def _note(self, path: str, reason: str, error: Exception | None = None) -> None:
        why = "" if error is None else f"in {name_of(self._other)}: {error.reason if isinstance(error, Damaged) else error}"
        self.faults[path] = Fault(path=path, reason=reason, why=why)


def repair(tier: Tier, other: Tier, lineage: str, *, writer: Writer, clock: Clock, dry_run: bool = False) -> RepairReport:
    """Mend all checkpoints that are not condemned, then verify everything. Refused where `other` holds another run.

    Cost: what `verify` costs, twice, and the bad objects once or twice from `other`.
    """
    facts, mine = facts_at(other), facts_at(tier)
    if facts is None:
        raise Damaged(paths.RUN, f"{name_of(other)} holds no run to repair from")
    if mine is not None:
        require_same_run(facts, mine.run_id, name_of(other))
    work = Repair(tier, other, lineage, writer, clock, dry_run=dry_run)
    log = Log.open(tier, lineage)
    condemned = {key_of(entry) for entry in log.state.condemned}
    for commit in log.state.commits:
        if key_of(commit) not in condemned:
            work.mend(commit)
    faults = sorted(work.faults.values(), key=lambda fault: fault.path)
    curable = {fault.path for fault in faults if not fault.why} if dry_run else set()
    bad = [(path, reason) for path, reason in verify(tier, lineage).bad if path not in curable]
    return RepairReport(ok=not bad, dry_run=dry_run, faults=faults, bad=bad, written_bytes=work.written_bytes)
