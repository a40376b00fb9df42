"""The watchdog over real processes that are no trainers: when it looks, what it does to whom, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.core.errors import StoreError, UnbrokenError
from unbroken.core.limits import HANG_PATIENCE, HEARTBEAT_S, MIN_HANG_TIMEOUT_S
from unbroken.core.messages import Hello, Watch
from unbroken.core.os import HANG_EXIT_CODE
from unbroken.core.ports import SystemClock
from unbroken.core.records import EventRecord
from unbroken.daemon.folder import RunFolder
from unbroken.daemon.watchdog import Watchdog
from unbroken.shm.pulse import Phase, Pulse

RANK = """
import os, sys, time
from unbroken.core.os import heed_watchdog
from unbroken.shm.pulse import Phase, Pulse
fd = int(sys.argv[1])
pulse = Pulse(time.monotonic)
pulse.attach(fd)
heed_watchdog(fd)
for step in range(1, 8):
    pulse.begin(step)
    pulse.mark(Phase.UNIT)
    pulse.done()
pulse.begin(8)
"""


class Board:
    """What the watchdog needs of the daemon's."""

    generation = 3

    def __init__(self) -> None:
        self.events: list[EventRecord] = []

    def write_events(self, events: list[EventRecord]) -> None:
        self.events += events


