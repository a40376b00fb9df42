"""Pruning on purpose: what the rules no longer keep, and what dead writers left, goes; with a reason for everything, and at any time.

Whoever prunes is the lineage's writer for as long: under its lease, with a generation of its own on the newest checkpoint, which is read
and verified before anything older goes. Then it is the collection that follows every save (`store/collect.py`), as safe against being
killed. Nothing is opened, and nothing changes, where there is nothing to remove.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from unbroken.archive import reading
from unbroken.core.errors import Damaged, Fenced, NoCheckpoint, Refused
from unbroken.core.limits import LINGER_S
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import Clock, Nonces, failpoint
from unbroken.core.records import CommitEntry, Keep, Writer
from unbroken.store.collect import Forecast, foresee
from unbroken.store.lease import WriterLease, holder, is_held_here
from unbroken.store.lineages import require_log
from unbroken.store.logged import rules_in_force
from unbroken.store.repository import Repository
from unbroken.store.retention import Verdict, told
from unbroken.store.tiers.disk import DiskTier

WAIT_S = 2 * LINGER_S
"""For the daemon of a run that has just ended, which stays for LINGER_S."""


class Judged(Struct, frozen=True, kw_only=True):
    """One checkpoint, and why it stays or goes."""

    step: int
    generation: int
    size_bytes: int
    reasons: list[str]


class Pruning(Struct, frozen=True, kw_only=True):
    """What went and what stays, or, after a dry run, would.

    `freed_bytes` counts files that are gone: what several checkpoints or lineages share goes with the last of them. `num_files` of them,
    `num_leftovers` of those belonged to no checkpoint: dead writers have left them.
    """

    lineage: str
    rules: str
    dry_run: bool
    stays: list[Judged]
    goes: list[Judged]
    freed_bytes: int
    num_files: int
    num_leftovers: int


def prune(tier: DiskTier, lineage: str, keep: Keep | None, *, dry_run: bool, clock: Clock, nonces: Nonces) -> Pruning:
    """Apply the rules, or those of the newest start (None), to one lineage.

    Refused (Fenced) while another process, or a Store or Run of this one, writes it, and where its newest checkpoint is not whole;
    NoCheckpoint, Damaged, Transient with nothing deleted. Cost: one read of the newest checkpoint, one delete per file.
    """
    if dry_run:
        repository = Repository.open(tier, lineage, nonces)
        rules = rules_of(repository, keep)
        forecast = foresee(tier, repository.log, rules, is_written=holder(tier.root, lineage) is not None)
        return _pruning(lineage, rules, forecast, tier.temporaries(), dry_run=True)
    with writing(tier, lineage, clock) as writer:
        repository = Repository.open(tier, lineage, nonces)
        require_log(repository.log)
        rules = rules_of(repository, keep)
        forecast, temporaries = foresee(tier, repository.log, rules, is_written=False), tier.temporaries()
        if not forecast.objects and not temporaries and all(verdict.stays for verdict in forecast.verdicts):
            return _pruning(lineage, rules, forecast, {}, dry_run=False)
        begin(repository, verified_newest(repository), writer, clock, nonces)
        failpoint("prune.opened")
        gone = set(repository.collect(rules, writer=writer, clock=clock))
    objects = {path: size for path, size in forecast.objects.items() if path in gone}
    temporaries = {path: size for path, size in temporaries.items() if path in gone}
    return _pruning(lineage, rules, forecast._replace(objects=objects, leftovers=forecast.leftovers & gone), temporaries, dry_run=False)


def rules_of(repository: Repository, keep: Keep | None) -> Keep:
    """The rules given, or those of the newest start."""
    return keep or rules_in_force(repository.tier, repository.lineage, repository.log.state, repository.facts)


@contextmanager
def writing(tier: DiskTier, lineage: str, clock: Clock) -> Iterator[Writer]:
    """Be the writer of a lineage. Fenced while anybody is: also a Store of this process, whose lease could be had for the asking."""
    Repository.open(tier, lineage)  # what is no run of ours must not get so much as a lock file
    if is_held_here(tier.root, lineage):
        raise Fenced(f"{tier.root}: this process itself is writing this run: close its Store first")
    writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since=clock.utc())
    until_s = clock.monotonic() + WAIT_S
    while True:
        try:
            lease = WriterLease.acquire(tier.root, writer, lineage)
            break
        except Fenced:
            if clock.monotonic() >= until_s:
                raise
        clock.sleep(0.1)
    try:
        yield writer
    finally:
        lease.release()


def verified_newest(repository: Repository) -> CommitEntry:
    """The newest checkpoint, read whole. Refused where it is damaged: older ones may be all that is left.

    Refused, too, where the log is: what it does not name any more could still be had back with an entry restored.
    """
    if repository.log.damage:
        raise Refused(f"the log is damaged, and nothing has been removed: restore it from a copy first: {repository.log.damage[0]}")
    seen = repository.visible()
    if not seen:
        raise NoCheckpoint("no checkpoint here, so nothing says what may go")
    try:
        reading.read_through(repository, seen[-1])
    except Damaged as error:
        raise Refused(
            f"the newest checkpoint, of step {seen[-1].step}, is not whole, and nothing has been removed: {error}. "
            "Go on with the run or Store: that gives it up, and then this can be done"
        ) from error
    return seen[-1]


def begin(repository: Repository, base: CommitEntry, writer: Writer, clock: Clock, nonces: Nonces) -> None:
    """Open a generation on the newest checkpoint: it fences every older writer, and whoever starts next goes on from the same step."""
    of_base = next((g for g in repository.log.state.generations if g.number == base.generation), None)
    repository.open_generation(
        base_step=base.step,
        base_root=base.state_root,
        source="disk",
        nonce=nonces.nonce(),
        world_size=of_base.world_size if of_base is not None else 1,
        writer=writer,
        clock=clock,
    )


def _pruning(lineage: str, rules: Keep, forecast: Forecast, temporaries: dict[str, int], *, dry_run: bool) -> Pruning:
    return Pruning(
        lineage=lineage,
        rules=told(rules),
        dry_run=dry_run,
        stays=[_judged(verdict) for verdict in forecast.verdicts if verdict.stays],
        goes=[_judged(verdict) for verdict in forecast.verdicts if not verdict.stays],
        freed_bytes=sum(forecast.objects.values()) + sum(temporaries.values()),
        num_files=len(forecast.objects) + len(temporaries),
        num_leftovers=len(forecast.leftovers) + len(temporaries),
    )


def _judged(verdict: Verdict) -> Judged:
    commit = verdict.commit
    return Judged(step=commit.step, generation=commit.generation, size_bytes=commit.size_bytes, reasons=list(verdict.reasons))
