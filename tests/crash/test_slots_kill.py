"""A writer is killed at random moments, over and over, while a reader looks at its slots."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from unbroken.core.os import memory_file
from unbroken.core.records import Piece, Placed, SlotIndex
from unbroken.shm.slots import Slot, slot_bytes

DATA_BYTES = 2 << 20
INDEX = SlotIndex(
    generation=0,
    step=0,
    rank=0,
    world_size=1,
    milestone=False,
    pieces=(Placed(piece=Piece(pointer="/w", dtype="uint8", shape=(DATA_BYTES,)), offset=0, size_bytes=DATA_BYTES),),
)

WRITER = """
import sys, msgspec
from unbroken.core.records import SlotIndex
from unbroken.shm.slots import Slot, pick
index = msgspec.json.decode(sys.argv[1], type=SlotIndex)
slots = [Slot(int(fd), int(sys.argv[2])) for fd in sys.argv[3:]]
step = max((slot.step for slot in slots if slot.is_ready), default=0)
print("up", flush=True)
while True:
    step += 1
    slot = pick(slots)
    assert slot is not None
    view = slot.begin(msgspec.structs.replace(index, step=step))
    for start in range(0, len(view), 1 << 16):
        view[start : start + (1 << 16)] = bytes([step % 251]) * (1 << 16)
    slot.finish()
"""


def newest_whole(slots: list[Slot]) -> int:
    """Step of the newest READY slot after checking that every READY slot is whole; 0 if there is none."""
    newest = 0
    for slot in slots:
        if slot.is_ready:
            step = slot.index().step
            assert bytes(slot.data()) == bytes([step % 251]) * DATA_BYTES
            newest = max(newest, step)
    return newest


def ready_of_a_frozen(pid: int, slots: list[Slot]) -> list[Slot]:
    """The READY slots, seen while their writer stands still: read one after the other beside a living writer they are no one moment's."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    frozen = [slot for slot in slots if slot.is_ready]
    os.kill(pid, signal.SIGCONT)
    return frozen


@pytest.mark.timeout(120)
def test_I4_after_a_kill_at_any_moment_ready_is_whole_and_one_slot_is_ready() -> None:
    size = slot_bytes(INDEX)
    slots = [Slot(memory_file("test", size), size) for _ in range(2)]
    rng = random.Random(7)
    newest, states = 0, set()
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, __import__("msgspec").json.encode(INDEX).decode(), str(size), *(str(s.fd) for s in slots)],
            pass_fds=[slot.fd for slot in slots],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 10
        while not any(slot.step > newest and slot.is_ready for slot in slots):
            assert time.monotonic() < deadline
        end = time.monotonic() + rng.uniform(0, 0.01)
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, 0.002))
            assert ready_of_a_frozen(process.pid, slots)
        process.kill()
        process.wait()
        process.stdout.close()
        states |= {slot.state for slot in slots}
        found = newest_whole(slots)
        assert found > newest
        newest = found
    assert "writing" in states, "no kill hit a write: the test has shown nothing"
    for slot in slots:
        slot.close()


def test_I4_a_daemon_that_announces_itself_too_late_does_not_disturb_the_writer() -> None:
    """Between claim and begin the hold word may be set for a moment: the daemon has not seen WRITING yet."""
    size = slot_bytes(INDEX)
    slot = Slot(memory_file("test", size), size)
    assert slot.claim()
    slot._words[6] = 1  # what hold() writes before it looks at the state
    slot.begin(INDEX)
    assert not slot.hold(INDEX.generation, INDEX.step), "hold() sees WRITING and draws back"
    slot.finish()
    assert slot.state == "ready"
    slot.close()


def test_I4_a_reader_that_holds_a_slot_is_never_overwritten() -> None:
    """The daemon holds and reads while the trainer writes as fast as it can."""
    size = slot_bytes(INDEX)
    slots = [Slot(memory_file("test", size), size) for _ in range(3)]
    writer = WRITER.replace("assert slot is not None", "\n    if slot is None:\n        continue")
    process = subprocess.Popen(
        [sys.executable, "-c", writer, __import__("msgspec").json.encode(INDEX).decode(), str(size), *(str(s.fd) for s in slots)],
        pass_fds=[slot.fd for slot in slots],
    )
    try:
        deadline, held = time.monotonic() + 20, 0
        while held < 200:
            assert process.poll() is None, "the writer has died"
            assert time.monotonic() < deadline
            for slot in slots:
                generation, step, _, _ = slot.stamp
                if slot.hold(generation, step):
                    assert slot.index().step == step
                    assert bytes(slot.data()) == bytes([step % 251]) * DATA_BYTES
                    slot.release()
                    held += 1
    finally:
        process.kill()
        process.wait()
    for slot in slots:
        slot.close()
