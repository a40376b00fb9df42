"""The run that the golden files hold: `write(root)` makes it anew, byte by byte the same as long as the format is.

To renew the files after a wanted change of format: `python -c "from tests.rigs.golden_run import write; write('tests/golden/vN/run')"`,
in a new folder; the old ones stay, because old files must stay readable. `v1` is as first written, `v1b` has the fields added since.
"""

from __future__ import annotations

from tests.rigs.store_run import WRITER, CountedNonces, StillClock, opened, part, state
from unbroken.core.records import BeginRecord, CommitEntry, EventRecord, RunFacts, StepRecord
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

FACTS = RunFacts(run_id="golden", created="2026-01-01T00:00:00.000Z", options={"units": 2, "seed": 7, "order": {"epochs": 1}})


def write(root: str) -> list[CommitEntry]:
    """Two generations, four checkpoints of which one is pruned, one a milestone and one condemned; its commits."""
    nonces = CountedNonces("golden")
    tier = DiskTier(root)
    repository = Repository.create(tier, FACTS, nonces=nonces)
    first = opened(repository, None, nonces)
    commits = []
    for step in (1, 2, 3):
        first.journal.add(
            StepRecord(
                step=step,
                units=("00" * 16, "11" * 16),
                num_samples=8,
                loss="3ff0000000000000",
                clock=((0, step, 2),),
                time_s=1.5,
            )
        )
        logical = [*state(step, 50), part("/void", b""), part("/lr", b"\0" * 8, dtype="py:float", role="compared")]
        commits.append(first.save(step, milestone=step == 2, logical=logical))
    first.collect(2)
    repository = Repository.open(tier, nonces=nonces)
    (pack,) = {chunk.pack for manifest in repository.manifests(commits[2]) for chunk in manifest.chunks}
    repository.condemn(3, 0, [pack], "a golden example", writer=WRITER, clock=StillClock())
    second = opened(repository, commits[1], nonces)
    second.journal.add(BeginRecord(generation=1, base_step=2, source="disk", loaded_root=commits[1].state_root, world_size=2, time_s=2.5))
    second.journal.add(EventRecord(name="fell_back", step=2, at={"detect_s": 0.5}, facts={"from": 3}))
    commits.append(second.save(3, logical=state(3, 50)))
    return commits
