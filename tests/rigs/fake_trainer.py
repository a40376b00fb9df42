"""Trainers without a model: they speak to a real daemon and freeze plain bytes into real slots."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from unbroken.core import messages as m
from unbroken.core.records import EventRecord, Piece, Placed, Record, SlotIndex, StepRecord
from unbroken.shm.channel import Channel, connect, daemon_environment
from unbroken.shm.slots import Slot, pick, slot_bytes
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

WAIT_S = 20.0

M = TypeVar("M")


class Told(Exception):
    """The daemon answered with an Error."""

    def __init__(self, error: m.Error) -> None:
        super().__init__(f"{error.kind}: {error.text}")
        self.error = error


def pieces_of(logical: Mapping[str, bytes], rank: Mapping[str, bytes]) -> tuple[tuple[Placed, ...], bytes]:
    """Pieces laid out one after another on multiples of 64, and their bytes."""
    placed, data = [], bytearray()
    for scope, table in (("logical", logical), ("rank", rank)):
        for pointer, raw in table.items():
            data += bytes(-len(data) % 64)
            piece = Piece(pointer=pointer, dtype="uint8", shape=(len(raw),), scope=scope)  # type: ignore[arg-type]
            if pointer.startswith("/model/parameters/"):
                piece = replace(piece, kind="parameter", dtype="float32", shape=(len(raw) // 4,))
            placed.append(Placed(piece=piece, offset=len(data), size_bytes=len(raw)))
            data += raw
    return tuple(placed), bytes(data)


@dataclass
class FakeRank:
    """One rank. `state` and `own` are what the next snapshot holds."""

    directory: str
    rank: int
    world_size: int
    state: dict[str, bytes] = field(default_factory=lambda: {"/w": b"w" * 100_000, "/b": b"b"})
    own: dict[str, bytes] = field(default_factory=lambda: {"/rng": b"r" * 64})
    slots: list[Slot] = field(default_factory=list)
    generation: int = -1
    channel: Channel | None = None

    def hello(self, **more: Any) -> m.Welcome:
        self.dial()
        return self.ask(m.Hello(role="worker", pid=os.getpid(), rank=self.rank, world_size=self.world_size, **more), m.Welcome)

    def dial(self) -> None:
        """Connect, and say nothing."""
        self.channel = connect(self.directory, start=True)
        _dialled.append(self)

    def send(self, message: m.Message) -> None:
        assert self.channel is not None
        self.channel.send(message)

    def expect(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this type; others are passed over, an Error is raised."""
        return self.expect_with_fds(kind, where)[0]

    def expect_with_fds(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> tuple[M, list[int]]:
        assert self.channel is not None
        deadline = time.monotonic() + WAIT_S
        while True:
            message, fds = self.channel.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind) and where(message):
                return message, fds
            if isinstance(message, m.Error):
                raise Told(message)

    def ask(self, message: m.Message, kind: type[M]) -> M:
        self.send(message)
        return self.expect(kind)

    def begin(self, **more: Any) -> m.Plan:
        facts = {"resume": "auto", "options": {"units": 4}} | more
        return self.ask(m.Begin(world_size=self.world_size, **facts), m.Plan)

    def open(self, plan: m.Plan, root: str = "") -> m.Opened:
        return self.ask(m.Opened(generation=plan.generation, step=plan.step, loaded_root=root or plan.state_root), m.Opened)

    def need_slots(self, size_bytes: int | None = None, num: int = 2) -> list[Slot]:
        size = size_bytes or slot_bytes(self.index(0)) + 4096
        self.send(m.NeedSlots(size_bytes=size, num=num))
        answer, fds = self.expect_with_fds(m.Slots)
        for slot in self.slots:
            slot.close()
        self.slots = [Slot(fd, size) for fd, size in zip(fds, answer.sizes, strict=True)]
        return self.slots

    def old_slots(self, plan: m.Plan) -> list[Slot]:
        self.send(m.OldSlots(slots=plan.slots))
        answer, fds = self.expect_with_fds(m.Slots)
        return [Slot(fd, size) for fd, size in zip(fds, answer.sizes, strict=True)]

    def index(self, step: int, milestone: bool = False) -> SlotIndex:
        placed, _ = pieces_of(self.state, self.own)
        return SlotIndex(
            generation=max(self.generation, 0), step=step, rank=self.rank, world_size=self.world_size, milestone=milestone, pieces=placed
        )

    def freeze(self, step: int, milestone: bool = False) -> Slot | None:
        """Fill a slot; it is READY, and nobody has been told."""
        slot = pick(self.slots)
        if slot is not None:
            view = slot.begin(self.index(step, milestone))
            view[:] = pieces_of(self.state, self.own)[1]
            view.release()
            slot.finish()
        return slot

    def ready(self, step: int, milestone: bool = False) -> bool:
        """Fill a slot and say so."""
        slot = self.freeze(step, milestone)
        if slot is None:
            return False
        number = self.slots.index(slot)
        self.send(m.Ready(generation=self.generation, step=step, rank=self.rank, slot=number, milestone=milestone))
        return True

    def journal(self, first: int, last: int) -> None:
        """Step records of steps `first` to `last`."""
        records = tuple(
            StepRecord(
                step=step,
                units=("0" * 32,),
                num_samples=1,
                loss="0" * 16,
                clock=((self.generation, step, self.world_size),),
                time_s=0.0,
            )
            for step in range(first, last + 1)
        )
        self.send(m.Journal(generation=self.generation, records=records))

    def vanish(self) -> None:
        """Like the death of the process: the connection ends, slots stay as they are."""
        assert self.channel is not None
        self.channel.close()
        for slot in self.slots:
            slot.close()
        self.slots = []


