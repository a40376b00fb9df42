"""Checkpoints without a run: `Store` saves and loads any state from a plain script, `open` reads what a Store or a Run has written.

Neither needs a launcher, a daemon or a process group. torch is imported when a state is first saved or loaded, not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from unbroken.archive import reading
from unbroken.archive.background import Background
from unbroken.archive.branching import Branch, LineageInfo, list_lineages, make_branch
from unbroken.archive.compacting import Compaction, compact
from unbroken.archive.comparing import Difference, choose_commits, compare
from unbroken.archive.exporting import Export, export
from unbroken.archive.pruning import Pruning, prune
from unbroken.archive.saving import Saving, save_failed
from unbroken.archive.staging import CopyFailed, Staging
from unbroken.codec.metrics import Value, checked
from unbroken.config import Interval, parse_interval
from unbroken.core.errors import CheckpointWarning, Fenced, NoCheckpoint, Refused, SaveFailed, StoreError
from unbroken.core.limits import DRAIN_TIMEOUT_S, KEEP_NEWEST
from unbroken.core.ports import SystemClock, SystemNonces, Tier, environment
from unbroken.core.records import MAIN_LINEAGE, CommitEntry, RunFacts, StoredPiece
from unbroken.proof.certify import Certificate, certify
from unbroken.proof.diverging import Parting, part_ways
from unbroken.proof.replaying import Replayable, replayable
from unbroken.store.deltas import FullEvery
from unbroken.store.log import replay_of
from unbroken.store.paths import check_lineage
from unbroken.store.repository import Part, Repository, VerifyReport, naming
from unbroken.store.retention import rules
from unbroken.store.shards import merged
from unbroken.store.tiers.choose import name_of, tier_at
from unbroken.store.tiers.disk import DiskTier, local_path

if TYPE_CHECKING:
    from unbroken.importing.storing import Imported

_NUM_BUFFERS = 2
_MAX_STEP = 10**12 - 1


def _warn(notes: Iterable[str], depth: int) -> None:
    """Show notes at the user's line, `depth` calls above ours."""
    for note in notes:
        warnings.warn(note, CheckpointWarning, stacklevel=depth + 2)


@dataclasses.dataclass(slots=True, eq=False)
class _Save:
    step: int
    milestone: bool
    base: CommitEntry | None
    loaded_root: str
    metrics: Mapping[str, Value]
    staging: Staging
    parts: list[Part]


def _report_unseen(failures: list[tuple[int, Exception]]) -> None:
    for step, cause in failures:
        print(f"unbroken: {save_failed(step, cause)}; reported at exit: nothing called wait() or close()", file=sys.stderr, flush=True)


