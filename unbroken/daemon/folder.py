"""The daemon's hold on one lineage of a run folder: lease, repository, and the steps of a start (Begin, Bad, Opened)."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from unbroken.core.errors import NoCheckpoint, Refused, SaveFailed, StoreError, Transient, UnbrokenError
from unbroken.core.limits import MAX_HANG_FILES
from unbroken.core.messages import Bad, Begin, Opened, Plan, Rules
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import Clock, Nonces, Tier
from unbroken.core.records import BeginRecord, Generation, JournalLine, Keep, LogState, Record, RootRecord, RunFacts, StepRecord, Writer
from unbroken.daemon.plan import Choice, Key, MemoryCut, choose
from unbroken.store import paths
from unbroken.store.deltas import Encoding, FullEvery
from unbroken.store.journal import JournalWriter
from unbroken.store.lease import WriterLease
from unbroken.store.lineages import require_log
from unbroken.store.log import visible
from unbroken.store.logged import born_with, event_of
from unbroken.store.repository import Repository, naming
from unbroken.store.tiers.disk import DiskTier

TAIL_BYTES = 1 << 20
MAX_NOTES = 16
MAX_NOTE_CHARS = 1000


class LiveJournal:
    """The journal of one generation, written by the event loop and made durable by the drain."""

    def __init__(self, tier: Tier, lineage: str, generation: Generation) -> None:
        self.generation = generation
        self.last_applied = generation.base_step
        self._tier = tier
        self._writer = JournalWriter(tier, lineage, generation.number, generation.nonce)
        self._lock = threading.Lock()
        self._failure: StoreError | None = None
        self._marks: dict[Record, tuple[str, int]] = {}

    def add(self, records: Iterable[Record]) -> None:
        """Append records, in order. StoreError once lines have been lost: from then on nothing more of this generation counts."""
        with self._lock:
            for record in records:
                if self._failure is not None:
                    raise self._failure
                try:
                    self._writer.add(record)
                except StoreError as error:
                    self._failure = error
                    raise
                if isinstance(record, StepRecord):
                    self.last_applied = record.step

    def mark(self, record: RootRecord) -> tuple[str, int]:
        """Append a record, once; chain value of its line, and the number of lines up to and including it."""
        with self._lock:
            if record not in self._marks:
                self._writer.add(record)
                self._marks = {record: (self._writer.head, self._writer.num_lines)}
            return self._marks[record]

    def sync(self) -> None:
        """Make all lines durable."""
        self.check_folder()
        self._writer.sync()

    def check_folder(self) -> None:
        """SaveFailed if the run has been removed: nothing of it may then be made anew."""
        try:
            self._tier.size(paths.RUN)
        except FileNotFoundError:
            raise SaveFailed("the run folder has been removed") from None


class _GivingWay(DiskTier):
    """The folder, where removing gives way to a start: a collection may have thousands of files to remove, and a start waits for it.

    What is not removed stays doomed, and a later collection removes it.
    """

    is_starting = False

    def delete(self, path: str) -> None:
        if self.is_starting:
            raise Transient(f"{path}: removed later, a start is in progress")
        super().delete(path)


@dataclass
class _Start:
    request: Begin
    choice: Choice
    plan: Plan
    witnessed: bool
    exclude: dict[Key, str] = field(default_factory=dict)


class RunFolder:
    """One lineage of a run folder. Nothing is created in it before a start needs it."""

    def __init__(self, directory: str, clock: Clock, nonces: Nonces, lineage: str = paths.MAIN) -> None:
        self.directory = directory
        self.lineage = lineage
        self.clock = clock
        self.writer = Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since=clock.utc())
        self._nonces = nonces
        self._tier = _GivingWay(directory)
        self._lease: WriterLease | None = None
        self._repository: Repository | None = None
        self._facts_raw = b""
        self._start: _Start | None = None
        self._live_journal: LiveJournal | None = None
        self._notes: list[str] = []
        self._news: list[str] = []
        self._lacking = ""
        self.rules = Rules()
        self._turn = threading.Lock()

    @property
    def repository(self) -> Repository:
        """The run's repository; there is one from the first `opened` on."""
        assert self._repository is not None, "no run has been opened"
        return self._repository

    @property
    def is_open(self) -> bool:
        """Is there a run, as far as this daemon knows?"""
        return self._repository is not None

    def changed(self) -> bool:
        """True if the run opened here has been removed, replaced or put back to an earlier copy meanwhile; it is forgotten then."""
        if self._repository is None or (self._read_facts() == self._facts_raw and self._repository.is_there()):
            return False
        self._news.append("the folder was removed, replaced or put back to an earlier copy: what memory held of it is forgotten")
        self._repository, self._facts_raw, self._start, self._live_journal = None, b"", None, None
        self.close()
        return True

    def looks_at_copy(self, request: Begin) -> bool:
        """Is the copy to be asked before this start? Not where a run is open here: what is in the folder then is its newest."""
        return request.from_copy and bool(request.rules.copy_to) and request.resume != "never" and self._repository is None

    def tell(self, notes: Sequence[str], lacking: str = "") -> None:
        """What the copy gave: `notes` go into the next plan, `lacking` into the error where no checkpoint is found."""
        self._news += [*self._notes, *notes]  # of the lease, too, which may have been taken over for this
        self._lacking = lacking

    def begin(self, request: Begin, memory: Sequence[MemoryCut], *, witnessed: bool, last_applied: int | None) -> Plan:
        """Choose where to start. Takes the lease; raises what the store raises, NoCheckpoint or Refused.

        `last_applied` is the newest step of the generation that ended, None if this daemon did not see it. A collection in progress is
        waited for: it ends after the file it is just removing.
        """
        self.rules = request.rules
        if request.world_size < 1:
            raise ValueError(f"world_size {request.world_size}: must be at least 1")
        self._tier.is_starting = True  # from here on nothing is removed until `opened`: it may be what this start loads (I2)
        with self._turn:
            pass
        self._start, self._notes, self._news = None, self._news, []
        exists = self._open()
        choice, reason = self._choose(request, memory, witnessed, {})
        if not exists:
            self.take_lease()
            if self._open():  # somebody made a run here before we had the lease
                choice, reason = self._choose(request, memory, witnessed, {})
        last_step = self._last_step_on_disk() if last_applied is None else last_applied
        plan = self._plan(request, choice, reason, last_step)
        self._start = _Start(request=request, choice=choice, plan=plan, witnessed=witnessed)
        return plan

    def bad(self, message: Bad, memory: Sequence[MemoryCut], *, note: str = "", is_repaired: bool = False) -> Plan:
        """The planned source did not verify: condemn it if it is on disk, and choose again; the same plan if it has been repaired."""
        start = self._started()
        if is_repaired:
            start.plan = msgspec.structs.replace(start.plan, notes=(*start.plan.notes, note))
            return start.plan
        self._notes += [note] * bool(note)
        if (message.step, message.stored_generation) != (start.choice.step, start.choice.generation):
            raise UnbrokenError(f"step {message.step} was reported bad, but step {start.choice.step} was planned: begin anew")
        start.exclude[start.choice.key] = message.reason[:MAX_NOTE_CHARS]
        if start.choice.commit is not None:
            self._condemn(start.choice, message)
        start.choice, reason = self._choose(start.request, memory, start.witnessed, start.exclude)
        start.plan = self._plan(start.request, start.choice, reason, start.plan.last_step)
        return start.plan

    def planned(self) -> Choice | None:
        """What the plan in progress loads."""
        return self._start.choice if self._start is not None else None

    def opened(self, message: Opened) -> LiveJournal:
        """Every rank stands at the planned step: write run.json if the run is new, then the generation entry, then begin its journal."""
        start = self._started()
        plan, choice = start.plan, start.choice
        if (message.generation, message.step) != (plan.generation, plan.step):
            raise UnbrokenError(f"generation {message.generation} opened at {message.step}; planned was {plan.generation} at {plan.step}")
        if self._repository is None:
            options = plan.options | ({"started_from": message.origin} if message.origin else {})
            facts = RunFacts(run_id=plan.run_id, created=self.clock.utc(), options=options)
            self._repository = Repository.create(self._tier, facts)
            self._facts_raw = self._read_facts()
        elif choice.source == "fresh" and plan.options.get("started_from", {}) != message.origin:
            born = plan.options.get("started_from", {}).get("source", "nothing")
            now = message.origin.get("source", "nothing")
            raise Refused(
                f"this run was born, but never made a checkpoint, from other state: start_from={born} then, {now} now, or another step "
                "of it: give it as it was, or another folder"
            )
        self._sync_journal()
        entry = self._repository.open_generation(
            base_step=choice.step,
            base_root=message.loaded_root,
            source=choice.source,
            nonce=self._nonces.nonce(),
            world_size=start.request.world_size,
            writer=self.writer,
            clock=self.clock,
        )
        if entry.number != plan.generation:
            raise Refused(f"generation {plan.generation} was planned but {entry.number} opened: somebody else wrote to {self.directory}")
        self._start, self._tier.is_starting = None, False
        self._live_journal = journal = LiveJournal(self._tier, self._repository.lineage, entry)
        begin = BeginRecord(
            generation=entry.number,
            base_step=entry.base_step,
            source=choice.source,
            loaded_root=message.loaded_root,
            world_size=entry.world_size,
            time_s=self.clock.monotonic(),
            differences=message.differences,
        )
        journal.add([begin, *event_of(self._keep(self._repository), entry.base_step, self._repository.facts)])
        return journal

    def encoding(self, repository: Repository, step: int, *, milestone: bool) -> Encoding | None:
        """How the checkpoint of this step is to be stored; None: as it is."""
        full_every = FullEvery(self.rules.full_steps, self.rules.full_s)
        return full_every.encoding(repository.visible(), step, self.clock.utc(), milestone=milestone)

    def collect(self, repository: Repository) -> None:
        """Remove old checkpoints, from the drain thread; put off while a start is in progress."""
        with self._turn:
            if not self._tier.is_starting:
                repository.collect(self._keep(repository), writer=self.writer, clock=self.clock)

    def keep_stacks(self, step: int, generation: int, text: str) -> str:
        """Write what the watchdog has seen into the folder of stacks, the oldest of which go; the file's path. For people: never read."""
        taken = self._tier.list(paths.HANGS)
        for path in [path for path in taken if paths.is_stacks(path)][: max(0, len(taken) - MAX_HANG_FILES + 1)]:
            self._tier.delete(path)
        number = next(n for n in itertools.count() if paths.stacks(step, generation, n) not in taken)
        path = paths.stacks(step, generation, number)
        self._tier.create(path, [text.encode(errors="replace")])
        return os.path.join(self.directory, path)

    def close(self) -> None:
        """Let the folder go."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _keep(self, repository: Repository) -> Keep:
        return self.rules.keep or born_with(repository.facts)

    def _sync_journal(self) -> None:
        """The generation entry to come anchors the journal before as it is on disk: what is still in memory should be there, too."""
        if self._live_journal is not None:
            with suppress(OSError, UnbrokenError):  # safe: the start needs no line of it, and the drain tries again and says why
                self._live_journal.sync()

    def _started(self) -> _Start:
        if self._start is None:
            raise UnbrokenError("nothing has been planned: begin first")
        return self._start

    def _read_facts(self) -> bytes:
        try:
            return self._tier.read(paths.RUN)
        except FileNotFoundError:
            return b""

    def _open(self) -> bool:
        with naming(self.directory):
            if not Repository.exists(self._tier):
                if self.lineage != paths.MAIN:
                    raise NoCheckpoint(f"no run here, so no lineage {self.lineage!r}: is this the right folder, and is it mounted?")
                return False
            if self._repository is None and self.lineage != paths.MAIN:
                Repository.open(self._tier, self.lineage)  # one that was never begun must not get so much as a lock file
        self.take_lease()
        if self._repository is None:
            self._repository = Repository.open(self._tier, self.lineage)
            self._facts_raw = self._read_facts()
        else:
            self._repository.refresh()
        return True

    def take_lease(self) -> None:
        """Take the lease, if it is not held. Fenced names the holder."""
        if self._lease is None:
            self._lease = WriterLease.acquire(self.directory, self.writer, self.lineage)
            if self._lease.took_over:
                self._notes.append(f"took the run over from {self._lease.took_over}")

    def _log_state(self) -> LogState | None:
        return self._repository.log.state if self._repository is not None else None

    def _choose(self, request: Begin, memory: Sequence[MemoryCut], witnessed: bool, exclude: dict[Key, str]) -> tuple[Choice, str]:
        state = self._log_state()
        with naming(self.directory, self._lacking):
            choice, why = choose(
                memory,
                visible(state) if state is not None else (),
                request.resume,
                exclude,
                state=state,
                restart_count=request.restart_count,
                witnessed=witnessed,
                at_most=request.at_most,
            )
            if choice.source == "fresh" and self._repository is not None:
                require_log(self._repository.log)
            return choice, why

    def _condemn(self, choice: Choice, message: Bad) -> None:
        assert choice.commit is not None
        objects = message.objects or tuple(ref.path for ref in choice.commit.manifests)
        reason = message.reason[:MAX_NOTE_CHARS]
        try:
            self.repository.condemn(choice.step, choice.generation, objects, reason, writer=self.writer, clock=self.clock)
        except (OSError, UnbrokenError) as error:
            # Safe: this start passes the checkpoint over anyway, and the next one finds the same damage.
            self._notes.append(f"step {choice.step} could not be condemned ({type(error).__name__}: {error})")

    def _plan(self, request: Begin, choice: Choice, reason: str, last_step: int) -> Plan:
        repository, state = self._repository, self._log_state()
        generations = {g.number: g for g in state.generations} if state is not None else {}
        notes = (*self._notes, *self._damage(), *choice.notes[:MAX_NOTES], reason)
        manifests = choice.commit.manifests if choice.commit is not None else ()
        stored_world_size = choice.cut.world_size if choice.cut is not None else 0
        if choice.commit is not None and choice.generation in generations:
            stored_world_size = generations[choice.generation].world_size
        return Plan(
            generation=self._next_generation(generations),
            step=choice.step,
            source=choice.source,
            stored_generation=choice.generation,
            state_root=self._root(choice),
            slots=choice.cut.slots if choice.cut is not None else (),
            manifests=manifests,
            stored_world_size=stored_world_size,
            last_step=last_step,
            options=repository.facts.options if repository is not None else request.options,
            run_id=repository.facts.run_id if repository is not None else self._nonces.nonce(),
            notes=tuple(dict.fromkeys(note[:MAX_NOTE_CHARS] for note in notes)),
        )

    def _next_generation(self, known: Iterable[int]) -> int:
        """The number that the store will give: above every journal's, too, because the log entry of one may have been lost."""
        lineage = self._repository.lineage if self._repository is not None else None
        journals = [paths.number(path) for path in self._tier.list(paths.journal_folder(lineage))] if lineage is not None else []
        return 1 + max([*known, *(number for number in journals if number is not None)], default=-1)

    def _root(self, choice: Choice) -> str:
        if choice.commit is not None:
            return choice.commit.state_root
        for commit in self._repository.visible() if self._repository is not None and choice.cut is not None else ():
            if (commit.step, commit.generation) == (choice.step, choice.generation):
                return commit.state_root
        return ""

    def _last_step_on_disk(self) -> int:
        """Newest step in the journal of the newest generation, looked for in its last lines; only timings depend on it."""
        state = self._log_state()
        newest = max(state.generations, key=lambda g: g.number, default=None) if state is not None else None
        if newest is None:
            return 0
        path = paths.journal(self.repository.lineage, newest.number)
        try:
            lines = self._tier.read(path, max(0, self._tier.size(path) - TAIL_BYTES)).split(b"\n")
        except (FileNotFoundError, StoreError):
            return newest.base_step
        for line in reversed(lines[:-1]):
            try:
                record = msgspec.json.decode(line, type=JournalLine).record
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            if isinstance(record, StepRecord):
                return record.step
        return newest.base_step

    def _damage(self) -> tuple[str, ...]:
        return tuple(self._repository.log.damage[:8]) if self._repository is not None else ()
