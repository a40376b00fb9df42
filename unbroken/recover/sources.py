"""The bytes behind a plan: every piece that one rank needs, verified, from memory slots or from the run folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from unbroken.codec.digest import digest, rank_root, state_root
from unbroken.codec.finite import poison
from unbroken.core.errors import Damaged, UnbrokenError
from unbroken.core.messages import OldSlots, Plan, Slots
from unbroken.core.ports import Buffer, Tier
from unbroken.core.records import MAIN_LINEAGE, Piece
from unbroken.recover.link import Link
from unbroken.shm.slots import Slot
from unbroken.store.repository import Repository


@dataclass
class Loaded:
    """Pieces by pointer; `own` says whether the rank pieces among them are this rank's. `slots` keep the memory mapped until `close`.

    `digests` are those of the restored pieces.
    """

    pieces: dict[str, tuple[Piece, Buffer]]
    own: bool
    slots: tuple[Slot, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """State root of what was loaded."""
        return state_root((self.pieces[pointer][0], value) for pointer, value in self.digests.items())

    def close(self) -> None:
        """Let go of the memory; the pieces' buffers are void afterwards."""
        self.pieces.clear()
        for slot in self.slots:
            slot.close()


def from_memory(link: Link, plan: Plan, rank: int) -> Loaded:
    """Pieces out of the slot that this rank froze, or of rank 0's where it has none. Damaged when the slot is not what the plan says.

    The pieces' bytes have no digest beside them: `check_frozen` and a comparison of `root` between ranks prove them. One hash pass.
    """
    mine = next((s for s in plan.slots if s.rank == rank), None)
    wanted = mine or plan.slots[0]
    answer, fds = link.ask(OldSlots(slots=(wanted,)), Slots)
    slot = Slot(fds[0], answer.sizes[0])
    try:
        index = slot.index()
        if (index.step, index.generation, index.rank) != (plan.step, plan.stored_generation, wanted.rank):
            raise Damaged(f"slot {wanted.slot} of rank {wanted.rank}", f"holds step {index.step}, not step {plan.step} of the plan")
    except Damaged:
        slot.close()
        raise
    data = slot.data()
    pieces: dict[str, tuple[Piece, Buffer]] = {
        p.piece.pointer: (p.piece, data[p.offset : p.offset + p.size_bytes])
        for p in index.pieces
        if p.piece.scope == "logical" or mine is not None or p.piece.role == "compared"
    }
    digests = {pointer: digest(raw) for pointer, (piece, raw) in pieces.items() if piece.role == "restored"}
    return Loaded(pieces, own=mine is not None, slots=(slot,), digests=digests)


def check_frozen(loaded: Loaded, tier: Tier, plan: Plan, rank: int, lineage: str = MAIN_LINEAGE) -> None:
    """Damaged when pieces out of memory are not those that are on disk as the same snapshot; nothing to compare, nothing said."""
    if not plan.state_root:
        return
    name = f"memory slot of rank {rank}"
    if loaded.root != plan.state_root:
        raise Damaged(name, f"the state of step {plan.step} in it has root {loaded.root[:16]}, stored was {plan.state_root[:16]}")
    stored = _stored_rank_root(tier, plan, rank, lineage) if loaded.own else ""
    mine = rank_root((loaded.pieces[pointer][0], value) for pointer, value in loaded.digests.items())
    if stored and mine != stored:
        raise Damaged(name, f"what is the rank's own of step {plan.step} in it has root {mine[:16]}, stored was {stored[:16]}")


def require_sound(loaded: Loaded, plan: Plan, rank: int) -> None:
    """Damaged when a snapshot that the daemon has not looked at yet holds NaN or infinities where there must be none."""
    if plan.state_root:  # a checkpoint: it was looked at before it became one
        return
    for piece, data in loaded.pieces.values():
        found = poison(piece, data)
        if found:
            raise Damaged(f"memory slot of rank {rank}", f"the state of step {plan.step} in it is poisoned: {found}")


def _stored_rank_root(tier: Tier, plan: Plan, rank: int, lineage: str) -> str:
    """As the commit of this snapshot has it; "" if that cannot be read, which is no fault of the snapshot in memory."""
    with contextlib.suppress(UnbrokenError, OSError):
        repository = Repository.open(tier, lineage)
        for commit in repository.visible():
            if (commit.step, commit.generation) == (plan.step, plan.stored_generation):
                return next((m.rank_roots[m.ranks.index(rank)] for m in repository.manifests(commit) if rank in m.ranks), "")
    return ""


def from_disk(tier: Tier, plan: Plan, rank: int, lineage: str = MAIN_LINEAGE) -> Loaded:
    """Pieces out of the folder, each chunk and piece verified; raises Damaged naming the pack or manifest."""
    repository = Repository.open(tier, lineage)
    commit = next((c for c in repository.visible() if (c.step, c.generation) == (plan.step, plan.stored_generation)), None)
    if commit is None:
        raise Damaged("log", f"the commit of step {plan.step}, generation {plan.stored_generation}, is not visible")
    pieces: dict[str, tuple[Piece, Buffer]] = {}
    digests: dict[str, str] = {}
    own = False
    for manifest in repository.manifests(commit):
        known = rank in manifest.ranks
        own = own or known
        # a rank that was not there compares itself with rank 0
        wanted = [s for s in manifest.pieces if s.rank in (None, rank) or (not known and s.rank == 0 and s.piece.role == "compared")]
        for stored, data in repository.read_pieces(manifest, wanted):
            pieces[stored.piece.pointer] = (stored.piece, data)
            if stored.piece.role == "restored":
                digests[stored.piece.pointer] = stored.digest
    return Loaded(pieces, own=own, digests=digests)
