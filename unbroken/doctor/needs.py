"""The memory and the disk that a run needs, against what the host has. Pure; a start says it, and the doctor says it of an existing run."""

from __future__ import annotations

from msgspec import Struct

from unbroken.core.limits import NUM_SLOTS
from unbroken.doctor.findings import Finding, judged, size


class Needs(Struct, frozen=True, kw_only=True):
    """Bytes on this host. `slot_bytes` and `gradient_bytes` are those of one rank, `state_bytes` one checkpoint on disk.

    Memory: two snapshots of every rank in the daemon, and the gradients set aside in every rank; what training itself needs comes on top.
    Disk: the newest `keep` checkpoints and the one being written, each stored whole at worst (what did not change is stored once), and
    milestones on top.
    """

    slot_bytes: int
    gradient_bytes: int
    state_bytes: int
    ranks: int
    keep: int

    @property
    def slots_bytes(self) -> int:
        """Memory of the daemon's slots."""
        return self.ranks * NUM_SLOTS * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.slots_bytes + self.ranks * self.gradient_bytes

    @property
    def disk_bytes(self) -> int:
        """Without milestones."""
        return (self.keep + 1) * self.state_bytes


def judge_memory(needs: Needs, available_bytes: int, held_bytes: int = 0) -> Finding:
    """Does it fit? `held_bytes` of the slots exist already and are not in `available_bytes` any more."""
    room = available_bytes + held_bytes
    seen = f"{size(needs.memory_bytes)} of memory for {needs.ranks} ranks, {size(room)} are available"
    fits = needs.memory_bytes <= room
    return judged("memory of the run", seen, warning="" if fits else "this does not fit: fewer ranks per host, or a smaller model")


def judge_disk(needs: Needs, free_bytes: int, stored_bytes: int = 0) -> Finding:
    """Does it fit? `stored_bytes` lie in the folder already; at most what is needed of them makes room."""
    room = free_bytes + min(stored_bytes, needs.disk_bytes)
    seen = f"up to {size(needs.disk_bytes)} on disk for {needs.keep + 1} checkpoints (milestones come on top), {size(room)} are free"
    remedy = "this does not fit: free space, or keep fewer checkpoints (keep=); a save that finds no room is reported and training goes on"
    return judged("disk of the run", seen, warning="" if needs.disk_bytes <= room else remedy)
