"""Retention and garbage collection, in the reverse of write order (I2): withdraw by a prune entry, then manifests, then packs.

What may go is decided from the logs of all lineages and from names alone. An object goes only when no commit left in any log names it, no
write of this process holds it, and either it belonged to a commit withdrawn here or its name says that an older generation wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from unbroken.core.errors import Damaged, StoreError
from unbroken.core.ports import Clock, Tier, failpoint
from unbroken.core.records import CommitEntry, LogState, PruneEntry, Writer
from unbroken.store import paths
from unbroken.store.catalog import Catalog
from unbroken.store.fence import check_collector
from unbroken.store.holds import Holds
from unbroken.store.lineages import OtherLineages
from unbroken.store.log import Key, Log, key_of, reach, visible


class _Nothing(Exception):
    """No commit is to be withdrawn."""


def withdrawn(state: LogState, keep_newest: int, borrowed: set[Key], in_grace: set[Key], reach_back: int = 0) -> tuple[CommitEntry, ...]:
    """Commits to withdraw: visible ones beyond the newest `keep_newest` and the milestones, superseded ones, condemned ones out of grace.

    With `reach_back` the newest one that is so many steps older than the newest of all stays, too, or the oldest if none is.

    Commits from before a fresh start are another history: they stay until somebody removes them on purpose.
    """
    seen = visible(state)
    keep = {key_of(c) for c in seen[-keep_newest:]} | {key_of(c) for c in seen if c.milestone} | borrowed | in_grace
    if reach_back:
        keep |= {key_of(c) for c in [c for c in seen if c.step <= seen[-1].step - reach_back][-1:] or seen[:1]}
    limits = reach(state)
    return tuple(c for c in state.commits if c.generation in limits and key_of(c) not in keep)


class Collector:
    """One collection by the process that opened generation `opened`."""

    def __init__(self, tier: Tier, log: Log, catalog: Catalog, others: OtherLineages, holds: Holds, *, opened: int) -> None:
        self._tier = tier
        self._log = log
        self._catalog = catalog
        self._others = others
        self._holds = holds
        self._opened = opened
        self._named: set[str] = set()

    def run(self, keep_newest: int, in_grace: set[Key], *, reach_back: int, writer: Writer, clock: Clock) -> list[str]:
        """Withdraw and delete; the paths that went. Raises Fenced before anything is changed when a newer generation exists.

        Raises Damaged or Transient, with nothing deleted, when it cannot be known what another lineage needs; a later collection goes on.
        """

        def make(state: LogState) -> PruneEntry:
            check_collector(state, self._opened)
            going = withdrawn(state, keep_newest, self._holds.borrowed(), in_grace, reach_back)
            self._named = self._objects(going)
            if not going:
                raise _Nothing
            return PruneEntry(commits=tuple(sorted(map(key_of, going))), objects=tuple(sorted(self._named)))

        self._log.refresh()
        with suppress(_Nothing):
            self._log.propose(make, writer=writer, clock=clock)
        failpoint("store.collect.after_prune")
        return self._delete()

    def _delete(self) -> list[str]:
        state = self._log.state
        self._catalog.forget_others({key_of(c) for c in state.commits})
        self._holds.doomed |= self._named
        elsewhere = self._others.needed()  # after the withdrawal: a branch made meanwhile has seen it, or is seen here
        rubbish = set(self._holds.doomed)
        older = {paths.origin(g.nonce) for g in state.generations if g.number < self._opened}
        held = self._holds.own()
        needed = held | elsewhere | {ref.path for c in state.commits for ref in c.manifests}
        manifests = self._candidates(paths.MANIFESTS, rubbish, older) - needed
        gone = self._remove(sorted(manifests))
        failpoint("store.collect.after_manifests")
        try:
            needed = held | elsewhere | self._needed_packs(state)
        except Damaged:  # safe: nothing is lost by keeping packs; the damaged commit is reported by whoever reads or verifies it
            return gone
        packs = self._candidates(paths.PACKS, rubbish, older) - needed
        return gone + self._remove(sorted(packs)) + self._tier.sweep()

    def _candidates(self, folder: str, rubbish: set[str], older: set[str]) -> set[str]:
        return {path for path in self._tier.list(folder) if path in rubbish or _origin(path) in older}

    def _needed_packs(self, state: LogState) -> set[str]:
        """Packs of every commit left in the log; a condemned one in its grace whose manifest is damaged needs none."""
        condemned = {key_of(c) for c in state.condemned}
        needed: set[str] = set()
        for commit in state.commits:
            try:
                needed |= self._catalog.packs(commit)
            except Damaged:
                if key_of(commit) not in condemned:
                    raise
        return needed

    def _objects(self, commits: Iterable[CommitEntry]) -> set[str]:
        """Manifests of these commits, and their packs as far as the manifests can be read."""
        objects: set[str] = set()
        for commit in commits:
            objects |= {ref.path for ref in commit.manifests}
            with suppress(Damaged):  # safe: packs that cannot be named here are found by their origin, once it is older
                objects |= self._catalog.packs(commit)
        return objects

    def _remove(self, paths_: list[str]) -> list[str]:
        gone = []
        for path in paths_:
            try:
                self._tier.delete(path)
            except StoreError:  # safe: it is withdrawn already and stays doomed, so the next collection tries again
                self._holds.doomed.add(path)
                continue
            gone.append(path)
            self._holds.doomed.discard(path)
        return gone


def _origin(path: str) -> str | None:
    name = paths.manifest_name(path)
    return name.origin if name is not None else paths.pack_origin(path)
