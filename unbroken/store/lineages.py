"""Lineages: several histories in one folder that share its packs and manifests. So who deletes reads every log first (I2).

A lineage that another one begets names its base in its first entry, before it looks whether the base is still there; a deleter withdraws
in its own log, before it looks at the others'. Whichever comes second sees the first: nothing that a branch stands on is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from unbroken.core.errors import Damaged, NoCheckpoint, Transient, UnbrokenError
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry, LogState, ManifestRef
from unbroken.store import paths
from unbroken.store.catalog import Catalog, condemned_objects
from unbroken.store.log import Log, branch_of, key_of

_MAX_TRIES = 16
"""Of reading what another lineage needs while its own writer removes old checkpoints."""


def is_begun(state: LogState) -> bool:
    """False where a branch was cut off before its base checkpoint became visible: such a lineage does not exist for a reader."""
    return bool(state.commits or state.pruned)


def lineage_names(tier: Tier) -> list[str]:
    """Every lineage that has a folder of its own, `main` first. What does not look like one is passed over."""
    found = [name for name in tier.folders(paths.RUNS) if paths.is_lineage(name)]
    return sorted(found, key=lambda name: (name != paths.MAIN, name))


def unlogged(log: Log) -> str | None:
    """A manifest of a generation that `main`'s log does not know, where that log has no checkpoint: it has lost entries. Else None.

    A run that was killed before its first checkpoint may leave manifests, too, but of generations that its log names.
    """
    if log.lineage != paths.MAIN or is_begun(log.state) or log.state.condemned:
        return None
    written = {path: name.generation for path in log.tier.list(paths.MANIFESTS) if (name := paths.manifest_name(path)) is not None}
    known = {generation.number for generation in log.state.generations}
    if not set(written.values()) <= known:  # or a living writer has just opened it: its log entry was there before the manifest
        known = {generation.number for generation in Log.open(log.tier, log.lineage).state.generations}
    return max((path for path, generation in written.items() if generation not in known), default=None)


def require_log(log: Log) -> None:
    """NoCheckpoint where no checkpoint is known only because the log has lost its entries. Cost: one listing, if none is known."""
    if path := unlogged(log):
        raise NoCheckpoint(
            f"this run has made checkpoints such as {path}, but its log has lost their entries: restore "
            f"{paths.log_folder(log.lineage)} from a copy. A fresh start needs another folder."
        )


def require_lineage(log: Log) -> None:
    """NoCheckpoint when this lineage is not `main` and was never begun; it names those that are there."""
    if log.lineage == paths.MAIN or is_begun(log.state) or log.damage:
        return
    if branch_of(log.state) is not None:
        raise NoCheckpoint(f"lineage {log.lineage!r} was cut off while it was made: make it again with `unbroken branch`")
    there = [name for name in lineage_names(log.tier) if name == paths.MAIN or is_begun(Log.open(log.tier, name).state)]
    raise NoCheckpoint(f"no lineage {log.lineage!r} here; there are {', '.join(there) or 'none'}: `unbroken branch` makes one")


class OtherLineages:
    """What the lineages besides one's own need. Logs stay open between looks: a look costs one listing and one read for each."""

    def __init__(self, tier: Tier, lineage: str) -> None:
        self._tier = tier
        self._lineage = lineage
        self._logs: dict[str, Log] = {}
        self._catalogs: dict[str, Catalog] = {}

    def needed(self) -> set[str]:
        """Manifests and packs that commits of other lineages name, and those that a branch in the making stands on.

        Damaged or Transient when that cannot be known: nothing may be deleted then.
        """
        return {path for log in self._look() for path in self._needed_by(log)}

    def condemned(self) -> set[str]:
        """Objects that another lineage has found to be bad: no chunk of theirs is to be used again. What cannot be read says nothing."""
        found: set[str] = set()
        with suppress(UnbrokenError):  # safe: a bad chunk is found when it is read, and a save must not fail for another lineage's sake
            for log in self._look():
                found |= condemned_objects(log.state)
        return found

    def origins(self) -> set[str]:
        """Marks in the names of what the other lineages wrote."""
        return {paths.origin(g.nonce) for log in self._look() for g in log.state.generations}

    def _look(self) -> Iterator[Log]:
        for name in lineage_names(self._tier):
            if name == self._lineage:
                continue
            log = self._logs.get(name)
            if log is None or log.damage:  # a summary written since may have made up for what could not be read
                log = self._logs[name] = Log.open(self._tier, name)
            else:
                log.refresh()
            yield log

    def _needed_by(self, log: Log) -> set[str]:
        if log.damage:
            raise Damaged(f"lineage {log.lineage}", f"it may need what would be deleted, and its log cannot be read: {log.damage[0]}")
        catalog = self._catalogs.setdefault(log.lineage, Catalog(self._tier))
        for _ in range(_MAX_TRIES):
            commits = log.state.commits
            catalog.forget_others({key_of(c) for c in commits})
            try:
                return {path for commit in self._pinned(log.state) for path in self._objects(catalog, log.state, commit)}
            except Damaged:
                log.refresh()
                if log.state.commits == commits:
                    raise
        raise Transient(f"lineage {log.lineage} changes faster than it can be read")

    def _pinned(self, state: LogState) -> tuple[CommitEntry, ...]:
        branch = branch_of(state)
        if branch is None or is_begun(state):
            return state.commits
        return (base_commit(branch.step, branch.generation, branch.state_root, branch.manifests),)

    def _objects(self, catalog: Catalog, state: LogState, commit: CommitEntry) -> set[str]:
        named = {ref.path for ref in commit.manifests}
        try:
            return named | catalog.packs(commit)
        except Damaged:
            # without its manifest a branch in the making cannot be finished, and a condemned commit is never read
            if not is_begun(state) or key_of(commit) in {key_of(c) for c in state.condemned}:
                return named
            raise


def base_commit(step: int, generation: int, state_root: str, manifests: tuple[ManifestRef, ...]) -> CommitEntry:
    """The commit that a branch entry speaks of, as far as it says."""
    return CommitEntry(
        step=step, generation=generation, manifests=manifests, state_root=state_root, size_bytes=0, journal_head="", journal_lines=0
    )
