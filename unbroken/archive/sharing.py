"""One checkpoint written by many processes: one of them leads, each writes its share, and the leader makes one commit of all shares.

The leader holds the folder as its only writer and opens the generation. Shares are packs and a manifest each, visible to nobody; the leader
adds a manifest with the index, then the log entry. A process that dies before that leaves nothing but rubbish of an older generation,
which the next save's collection removes. One `Shared` per process and folder; no torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from unbroken.archive.reading import PassedOver
from unbroken.archive.saving import Saving
from unbroken.archive.sharded import INDEX, state_pointer
from unbroken.core.boxes import Box, misfit
from unbroken.core.errors import Damaged, Fenced, NoCheckpoint, Refused
from unbroken.core.limits import DRAIN_TIMEOUT_S, REPLY_TIMEOUT_S
from unbroken.core.ports import SystemClock, SystemNonces, failpoint
from unbroken.core.records import CommitEntry, Keep, Manifest, ManifestRef, Piece, StateIndex, TensorEntry
from unbroken.store.layout import AnyPart
from unbroken.store.log import newest_generation
from unbroken.store.manifests import load_written
from unbroken.store.repository import Part, Repository, naming
from unbroken.store.shards import box_of, tensor_pointer
from unbroken.store.tiers.disk import DiskTier

_LOOK_S = 0.05
_shared: dict[str, Shared] = {}
_lock = threading.Lock()


class Ticket(NamedTuple):
    """What the leader tells the others: where to write. Plain values, which travel between processes of one job."""

    run_id: str
    generation: int
    world_size: int
    node: int


class Loaded(NamedTuple):
    """What this process has loaded from a folder: the checkpoint, and the damaged ones that were passed over for it."""

    commit: CommitEntry | None = None
    passed_over: tuple[PassedOver, ...] = ()


def shared(root: str) -> Shared:
    """This process's part in saving to one folder."""
    name = os.path.realpath(root)
    with _lock:
        if name not in _shared or not _shared[name].is_ours:
            _shared[name] = Shared(DiskTier(root))
        return _shared[name]


