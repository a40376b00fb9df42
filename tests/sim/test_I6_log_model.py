"""Model check of the log protocol: the product's own code over an in-memory tier, every port call one atomic step, all interleavings.

Actors are deterministic programs. An actor's next call is a pure function of the results of its calls so far: it is found by running
the program anew against those results, and remembered. So the whole system's state is (tier, results of each actor), and a depth-first
search visits every reachable one.

One reduction, which loses no behaviour: reading a log entry or run.json that exists gives the same result at any later time, because
they are never changed or deleted; such a read is done at once instead of being interleaved.

The actors, on a run whose generation 0 committed step 10 and whose generation 1 committed step 20:
  zombie     opened generation 0, missed the rest; commits step 9, then collects
  writer     commits step 30 for generation 1 (reusing the chunk of step 10), writes once more when told to
  gc         opened generation 1; keeps the newest checkpoint, deletes the others
  recoverer  opens generation 2 on the newest checkpoint it finds, once more when told to
  successor  the same, and then commits step 40 and collects (its own search, without the reader)
  reader     reads the newest checkpoint whole, once more when that one was withdrawn meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from tests.rigs.store_run import FACTS, WRITER, CountedNonces, StillClock, Trainer, opened, part
from unbroken.core.errors import Damaged, Fenced, Transient
from unbroken.core.ports import Buffer
from unbroken.core.records import CommitEntry, CondemnEntry, Generation, GenerationEntry, LogEntry, LogState, PruneEntry
from unbroken.store import collect as collect_module
from unbroken.store import repository as repository_module
from unbroken.store.journal import first_chain
from unbroken.store.log import Log, visible
from unbroken.store.packs import read_chunk
from unbroken.store.repository import Repository
from unbroken.store.sealed import unseal
from unbroken.store.tiers.memory import MemoryTier, Snapshot

CLOCK = StillClock()
Call = tuple[Any, ...]


class Violation(AssertionError):
    """A property does not hold."""


class Paused(BaseException):
    """The actor has come to a call whose result is not known yet."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class RecordedTier:
    """Answers an actor's calls from its record; the first call beyond it, and any after that, pauses the actor."""

    def __init__(self, results: Iterable[Any]) -> None:
        self._results = iter(results)
        self._paused: Paused | None = None

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        return self._call("create", path, (b"".join(parts),))

    def append(self, path: str, data: Buffer) -> None:
        self._call("append", path, bytes(data))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._call("read", path, offset, length)

    def size(self, path: str) -> int:
        return self._call("size", path)

    def sweep(self) -> list[str]:
        return []

    def list(self, prefix: str) -> Any:
        return self._call("list", prefix)

    def folders(self, prefix: str) -> Any:
        return self._call("folders", prefix)

    def delete(self, path: str) -> None:
        self._call("delete", path)

    def go(self) -> None:
        """The end of an actor's part in the set-up."""
        self._call("go")

    def _call(self, *call: Any) -> Any:
        if self._paused is not None:
            raise self._paused
        try:
            result = next(self._results)
        except StopIteration:
            self._paused = Paused(call)
            raise self._paused from None
        if isinstance(result, type):
            raise result(call[1])
        return list(result) if isinstance(result, tuple) else result


def content(value: str) -> list[Any]:
    """A state of one small piece: one chunk."""
    return [part("/w", value.encode())]


def commit(repository: Repository, generation: Generation, step: int, value: str) -> CommitEntry:
    written = repository.write(
        step=step, generation=generation.number, nonce=generation.nonce, node=0, world_size=1, logical=content(value), per_rank={0: []}
    )
    return repository.commit(
        manifests=[written],
        milestone=False,
        journal_head=first_chain(generation.number, generation.nonce),
        journal_lines=0,
        writer=WRITER,
        clock=CLOCK,
    )


def zombie(tier: RecordedTier) -> str:
    nonces = CountedNonces("zombie")
    trainer = opened(Repository.create(tier, FACTS, nonces=nonces), None, nonces, world_size=1)
    commit(trainer.repository, trainer.generation, 10, "a")
    tier.go()
    said = []
    for act in (lambda: commit(trainer.repository, trainer.generation, 9, "z"), lambda: trainer.collect(1)):
        try:
            act()
            said.append("done")
        except Fenced:
            said.append("fenced")
    return " ".join(said)


