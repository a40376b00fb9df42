"""The door for torch.distributed.checkpoint: its `save`, `async_save` and `load` on a folder of ours, with any mesh on either side.

    dcp.save(state, storage_writer=StorageWriter("checkpoints", step=100))
    dcp.load(state, storage_reader=StorageReader("checkpoints"))

Each rank writes its share; the coordinator's `finish` makes one commit of all of them, and nothing is visible before. What torch would
pickle is stored typed, or refused by name. docs/dcp.md says what holds.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from unbroken.archive import reading
from unbroken.archive.sharing import Loaded, Shared, Ticket, shared
from unbroken.core.errors import CheckpointWarning
from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.records import ManifestRef
from unbroken.integrations.choosing import Choice, Chooser, agreed
from unbroken.integrations.filling import fill
from unbroken.integrations.items import parts_of
from unbroken.integrations.metadata import index_of, metadata_of
from unbroken.integrations.places import Place, Url, checked_step, place_of
from unbroken.store.repository import Repository, naming
from unbroken.store.tiers.disk import DiskTier, local_path

__all__ = ["StorageReader", "StorageWriter", "latest"]


def latest(url: Url) -> int | None:
    """The newest step in a folder whose files are there and whole in size; None if nothing has ever been committed there.

    NoCheckpoint if there were checkpoints but none is usable. Reads the log and the manifests of one checkpoint, no data.
    """
    tier = DiskTier(local_path(url))
    with naming(tier.root):
        if not Repository.exists(tier):
            return None
        commit = reading.newest_plausible(Repository.open(tier))
    return commit.step if commit is not None else None


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        warnings.warn(note, CheckpointWarning, stacklevel=3)


class StorageWriter(TorchStorageWriter):
    """Writes checkpoints of a job, all steps in one folder. Make one for each save, or use one with `checkpoint_id="folder/step-100"`.

    url: the folder, a path or file:// URL that all ranks see; may be left out where checkpoint_id names it. step: of this checkpoint;
    steps ascend. keep: so many newest ones stay, and each that was saved with `milestone`.

    torch wraps what goes wrong in its CheckpointException, whose `failures` hold our errors by rank: Fenced if another process writes
    here, Refused for a step that does not follow, TypeError naming what cannot be stored without a pickle. After any of them nothing new
    is visible and older checkpoints are as they were.
    """

    def __init__(self, url: Url | None = None, *, step: int | None = None, keep: int = KEEP_NEWEST, milestone: bool = False) -> None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep={keep!r}: keep at least 1 checkpoint")
        self._url = None if url is None else local_path(url)
        self._step = checked_step(step)
        self._keep = keep
        self._milestone = milestone
        self._place: Place | None = None
        self._travelled: Loaded | None = None

    def reset(self, checkpoint_id: Url | None = None) -> None:
        self._place = None if checkpoint_id is None else place_of(self._url, checkpoint_id, self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False: a checkpoint is one commit of all ranks, for which they must meet: leave it out")
        _ = self._step_now  # a missing one is said before anything is planned

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) == 1:
            return plans  # begun in write_data, when it is known that everything can be stored
        tickets = self._lead(len(plans))
        return [dataclasses.replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts, folder, ticket = parts_of(plan, planner), self._folder(), plan.storage_data
        if isinstance(ticket, Ticket):
            ref = folder.write(ticket, self._step_now, parts)
        else:
            folder.wait_alone()  # until `finish` has ended: threads of one process may save at the same time
            try:
                (ticket,) = self._lead(1)
                ref = folder.write(ticket, self._step_now, parts)
            except BaseException:  # raised again: whatever it was, others must not wait for it
                self._let_go(folder)
                folder.alone.release()
                raise
        done: Future[list[WriteResult]] = Future()
        own = WriteResult(MetadataIndex(""), 0, ref)  # of a rank without items, too
        done.set_result([own, *(WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        folder = self._folder()
        shares: list[ManifestRef] = [of_rank[0].storage_data for of_rank in results]
        owners = {one.index: node for node, of_rank in enumerate(results) for one in of_rank[1:]}
        try:
            index = index_of(self._step_now, metadata, owners)
            notes = folder.publish(self._step_now, shares, index, milestone=self._milestone, keep=self._keep)
        finally:
            self._let_go(folder)
            if len(results) == 1:
                folder.alone.release()
        _warn(notes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Url) -> bool:
        try:
            place_of(None, checkpoint_id, None)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """Let the folder go to another writer; the end of the process does that, too."""
        self._folder().leave()

    @property
    def _step_now(self) -> int:
        step = self._target().step
        if step is None:
            raise ValueError("no step: give StorageWriter(..., step=100), or checkpoint_id='folder/step-100'")
        return step

    def _let_go(self, folder: Shared) -> None:
        """In a process that saves for another one, after each save: the other one may save, too."""
        if self._travelled is not None:
            folder.leave()

    def _lead(self, num_ranks: int) -> list[Ticket]:
        return self._folder().lead(self._step_now, num_ranks)

    def _target(self) -> Place:
        return self._place or place_of(self._url, None, self._step)

    def _folder(self) -> Shared:
        folder = shared(self._target().folder)
        if self._travelled is not None and folder.loaded == Loaded():
            folder.loaded = self._travelled
        return folder

    def __getstate__(self) -> dict[str, Any]:
        """For a process that saves in the background: the folder goes with the writer, and with it what was loaded here."""
        loaded = Loaded()
        if self._url is not None or self._place is not None:
            folder = self._folder()
            folder.leave()
            loaded = folder.loaded
        return self.__dict__ | {"_travelled": loaded}


class StorageReader(TorchStorageReader):
    """Reads checkpoints that StorageWriter has written, on any mesh; each rank reads what it needs of them, and verifies it before use.

    url: the folder; may be left out where checkpoint_id="folder/step-100" names it. step: which one; without it the newest good one, and a
    CheckpointWarning names what was passed over. cast: convert where a stored dtype is not the wanted one; else that is a ValueError.

    Without a step every rank verifies its part before any rank changes a tensor, and keeps 2 GiB of it in memory for its use. With a step
    bytes are verified while they are used. Errors come in torch's CheckpointException: NoCheckpoint lists the steps there are, Damaged
    names the file.
    """

    def __init__(self, url: Url | None = None, step: int | None = None, *, cast: bool = False) -> None:
        self._url = None if url is None else local_path(url)
        self._step = checked_step(step)
        self._cast = cast
        self._place: Place | None = None
        self._chooser: Chooser | None = None
        self.loaded_step: int | None = None

    def reset(self, checkpoint_id: Url | None = None) -> None:
        self._place = None if checkpoint_id is None else place_of(self._url, checkpoint_id, self._step)

    def read_metadata(self, *args: Any, **others: Any) -> Metadata:  # torch would try again by rank where it finds "kwargs"
        """Of the checkpoint that was asked for, or the newest one whose index is whole. NoCheckpoint, Damaged, Refused, ForeignFolder."""
        place = self._target()
        tier = DiskTier(place.folder)
        with naming(tier.root):
            self._chooser = Chooser(Repository.open(tier), place.step)
        return metadata_of(self._chooser.first.entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._chooser is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._chosen().choose(plan))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        with naming(self._target().folder):
            choice = agreed([plan.storage_data for plan in plans])
        if choice.passed_over and choice.key is not None:
            reasons = "; ".join(map(str, choice.passed_over))
            _warn([f"loaded step {choice.key[0]} from {self._target().folder}; passed over: {reasons}"])
        return [dataclasses.replace(plan, storage_data=choice) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        choice = plan.storage_data
        if not isinstance(choice, Choice) or choice.key is None:
            raise TypeError("the plan has lost its storage_data: a planner must pass on what prepare_local_plan has put there")
        sharded = self._chosen().get(choice.key)
        fill(sharded, plan, planner, cast=self._cast)
        shared(self._target().folder).loaded = Loaded(sharded.commit, choice.passed_over)
        self.loaded_step = sharded.commit.step
        self._chooser = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Url) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)

    def _chosen(self) -> Chooser:
        assert self._chooser is not None, "read_metadata comes first"
        return self._chooser

    def _target(self) -> Place:
        return self._place or place_of(self._url, None, self._step)
