"""The warm fork server: a process that has imported what workers need and starts each of them by fork, in milliseconds.

    python -u -c 'from unbroken.cluster.warm import main; main([descriptor, module, ...])'

It computes nothing and stays single-threaded, which is checked after each import: a thread or an initialised accelerator would not
survive the fork. A module that breaks this is dropped and named. A worker is forked twice, so that it becomes the launcher's own child
(which asks for that by being a subreaper): waiting, signals and death are then those of a process that the launcher has started itself.
Standby processes are forked ahead and wait for their order, so that a restart does not even wait for the forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from msgspec import Struct
from setproctitle import setproctitle

from unbroken.cluster import script
from unbroken.core.os import die_with_parent, num_threads
from unbroken.core.ports import SystemClock

ADOPTION_TIMEOUT_S = 5.0
"""A worker becomes the launcher's child within microseconds; a launcher that has died meanwhile never adopts it."""

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Libraries that start threads when they are imported, unless told otherwise."""


GROUP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends to all processes of a job. It means the workers: the server ends with the launcher."""


class Warmed(Struct, frozen=True, kw_only=True):
    """What the server says once, when it is ready: modules left out, with the reason; `spoiled_by` the one after which it must not fork."""

    dropped: dict[str, str]
    spoiled_by: str = ""


class Order(Struct, frozen=True, kw_only=True, tag=True):
    """Start one worker. `argv` is what stands behind `python -m unbroken.cluster.worker`; an empty path leaves the server's own stream."""

    argv: tuple[str, ...]
    env: dict[str, str]
    stdout: str = ""
    stderr: str = ""


class StandBy(Struct, frozen=True, kw_only=True, tag=True):
    """Have so many standby processes."""

    count: int


class Standing(Struct, frozen=True, kw_only=True):
    """The standby processes there are; fewer than asked for where the system gives no more."""

    pids: tuple[int, ...]


class Started(Struct, frozen=True, kw_only=True):
    """The worker's process number, or why it could not be started."""

    pid: int = 0
    error: str = ""


def main(argv: list[str]) -> None:
    """Serve the launcher at the other end of descriptor `argv[0]` until it closes its end. In a forked worker this does not return."""
    die_with_parent()
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard's interrupt is the launcher's business
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # and in a worker, until it is one: what comes before is kept for it
    setproctitle(f"unbroken: warm fork server of process {os.getppid()}")
    launcher = os.getppid()
    connection = Connection(int(argv[0]))
    connection.send_bytes(msgspec.json.encode(preload(argv[1:])))
    gc.collect()
    gc.freeze()  # what is here already is never garbage: a collection in a worker must not touch, and so copy, all of it
    standby: list[tuple[int, Connection]] = []

    def leave() -> None:
        """What a forked process does first: nothing of the server's is its business."""
        for theirs in (connection, *(end for _, end in standby)):
            theirs.close()
        os.setsid()
        _adopted_by(launcher)

    while True:
        try:
            asked = msgspec.json.decode(connection.recv_bytes(), type=Order | StandBy)
        except EOFError:
            return
        answer: Standing | Started
        if isinstance(asked, StandBy):
            _fill(standby, asked.count, leave, on_interrupt)
            answer = Standing(pids=tuple(pid for pid, _ in standby))
        else:
            answer = _call(standby, asked) or fork_worker(partial(_work, leave, asked, on_interrupt))
        connection.send_bytes(msgspec.json.encode(answer))


def preload(modules: list[str]) -> Warmed:
    """Import modules. What cannot be imported is left out; after one that spoils the process the server is of no use any more."""
    dropped: dict[str, str] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (said to the launcher; the worker that needs the module meets it itself)
            dropped[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        reason = unsafe()
        if reason:
            return Warmed(dropped=dropped | {name: reason}, spoiled_by=name)
    return Warmed(dropped=dropped)


def unsafe() -> str:
    """Why this process must not fork, "" if it may."""
    threads = num_threads()
    if threads > 1:
        return f"started {threads - 1} threads, which a fork does not copy"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initialised an accelerator, which a forked process cannot use"
    return ""


def _fill(standby: list[tuple[int, Connection]], count: int, leave: Callable[[], None], on_interrupt: Any) -> None:
    """Fork processes that wait, until there are `count`."""
    while len(standby) < count:
        theirs, ours = Pipe(duplex=False)
        started = fork_worker(partial(_stand_by, leave, ours, theirs, on_interrupt))
        theirs.close()
        if started.error:
            ours.close()
            return
        standby.append((started.pid, ours))


def _call(standby: list[tuple[int, Connection]], order: Order) -> Started | None:
    """Give the order to a process that stands by; None where none lives."""
    while standby:
        pid, end = standby.pop(0)
        try:
            end.send_bytes(msgspec.json.encode(order))
        except OSError:  # it was killed; the launcher reaps it
            continue
        finally:
            end.close()
        return Started(pid=pid)
    return None


def _work(leave: Callable[[], None], order: Order, on_interrupt: Any) -> None:
    leave()
    _become_worker(order, on_interrupt)


def _stand_by(leave: Callable[[], None], ours: Connection, orders: Connection, on_interrupt: Any) -> None:
    """Wait for an order; without one, end with the launcher or the server."""
    ours.close()
    leave()
    die_with_parent()
    setproctitle("unbroken: standby worker")
    try:
        order = msgspec.json.decode(orders.recv_bytes(), type=Order)
    except EOFError:
        os._exit(0)
    orders.close()
    _become_worker(order, on_interrupt)


def fork_worker(become: Callable[[], None]) -> Started:
    """Fork a grandchild that runs `become`; its parent ends at once, so that it is adopted. No `finally` here: the worker leaves by it."""
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        between = os.fork()
    except OSError as error:
        return Started(error=f"{type(error).__name__}: {error}")
    if between == 0:
        worker = os.fork()
        if worker:
            os.write(writing, b"%d" % worker)
            os._exit(0)
        os.close(reading)
        os.close(writing)
        become()
    os.close(writing)
    os.waitpid(between, 0)
    told = os.read(reading, 32)
    os.close(reading)
    return Started(pid=int(told)) if told else Started(error="the fork failed")


def _become_worker(order: Order, on_interrupt: Any) -> None:
    """Be what `python -m unbroken.cluster.worker` would be, had it just been started with this environment."""
    signal.signal(signal.SIGINT, on_interrupt)
    os.environ.clear()
    os.environ.update(order.env)
    for path, number in ((order.stdout, 1), (order.stderr, 2)):
        if path:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.dup2(fd, number)
            os.close(fd)
    setproctitle(" ".join([sys.executable, *order.argv]))  # what people and their scripts look for with ps and pgrep
    _draw_anew()
    _use_threads(order.env.get("OMP_NUM_THREADS", ""))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    script.main(list(order.argv))


def _adopted_by(launcher: int) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != launcher and clock.monotonic() < deadline_s:
        clock.sleep(0.0005)


def _draw_anew() -> None:
    """Streams that a fresh process draws from the system's entropy must not be the same in all workers and all their restarts."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _use_threads(number: str) -> None:
    """The libraries have read the server's environment, not the worker's."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and number.isdigit() and int(number) > 0:
        torch.set_num_threads(int(number))