def gc(tier: RecordedTier) -> str:
    nonces = CountedNonces("gc")
    repository = Repository.open(tier, nonces=nonces)
    trainer: Trainer = opened(repository, repository.visible()[-1], nonces, world_size=1)
    tier.go()
    try:
        return f"deleted {len(trainer.collect(1))}"
    except Fenced:
        return "fenced"


def writer(tier: RecordedTier) -> str:
    repository = Repository.open(tier, nonces=CountedNonces("writer"))
    generation = repository.log.state.generations[-1]
    commit(repository, generation, 20, "b")
    tier.go()
    for attempt in ("first", "second"):
        try:
            return f"committed {commit(repository, generation, 30, 'a').step} at the {attempt} try"
        except Transient:
            continue
        except Fenced:
            return "fenced"
    return "gave up"


def recoverer(tier: RecordedTier) -> str:
    tier.go()
    return recover(tier)[0]


def successor(tier: RecordedTier) -> str:
    tier.go()
    said, trainer = recover(tier)
    if trainer is None:
        return said
    commit(trainer.repository, trainer.generation, 40, "b")
    return f"{said}, committed 40, deleted {len(trainer.collect(1))}"


def recover(tier: RecordedTier) -> tuple[str, Trainer | None]:
    nonces = CountedNonces("recoverer")
    repository = Repository.open(tier, nonces=nonces)
    for attempt in ("first", "second"):
        base = repository.visible()[-1]
        try:
            read_whole(repository, base)
            return f"opened on {base.step} at the {attempt} try", opened(repository, base, nonces, world_size=1)
        except (Damaged, Transient):
            repository.refresh()
    return "gave up", None


def reader(tier: RecordedTier) -> str:
    tier.go()
    repository = Repository.open(tier)
    for attempt in ("first", "second"):
        newest = repository.visible()[-1]
        try:
            read_whole(repository, newest)
            return f"read {newest.step} at the {attempt} try"
        except Damaged as e:
            repository.refresh()
            if newest in repository.visible():
                raise Violation(f"step {newest.step} is visible and cannot be read: {e}") from e
    return "gave up"


def read_whole(repository: Repository, commit: CommitEntry) -> None:
    for manifest in repository.manifests(commit):
        for _ in repository.read_pieces(manifest, manifest.pieces):
            pass


Actor = Callable[[RecordedTier], str]
GENERATION: dict[Actor, int] = {zombie: 0, gc: 1, writer: 1, recoverer: 2, successor: 2}
"""An actor for which a newer generation exists can change nothing that is visible."""