class Store:
    """Checkpoints of any state in one folder, saved in the background.

        store = unbroken.Store("checkpoints", keep=3)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if store.latest() is not None:
            store.load(into=state)
        ...
        store.save(step, state)
        store.close()

    A Store is for state that is the same on every rank: in a multi-process job save() writes on rank 0 only and returns at once
    elsewhere. One process writes a folder at a time; any number may read it. Use one Store from one thread.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int = KEEP_NEWEST,
        keep_every: str | None = None,
        keep_hours: int | None = None,
        keep_best: str | None = None,
        full_every: str | None = None,
        lineage: str = MAIN_LINEAGE,
    ) -> None:
        """`url`: a folder's path, file:// URL or place in an object store (s3://bucket/prefix, gs://, az://); nothing is made before the
        first save. In an object store whoever saves first after opening fences the others: nobody can be asked whether one writes.

        `keep` >= 1 newest ones stay, and milestones; with `keep_every="1000 steps"` the first at or after each multiple, with
        `keep_hours=24` the newest of each of the newest 24 hours, with `keep_best="val_loss"` (or "accuracy max 3") the best by a metric
        that was given to `save`.
        `full_every="100 steps"` or "6h": stored as exact differences from the one before, and whole at least so often, as milestones are.
        `lineage`: the branch to go on with (see `Archive.branch`); NoCheckpoint at the first call if there is none of that name.
        """
        if keep is None:
            raise ValueError("keep=None: give a whole number of at least 1")
        self._keep = rules({"keep": keep, "keep_every": keep_every, "keep_hours": keep_hours, "keep_best": keep_best})
        full = Interval() if full_every is None else parse_interval(full_every, "full_every")
        self._full_every = FullEvery(full.steps, full.seconds)
        self._tier = tier_at(url)
        self._place = name_of(self._tier)
        self._lineage = check_lineage(lineage)
        self._saving: Saving | None = None
        self._background = Background()
        self._buffers = deque(Staging() for _ in range(_NUM_BUFFERS))
        self._freed = threading.Condition()
        self._in_flight: deque[_Save] = deque()
        self._failures: list[tuple[int, Exception]] = []
        self._loaded: CommitEntry | None = None
        self._damaged: list[reading.PassedOver] = []
        self._fenced: Fenced | None = None
        self._is_closed = False
        weakref.finalize(self, _report_unseen, self._failures)

    def save(self, step: int, state: Any, *, wait: bool = False, milestone: bool = False, metrics: Mapping[str, Any] | None = None) -> None:
        """Save `state` as the checkpoint of `step`. Returns when it has been copied; writing goes on in the background.

        Cost here: one copy of the state at memory bandwidth, 3 us per value; two saves may be in flight, a third waits. Steps ascend;
        to go back, load() an earlier step first, whose successors are then left behind. `milestone` checkpoints are never removed;
        `wait` returns when it is durable, and what `keep` no longer keeps is no checkpoint any more; its files go right after.
        `metrics` are numbers for `keep_best`.

        TypeError names the path of what cannot be stored, before anything is written. Fenced if another process writes here. SaveFailed
        (an OSError too, with errno, when the disk said so) reports that an *earlier* save failed: this one has then not been begun.
        """
        if type(step) is not int or not 0 <= step <= _MAX_STEP:
            raise ValueError(f"step={step!r}: a whole number from 0 to {_MAX_STEP}")
        if self._is_closed:
            raise ValueError("save() on a closed Store: make a new one")
        if environment("RANK", "0") not in ("", "0"):
            return
        logged = checked(metrics or {})
        self._raise_failures()
        from unbroken.capture.tree import flatten

        items = flatten(state)
        saving = self._open(step)
        base = self._base(saving, step)
        staging = self._buffer()
        loaded_root = self._loaded.state_root if self._loaded is not None else ""
        save = _Save(step, milestone, base, loaded_root, logged, staging, staging.place(items))
        self._in_flight.append(save)
        try:
            self._background.submit(lambda: self._write(saving, save))  # begins with what has been copied
            staging.copy()
        except BaseException:  # raised again: whatever it was, the writing must not wait for the rest
            staging.give_up()
            with contextlib.suppress(ValueError):  # it was over already
                self._in_flight.remove(save)
            raise
        self._loaded = None  # "go back to here" was meant for this save: later steps ascend again, or a repeated one would delete newer
        self._show_notes()
        if wait:
            self.wait()

    def load(self, step: int | None = None, *, into: Any = None, strict: bool = True, cast: bool = False) -> Any:
        """The state of `step`, or of the newest good checkpoint. Saves of this Store in flight are waited for first.

        Without `into` the state is made anew, tensors on the CPU (`resize_` refuses large ones). With `into` (a dict, module, ...) it is
        loaded in place, a LoadReport returned: strict=True makes all missing, unexpected or mismatched values one LayoutMismatch and
        leaves `into` as it was, strict=False loads what fits; dtypes are converted only with cast=True.

        Without `step`, damaged checkpoints are passed over with one CheckpointWarning. NoCheckpoint lists what there is: never a step
        that was not asked for, never a silent fresh start. Damaged (with `step`) names the file. Every byte is verified before use.

        Memory: the target and its largest value (a module or other object: a copy of its own state); in place, large values are read
        twice, so that all are verified before the first is changed.
        """
        from unbroken.capture.tree import load_into, rebuild

        self._background.join(DRAIN_TIMEOUT_S)
        with naming(self._place):
            repository = Repository.open(self._tier, self._lineage)

            def use(commit: CommitEntry) -> Any:
                if into is None:
                    return rebuild(reading.read_commit(repository, commit), adopt=True)
                return load_into(reading.on_demand(repository, commit), into, strict=strict, cast=cast)

            found = reading.newest_good(repository, use) if step is None else reading.exactly(repository, step, use)
        self._loaded = found.commit
        self._pass_over(found, repository.log.damage)
        return found.value if into is None else dataclasses.replace(found.value, step=found.commit.step)

    def latest(self) -> int | None:
        """The newest step that is durable, its files there and whole in size; None if nothing has ever been committed here.

        NoCheckpoint if there were checkpoints but none is usable. Cost: the log and one manifest; no data is read.
        """
        with naming(self._place):
            if not Repository.exists(self._tier):
                return None
            commit = reading.newest_plausible(Repository.open(self._tier, self._lineage))
        return commit.step if commit is not None else None

    def wait(self) -> None:
        """Return when every save so far is durable. SaveFailed if one is not, once; the Store goes on to work."""
        if not self._background.join(DRAIN_TIMEOUT_S):
            raise SaveFailed(f"steps {[save.step for save in list(self._in_flight)]} have not become durable in {DRAIN_TIMEOUT_S:.0f} s")
        self._show_notes()
        self._raise_failures()

    def close(self) -> None:
        """Wait for saves in flight and let the folder go to another writer. SaveFailed as in wait(). A second call does nothing."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._background.join(DRAIN_TIMEOUT_S, awaited=False)
            if self._saving is not None:
                self._saving.release()
                self._show_notes()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """close(); when the block failed its error is the one that surfaces, and a save's failure is noted on it."""
        try:
            self.close()
        except SaveFailed as failure:
            if error is None:
                raise
            error.add_note(f"besides, {failure}")
            if error.__context__ is None:
                error.__context__ = failure

    def _open(self, step: int) -> Saving:
        if self._fenced is not None:
            raise Fenced(str(self._fenced))
        if self._saving is None:
            try:
                with naming(self._place):
                    self._saving = Saving.open(self._tier, SystemClock(), SystemNonces(), self._lineage, keep=self._keep)
            except (OSError, StoreError) as error:
                raise save_failed(step, error) from error
            self._saving.full_every = self._full_every
            self._condemn_damaged()
        self._saving.check()
        return self._saving

    def _base(self, saving: Saving, step: int) -> CommitEntry | None:
        """The checkpoint to go back to before `step` can be saved; None when it simply follows. Refused when it does neither."""
        last = saving.last
        newest = self._in_flight[-1].step if self._in_flight else last.step if last is not None else -1
        if step > newest:
            return None
        if self._loaded is not None and self._loaded.step <= step:
            return self._loaded
        raise Refused(
            f"step {step} does not follow step {newest}, the newest in {self._place}, and nothing has been changed: "
            "load() the step to go back to first, or use another folder for another run"
        )

    def _buffer(self) -> Staging:
        with self._freed:
            if not self._freed.wait_for(lambda: bool(self._buffers), DRAIN_TIMEOUT_S):
                step = self._in_flight[0].step
                raise SaveFailed(f"step {step} has not become durable in {DRAIN_TIMEOUT_S:.0f} s: this save was not begun")
            return self._buffers.popleft()

    def _give_back(self, staging: Staging) -> None:
        with self._freed:
            self._buffers.appendleft(staging)  # used first again: the other one's memory is made only when two saves are in flight
            self._freed.notify()

    def _write(self, saving: Saving, save: _Save) -> None:
        """In the background: one save, and its failure kept for the caller's next call."""
        try:
            saving.save(save.step, save.parts, save.milestone, save.base, save.loaded_root, logged=save.metrics)
        except CopyFailed:
            pass  # safe: nothing was written that stays, and the caller has met the error itself
        except Exception as error:  # noqa: BLE001  (whatever it is, it is raised as SaveFailed at the next call)
            if isinstance(error, Fenced):
                self._fenced = error
            self._failures.append((save.step, error))
        else:
            saving.collect(later=lambda remove: self._background.submit(remove, awaited=False))
        finally:
            save.parts.clear()
            with contextlib.suppress(ValueError):  # given up
                self._in_flight.remove(save)
            self._give_back(save.staging)

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        (step, cause), *others = self._failures
        self._failures.clear()
        failure = save_failed(step, cause)
        for other_step, other in others:
            failure.add_note(str(save_failed(other_step, other)))
        raise failure from cause

    def _show_notes(self) -> None:
        if self._saving is not None and self._saving.notes:
            notes, self._saving.notes = self._saving.notes, []
            _warn(notes, 2)

    def _pass_over(self, found: reading.Found[Any], damage: Sequence[str]) -> None:
        """Warn once of what was passed over, and withdraw it if this Store may write."""
        reasons = [str(bad) for bad in found.passed_over]
        reasons += [f"log: {text}" for text in damage if not any(text in reason for reason in reasons)]
        if not reasons:
            return
        self._damaged += found.passed_over
        self._condemn_damaged()
        _warn([f"loaded step {found.commit.step} from {self._place}; passed over: " + "; ".join(reasons)], 2)

    def _condemn_damaged(self) -> None:
        saving = self._saving
        if saving is None or not self._damaged:
            return
        bad, self._damaged = self._damaged, []

        def condemn() -> None:
            try:
                saving.condemn(bad)
            except Exception as error:  # noqa: BLE001  (safe: the checkpoint is passed over by every load, and this is shown)
                saving.notes.append(f"damaged checkpoints could not be condemned ({type(error).__name__}: {error})")

        self._background.submit(condemn)
        self._background.join(DRAIN_TIMEOUT_S)


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    """One checkpoint that can be loaded. `size_bytes` is its state's logical size, `created` UTC ("" if unknown), `root` its state root.

    `kind`: "full", "incremental" (in part differences from an older one), or "replay": in a lineage that makes a step again.
    """

    step: int
    generation: int
    size_bytes: int
    created: str
    kind: str
    root: str
    milestone: bool
    lineage: str = MAIN_LINEAGE


