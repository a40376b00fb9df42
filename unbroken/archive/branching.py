"""Branching: a lineage of its own in the same folder, which goes on from a checkpoint of another one. No byte of state is copied.

Order: the branch entry, which keeps the base's objects from being deleted; a second look at the parent's log, which knows whether that
came in time; then as for every checkpoint the packs (of changed values only), the manifest, the journal and the commit. Only the commit
makes the lineage visible: whatever ends this before leaves nothing that a reader sees, and the name can be used again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct

from unbroken.archive import reading
from unbroken.archive.settings import Changed, change_settings, is_setting
from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import Clock, Nonces, Tier, failpoint
from unbroken.core.records import BeginRecord, BranchEntry, Change, CommitEntry, EventRecord, Generation, Manifest, RootRecord, Writer
from unbroken.store import paths
from unbroken.store.journal import JournalWriter
from unbroken.store.lease import WriterLease
from unbroken.store.lineages import is_begun, lineage_names, require_lineage
from unbroken.store.log import Log, branch_of, replay_of, visible
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.disk import DiskTier


class Branch(Struct, frozen=True, kw_only=True):
    """A lineage that was made: from which checkpoint, and what its base checkpoint has other than that one."""

    lineage: str
    parent: str
    step: int
    generation: int
    root: str
    changes: list[Change]


class LineageInfo(Struct, frozen=True, kw_only=True):
    """A history in a folder: where it was branched off ("" and 0 for `main`), its newest step (None: none yet), its checkpoints.

    `replay`: the step of its parent that it is there to make again, None for one that is there to be trained.
    """

    name: str
    parent: str
    base_step: int
    newest: int | None
    num_checkpoints: int
    changes: list[Change]
    replay: int | None = None


def list_lineages(tier: Tier) -> list[LineageInfo]:
    """Every lineage that a reader can open, `main` first."""
    found = []
    for name in dict.fromkeys((paths.MAIN, *lineage_names(tier))):
        state = Log.open(tier, name).state
        commits, branch = visible(state), branch_of(state)
        if name != paths.MAIN and not is_begun(state):
            continue
        found.append(
            LineageInfo(
                name=name,
                parent=branch.parent if branch is not None else "",
                base_step=branch.step if branch is not None else 0,
                newest=commits[-1].step if commits else None,
                num_checkpoints=len(commits),
                changes=list(branch.changes) if branch is not None else [],
                replay=replay_of(state),
            )
        )
    return found


def check_name(name: str) -> str:
    """The name itself; ValueError for one that no lineage may have. Digits alone are a step in `DIR@STEP`."""
    if name == paths.MAIN or name.isdecimal():
        raise ValueError(f"lineage {name!r}: {'every run has it already' if name == paths.MAIN else 'digits alone are a step'}")
    return paths.check_lineage(name)


def make_branch(
    source: Repository,
    tier: Tier,
    step: int,
    name: str,
    settings: Mapping[str, Any],
    *,
    clock: Clock,
    nonces: Nonces,
    replay: int | None = None,
) -> Branch:
    """Begin lineage `name` on the checkpoint of `step`; durable on return. Reads the manifests and the settings that are changed.

    `replay`: it is there to make this step again, and will not be trained further.

    NoCheckpoint if there is no such step, or retention removed it meanwhile; Damaged if it is not whole; Refused if the lineage is there
    already; Fenced while another process makes it; ValueError for a bad name or a setting that does not fit. Nothing is visible then.
    """
    check_name(name)
    if not isinstance(tier, DiskTier):
        raise Refused("a branch is made in a run's folder, not in an object store")
    base = reading.commit_of(source, step)
    if base.kind == "sharded":
        raise Refused(f"step {step} is a sharded checkpoint of torch.distributed.checkpoint, of which no branch can be made yet")
    manifests = reading.checked_manifests(source, base)
    changed = change_settings(_settings(source, manifests), settings) if settings else Changed({}, ())
    _require_free(Log.open(tier, name), name)
    writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since=clock.utc())
    lease = WriterLease.acquire(tier.root, writer, name)
    try:
        log = Log.open(tier, name)
        _require_free(log, name)
        branch = BranchEntry(
            parent=source.lineage,
            step=base.step,
            generation=base.generation,
            state_root=base.state_root,
            manifests=base.manifests,
            changes=changed.told,
            replay=UNSET if replay is None else replay,
        )
        log.append(branch, writer=writer, clock=clock, check=lambda state: None)
        failpoint("branch.pinned")
        _require_base(source, base)
        commit = _begin(Repository(tier, source.facts, log), base, manifests, changed, writer=writer, clock=clock, nonces=nonces)
    finally:
        lease.release()
    return Branch(
        lineage=name,
        parent=source.lineage,
        step=base.step,
        generation=base.generation,
        root=commit.state_root,
        changes=list(changed.told),
    )


def _require_free(log: Log, name: str) -> None:
    if is_begun(log.state) or log.damage:
        raise Refused(f"lineage {name!r} exists: choose another name, or go on with it")


def _require_base(source: Repository, base: CommitEntry) -> None:
    """Was the base still in its lineage's log after everybody who deletes could see that we need it?"""
    source.refresh()
    require_lineage(source.log)
    if base not in source.visible():  # this very one: what has been stored anew meanwhile is in other files
        raise NoCheckpoint(f"the checkpoint of step {base.step} was removed while it was branched from: choose another step")