class Model:
    """The search. Tiers, results and records are numbered as they appear, so that a state is a tuple of small integers."""

    def __init__(self, actors: Iterable[Actor]) -> None:
        self.actors = list(actors)
        self._tiers: list[Snapshot] = []
        self._tier_numbers: dict[Snapshot, int] = {}
        self._records: list[tuple[int, Any]] = [(-1, None)] * len(self.actors)
        self._record_numbers: dict[tuple[int, Any], int] = {}
        self._actor_of: list[int] = list(range(len(self.actors)))
        self._next: dict[int, Call] = {}
        self._ended: dict[int, int] = {}
        self._applied: dict[tuple[int, Call], tuple[Any, int]] = {}
        self._views: dict[Snapshot, LogState] = {}
        self._checked: set[tuple[int, int, int]] = set()
        self.outcomes: dict[Actor, set[str]] = {actor: set() for actor in self.actors}
        self.num_states = 0

    @property
    def num_tiers(self) -> int:
        """Different contents of the tier."""
        return len(self._tiers)

    def run(self) -> None:
        """Set up, then visit every reachable state. Raises Violation."""
        tier, records = self._set_up()
        self._check_tier(tier)
        seen = {(tier, *records)}
        stack = list(seen)
        while stack:
            state = stack.pop()
            self.num_states += 1
            for actor in range(len(self.actors)):
                call = self._next_call(state[actor + 1])
                if call[0] == "done":
                    continue
                new = self._step(state, actor, call)
                if new not in seen:
                    seen.add(new)
                    stack.append(new)

    def _set_up(self) -> tuple[int, list[int]]:
        """Each actor up to its `go`, one after another."""
        tier, records = self._tier_number(()), list(range(len(self.actors)))
        for actor in range(len(self.actors)):
            while (call := self._next_call(records[actor]))[0] != "go":
                result, tier = self._apply(tier, call)
                records[actor] = self._record(records[actor], result, actor)
            records[actor] = self._record(records[actor], None, actor)
        return tier, [self._settle(tier, record, actor) for actor, record in enumerate(records)]

    def _step(self, state: tuple[int, ...], actor: int, call: Call) -> tuple[int, ...]:
        result, tier = self._apply(state[0], call)
        record = self._settle(tier, self._record(state[actor + 1], result, actor), actor)
        if tier != state[0]:
            self._check_step(state[0], tier, actor)
        new = list(state)
        new[0], new[actor + 1] = tier, record
        return tuple(new)

    def _settle(self, tier: int, record: int, actor: int) -> int:
        """Do the reads whose result can never change; all ends of an actor are one."""
        while True:
            call = self._next_call(record)
            if call[0] == "done":
                return self._ended.setdefault(actor, record)
            if call[0] != "read" or not (call[1].startswith("runs/") or call[1] == "run.json"):
                return record
            result, _ = self._apply(tier, call)
            if isinstance(result, type):
                return record
            record = self._record(record, result, actor)

    def _next_call(self, record: int) -> Call:
        if record not in self._next:
            program = self.actors[self._actor_of[record]]
            try:
                outcome = program(RecordedTier(self._results(record)))
                self.outcomes[program].add(outcome)
                self._next[record] = ("done", outcome)
            except Paused as paused:
                self._next[record] = paused.call
        return self._next[record]

    def _results(self, record: int) -> list[Any]:
        results = []
        while record >= len(self.actors):
            record, result = self._records[record]
            results.append(result)
        return results[::-1]

    def _record(self, before: int, result: Any, actor: int) -> int:
        key = (before, result)
        if key not in self._record_numbers:
            self._record_numbers[key] = len(self._records)
            self._records.append(key)
            self._actor_of.append(actor)
        return self._record_numbers[key]

    def _tier_number(self, snapshot: Snapshot) -> int:
        if snapshot not in self._tier_numbers:
            self._tier_numbers[snapshot] = len(self._tiers)
            self._tiers.append(snapshot)
        return self._tier_numbers[snapshot]

    def _apply(self, number: int, call: Call) -> tuple[Any, int]:
        """One atomic step: the call's result (an error's class for an error) and the tier after it."""
        key = (number, call)
        if key not in self._applied:
            tier = MemoryTier(self._tiers[number])
            try:
                result = getattr(tier, call[0])(*call[1:])
            except (FileNotFoundError, FileExistsError) as e:
                result = type(e)
            frozen = tuple(result) if isinstance(result, list) else result
            self._applied[key] = (frozen, self._tier_number(tier.snapshot()))
        return self._applied[key]

    def _view(self, number: int) -> LogState:
        entries = tuple(item for item in self._tiers[number] if item[0].startswith("runs/"))
        if entries not in self._views:
            self._views[entries] = Log.open(MemoryTier(entries)).state
        return self._views[entries]

    def _check_step(self, before: int, after: int, actor: int) -> None:
        """Properties of one step that changed the tier."""
        if (before, after, actor) in self._checked:
            return
        self._checked.add((before, after, actor))
        self._check_tier(after)
        old, new = self._view(before), self._view(after)
        seen, now = set(visible(old)), set(visible(new))
        program = self.actors[actor]
        if GENERATION[program] < max(g.number for g in old.generations) and seen != now:
            raise Violation(f"I6: the {program.__name__} of an older generation changed what is visible: {seen ^ now}")
        entry = self._new_entry(before, after)
        for gone in seen - now:
            if not _may_withdraw(entry, gone):
                raise Violation(f"step {gone.step} of generation {gone.generation} disappeared by {entry}")
        if isinstance(entry, CommitEntry) and entry not in now:
            raise Violation(f"step {entry.step} of generation {entry.generation} was committed and is not visible")
        if isinstance(entry, GenerationEntry):
            base = (entry.generation.base_step, entry.base_root)
            for commits in (seen, now):
                if entry.source == "disk" and base not in {(c.step, c.state_root) for c in commits}:
                    raise Violation(f"generation {entry.generation.number} was opened on step {base[0]}, which is not visible")
            if entry.generation.number in {g.number for g in old.generations}:
                raise Violation(f"generation {entry.generation.number} was opened twice")

    def _new_entry(self, before: int, after: int) -> Any:
        new = set(self._tiers[after]) - set(self._tiers[before])
        entries = [unseal("log", raw, LogEntry, path) for path, raw in new if path.startswith("runs/main/log/")]
        return entries[0].entry if entries else None

    def _check_tier(self, number: int) -> None:
        """Properties of one state: every visible checkpoint is whole, and on the newest generation's lineage (I1, I2)."""
        tier = MemoryTier(self._tiers[number])
        state = self._view(number)
        repository = Repository(tier, FACTS, Log(tier))
        for entry in visible(state):
            if not _is_on_lineage(state, entry):
                raise Violation(f"step {entry.step} of generation {entry.generation} is visible beside the lineage")
            try:
                for manifest in repository.manifests(entry):
                    for chunk in manifest.chunks:
                        read_chunk(tier, chunk)
            except Damaged as e:
                raise Violation(f"step {entry.step} is visible, but {e}") from e


