"""Where two histories part: the first step whose samples, loss or state root is not the same. Both journals are streamed side by side."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from unbroken.core.records import RootRecord, StepRecord
from unbroken.store.journal import read_journal
from unbroken.store.log import branch_of, reach
from unbroken.store.repository import Repository


class Parting(Struct, frozen=True, kw_only=True):
    """The first step of each kind that differs, None where all that both tell are equal.

    `steps` were compared, those that both histories hold; `num_steps` is how many each holds. `roots` compares the steps with a snapshot
    on both sides.
    """

    steps: int
    num_steps: list[int]
    samples: int | None
    losses: int | None
    roots: int | None

    @property
    def is_equal(self) -> bool:
        """Nothing that both tell differs."""
        return self.samples is None and self.losses is None and self.roots is None


def part_ways(a: Repository, b: Repository, until: tuple[int, int]) -> Parting:
    """Compare the surviving steps of two histories up to a step of each. Damaged names a journal that cannot be read.

    Cost: one pass over both journals; memory: one root per snapshot.
    """
    ours, theirs = _Told(a, until[0]), _Told(b, until[1])
    steps, samples, losses = 0, None, None
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None and other is not None:
        if mine.step != other.step:
            if mine.step < other.step:
                mine = next(ours, None)
            else:
                other = next(theirs, None)
            continue
        steps += 1
        samples = mine.step if samples is None and mine.units != other.units else samples
        losses = mine.step if losses is None and mine.loss != other.loss else losses
        mine, other = next(ours, None), next(theirs, None)
    for told in (ours, theirs):
        for _ in told:
            pass
    differing = [step for step in ours.roots.keys() & theirs.roots.keys() if ours.roots[step] != theirs.roots[step]]
    num_steps = [ours.num_steps, theirs.num_steps]
    return Parting(steps=steps, num_steps=num_steps, samples=samples, losses=losses, roots=min(differing, default=None))


class _Told:
    """The surviving steps of a history in order; `roots` fills while they are read."""

    def __init__(self, repository: Repository, until: int) -> None:
        self.roots: dict[int, bytes] = {}
        self.num_steps = 0
        self._steps = self._read(repository, until)

    def __iter__(self) -> Iterator[StepRecord]:
        return self

    def __next__(self) -> StepRecord:
        step = next(self._steps)
        self.num_steps += 1
        return step

    def _read(self, repository: Repository, until: int, at: tuple[int, int] | None = None) -> Iterator[StepRecord]:
        state = repository.log.state
        branch = branch_of(state)
        if branch is not None:
            parent = Repository.open(repository.tier, branch.parent)
            yield from self._read(parent, min(until, branch.step), (branch.generation, branch.step))
        reached = reach(state) if at is None else reach(state, *at)
        for generation in state.generations:
            end = min(reached.get(generation.number, -1), until)
            if end < generation.base_step:
                continue
            for line in read_journal(repository.tier, repository.lineage, generation.number, generation.nonce):
                record = line.record
                if isinstance(record, StepRecord) and generation.base_step < record.step <= end:
                    yield record
                elif isinstance(record, RootRecord) and generation.base_step <= record.step <= end:
                    self.roots[record.step] = bytes.fromhex(record.state_root)