class Client:
    """A connection whose other end is a process of the test."""

    def __init__(self, rank: int, world_size: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self.hello = Hello(role="worker", pid=pid, rank=rank, world_size=world_size)
        self.fds: list[int] = []

    def send(self, message: Any, fds: list[int]) -> None:
        self.fds = [os.dup(fd) for fd in fds]


class Bench:
    """A watchdog and the processes it watches."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.board = folder, Board()
        self.dog = Watchdog(self.board, RunFolder(str(folder), SystemClock(), None), SystemClock())  # type: ignore[arg-type]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def rank(self, rank: int, world_size: int, then: str, timeout_s: float | None = MIN_HANG_TIMEOUT_S, aloud: bool = False) -> None:
        """Start a rank that does some steps, then `then`."""
        first = Client(rank, world_size, os.getpid())
        self.dog.answer(first, Watch(timeout_s=timeout_s, aloud=aloud))  # type: ignore[arg-type]
        (fd,) = first.fds
        command = [sys.executable, "-c", RANK + textwrap.dedent(then), str(fd)]
        with open(f"{self.folder}.err{rank}", "wb") as err:
            self.processes[rank] = subprocess.Popen(command, pass_fds=[fd], stderr=err)
        self.dog._watched[rank].pid = self.processes[rank].pid
        os.close(fd)
        while self.dog._watched[rank].page.read().steps < 7:
            time.sleep(0.01)

    def look_until(self, condition: Any, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            self.dog.look()
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    self.dog.left(rank)
            time.sleep(0.02)

    def look_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.look_until(lambda: time.monotonic() > deadline)

    @property
    def codes(self) -> list[int | None]:
        return [self.processes[rank].poll() for rank in sorted(self.processes)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "run")
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait(10)


STUCK = "pulse.mark(Phase.UNIT, 2); time.sleep(1000)"
WAITING = "pulse.mark(Phase.COLLECTIVE); time.sleep(1000)"


def test_B37_e_the_stuck_rank_is_named_everywhere_before_all_are_ended(bench: Bench) -> None:
    bench.rank(0, 2, WAITING)
    bench.rank(1, 2, STUCK, aloud=True)
    bench.look_until(lambda: None not in bench.codes)
    assert bench.codes == [HANG_EXIT_CODE, HANG_EXIT_CODE]
    assert bench.dog._patience(8).times == HANG_PATIENCE, "the same step gets longer, should it come again"
    assert bench.dog._patience(9).times == 1.0
    (event,) = bench.board.events
    assert (event.name, event.step, event.facts["ranks"]) == ("hang", 8, [1])
    assert bench.dog.facts["rank"] == 1
    assert bench.dog.facts["generation"] == 3
    (file,) = (bench.folder / "hangs").iterdir()
    assert str(file) in bench.dog.facts["text"]
    assert Path(f"{bench.folder}.err1").read_text().startswith("unbroken: hang: rank 1 has made no progress for ")
    assert Path(f"{bench.folder}.err0").read_text() == "", "a launcher says it once"


def test_a_disk_that_takes_no_file_does_not_stop_the_watchdog(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> str:
        raise StoreError("No space left on device")

    monkeypatch.setattr(RunFolder, "keep_stacks", full)
    bench.rank(0, 1, STUCK)
    bench.look_until(lambda: None not in bench.codes)
    assert "No space left on device" in bench.dog.facts["text"]


def test_I9_a_watchdog_that_fails_does_not_take_the_daemon_along(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.rank(0, 1, STUCK)
    monkeypatch.setattr("unbroken.daemon.watchdog.judge", lambda *_: 1 / 0)
    bench.look_for(0.6)
    assert bench.codes == [None]


def test_a_process_that_does_not_end_by_itself_is_killed(bench: Bench) -> None:
    bench.rank(0, 1, "import signal; from unbroken.core.os import ignore_watchdog; ignore_watchdog(fd);" + STUCK)
    bench.look_until(lambda: None not in bench.codes)
    assert bench.codes == [-9]
    (file,) = (bench.folder / "hangs").iterdir()
    assert "(no stacks: the process does not handle the signal; its state is 'S')" in file.read_text()


def test_a_rank_that_goes_on_while_its_stacks_are_taken_down_is_left_alone(bench: Bench) -> None:
    bench.rank(0, 1, "pulse.mark(Phase.UNIT); time.sleep(1.4)\nwhile True: pulse.mark(Phase.UNIT); time.sleep(0.01)")
    bench.look_for(2.5)
    assert bench.codes == [None]
    assert bench.board.events == []


def test_who_has_come_in_the_place_of_the_ended_is_not_killed_in_their_stead(bench: Bench) -> None:
    bench.rank(0, 1, STUCK)
    bench.look_until(lambda: None not in bench.codes)
    bench.rank(0, 1, WAITING)
    bench.look_for(3.0)
    assert bench.codes == [None]


def test_B37_learned_times_survive_a_restart_and_are_forgotten_in_another_world(bench: Bench) -> None:
    def learned(rank: int, world_size: int) -> int:
        client = Client(rank, world_size, os.getpid())
        bench.dog.answer(client, Watch())  # type: ignore[arg-type]
        pulse = Pulse(time.monotonic)
        pulse.attach(client.fds[0])
        pulse.begin(1)
        pulse.mark(Phase.UNIT)
        pulse.done()
        number = len(bench.dog._watched[rank].page.read().times)
        pulse.detach()
        os.close(client.fds[0])
        return number

    assert [learned(0, 2) for _ in range(3)] == [1, 2, 3]
    assert learned(0, 3) == 1


def test_nobody_is_looked_at_more_often_than_needed(bench: Bench) -> None:
    assert bench.dog.patience_s == HEARTBEAT_S
    bench.rank(0, 2, WAITING, timeout_s=None)
    assert bench.dog.patience_s == HEARTBEAT_S
    bench.rank(1, 2, WAITING, timeout_s=2.0)
    assert bench.dog.patience_s == 0.5


def test_only_a_worker_of_this_host_can_be_watched(bench: Bench) -> None:
    with pytest.raises(UnbrokenError, match="only workers"):
        bench.dog.answer(Client(0, 1, 0), Watch())  # type: ignore[arg-type]
    with pytest.raises(UnbrokenError, match="only workers"):
        bench.dog.answer(Client(-1, 1, os.getpid()), Watch())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 s"):
        bench.dog.answer(Client(0, 1, os.getpid()), Watch(timeout_s=0.0))  # type: ignore[arg-type]


def test_I11_files_with_stacks_do_not_pile_up(bench: Bench) -> None:
    folder = RunFolder(str(bench.folder), SystemClock(), None)  # type: ignore[arg-type]
    kept = [folder.keep_stacks(step, 0, "x") for step in range(1, 20)]
    assert folder.keep_stacks(19, 0, "y") != kept[-1]
    (bench.folder / "hangs" / "notes").write_text("mine")
    there = sorted(path.name for path in (bench.folder / "hangs").iterdir())
    assert len(there) == 17
    assert "notes" in there
    assert os.path.basename(kept[0]) not in there
