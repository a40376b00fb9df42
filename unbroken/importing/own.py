"""A checkpoint of unbroken itself as a source: a Store's state as it was saved, a run's with torch's names and numbers."""

from __future__ import annotations

import os
from typing import Any

from unbroken.archive import reading
from unbroken.archive.places import parse_place
from unbroken.capture import portable
from unbroken.capture.select import assemble
from unbroken.core.errors import ForeignFolder, NoCheckpoint
from unbroken.core.records import CommitEntry, StoredPiece
from unbroken.store import paths
from unbroken.store.repository import Repository, naming
from unbroken.store.tiers.disk import DiskTier

Own = tuple[Any, int, str, list[str]]
"""The state, its step, its root, notes."""


def read_own(source: str, step: int | None) -> Own | None:
    """What a folder of unbroken, DIR or DIR@STEP or DIR@LINEAGE:STEP, holds; None where the source is no such folder.

    NoCheckpoint, Damaged, NewerFormat as `unbroken.open(...).load()`; ValueError for two steps.
    """
    directory, lineage, named = parse_place(source) if "@" in os.path.basename(source) else (source, paths.MAIN, None)
    if not os.path.isdir(directory) or not os.path.lexists(os.path.join(directory, paths.RUN)):
        return None
    if step is not None and named is not None and step != named:
        raise ValueError(f"{source}: names step {named}, and step {step} is asked for: give one of them")
    wanted = step if named is None else named
    tier = DiskTier(directory)
    with naming(tier.root):
        try:
            repository = Repository.open(tier, lineage)
        except ForeignFolder:
            return None
        return _read(repository, wanted)


def _read(repository: Repository, step: int | None) -> Own:
    def wanted(stored: StoredPiece) -> bool:
        return reading.logical(stored) or stored.piece.pointer in portable.NAMES

    def use(commit: CommitEntry) -> reading.Pieces:
        return reading.read_commit(repository, commit, wanted)

    found = reading.newest_good(repository, use) if step is None else reading.exactly(repository, step, use)
    if not found.value:
        raise NoCheckpoint("its newest checkpoint is empty")
    is_run = "/model/parameters" in found.value
    parts, notes = portable.state_dicts(found.value) if is_run else (assemble(found.value), [])
    notes += [f"passed over: {bad}" for bad in found.passed_over]
    return parts, found.commit.step, found.commit.state_root, notes