class Diff(Struct, frozen=True, kw_only=True):
    """What differs between two checkpoints and the histories behind them. `steps` and `roots` are those of the two.

    `equal`: every restored and compared variable of the ranks that both have has the same bits, and the journals part nowhere.
    """

    equal: bool
    state_equal: bool
    steps: list[int]
    roots: list[str]
    differences: list[Difference]
    journal: Parting


def open(url: str | os.PathLike[str], lineage: str = MAIN_LINEAGE) -> Archive:
    """Open what a Store or a Run has written, or a copy of it (s3://bucket/run), for reading.

    Only `branch`, `prune` and `compact` change something, and in folders only.

    lineage: which of its histories, "main" or the name of a branch. NoCheckpoint if nothing is there, ForeignFolder if something else is,
    NewerFormat if a newer version wrote it.
    """
    tier = tier_at(url)
    with naming(name_of(tier)):
        return Archive(Repository.open(tier, check_lineage(lineage)), tier)


def import_checkpoint(source: str | os.PathLike[str], directory: str | os.PathLike[str], step: int | None = None) -> Imported:
    """Write somebody else's checkpoint into a new folder, as a Store would; see docs/importing.md for what is understood.

    step: which one, where the source holds several; else the number to save it under where the source tells none. Nothing in the source
    is executed: Refused names the class that a file wants and the lines that re-save it. Damaged, NoCheckpoint, MissingExtra, ValueError.
    """
    from unbroken.importing.storing import import_into

    target = local_path(directory)
    return import_into(os.fspath(source), target, step, clock=SystemClock(), nonces=SystemNonces())


