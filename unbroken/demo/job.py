"""One launch of the training script, and what is done to it from outside."""

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
from unbroken.demo.narrator import Narrator, Tell
from unbroken.demo.story import POWER, PowerLoss
from unbroken.shm.channel import connect

JOB_TIMEOUT_S = 600.0
QUIET_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_TAIL_BYTES = 4000


class Job:
    """`unbroken run` of the demo's script on one folder, once or several times. What happens meanwhile goes to `tell`.

    `start()`, then wait for an end or for a strike. A context: nothing of it runs on after an error. `fault_log` and `output` (all that
    launchers and ranks print) lie beside the folder.
    """

    def __init__(self, directory: Path, *, steps: int, seed: int, interval: str, tell: Tell) -> None:
        self.directory = directory
        self.fault_log = directory.with_name(f"{directory.name}-faults.jsonl")
        self.output = directory.with_name(f"{directory.name}-output.txt")
        self.narrator = Narrator(directory, self.fault_log, self.output, tell)
        self._script = ["--steps", str(steps), "--seed", str(seed), "--lose-at-most", interval]
        self._clock = SystemClock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ranks: int, faults: Sequence[Fault] = ()) -> None:
        """Start the launcher with so many ranks and this fault plan."""
        environment = whole_environment() | {
            "UNBROKEN_FAULTS": msgspec.json.encode(list(faults)).decode(),
            "UNBROKEN_FAULT_LOG": str(self.fault_log),
            "OMP_NUM_THREADS": "1",
        }
        launch = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", str(ranks)]
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
        self._wait(lambda: process.poll() is not None, JOB_TIMEOUT_S, "did not end")
        self.narrator.look()
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

    def fail_power(self, stop: Struck, damage: Callable[[Path], str]) -> PowerLoss:
        """Let `damage` loose on the folder of a stopped job, then kill launcher, ranks and daemon at once.

        First the daemon may finish what it drains, and everything is halted: else a newer checkpoint could appear after the damage.
        """
        self._wait(lambda: self._daemon()[1] == "idle", QUIET_TIMEOUT_S, "its daemon never came to rest")
        daemon, _ = self._daemon()
        launcher = self._running().pid
        pids = [launcher, *descendants(launcher), daemon]
        try:
            _send(signal.SIGSTOP, pids)
            self.narrator.look()
            self.narrator.tell("strike", damage(self.directory))
            now_s = self._clock.monotonic()
            struck = Struck(at=POWER, step=stop.step, rank=stop.rank, generation=stop.generation, action="kill", time_s=now_s, pid=launcher)
            record_strike(str(self.fault_log), struck)
        finally:
            _send(signal.SIGKILL, pids)
        self._running().wait(QUIET_TIMEOUT_S)
        self._wait(lambda: not any(map(is_alive, pids)), QUIET_TIMEOUT_S, "some of its processes survived SIGKILL")
        self.narrator.look()
        self.narrator.power = PowerLoss(num_killed=len(pids), noticed_s=self._clock.monotonic())
        return self.narrator.power

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of launcher and ranks; the daemon follows when its last client is gone."""
        if self._process is not None and self._process.poll() is None:
            _send(signal.SIGKILL, [*descendants(self._process.pid), self._process.pid])
            self._process.wait(QUIET_TIMEOUT_S)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the job was not started"
        return self._process

    def _wait(self, done: Callable[[], bool], timeout_s: float, failure: str) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while not done():
            if self._clock.monotonic() > deadline:
                raise GaveUp(f"the job in {self.directory} {failure} within {timeout_s:.0f} s; {self._tail()}")
            self.narrator.look()
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


def _send(sign: int, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
