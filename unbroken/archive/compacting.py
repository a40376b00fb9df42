"""Compacting on purpose: the files of a lineage hold again mostly what its checkpoints need. The bits of no checkpoint change.

Under the lease and a generation of its own, like pruning; each step of it may be cut off, and the next one completes it.
"""

from __future__ import annotations

from msgspec import Struct

from unbroken.archive.pruning import begin, verified_newest, writing
from unbroken.archive.reading import sizes
from unbroken.core.errors import Damaged, Refused
from unbroken.core.ports import Clock, Nonces, failpoint
from unbroken.core.records import Keep
from unbroken.store.compact import Compactor, Plan, survey
from unbroken.store.lineages import require_log
from unbroken.store.log import newest_generation
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

ALL = Keep(newest=1 << 62)
"""Compacting removes no checkpoint."""


class Compaction(Struct, frozen=True, kw_only=True):
    """What was stored again, or, after a dry run, would be.

    `steps` of the checkpoints that lie in other files now, `num_packs` that went for it, `num_chunks` that were copied, `num_whole` that
    were stored whole in place of a chain of differences. `written_bytes` must fit beside the old files; `freed_bytes` is what all
    files take less now (in a dry run: about).
    """

    lineage: str
    dry_run: bool
    steps: list[int]
    num_packs: int
    num_chunks: int
    num_whole: int
    written_bytes: int
    freed_bytes: int


def compact(tier: DiskTier, lineage: str, *, dry_run: bool, clock: Clock, nonces: Nonces) -> Compaction:
    """Store again what lies in packs of which less than half is needed, and shorten chains of differences where that frees space.

    Refused as `prune` is; Damaged where what is to be copied is not whole. Nothing is opened or changed where nothing is worth it.
    Cost: one read of the newest checkpoint and of what is copied, one write of that.
    """
    if dry_run:
        plan = survey(tier, Repository.open(tier, lineage, nonces).log)
        return _compaction(lineage, plan, plan.written_bytes, plan.freed_bytes, dry_run=True)
    with writing(tier, lineage, clock) as writer:
        repository = Repository.open(tier, lineage, nonces)
        require_log(repository.log)
        if not survey(tier, repository.log).packs:
            return _compaction(lineage, Plan(()), 0, 0, dry_run=False)
        before = sum(sizes(tier))
        begin(repository, verified_newest(repository), writer, clock, nonces)
        failpoint("compact.opened")
        repository.collect(ALL, writer=writer, clock=clock)  # what no commit names, left by whoever was cut off here before
        generation = newest_generation(repository.log.state)
        assert generation is not None
        plan = survey(tier, repository.log)
        try:
            compactor = Compactor(tier, repository.log, repository.holds, generation, writer=writer, clock=clock, nonces=nonces)
            written = compactor.run(plan)
        except Damaged as error:
            raise Refused(f"a file that was to be stored again is damaged, and stays as it is: {error}. See `unbroken verify`") from error
        repository.collect(ALL, writer=writer, clock=clock)
        freed = before - sum(sizes(tier))
    return _compaction(lineage, plan, written, freed, dry_run=False)


def _compaction(lineage: str, plan: Plan, written: int, freed: int, *, dry_run: bool) -> Compaction:
    return Compaction(
        lineage=lineage,
        dry_run=dry_run,
        steps=[one.commit.step for one in plan.concerned],
        num_packs=len(plan.packs),
        num_chunks=len(plan.copied),
        num_whole=len(plan.whole),
        written_bytes=written,
        freed_bytes=freed,
    )
