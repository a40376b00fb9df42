"""The memory slots of all ranks of this host, and the consistent cuts that lie in them. They outlive the trainers that filled them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

from unbroken.core.errors import UnbrokenError
from unbroken.core.messages import SlotSource
from unbroken.core.os import available_memory_bytes, fill_memory, memory_file
from unbroken.daemon.plan import MemoryCut
from unbroken.shm.slots import HEADER_BYTES, Slot

MAX_SLOTS_PER_RANK = 16
"""A rank that asks for more is confused."""

PIECE_BYTES = 64 << 20
"""Memory that is made at a time, 10-50 ms: the daemon answers others in between."""

RESERVE_BYTES = 64 << 20
"""Left to everybody else when slots are made."""


@dataclass
class _Entry:
    rank: int
    slot: Slot


class SlotTable:
    """All slots this daemon made. A slot's number is unique for the life of the table; a rank's slots are those it was given last."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._given: dict[int, list[int]] = {}
        self._next = 0

    @property
    def total_bytes(self) -> int:
        """Memory of all slots."""
        return sum(entry.slot.size_bytes for entry in self._entries.values())

    def need(self, rank: int, size_bytes: int, num: int) -> list[Slot]:
        """`grow` in one go."""
        growing = self.grow(rank, size_bytes, num)
        while True:
            try:
                next(growing)
            except StopIteration as done:
                found: list[Slot] = done.value
                return found

    def grow(self, rank: int, size_bytes: int, num: int) -> Generator[None, None, list[Slot]]:
        """Slots for a rank: those it had, as far as they are large enough, else new ones. UnbrokenError if memory does not suffice.

        Slots it had and does not get again stay until `sweep` finds that no cut needs them. New pages cost ~0.2 s per GB; it yields after
        every piece of them, and closing it before its end gives them back. Only one may be in progress: the memory has to be counted.
        """
        if not (0 < num <= MAX_SLOTS_PER_RANK and size_bytes >= HEADER_BYTES):
            raise ValueError(f"{num} slots of {size_bytes} bytes: ask for 1 to {MAX_SLOTS_PER_RANK} of at least {HEADER_BYTES}")
        had = sorted(self._given.get(rank, []), key=lambda number: not self._entries[number].slot.is_ready)
        kept = [number for number in had if self._entries[number].slot.size_bytes >= size_bytes][:num]
        made = yield from self._allocate(rank, size_bytes, num - len(kept))
        first, self._next = self._next, self._next + len(made)
        self._entries |= {first + i: _Entry(rank, slot) for i, slot in enumerate(made)}
        self._given[rank] = [number for number in kept if number in self._entries] + list(range(first, self._next))
        return [self._entries[number].slot for number in self._given[rank]]

    def find(self, sources: Sequence[SlotSource]) -> list[Slot]:
        """The named slots, in order; UnbrokenError if one does not exist (any more)."""
        found = []
        for source in sources:
            entry = self._entries.get(source.slot)
            if entry is None or entry.rank != source.rank:
                raise UnbrokenError(f"slot {source.slot} of rank {source.rank} does not exist: ask for a new plan")
            found.append(entry.slot)
        return found

    def cuts(self) -> list[MemoryCut]:
        """Sets of READY slots of all ranks of one world, generation and step (I5); newest step first."""
        groups: defaultdict[tuple[int, int, bool, int], dict[int, int]] = defaultdict(dict)
        for number, entry in self._entries.items():
            generation, step, rank, world_size = entry.slot.stamp
            if entry.slot.is_ready and rank == entry.rank < world_size:
                groups[step, generation, entry.slot.milestone, world_size][rank] = number
        return [
            MemoryCut(
                generation=generation,
                step=step,
                world_size=world_size,
                milestone=milestone,
                slots=tuple(SlotSource(rank=rank, slot=ranks[rank]) for rank in range(world_size)),
            )
            for (step, generation, milestone, world_size), ranks in sorted(groups.items(), reverse=True)
            if len(ranks) == world_size
        ]

    def missing(self, generation: int, step: int, world_size: int) -> list[int]:
        """Ranks without a READY slot of this snapshot."""
        stamps = {entry.slot.stamp for entry in self._entries.values() if entry.slot.is_ready}
        return [rank for rank in range(world_size) if (generation, step, rank, world_size) not in stamps]

    def hold(self, cut: MemoryCut) -> bool:
        """Keep a cut from being overwritten; False if some rank has begun to overwrite it already."""
        taken: list[Slot] = []
        for slot in self.find(cut.slots):
            if not slot.hold(cut.generation, cut.step):
                for other in taken:
                    other.release()
                return False
            taken.append(slot)
        return True

    def release(self, cut: MemoryCut) -> None:
        """End `hold`."""
        for source in cut.slots:
            if source.slot in self._entries:
                self._entries[source.slot].slot.release()

    def drop(self, cut: MemoryCut) -> None:
        """A cut that turned out to be bad."""
        for slot in self.find(cut.slots):
            slot.free()

    def discard_after(self, step: int) -> None:
        """A new generation goes on from `step`: whatever is newer does not exist any more."""
        for entry in self._entries.values():
            if entry.slot.is_ready and entry.slot.step > step:
                entry.slot.free()

    def sweep(self, needed: Collection[MemoryCut], world_size: int) -> None:
        """Close slots that no rank of this world was given last and that no needed cut lies in."""
        for rank in [rank for rank in self._given if rank >= world_size]:
            del self._given[rank]
        keep = {number for numbers in self._given.values() for number in numbers}
        keep |= {source.slot for cut in needed for source in cut.slots}
        for number in [number for number in self._entries if number not in keep]:
            self._entries.pop(number).slot.close()

    def close(self) -> None:
        """Give all memory back."""
        for entry in self._entries.values():
            entry.slot.close()
        self._entries.clear()
        self._given.clear()

    def _allocate(self, rank: int, size_bytes: int, num: int) -> Generator[None, None, list[Slot]]:
        need_bytes, have_bytes = num * size_bytes, available_memory_bytes()
        shortage = (
            f"rank {rank} needs {num} memory slots of {size_bytes} bytes, {need_bytes} in all, and {have_bytes} bytes are available: "
            "use one slot per rank, fewer ranks per host, or a smaller model"
        )
        if need_bytes > 0 and need_bytes + RESERVE_BYTES > have_bytes:
            raise UnbrokenError(shortage)
        made: list[Slot] = []
        try:
            for _ in range(num):
                made.append(Slot(memory_file(f"unbroken-{rank}", size_bytes, fill=False), size_bytes))
                for offset in range(0, size_bytes, PIECE_BYTES):
                    fill_memory(made[-1].fd, offset, min(PIECE_BYTES, size_bytes - offset))
                    yield
        except BaseException as error:  # raised again; GeneratorExit is how a caller gives up
            for slot in made:
                slot.close()
            if isinstance(error, OSError):
                raise UnbrokenError(f"{shortage} ({error})") from error
            raise
        return made
