"""Workers that come from the warm fork server, in the shape in which TorchElastic holds those that it starts itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from unbroken.cluster.warm import ONE_THREAD, Order, StandBy, Standing, Started, Warmed
from unbroken.core.os import adopt_orphans, pidfd, wait_any
from unbroken.core.ports import whole_environment

WARM_UP_TIMEOUT_S = 120.0
"""Importing torch takes 2 s, and minutes on a cold network file system; then workers are started one by one as before."""

ORDER_TIMEOUT_S = 30.0
"""One fork takes milliseconds."""

END_TIMEOUT_S = 30.0
"""A killed server that does not die in this time is left behind."""

ROOM_FOR_TITLES = 4096
"""The workers' titles overwrite the server's command line, not its environment: by that strays are known (see strays.py)."""

SERVER_CODE = "import sys; from unbroken.cluster.warm import main; main(sys.argv[1:])" + " " * ROOM_FOR_TITLES

WORKER_COMMAND = ("-u", "-m", "unbroken.cluster.worker")


class ServerLost(RuntimeError):
    """The fork server does not answer any more."""


class ForkServer:
    """The launcher's end of a warm fork server. Used by the main thread alone."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        self.has_forked = False
        self.standby: tuple[int, ...] = ()
        self.dropped: dict[str, str] = {}

    def open(self) -> None:
        """Start the server; it warms up on its own."""
        ours, theirs = Pipe()
        command = [sys.executable, "-u", "-c", SERVER_CODE, str(theirs.fileno()), *self._modules]
        environment = dict(whole_environment()) | dict.fromkeys(ONE_THREAD, "1") | {"SPT_NOENV": "1"}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._connection = ours

    @property
    def pid(self) -> int | None:
        """The server's process, None when there is none."""
        return self._process.pid if self._process is not None else None

    def warm_up(self) -> None:
        """Wait until the server is ready, or gone: the next fork says why."""
        with contextlib.suppress(ServerLost):
            self._warm_up()

    def close(self) -> None:
        """Let the server and the standby processes end; its workers have other parents."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it sits in the kernel: init reaps it when we have ended
                self._process.wait(END_TIMEOUT_S)
        for pid in self.standby:  # our children, whom nobody needs any more
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.kill(pid, signal.SIGKILL)
                ForkedProcess(pid).wait(END_TIMEOUT_S)
        self._process, self._connection, self._is_ready, self.standby = None, None, False, ()

    def fork(self, order: Order) -> int:
        """Start one worker and become its parent; its process number. ServerLost when that cannot be."""
        self._warm_up()
        adopt_orphans(True)
        try:
            self._say(order)
            started = self._hear(Started, ORDER_TIMEOUT_S)
        finally:
            adopt_orphans(False)
        if started.error:
            raise ServerLost(started.error)
        pid: int = started.pid
        self.standby = tuple(other for other in self.standby if other != pid)
        self.has_forked = True
        return pid

    def stand_by(self, count: int) -> None:
        """Have `count` processes wait for the next orders; best effort. Cost: a fork each, 15 to 24 ms with torch imported."""
        if not self.has_forked or len(self.standby) >= count:
            return
        adopt_orphans(True)
        try:
            self._say(StandBy(count=count))
            self.standby = self._hear(Standing, ORDER_TIMEOUT_S).pids
        except ServerLost:
            self.has_forked = False  # the next order finds out and says why
        finally:
            adopt_orphans(False)

    def _warm_up(self) -> None:
        """Wait until the server is ready; one that a module has spoiled makes way for another without that module."""
        while not self._is_ready:
            warmed = self._hear(Warmed, WARM_UP_TIMEOUT_S)
            self.dropped |= warmed.dropped
            if warmed.spoiled_by:
                self.close()
                self._modules = tuple(name for name in self._modules if name not in self.dropped)
                self.open()
            self._is_ready = not warmed.spoiled_by

    def _say(self, order: Order | StandBy) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(msgspec.json.encode(order))
        except OSError as error:
            raise ServerLost(str(error)) from error

    def _hear(self, kind: type[Any], timeout_s: float) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout_s):
                raise ServerLost(f"no answer within {timeout_s:g} s")
            return msgspec.json.decode(self._connection.recv_bytes(), type=kind)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise ServerLost(f"it ended: {type(error).__name__}") from error


class ForkedProcess:
    """What TorchElastic asks of a `Popen`. The process is our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code once it has ended, signals as negative numbers; reaps it."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code; subprocess.TimeoutExpired when it has not ended in time."""
        if self.poll() is None:
            fd = pidfd(self.pid)
            try:
                wait_any([fd], timeout)
            finally:
                os.close(fd)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code


class ForkedWorker:
    """What TorchElastic asks of a `SubprocessHandler`."""

    def __init__(self, process: ForkedProcess) -> None:
        self.proc = process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the worker's whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class ForkedContext(SubprocessContext):
    """The workers of one attempt."""

    def __init__(self, server: ForkServer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._server = server

    def _start(self) -> None:
        for local in range(self.nprocs):
            order = Order(
                argv=tuple(map(str, self.args[local][len(WORKER_COMMAND) :])),
                env=dict(whole_environment()) | self.envs[local],
                stdout=self.stdouts[local] or "",
                stderr=self.stderrs[local] or "",
            )
            handler: Any = ForkedWorker(ForkedProcess(self._server.fork(order)))
            self.subprocess_handlers[local] = handler


def can_fork(arguments: dict[str, Any]) -> bool:
    """May these workers come from a fork? Not those of another program, nor where the number of threads is left to the libraries."""
    args, envs = arguments["args"], arguments["envs"]
    is_ours = arguments["entrypoint"] == sys.executable and all(a[: len(WORKER_COMMAND)] == WORKER_COMMAND for a in args.values())
    is_python = all(a[len(WORKER_COMMAND)] != "--exec" for a in args.values()) if is_ours else False
    return is_python and arguments.get("numa_options") is None and all("OMP_NUM_THREADS" in env for env in envs.values())


@contextlib.contextmanager
def started_by(server: ForkServer | None, waiting: Callable[[], AbstractContextManager[None]]) -> Iterator[list[str]]:
    """Within, TorchElastic's agent gets its workers from the server; from itself where that cannot be, and why is in the list.

    A server that is still warming up is waited for inside `waiting()`.
    """
    why: list[str] = []

    def start(**arguments: Any) -> Any:
        if server is None or not can_fork(arguments):
            return start_processes(**arguments)
        with waiting():
            server.warm_up()
        start_method = arguments.pop("start_method")
        context = ForkedContext(server, **arguments)
        try:
            context.start()
        except ServerLost as error:
            why.append(f"the warm fork server is gone ({error}): workers are started without it")
            context.close(signal.SIGKILL)
            return start_processes(start_method=start_method, **arguments)
        why.extend(f"--preload: {name} is left out: {reason}" for name, reason in server.dropped.items())
        server.dropped = {}
        return context

    agent: Any = local_elastic_agent
    before, agent.start_processes = agent.start_processes, start
    try:
        yield why
    finally:
        agent.start_processes = before