def _settings(source: Repository, manifests: Sequence[Manifest]) -> reading.Pieces:
    found: reading.Pieces = {}
    for manifest in manifests[:1]:  # each holds all logical pieces
        for stored, data in source.read_pieces(
            manifest, [s for s in manifest.pieces if reading.logical(s) and is_setting(s.piece.pointer)]
        ):
            found[stored.piece.pointer] = (stored.piece, data)
    return found


def _begin(
    repository: Repository,
    base: CommitEntry,
    manifests: Sequence[Manifest],
    changed: Changed,
    *,
    writer: Writer,
    clock: Clock,
    nonces: Nonces,
) -> CommitEntry:
    """The lineage's first generation, and in it the base checkpoint as its own."""
    generation = repository.open_generation(
        base_step=base.step,
        base_root=base.state_root,
        source="branch",
        nonce=nonces.nonce(),
        world_size=manifests[0].world_size,
        writer=writer,
        clock=clock,
    )
    written = [repository.derive(manifest, _parts(manifest, changed), generation) for manifest in manifests]
    journal = _journal(repository, generation, base, written[0][0], changed, clock=clock)
    failpoint("branch.before_commit")
    return repository.commit(
        manifests=written,
        milestone=False,
        journal_head=journal.head,
        journal_lines=journal.num_lines,
        writer=writer,
        clock=clock,
    )


def _parts(manifest: Manifest, changed: Changed) -> list[Part]:
    return [
        Part(stored.piece, memoryview(changed.pieces[stored.piece.pointer]))
        for stored in manifest.pieces
        if stored.rank is None and stored.piece.pointer in changed.pieces
    ]


def _journal(
    repository: Repository, generation: Generation, base: CommitEntry, manifest: Manifest, changed: Changed, *, clock: Clock
) -> JournalWriter:
    """What a person finds at the beginning of the lineage's history, durable on return."""
    branch = branch_of(repository.log.state)
    assert branch is not None
    journal = JournalWriter(repository.tier, repository.lineage, generation.number, generation.nonce)
    begin = BeginRecord(
        generation=generation.number,
        base_step=generation.base_step,
        source="branch",
        loaded_root=base.state_root,
        world_size=generation.world_size,
        time_s=clock.monotonic(),
    )
    facts = {"parent": branch.parent, "step": base.step, "generation": base.generation, "changes": [told(c) for c in changed.told]}
    journal.add(begin)
    journal.add(EventRecord(name="branched", step=base.step, facts=facts))
    journal.add(RootRecord(step=base.step, state_root=manifest.state_root, rank_roots=manifest.rank_roots))
    journal.sync()
    return journal


def told(change: Change) -> str:
    """One change in words."""
    return f"{change.pointer}: {change.before} -> {change.after}"