class Archive:
    """What `open` returns: one lineage of a folder. Every call sees what has been committed by then."""

    def __init__(self, repository: Repository, tier: Tier) -> None:
        self._repository = repository
        self._tier = tier
        self._root = name_of(tier)

    @property
    def facts(self) -> RunFacts:
        """What was fixed when the run began."""
        return self._repository.facts

    @property
    def damage(self) -> list[str]:
        """Log entries that are missing or unreadable."""
        return list(self._repository.log.damage)

    def steps(self) -> list[CheckpointInfo]:
        """The checkpoints, ascending by step. Reads the log only."""
        repository = self._fresh()
        commits = repository.visible()
        times = reading.commit_times(repository.tier, repository.lineage, repository.log.head, commits)
        return [
            CheckpointInfo(
                step=commit.step,
                generation=commit.generation,
                size_bytes=commit.size_bytes,
                created=times.get((commit.step, commit.generation), ""),
                kind=commit.kind if replay_of(repository.log.state) is None else "replay",
                root=commit.state_root,
                milestone=commit.milestone,
                lineage=repository.lineage,
            )
            for commit in commits
        ]

    def stored_bytes(self) -> int:
        """What all lineages take on disk: packs, manifests, logs and journals. One look at every file's size."""
        return sum(reading.sizes(self._tier))

    def lineages(self) -> list[LineageInfo]:
        """The histories in this folder, the run's own first. Reads their logs."""
        return list_lineages(self._tier)

    def replayable(self) -> list[Replayable]:
        """The steps between the checkpoints here, which `unbroken materialize` makes again. Reads their journals: 5 us per step."""
        with naming(self._root):
            return replayable(self._fresh()) if "units" in self.facts.options else []

    def branch(self, step: int, name: str, set: Mapping[str, Any] | None = None) -> Branch:
        """Begin a lineage `name` in the same folder that goes on from the checkpoint of `step`; durable on return, no state is copied.

        set: hyper-parameters that its base checkpoint has instead of the stored ones, such as {"lr": 1e-4, "1.weight_decay": 0.0}
        ("1." is a group). They keep their types; a schedule that computes the rate is scaled with "lr". `Run(folder, lineage=name)` then
        trains it, also while this lineage is trained.

        ValueError for a bad name or setting (with those there are), NoCheckpoint for a step that is not there, Damaged if it is not
        whole, Refused if the name is taken. After any error nothing is visible.
        """
        with naming(self._root):
            return make_branch(self._fresh(), self._tier, step, name, set or {}, clock=SystemClock(), nonces=SystemNonces())

    def load(self, step: int | None = None, keys: Iterable[str] | None = None) -> Any:
        """The restored state of `step` or of the newest good checkpoint, made anew on the CPU, every byte verified.

        `keys` picks parts: names of the top level ("model") or JSON pointers ("/model/parameters/head.weight"); the result is then a
        dict of them, and only their bytes are read. KeyError for a part that is not there; NoCheckpoint, Damaged and CheckpointWarning
        as in Store.load.
        """
        from unbroken.capture.select import assemble, pointer_of, select

        repository = self._fresh()
        wanted = None if keys is None else {key: pointer_of(key) for key in keys}

        def use(commit: CommitEntry) -> Any:
            if wanted is None:
                return assemble(reading.read_commit(repository, commit))

            def read(pointers: Callable[[str], bool]) -> reading.Pieces:
                return reading.read_commit(repository, commit, lambda s: reading.logical(s) and pointers(s.piece.pointer))

            return select(read, wanted)

        with naming(self._root):
            if step is not None:
                return reading.exactly(repository, step, use).value
            found = reading.newest_good(repository, use)
        if found.passed_over:
            reasons = "; ".join(map(str, found.passed_over))
            _warn([f"loaded step {found.commit.step} from {self._root}; passed over: {reasons}"], 1)
        return found.value

    def variables(self, step: int | None = None) -> list[dict[str, Any]]:
        """Every piece of a checkpoint, by name: what it is, its size and hash; rank pieces once per rank, shards as one tensor."""
        repository = self._fresh()
        with naming(self._root):
            commit = reading.newest_plausible(repository) if step is None else reading.commit_of(repository, step)
            if commit is None:
                raise NoCheckpoint("no checkpoint has been committed here yet")
            manifests = repository.manifests(commit)
        seen: dict[tuple[str, int], StoredPiece] = {}
        for stored in merged(one for manifest in manifests for one in manifest.pieces):
            seen.setdefault((stored.piece.pointer, -1 if stored.rank is None else stored.rank), stored)
        return [_described(seen[name]) for name in sorted(seen)]

    def diff(self, other: Archive | str | os.PathLike[str], step: int | None = None, other_step: int | None = None) -> Diff:
        """What differs from a checkpoint here to one of `other`: variables by name, and the first step at which the histories part.

        Without steps, the newest checkpoint that both hold, else the newest of each. Cost: manifests and journals, and of the data only
        the chunks of variables with other digests; memory is a few chunks. NoCheckpoint, Damaged as in load.
        """
        theirs = other if isinstance(other, Archive) else open(other)
        ours, others = self._fresh(), theirs._fresh()
        with naming(self._root):
            a, b = choose_commits(ours, step, others, other_step)
            found = compare((ours, a), (others, b))
            journal = part_ways(ours, others, (a.step, b.step))
        return Diff(
            equal=not any(one.counts for one in found) and journal.is_equal,
            state_equal=a.state_root == b.state_root,
            steps=[a.step, b.step],
            roots=[a.state_root, b.state_root],
            differences=found,
            journal=journal,
        )

    def export(self, to: str | os.PathLike[str], step: int | None = None, format: str = "safetensors") -> Export:
        """Write a checkpoint for other tools: a new folder of safetensors files and JSON, or with format="torch" one new file.

        Weights have the names that `load_state_dict` expects; see `unbroken.capture.portable` for what is where. Nothing is overwritten,
        and after an error nothing is there. Memory: the whole state. Refused, ValueError, MissingExtra; NoCheckpoint, Damaged as in load.
        """
        with naming(self._root):
            return export(self._fresh(), self._root, step, os.fspath(to), format, nonces=SystemNonces())

    def prune(
        self,
        *,
        keep: int | None = None,
        keep_every: str | None = None,
        keep_hours: int | None = None,
        keep_best: str | None = None,
        dry_run: bool = False,
    ) -> Pruning:
        """Remove the checkpoints of this lineage that no rule keeps, and what dead writers left; with `dry_run` only say so.

        The rules are those of a Store or Run; where none is given, those of the newest start, and else `keep` is 3. The newest checkpoint
        is read and verified first. Refused while somebody writes, and where it is not whole; ValueError for a rule that is none.
        """
        given = {"keep": keep, "keep_every": keep_every, "keep_hours": keep_hours, "keep_best": keep_best}
        wanted = None if all(value is None for value in given.values()) else rules(given)
        with naming(self._root):
            return prune(self._folder(), self._repository.lineage, wanted, dry_run=dry_run, clock=SystemClock(), nonces=SystemNonces())

    def compact(self, *, dry_run: bool = False) -> Compaction:
        """Store again what is needed of files that are mostly not, and shorten chains of differences where that frees space.

        No checkpoint goes and no bit of one changes. Refused while somebody writes, and where something is not whole.
        """
        with naming(self._root):
            return compact(self._folder(), self._repository.lineage, dry_run=dry_run, clock=SystemClock(), nonces=SystemNonces())

    def verify(self) -> VerifyReport:
        """Recompute every digest and root of what is not condemned from stored bytes. Cost: reads everything once."""
        return self._repository.verify()

    def certify(self, against: str | os.PathLike[str] | None = None, against_lineage: str = MAIN_LINEAGE) -> Certificate:
        """Prove from stored bytes that the run was unbroken; with `against`, that it has the bits of that reference run."""
        other = None if against is None else tier_at(against)
        if other is not None:
            with naming(name_of(other)):
                Repository.open(other, check_lineage(against_lineage))  # what is wrong with the reference's folder is said with its name
        with naming(self._root):
            return certify(self._tier, self._repository.lineage, against=other, against_lineage=against_lineage)

    def _folder(self) -> DiskTier:
        if not isinstance(self._tier, DiskTier):
            raise Refused("only a folder can be changed like this: in an object store nobody knows who else writes")
        return self._tier

    def _fresh(self) -> Repository:
        self._repository.refresh()
        return self._repository


def _described(stored: StoredPiece) -> dict[str, Any]:
    piece = stored.piece
    return {
        "name": piece.pointer,
        "layer": piece.layer,
        "kind": piece.kind,
        "role": piece.role,
        "scope": piece.scope,
        "rank": stored.rank,
        "dtype": piece.dtype,
        "shape": list(piece.shape),
        "size_bytes": stored.size_bytes,
        "hash": stored.digest,
        "captured": piece.captured,
    }