def _may_withdraw(entry: Any, commit: CommitEntry) -> bool:
    name = (commit.step, commit.generation)
    if isinstance(entry, PruneEntry):
        return name in entry.commits
    if isinstance(entry, CondemnEntry):
        return name == (entry.step, entry.generation)
    return isinstance(entry, GenerationEntry) and commit.step > entry.generation.base_step


def _is_on_lineage(state: LogState, commit: CommitEntry) -> bool:
    """The rule said once more, from the commit's side: every generation between it and the newest one started at its step or later."""
    current = state.generations[-1]
    table = {g.number: g for g in state.generations}
    while current.number != commit.generation:
        if current.parent is None or current.base_step < commit.step:
            return False
        current = table[current.parent]
    return True


def checked(*actors: Actor) -> Model:
    """The finished search."""
    model = Model(actors)
    model.run()
    print(f"\n{model.num_states} states, {model.num_tiers} different tiers, 0 violations")
    for actor, outcomes in model.outcomes.items():
        print(f"  {actor.__name__}: {sorted(outcomes)}")
    return model


def test_I6_no_interleaving_of_writer_zombie_recoverer_gc_and_reader_breaks_a_property() -> None:
    model = checked(zombie, gc, writer, recoverer, reader)
    assert model.num_states > 100_000
    assert {"committed 30 at the first try", "committed 30 at the second try", "fenced"} <= model.outcomes[writer]
    assert model.outcomes[zombie] == {"fenced fenced"}
    assert {f"opened on {step} at the {n} try" for step, n in ((20, "first"), (30, "first"), (30, "second"))} <= model.outcomes[recoverer]


def test_I2_a_successor_that_commits_and_collects_is_not_harmed_by_the_older_generations() -> None:
    model = checked(zombie, gc, writer, successor)
    assert model.num_states > 10_000
    assert any("committed 40" in outcome for outcome in model.outcomes[successor])


def violation_of(*actors: Actor) -> str:
    """What the search finds, which has to be something."""
    model = Model(actors)
    with pytest.raises(Violation) as found:
        model.run()
    print(f"\n{model.num_states} states until: {str(found.value)[:200]}")
    return str(found.value)


def test_I6_without_the_reread_after_a_lost_slot_the_model_finds_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_the_next_slot(log: Log) -> None:
        log.head += 1

    monkeypatch.setattr(Log, "_reread", take_the_next_slot)
    violation_of(zombie, gc, writer, recoverer, reader)


@pytest.mark.parametrize(
    ("module", "rule", "expected"),
    [
        (repository_module, "check_writer", "was committed and is not visible"),
        (repository_module, "check_borrowed", "is visible, but packs/"),
        (repository_module, "check_base", "which is not visible"),
        (collect_module, "check_collector", "I6: the gc"),
    ],
)
def test_I6_without_any_one_of_the_rules_the_model_finds_a_violation(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, rule: str, expected: str
) -> None:
    monkeypatch.setattr(module, rule, lambda *args: None)
    assert expected in violation_of(zombie, gc, writer, recoverer, reader)