_dialled: list[FakeRank] = []


def hang_up() -> None:
    """End all connections of this process."""
    while _dialled:
        _dialled.pop().vanish()


@dataclass
class FakeJob:
    """All ranks of a job, in one process, in step."""

    directory: str
    world_size: int
    ranks: list[FakeRank] = field(default_factory=list)
    plan: m.Plan | None = None
    step: int = 0

    def start(self, *, keeper_pid: int = 0, **begin: Any) -> m.Plan:
        """Hello of all, Begin, Opened, slots; the plan."""
        self.ranks = [FakeRank(self.directory, rank, self.world_size) for rank in range(self.world_size)]
        for rank in self.ranks:
            rank.hello(keeper_pid=keeper_pid)
        self.plan = self.ranks[0].begin(**begin)
        self.open(self.plan)
        return self.plan

    def open(self, plan: m.Plan, root: str = "") -> None:
        self.ranks[0].open(plan, root)
        self.step = plan.step
        for rank in self.ranks:
            rank.generation = plan.generation
            rank.need_slots()

    def train(self, steps: int) -> None:
        """Apply some steps: the state changes on all ranks alike."""
        first, self.step = self.step + 1, self.step + steps
        self.ranks[0].journal(first, self.step)
        for rank in self.ranks:
            rank.state["/w"] = (b"%08d" % self.step) * 12_500
            rank.own["/rng"] = (b"%04d%04d" % (rank.rank, self.step)) * 8

    def snapshot(self, milestone: bool = False) -> None:
        for rank in self.ranks:
            assert rank.ready(self.step, milestone)

    def committed(self) -> m.Committed:
        """Wait until the snapshot of this step is durable; what rank 0 was told."""
        told = [rank.expect(m.Committed, lambda c: c.step == self.step) for rank in self.ranks]
        return told[0]

    def save(self, milestone: bool = False) -> m.Committed:
        self.snapshot(milestone)
        return self.committed()

    def vanish(self) -> None:
        for rank in self.ranks:
            rank.vanish()


def status(directory: str) -> m.StatusReply:
    """Ask the daemon."""
    channel = connect(directory, start=False)
    try:
        channel.send(m.Hello(role="observer", pid=os.getpid()))
        channel.send(m.Status())
        while True:
            message, _ = channel.receive(WAIT_S)
            if isinstance(message, m.StatusReply):
                return message
    finally:
        channel.close()


def _serves(directory: str) -> bool:
    try:
        return bool(status(directory))
    except ConnectionError:
        return False


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return value


def lives(pid: int) -> bool:
    """True while a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """End a process and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)
    until(lambda: not lives(pid), f"process {pid} ends")


@contextlib.contextmanager
def prepared_daemon(directory: str, prepare: str) -> Iterator[int]:
    """A daemon whose process runs some lines first, such as arming a failpoint; its pid."""
    code = f"import os, signal, sys, time\nfrom unbroken.core.ports import arm\n{prepare}\n"
    code += "from unbroken.agent import main\nsys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code, directory], env=daemon_environment())
    try:
        until(lambda: _serves(directory), "the daemon serves")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run folder that does not exist yet; whatever daemon serves it is gone afterwards. Sockets need a short path of their own."""
    runtime = tempfile.mkdtemp(prefix="ub", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    folder = str(tmp_path / "run")
    yield folder
    hang_up()
    with contextlib.suppress(ConnectionError):
        kill(daemon_pid(folder))
    shutil.rmtree(runtime)


def daemon_pid(directory: str) -> int:
    pid = status(directory).facts["pid"]
    assert isinstance(pid, int)
    return pid


def open_run(directory: str) -> Repository:
    return Repository.open(DiskTier(directory))


def steps(directory: str) -> list[int]:
    return [commit.step for commit in open_run(directory).visible()]


def journal_of(directory: str, generation: int) -> list[Record]:
    repository = open_run(directory)
    nonce = next(g.nonce for g in repository.log.state.generations if g.number == generation)
    return [line.record for line in read_journal(repository.tier, "main", generation, nonce)]


def events_of(directory: str, generation: int) -> dict[str, EventRecord]:
    return {record.name: record for record in journal_of(directory, generation) if isinstance(record, EventRecord)}


def shut(directory: str) -> None:
    """End the daemon in order, so that everything is on disk."""
    kill(daemon_pid(directory), signal.SIGINT)
