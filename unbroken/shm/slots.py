"""A memory slot: one frozen snapshot of one rank in a memory file that outlives its writer.

    0      header, 4096 bytes: magic, format, state, hold, milestone, generation, step, rank, world size, lengths, index digest
    4096   index: JSON of a `SlotIndex`
    ...    data, starting at a multiple of 4096

The trainer writes `state`, the daemon writes `hold`; there is no lock between them, because either may be killed at any instruction.
WRITING is stored before the first byte changes and READY after the last one, so that a slot is unusable or whole. Both sides
announce first (`state`, `hold`) and look at the other's word afterwards: at least one of them sees the other and draws back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from blake3 import blake3

from unbroken.core.errors import Damaged
from unbroken.core.limits import MAX_JSON_BYTES, MAX_PIECES
from unbroken.core.records import SlotIndex

State = Literal["free", "writing", "ready", "draining"]

HEADER_BYTES = 4096
ALIGN_BYTES = 4096
FORMAT = 1
MAGIC = b"unbroken/slot\0\0\0"

_FREE, _WRITING, _READY = 0, 1, 2
_STATE_WORD, _HOLD_WORD, _MILESTONE_WORD = 5, 6, 7
_FACTS = struct.Struct("<QQQQQQQ32s")
_FACTS_OFFSET = 32
_STEP_DIGITS_BYTES = 64
"""Room for step and generation to grow by some digits without the slot becoming too small."""


def _align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _data_bytes(index: SlotIndex) -> int:
    return max((p.offset + p.size_bytes for p in index.pieces), default=0)


def slot_bytes(index: SlotIndex) -> int:
    """Size in bytes of a slot that holds a snapshot like this one, at any later step."""
    return _align(HEADER_BYTES + len(msgspec.json.encode(index)) + _STEP_DIGITS_BYTES) + _align(_data_bytes(index))


class Slot:
    """One mapped memory file of `size_bytes`. Owns `fd`. One writer, the trainer; the daemon reads, holds and frees."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        actual = os.fstat(fd).st_size
        if not HEADER_BYTES <= size_bytes <= actual:
            raise Damaged(f"slot of descriptor {fd}", f"{actual} bytes long, expected at least {max(size_bytes, HEADER_BYTES)}")
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("I")

    @property
    def state(self) -> State:
        """What the header says; "draining" is READY and held by the daemon. Damaged if it says nothing sensible."""
        state = self._words[_STATE_WORD]
        if state == _FREE:
            return "free"
        if state == _WRITING:
            return "writing"
        if state != _READY:
            raise Damaged("slot header", f"unknown state {state}")
        return "draining" if self.held else "ready"

    @property
    def is_ready(self) -> bool:
        """True if the slot is whole, held or not."""
        return self._words[_STATE_WORD] == _READY

    @property
    def held(self) -> bool:
        """True while the daemon needs the contents."""
        return self._words[_HOLD_WORD] != 0

    @property
    def step(self) -> int:
        """Step of the contents; means something only when READY."""
        return int(self._facts()[1])

    @property
    def milestone(self) -> bool:
        """True if the contents are to be kept for good; means something only when READY."""
        return self._words[_MILESTONE_WORD] != 0

    @property
    def stamp(self) -> tuple[int, int, int, int]:
        """(generation, step, rank, world size) of the contents, unchecked: `index` checks them."""
        generation, step, rank, world_size = self._facts()[:4]
        return generation, step, rank, world_size

    def begin(self, index: SlotIndex) -> memoryview:
        """Start a snapshot: WRITING, then header and index; the writable data area, `_data_bytes(index)` long.

        Only for a slot that `pick` returned, or one that was never READY: READY contents are given up by `pick` alone (I4). The hold
        word may flicker meanwhile: that is a daemon that announced itself too late, sees WRITING and draws back.
        Costs one encoding and hashing of the index, ~1 ms for 1,000 pieces. ValueError if the slot is too small.
        """
        assert not self.is_ready, "begin on a READY slot: let pick() choose the slot"
        encoded = msgspec.json.encode(index)
        data_offset, data_bytes = _align(HEADER_BYTES + len(encoded)), _data_bytes(index)
        if data_offset + data_bytes > self.size_bytes:
            raise ValueError(
                f"slot of {self.size_bytes} bytes is too small for {data_offset + data_bytes}: ask for slots of slot_bytes(index)"
            )
        if len(index.pieces) > MAX_PIECES:
            raise ValueError(f"{len(index.pieces)} pieces in one snapshot, at most {MAX_PIECES} are allowed: join small values")
        self._words[_STATE_WORD] = _WRITING
        self._view[: len(MAGIC)] = MAGIC
        self._words[len(MAGIC) // 4] = FORMAT
        self._words[_MILESTONE_WORD] = index.milestone
        _FACTS.pack_into(
            self._view,
            _FACTS_OFFSET,
            index.generation,
            index.step,
            index.rank,
            index.world_size,
            len(encoded),
            data_offset,
            data_bytes,
            blake3(encoded).digest(),
        )
        self._view[HEADER_BYTES : HEADER_BYTES + len(encoded)] = encoded
        return self._view[data_offset : data_offset + data_bytes]

    def finish(self) -> None:
        """The snapshot is whole: READY, the last store of all."""
        assert self._words[_STATE_WORD] == _WRITING, "finish without begin"
        self._words[_STATE_WORD] = _READY

    def claim(self) -> bool:
        """Give up the contents in order to write new ones; False if the daemon holds them, which are then untouched."""
        before = self._words[_STATE_WORD]
        self._words[_STATE_WORD] = _WRITING
        if self.held:
            self._words[_STATE_WORD] = before
            return False
        return True

    def hold(self, generation: int, step: int) -> bool:
        """Daemon: keep these contents from being overwritten; False if they are not there (any more)."""
        self._words[_HOLD_WORD] = 1
        if self.is_ready and self.stamp[:2] == (generation, step):
            return True
        self._words[_HOLD_WORD] = 0
        return False

    def release(self) -> None:
        """Daemon: the contents may be overwritten again."""
        self._words[_HOLD_WORD] = 0

    def free(self) -> None:
        """Daemon: the contents are worthless. Only when no trainer writes here."""
        self._words[_STATE_WORD] = _FREE

    def index(self) -> SlotIndex:
        """The directory of a READY slot, verified against its digest, the header and the bounds of the slot; else Damaged."""
        name = "slot"
        if bytes(self._view[: len(MAGIC)]) != MAGIC or self._words[len(MAGIC) // 4] != FORMAT:
            raise Damaged(name, "header has not the magic and format of a slot")
        if not self.is_ready:
            raise Damaged(name, f"is {self.state}, not READY: its writer was interrupted")
        generation, step, rank, world_size, index_bytes, data_offset, data_bytes, digest = self._facts()
        name = f"slot of rank {rank}, generation {generation}, step {step}"
        if index_bytes > min(MAX_JSON_BYTES, self.size_bytes - HEADER_BYTES):
            raise Damaged(name, f"index of {index_bytes} bytes does not fit into {self.size_bytes}")
        if data_offset != _align(HEADER_BYTES + index_bytes) or data_offset + data_bytes > self.size_bytes:
            raise Damaged(name, f"data of {data_bytes} bytes at {data_offset} does not fit into {self.size_bytes}")
        encoded = bytes(self._view[HEADER_BYTES : HEADER_BYTES + index_bytes])
        if blake3(encoded).digest() != digest:
            raise Damaged(name, "index does not match its digest")
        try:
            index = msgspec.json.decode(encoded, type=SlotIndex)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Damaged(name, f"index is no SlotIndex: {error}") from error
        if (index.generation, index.step, index.rank, index.world_size) != (generation, step, rank, world_size):
            raise Damaged(name, "index and header name different snapshots")
        if len(index.pieces) > MAX_PIECES or _data_bytes(index) != data_bytes:
            raise Damaged(name, f"{len(index.pieces)} pieces do not fit {data_bytes} bytes of data")
        return index

    def data(self) -> memoryview:
        """The data area, read-only, without a copy. Call `index` first: it checks the bounds."""
        data_offset, data_bytes = self._facts()[5:7]
        if data_offset + data_bytes > self.size_bytes:
            raise Damaged("slot", f"data of {data_bytes} bytes at {data_offset} does not fit into {self.size_bytes}")
        return self._view[data_offset : data_offset + data_bytes].toreadonly()

    def close(self) -> None:
        """Close the descriptor and the mapping; the memory itself stays mapped until the last view handed out is gone."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._words.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # somebody still looks at the data: the mapping goes away with that view
            self._map.close()

    def _facts(self) -> tuple[int, int, int, int, int, int, int, bytes]:
        return _FACTS.unpack_from(self._view, _FACTS_OFFSET)


def pick(slots: Sequence[Slot], is_awaited: Callable[[Slot], bool] = lambda slot: False) -> Slot | None:
    """The slot to write next, claimed: its old contents are gone. None if every slot is held, awaited, or the last READY one (I4).

    Unwritten slots come first, then the oldest READY one, which is given up only while another READY one remains.
    """
    waiting = [slot for slot in slots if not slot.is_ready and not slot.held]
    ready = sorted((slot for slot in slots if slot.is_ready), key=lambda slot: (slot.step, slot.stamp[0], slot.milestone))
    overwritable = [slot for slot in ready if not slot.held and not is_awaited(slot)] if len(ready) > 1 else []
    for slot in [*waiting, *overwritable]:
        if slot.claim():
            return slot
    return None
