"""Repair by hand: two places named by a person, and the lease on a folder, so that nobody writes it meanwhile."""

from __future__ import annotations

import os

from unbroken.core.errors import NoCheckpoint
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import SystemClock
from unbroken.core.records import Writer
from unbroken.store import paths
from unbroken.store.copying import facts_at
from unbroken.store.lease import WriterLease
from unbroken.store.repair import RepairReport, repair
from unbroken.store.repository import Repository
from unbroken.store.tiers.choose import name_of, tier_at
from unbroken.store.tiers.disk import DiskTier


def repair_place(url: str, source: str, lineage: str, *, dry_run: bool) -> RepairReport:
    """Put back what is damaged or missing at `url` from `source`, a copy of the same run or the run itself.

    NoCheckpoint where one of them holds no run, Refused where they hold two, Fenced while somebody writes the folder.
    """
    tier, other, clock = tier_at(url), tier_at(source), SystemClock()
    for place in (tier, other):
        if facts_at(place) is None:
            raise NoCheckpoint(f"{name_of(place)}: no run here: the folder is missing or empty")
    Repository.open(tier, paths.check_lineage(lineage))
    writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since=clock.utc())
    lease = WriterLease.acquire(tier.root, writer, lineage) if isinstance(tier, DiskTier) and not dry_run else None
    try:
        return repair(tier, other, lineage, writer=writer, clock=clock, dry_run=dry_run)
    finally:
        if lease is not None:
            lease.release()
