"""One launch of the training script, watched from outside: through its folder, its fault log and its daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from unbroken.chaos.inject import Fault, Struck, read_strikes, record_strike
from unbroken.core.errors import GaveUp
from unbroken.core.messages import Hello, Status, StatusReply, Welcome
from unbroken.core.os import descendants, is_alive
from unbroken.core.ports import SystemClock, whole_environment
from unbroken.demo.story import moment
from unbroken.shm.channel import connect
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

Say = Callable[[str], None]

JOB_TIMEOUT_S = 600.0
QUIET_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_TAIL_BYTES = 4000


class Job:
    """`unbroken run` of the demo's script on one folder. `start()`, then wait for an end or for a strike; what happens is told to `say`."""

    def __init__(self, directory: Path, *, ranks: int, steps: int, seed: int, interval: str, say: Say) -> None:
        self.directory = directory
        self.fault_log = directory.with_name(f"{directory.name}-faults.jsonl")
        self.output = directory.with_name(f"{directory.name}-output.txt")
        self._script = ["--steps", str(steps), "--seed", str(seed), "--lose-at-most", interval]
        self._ranks = ranks
        self._say = say
        self._narrator = Narrator(directory, self.fault_log, say)
        self._clock = SystemClock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, faults: Sequence[Fault] = ()) -> None:
        """Start the launcher with this fault plan; everything it and its workers print goes to `output`."""
        environment = whole_environment() | {
            "UNBROKEN_FAULTS": msgspec.json.encode(list(faults)).decode(),
            "UNBROKEN_FAULT_LOG": str(self.fault_log),
            "OMP_NUM_THREADS": "1",
        }
        launch = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", str(self._ranks)]
        with open(self.output, "ab") as output:
            self._process = subprocess.Popen(
                [*launch, "-m", "unbroken.demo.train", str(self.directory), *self._script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Wait until the job ends by itself; GaveUp with the end of its output if it fails or hangs."""
        process = self._running()
        try:
            self._wait(lambda: process.poll() is not None, JOB_TIMEOUT_S, "did not end")
        except BaseException:
            self.kill()
            raise
        self._narrator.look()
        if process.returncode:
            raise GaveUp(f"the job in {self.directory} ended with exit code {process.returncode}; {self._tail()}")

    def wait_for_stop(self) -> Struck:
        """Wait until a fault of action "stop" has struck; GaveUp if the job ends before."""
        process = self._running()

        def stopped() -> bool:
            return process.poll() is not None or any(s.action == "stop" for s in read_strikes(str(self.fault_log)))

        self._wait(stopped, JOB_TIMEOUT_S, "did not reach the step where it was to stop")
        if process.poll() is not None:
            raise GaveUp(f"the job in {self.directory} ended too early with exit code {process.returncode}; {self._tail()}")
        return next(s for s in read_strikes(str(self.fault_log)) if s.action == "stop")

    def fail_power(self, stop: Struck, damage: Callable[[Path], str]) -> tuple[Struck, int]:
        """Let `damage` loose on the folder of a stopped job, then kill launcher, workers and daemon at once: the strike, processes killed.

        First the daemon may finish what it drains, and everything is halted: else a newer checkpoint could appear after the damage.
        """
        self._wait(lambda: self._daemon()[1] == "idle", QUIET_TIMEOUT_S, "its daemon never came to rest")
        daemon, _ = self._daemon()
        launcher = self._running().pid
        pids = [launcher, *descendants(launcher), daemon]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._narrator.look()
        self._say(damage(self.directory))
        time_s = self._clock.monotonic()
        struck = Struck(at="power", step=stop.step, rank=stop.rank, generation=stop.generation, action="kill", time_s=time_s, pid=launcher)
        record_strike(str(self.fault_log), struck)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running().wait()
        self._wait(lambda: not any(map(is_alive, pids)), QUIET_TIMEOUT_S, "some of its processes survived SIGKILL")
        self._narrator.look()
        return struck, len(pids)

    def kill(self) -> None:
        """End launcher and workers; the daemon follows when its last client is gone."""
        process = self._running()
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the job was not started"
        return self._process

    def _wait(self, done: Callable[[], bool], timeout_s: float, failure: str) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while not done():
            if self._clock.monotonic() > deadline:
                raise GaveUp(f"the job in {self.directory} {failure} within {timeout_s:.0f} s; {self._tail()}")
            self._narrator.look()
            self._clock.sleep(POLL_S)

    def _daemon(self) -> tuple[int, str]:
        """(pid, phase) of the daemon."""
        channel = connect(str(self.directory), start=False)
        try:
            channel.send(Hello(role="observer", pid=os.getpid()))
            welcome, _ = channel.receive(QUIET_TIMEOUT_S)
            channel.send(Status())
            reply, _ = channel.receive(QUIET_TIMEOUT_S)
        finally:
            channel.close()
        if not isinstance(welcome, Welcome) or not isinstance(reply, StatusReply):
            raise GaveUp(f"the daemon of {self.directory} answered {welcome} and {reply} instead of its state")
        return welcome.pid, reply.phase

    def _tail(self) -> str:
        raw = self.output.read_bytes() if self.output.exists() else b""
        return f"the end of {self.output}:\n{raw[-LOG_TAIL_BYTES:].decode(errors='replace')}"


def strike_words(struck: Struck) -> str:
    """A strike for people."""
    if struck.at == "power":
        return f"  power lost at step {struck.step}: launcher, workers and daemon killed together, their memory is gone"
    if struck.action == "stop":
        return f"  step {struck.step} is where the power will fail"
    return f"  SIGKILL: rank {struck.rank} in {moment(struck.at)} of step {struck.step}"


class Narrator:
    """Says what has happened in a run since it last looked: strikes, generations, checkpoints, condemnations."""

    def __init__(self, directory: Path, fault_log: Path, say: Say) -> None:
        self._directory = directory
        self._fault_log = fault_log
        self._say = say
        self._num_files = 0
        self._told: set[tuple[str, int, int]] = set()
        self._collect()

    def look(self) -> None:
        """Say what is new."""
        for line in self._collect():
            self._say(line)

    def _collect(self) -> list[str]:
        lines = [
            line for i, s in enumerate(read_strikes(str(self._fault_log))) if self._is_new("strike", i, 0) for line in [strike_words(s)]
        ]
        num_files = len(list(self._directory.glob("runs/main/log/*.json")))
        if num_files > self._num_files:
            self._num_files = num_files
            lines += self._collect_log()
        return lines

    def _collect_log(self) -> list[str]:
        state = Repository.open(DiskTier(str(self._directory))).log.state
        lines = []
        for c in state.condemned:
            if self._is_new("condemned", c.generation, c.step):
                lines.append(f"  checkpoint of step {c.step} is damaged and given up: {c.reason}")
        for g in state.generations:
            if self._is_new("generation", g.number, 0):
                lines.append(f"  generation {g.number} begins after step {g.base_step} with {g.world_size} ranks")
        for commit in state.commits:
            if self._is_new("commit", commit.generation, commit.step):
                lines.append(f"  checkpoint: step {commit.step}, generation {commit.generation}")
        return lines

    def _is_new(self, kind: str, first: int, second: int) -> bool:
        new = (kind, first, second) not in self._told
        self._told.add((kind, first, second))
        return new