class Shared:
    """Saves of one process into one folder, one after another."""

    def __init__(self, tier: DiskTier) -> None:
        self.loaded = Loaded()
        self.alone = threading.Lock()
        self._tier = tier
        self._saving: Saving | None = None
        self._repository: Repository | None = None
        self._under_way: int | None = None
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False in a forked child of the process that made it."""
        return self._pid == os.getpid()

    def wait_alone(self) -> None:
        """Wait for another save of this process into the folder to end; `alone.release()` afterwards."""
        if not self.alone.acquire(timeout=DRAIN_TIMEOUT_S):
            raise Refused(f"another save of this process into {self._tier.root} has not ended in {DRAIN_TIMEOUT_S:.0f} s")

    def lead(self, step: int, world_size: int) -> list[Ticket]:
        """Begin a checkpoint as the one that leads; a ticket for each of `world_size` nodes.

        Fenced naming the holder if another process writes here, Refused for a step that does not follow, ForeignFolder, NewerFormat.
        """
        with naming(self._tier.root):
            saving = self._open()
            if self._under_way is not None:
                saving.give_up()
            self._condemn(saving)
            base = self._base(saving, step)
            loaded_root = self.loaded.commit.state_root if self.loaded.commit is not None else ""
            generation = saving.prepare(step, base, loaded_root, world_size)
        self._under_way = step
        run_id = saving.repository.facts.run_id
        return [Ticket(run_id, generation.number, world_size, node) for node in range(world_size)]

    def write(self, ticket: Ticket, step: int, parts: Sequence[AnyPart]) -> ManifestRef:
        """This node's share, durable on return. Refused if this process does not see the folder that the leader writes."""
        repository = self._saving.repository if self._saving is not None and self._under_way is not None else self._follow(ticket)
        generation = newest_generation(repository.log.state)
        assert generation is not None, "followed"
        _, ref = repository.write(
            step=step,
            generation=generation.number,
            nonce=generation.nonce,
            node=ticket.node,
            world_size=ticket.world_size,
            logical=parts,
            per_rank={ticket.node: ()},
            partial=True,
        )
        failpoint("sharing.share_written")
        return ref

    def publish(self, step: int, shares: Sequence[ManifestRef], index: StateIndex, *, milestone: bool, keep: int) -> list[str]:
        """The leader makes one checkpoint of all shares, in the order of nodes, and removes what retention no longer keeps; notes to show.

        Damaged unless they are one cut of what the index says. After an error nothing is visible.
        """
        saving = self._saving
        if saving is None or self._under_way != step:
            raise Refused(f"step {step} was not begun here")
        with naming(self._tier.root):
            saving.check()
            written = [(load_written(self._tier, ref, "the node that wrote it"), ref) for ref in shares]
            check_shares(index, [manifest for manifest, _ in written])
            generation, raw = written[0][0], msgspec.json.encode(index)
            piece = Piece(pointer=INDEX, dtype="py:str", role="recorded", kind="index")
            last = saving.repository.write(
                step=step,
                generation=generation.generation,
                nonce=generation.nonce,
                node=len(shares),
                world_size=len(shares),
                logical=[Part(piece, memoryview(raw))],
                per_rank={},
                partial=True,
            )
            saving.publish(step, [*written, last], milestone)
        self._under_way = None
        self.loaded = Loaded()
        saving.collect(Keep(newest=keep))
        notes, saving.notes = saving.notes, []
        return notes

    def leave(self) -> None:
        """Let the folder go to another writer."""
        if self._saving is not None:
            self._saving.release()
        self._saving = None
        self._under_way = None

    def _open(self) -> Saving:
        if self._saving is not None and not (self._saving.is_held and self._saving.repository.is_there()):
            self.leave()  # the folder was taken over, removed, or put back to an earlier copy: what is known of it is of no use
        if self._saving is None:
            self._saving = Saving.open(self._tier, SystemClock(), SystemNonces(), kind="dcp")
        return self._saving

    def _condemn(self, saving: Saving) -> None:
        if self.loaded.passed_over:
            saving.condemn(self.loaded.passed_over)
            self.loaded = self.loaded._replace(passed_over=())

    def _base(self, saving: Saving, step: int) -> CommitEntry | None:
        """The checkpoint to go back to before `step` can be saved; None when it simply follows. Refused when it does neither."""
        last = saving.last
        if last is None or step > last.step:
            return None
        if self.loaded.commit is not None and self.loaded.commit.step <= step:
            return self.loaded.commit
        raise Refused(
            f"step {step} does not follow step {last.step}, the newest there, and nothing has been changed: load the step to go back to "
            "first, in this process, or use another folder for another run"
        )

    def _follow(self, ticket: Ticket) -> Repository:
        """The log as the leader left it. A shared file system may show it late."""
        clock = SystemClock()
        end = clock.monotonic() + REPLY_TIMEOUT_S
        while True:
            try:
                if self._repository is None or self._repository.facts.run_id != ticket.run_id or not self._repository.is_there():
                    self._repository = Repository.open(self._tier)
                self._repository.refresh()
                newest = newest_generation(self._repository.log.state)
                if self._repository.facts.run_id == ticket.run_id and newest is not None and newest.number >= ticket.generation:
                    return self._repository
            except NoCheckpoint:
                pass  # looked at again below
            if clock.monotonic() > end:
                raise Refused(
                    f"rank {ticket.node} does not see in {self._tier.root} what rank 0 has written there: all ranks need the same folder"
                )
            clock.sleep(_LOOK_S)


def check_shares(index: StateIndex, manifests: Sequence[Manifest]) -> None:
    """Raises Damaged unless the shares hold what the index says, each node its own."""
    for node, manifest in enumerate(manifests):
        if manifest.node != node:
            raise Fenced(f"node {node} has written the share of node {manifest.node}")
    shards: dict[tuple[int, str], list[Piece]] = {}
    others: set[tuple[int, str]] = set()
    for manifest in manifests:
        for stored in manifest.pieces:
            if box_of(stored.piece) is None:
                others.add((manifest.node, stored.piece.pointer))
            else:
                shards.setdefault((manifest.node, tensor_pointer(stored.piece)), []).append(stored.piece)
    for entry in index.entries:
        pointer = state_pointer(entry.name)
        if not isinstance(entry, TensorEntry):
            if (entry.node, pointer) not in others:
                raise Damaged(pointer, f"node {entry.node} has not written it")
            continue
        for shard in entry.shards:
            box = Box(shard.offsets, shard.shape)
            pieces = shards.get((shard.node, pointer), [])
            if any((piece.dtype, piece.global_shape) != (entry.dtype, entry.shape) for piece in pieces):
                raise Damaged(pointer, f"node {shard.node} has written it with another dtype or shape than planned")
            found = [common for piece in pieces if (place := box_of(piece)) is not None and (common := place.common(box)) is not None]
            if reason := misfit(box, found):
                raise Damaged(pointer, f"node {shard.node}: {reason}")
