"""Which checkpoint a load takes, on all ranks the same: each rank verifies what it needs of the newest one, and of older ones if it must.

A rank sees only its own part of the damage. So each names the newest checkpoint whose bytes, as far as it needs them, are good; the oldest
of these is taken by all, before any of them has changed a tensor. Where a step was asked for there is no choice, and nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from unbroken.archive import reading
from unbroken.archive.reading import PassedOver
from unbroken.archive.sharded import Need, Sharded
from unbroken.core.boxes import Box
from unbroken.core.errors import Damaged, NoCheckpoint, Refused
from unbroken.core.records import CommitEntry, TensorEntry
from unbroken.store.repository import Repository

_MAX_REASONS = 20

Key = tuple[int, int]


class Choice(NamedTuple):
    """(step, generation) of the checkpoint that a rank can take, None if there is none, and those it passed over for it."""

    key: Key | None
    passed_over: tuple[PassedOver, ...] = ()


class _Unlike(Damaged):
    """A checkpoint of another state than the newest one: of no use for its plan, but whole, so that nobody may withdraw it."""


class Chooser:
    """One rank's view of the checkpoints in a folder."""

    def __init__(self, repository: Repository, step: int | None) -> None:
        """Finds the checkpoint of `step`, or the newest one whose index can be read. NoCheckpoint, Damaged, Refused."""
        self._repository = repository
        self._step = step
        self._opened: dict[Key, Sharded] = {}
        found = reading.newest_good(repository, self._open) if step is None else reading.exactly(repository, step, self._open)
        self.first = found.value
        self._passed = list(found.passed_over)

    def choose(self, plan: LoadPlan) -> Choice:
        """What this rank can take; reads, verifies and keeps the bytes that the plan needs, unless a step was asked for."""
        if self._step is not None:
            return Choice(_key(self.first.commit))
        for commit in reversed(self._repository.visible()):
            if commit.step > self.first.commit.step:
                continue
            try:
                self._verify(self._open(commit), plan)
            except Damaged as error:
                generation = None if isinstance(error, _Unlike) else commit.generation
                self._passed.append(PassedOver(commit.step, generation, (error.path,), str(error)))
                self._opened.pop(_key(commit), None)
            else:
                return Choice(_key(commit), tuple(self._passed))
        return Choice(None, tuple(self._passed))

    def get(self, key: Key) -> Sharded:
        """The checkpoint that all ranks take."""
        for commit in self._repository.visible():
            if _key(commit) == key:
                return self._open(commit)
        raise NoCheckpoint(f"no checkpoint of step {key[0]} of generation {key[1]} is there any more")

    def _open(self, commit: CommitEntry) -> Sharded:
        if commit.kind != "sharded":
            raise Refused(f"step {commit.step} was not saved by torch.distributed.checkpoint: load it with unbroken.Store or unbroken.open")
        if _key(commit) not in self._opened:
            self._opened[_key(commit)] = Sharded(self._repository, commit)
        return self._opened[_key(commit)]

    def _verify(self, sharded: Sharded, plan: LoadPlan) -> None:
        needs: list[Need] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if not _is_alike(self.first, sharded, name):
                raise _Unlike(
                    sharded.commit.manifests[-1].path, f"step {sharded.commit.step} has no {name!r} of the dtype and shape wanted"
                )
            if item.type == LoadItemType.BYTE_IO:
                sharded.value(name)
            else:
                needs += needs_of(sharded, item)
        sharded.verify(needs)


def agreed(choices: Sequence[Choice]) -> Choice:
    """What all ranks take. NoCheckpoint with all reasons where one of them can take nothing."""
    passed = {(bad.step, bad.generation, bad.reason): bad for choice in choices for bad in choice.passed_over}
    told = tuple(passed[name] for name in sorted(passed, key=lambda name: (-name[0], str(name))))
    if any(choice.key is None for choice in choices):
        raise NoCheckpoint("no usable checkpoint:\n  " + "\n  ".join(map(str, told[:_MAX_REASONS])))
    return Choice(min(choice.key for choice in choices if choice.key is not None), told)


def region_of(item: ReadItem) -> Box:
    """What a planner's item wants, in coordinates of the whole tensor."""
    base = item.storage_index.offset or (0,) * len(item.lengths)
    return Box(tuple(a + b for a, b in zip(base, item.storage_offsets, strict=True)), tuple(item.lengths))


def needs_of(sharded: Sharded, item: ReadItem) -> Iterator[Need]:
    """The stored parts that make up an item."""
    region = region_of(item)
    if region.volume:
        yield from sharded.needs(sharded.tensor(item.storage_index.fqn), region)


def _is_alike(first: Sharded, other: Sharded, name: str) -> bool:
    a, b = first.entries.get(name), other.entries.get(name)
    if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
        return (a.dtype, a.shape) == (b.dtype, b.shape)
    return a is not None and type(a) is type(b)


def _key(commit: CommitEntry) -> Key:
    return commit.step, commit.generation
