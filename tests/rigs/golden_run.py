"""The run that the golden files hold: `write(root)` makes it anew, byte by byte the same as long as the format is.

To renew the files after a wanted change of format: `python -c "from tests.rigs.golden_run import write; write('tests/golden/vN/run')"`,
in a new folder; the old ones stay, because old files must stay readable. `v1` is as first written, `v1b` has the fields added since.
`v2`, of format 2, has its states as differences; zstd may compress otherwise one day, so that it is only read (`encoding=Encoding()`).
"""

from __future__ import annotations

import random
import struct

from tests.rigs.store_run import WRITER, CountedNonces, StillClock, opened, part, state
from unbroken.core.records import BeginRecord, CommitEntry, EventRecord, Piece, RunFacts, StepRecord
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.disk import DiskTier

FACTS = RunFacts(run_id="golden", created="2026-01-01T00:00:00.000Z", options={"units": 2, "seed": 7, "order": {"epochs": 1}})


def moving(step: int) -> list[Part]:
    """Weights of which each moves a little from step to step, in two types, a table with one row that changes, flags, and noise."""
    noise = random.Random(5)
    old = [noise.gauss(0, 0.02) for _ in range(17_000)]
    weights = struct.pack("<17000f", *(w + step * noise.gauss(0, 1e-4) for w in old))
    moments = struct.pack("<8500d", *(w * step for w in old[:8_500]))
    table = bytearray(struct.pack("<17000f", *reversed(old)))
    table[400 * step : 400 * step + 4] = b"\xff\xff\xff\x7f"
    pieces = {"/model/w": ("float32", weights, 4), "/opt/m": ("float64", moments, 8), "/table": ("float32", bytes(table), 4)}
    bits, flips = random.Random(1).randbytes(68_000), random.Random(step)
    pieces["/flags"] = ("uint8", bytes(b ^ flips.choice((0, 0x08, 0x80, 0x88)) for b in bits), 1)
    pieces["/noise"] = ("uint8", random.Random(step).randbytes(68_000), 1)
    return [
        Part(Piece(pointer=pointer, dtype=dtype, shape=(len(data) // width,)), memoryview(data))
        for pointer, (dtype, data, width) in pieces.items()
    ]


def write(root: str, encoding: Encoding | None = None) -> list[CommitEntry]:
    """Two generations, four checkpoints of which one is pruned, one a milestone and one condemned; its commits."""
    nonces = CountedNonces("golden")
    tier = DiskTier(root)
    repository = Repository.create(tier, FACTS, nonces=nonces)
    first = opened(repository, None, nonces, encoding=encoding)
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
        logical = [
            *(state(step, 50) if encoding is None else moving(step)),
            part("/void", b""),
            part("/lr", b"\0" * 8, dtype="py:float", role="compared"),
        ]
        commits.append(first.save(step, milestone=step == 2, logical=logical))
    first.collect(2)
    repository = Repository.open(tier, nonces=nonces)
    pack = repository.manifests(commits[2])[0].chunks[-1].pack  # the others may hold what it is a difference from
    repository.condemn(3, 0, [pack], "a golden example", writer=WRITER, clock=StillClock())
    second = opened(repository, commits[1], nonces, encoding=encoding)
    second.journal.add(BeginRecord(generation=1, base_step=2, source="disk", loaded_root=commits[1].state_root, world_size=2, time_s=2.5))
    second.journal.add(EventRecord(name="fell_back", step=2, at={"detect_s": 0.5}, facts={"from": 3}))
    commits.append(second.save(3, logical=state(3, 50) if encoding is None else moving(4)))
    return commits
