"""Retention and garbage collection, in the reverse of write order (I2): withdraw by a prune entry, then manifests, then packs.

What may go is decided from the logs of all lineages and from names alone. An object goes only when no commit left in any log names it, no
write of this process holds it, and either it belonged to a commit withdrawn here or its name says that an older generation wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from unbroken.core.errors import Damaged, StoreError
from unbroken.core.ports import Clock, Tier, failpoint
from unbroken.core.records import CommitEntry, Keep, LogState, PruneEntry, Writer
from unbroken.store import paths
from unbroken.store.catalog import Catalog
from unbroken.store.fence import check_collector
from unbroken.store.holds import Holds
from unbroken.store.lineages import OtherLineages
from unbroken.store.log import Key, Log, key_of, newest_number
from unbroken.store.logged import LoggedValues
from unbroken.store.retention import Values, Verdict, judge


class _Nothing(Exception):
    """No commit is to be withdrawn."""


class Forecast(NamedTuple):
    """What a collection would do: the verdict on each commit, and the objects that would go, with their sizes.

    `leftovers` of these belong to no commit: who wrote them has not come as far as that, or whoever removed it has not come further.
    """

    verdicts: tuple[Verdict, ...]
    objects: dict[str, int]
    leftovers: frozenset[str]


def withdrawn(state: LogState, keep: Keep, values: Values, spared: Mapping[Key, str]) -> tuple[CommitEntry, ...]:
    """Commits to withdraw: visible ones that no rule keeps, superseded ones, condemned ones out of grace."""
    return tuple(verdict.commit for verdict in judge(state, keep, values, spared) if not verdict.stays)


def spare(borrowed: Iterable[Key], in_grace: Iterable[Key]) -> dict[Key, str]:
    """What stays whatever the rules say, and why."""
    return {key: "damaged; it goes when a newer one is whole" for key in in_grace} | {key: "a save under way needs it" for key in borrowed}


def foresee(tier: Tier, log: Log, keep: Keep, *, is_written: bool) -> Forecast:
    """What a collection would do if nothing else happened, by who opens the next generation or, if it `is_written`, by the writer there is.

    Changes nothing. Raises as `Collector.run` does. Cost: two LISTs, the manifests that are left, one size call per object that would go.
    """
    log.refresh()
    opened = newest_number(log.state) + (0 if is_written else 1)
    collector = Collector(tier, log, Catalog(tier), OtherLineages(tier, log.lineage), Holds(), opened=opened)
    return collector.foresee(keep, values_for(tier, log, keep), {key_of(c) for c in log.state.condemned})


def values_for(tier: Tier, log: Log, keep: Keep) -> Values:
    """The values that a rule asks for, read from the journals."""
    return {} if keep.best is None else LoggedValues(tier, log.lineage, keep.best.metric).of(log.state, log.state.commits)


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

    def withdraw(self, keep: Keep, values: Values, in_grace: set[Key], *, writer: Writer, clock: Clock) -> None:
        """What no rule keeps is no checkpoint from here on. Raises Fenced, with nothing changed, when a newer generation exists."""

        def make(state: LogState) -> PruneEntry:
            check_collector(state, self._opened)
            going = withdrawn(state, keep, values, spare(self._holds.borrowed(), in_grace))
            self._named = self._objects(going)
            if not going:
                raise _Nothing
            return PruneEntry(commits=tuple(sorted(map(key_of, going))), objects=tuple(sorted(self._named)))

        self._log.refresh()
        with suppress(_Nothing):
            self._log.propose(make, writer=writer, clock=clock)
        failpoint("store.collect.after_prune")

    def remove(self) -> list[str]:
        """Delete what has been withdrawn, and leftovers; the paths that went. Others may have saved since.

        Raises Damaged or Transient, with nothing deleted, when it cannot be known what another lineage needs; a later collection goes on.
        """
        self._catalog.forget_others({key_of(c) for c in self._log.state.commits})
        self._holds.doomed |= self._named
        manifests, packs = self._rubbish(self._log.state, set(self._holds.doomed))
        gone = self._remove(manifests)
        failpoint("store.collect.after_manifests")
        return gone if packs is None else gone + self._remove(packs) + self._tier.sweep()

    def foresee(self, keep: Keep, values: Values, in_grace: set[Key]) -> Forecast:
        """What `run` would do. Changes nothing."""
        state = self._log.state
        verdicts = judge(state, keep, values, spare(self._holds.borrowed(), in_grace))
        going = [verdict.commit for verdict in verdicts if not verdict.stays]
        left = replace(state, commits=tuple(verdict.commit for verdict in verdicts if verdict.stays))
        named = self._objects(going)
        manifests, packs = self._rubbish(left, named)
        sizes = {}
        for path in [*manifests, *(packs or [])]:
            with suppress(FileNotFoundError):  # somebody else has just removed it
                sizes[path] = self._tier.size(path)
        return Forecast(verdicts, sizes, frozenset(sizes.keys() - named))

    def _rubbish(self, state: LogState, rubbish: set[str]) -> tuple[list[str], list[str] | None]:
        """Manifests and packs that nothing needs. None: which packs are needed is not known, as a commit's manifest is damaged.

        The other lineages are asked after the withdrawal: a branch made meanwhile has seen it, or is seen here. Where our own log is
        damaged nothing is taken for a leftover: it may be of a checkpoint whose entry is lost, and can be had back with that.
        """
        elsewhere = self._others.needed()
        generations = () if self._log.damage else state.generations
        older = {paths.origin(g.nonce) for g in generations if g.number < self._opened}
        needed = self._holds.own() | elsewhere
        named = {ref.path for commit in state.commits for ref in commit.manifests}
        manifests = sorted(self._candidates(paths.MANIFESTS, rubbish, older) - needed - named)
        try:
            needed |= self._needed_packs(state)
        except Damaged:  # safe: nothing is lost by keeping packs; the damaged commit is reported by whoever reads or verifies it
            return manifests, None
        return manifests, sorted(self._candidates(paths.PACKS, rubbish, older) - needed)

    def _candidates(self, folder: str, rubbish: set[str], older: set[str]) -> set[str]:
        return {path for path in self._tier.list(folder) if path in rubbish or paths.origin_of(path) in older}

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
