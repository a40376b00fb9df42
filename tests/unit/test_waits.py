"""I11: every wait has a timeout and every queue a bound. What may wait without one is listed, with the reason.

A scan of the syntax tree finds calls that can wait for ever: the kinds are below, each shown to be found. It sees names, not types: a
call is looked at by its method's name and by whether a timeout is given. Entering `with lock:` is not looked at: the critical sections
are short and wait for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WAITING_METHODS = {"wait", "join", "get", "result", "acquire", "select", "recv_bytes"}
"""Wait for ever when called without arguments."""

SOCKET_METHODS = {"recv", "recvmsg", "recvfrom", "recv_into", "accept", "connect", "sendmsg", "sendall"}
"""Wait as long as the socket's own timeout says: who calls them is listed with what sets it."""

ALLOWED = {
    "cluster/elastic.py ElasticAgent._rendezvous group.store.get": "the store has TorchElastic's timeout for one request",
    "cluster/forked.py ForkServer._hear self._connection.recv_bytes": "poll(timeout) has said that something is there",
    "cluster/preempt.py StopRequest._watch os.read": "the pipe is O_NONBLOCK",
    "cluster/signals.py SignalInbox.take os.read": "the pipe is O_NONBLOCK",
    "cluster/warm.py fork_worker os.read": "the process at the other end has ended",
    "cluster/warm.py fork_worker os.waitpid": "the process in between forks and ends at once; the launcher waits ORDER_TIMEOUT_S",
    "cluster/warm.py _stand_by orders.recv_bytes": "a process that exists to wait; it dies with the launcher and the server",
    "cluster/warm.py main connection.recv_bytes": "the server exists to wait for orders; it dies with the launcher, which closes the pipe",
    "core/os.py heed_only.watch signal.sigwaitinfo": "a thread that exists to wait; it ends with its process",
    "core/os.py unlock fcntl.flock": "LOCK_UN does not wait",
    "loggers/feed.py Feed._work self._turn.wait_for": "a daemon thread that exists to wait for commits; who ends it waits LOG_CLOSE_S",
    "store/tiers/bucket.py Bucket._mark_of obstore.get": "the client has timeouts for connections, answers and retries",
    "store/tiers/bucket.py Bucket.read obstore.get": "the client has timeouts for connections, answers and retries",
    "shm/channel.py Channel._receive_packet self._socket.recvmsg": "`receive` sets the timeout",
    "shm/channel.py Channel.send self._socket.sendmsg": "the line above sets the timeout",
    "shm/channel.py _dial connection.connect": "settimeout above",
    "shm/channel.py accept listener.accept": "`listen` sets the listener to not blocking",
    "shm/server.py Server._woken self._wake_in.recv": "setblocking(False)",
    "step/exchange.py Exchange._start_gather group.recv": "begun here, waited for in `_wait`",
    "step/exchange.py Exchange._wait work.wait": "the group was made with COLLECTIVE_TIMEOUT_S",
    "step/lane.py Lane._run self._work.get": "a daemon thread that exists to wait for work; it ends with its process",
    "step/lane.py Lane.__init__ queue.SimpleQueue": "as many as a step has buckets",
    "checkpoints.py Store.save self.wait": "our own, which waits DRAIN_TIMEOUT_S",
    "checkpoints.py Store.close self.wait": "our own, which waits DRAIN_TIMEOUT_S",
    "opening.py Opening.open self.exchange.connect": "our own, whose groups have COLLECTIVE_TIMEOUT_S",
    "opening.py Opening.open self.start.connect": "our own, which waits CONNECT_TIMEOUT_S",
    "opening.py Opening.go_back self.start.connect": "our own, which waits CONNECT_TIMEOUT_S",
    "opening.py Opening.reattach self.start.connect": "our own, which waits CONNECT_TIMEOUT_S",
    "stepping.py Stepping._refuse self._exchange.connect": "our own, whose groups have COLLECTIVE_TIMEOUT_S",
    "agent.py Daemon.__init__ deque": "outcomes: one cargo at a time",
    "daemon/growth.py Growth.__init__ deque": "`ask` keeps MAX_CLIENTS",
    "archive/background.py Background.__init__ deque": "a save waits for a staging buffer, of which there are _NUM_BUFFERS",
    "checkpoints.py Store.__init__ deque": "as many as there are staging buffers",
    "shm/server.py Client.__init__ deque": "`send` keeps MAX_OUTBOX",
}


def waits_of(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function, call) of everything that can wait for ever or grow without end."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
        if isinstance(node, ast.Call) and (can_wait(node) or is_unbounded(node)):
            yield node.lineno, ".".join(inside), ast.unparse(node.func)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse(source), ())


def can_wait(call: ast.Call) -> bool:
    """Can it wait for ever, as far as its name and its arguments say?"""
    name = ast.unparse(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    arguments = [*map(ast.unparse, call.args), *(ast.unparse(k.value) for k in call.keywords)]
    has_timeout = any(k.arg is not None and "timeout" in k.arg for k in call.keywords)
    if name in ("os.waitpid", "os.waitid", "os.wait", "os.wait4"):
        return not any("WNOHANG" in argument for argument in arguments)
    if name in ("fcntl.flock", "fcntl.lockf"):
        return not any("LOCK_NB" in argument for argument in arguments)
    if name in ("signal.sigwait", "signal.sigwaitinfo", "signal.pause", "os.read", "input"):
        return True
    if name == "select.select":
        return len(call.args) < 4
    if name.startswith("subprocess.") and method in ("run", "call", "check_call", "check_output"):
        return not has_timeout
    if method in ("init_process_group", "rendezvous", "urlopen") or name in ("TCPStore", "rendezvous", "urlopen"):
        return not has_timeout
    if method in SOCKET_METHODS:
        return True
    if method == "get" and name.endswith("store.get"):
        return True
    if method == "communicate":
        return not has_timeout
    if method == "wait_for":
        return len(call.args) < 2 and not has_timeout
    if method == "poll" and "poll" in name.removesuffix(".poll"):
        return not call.args
    return method in WAITING_METHODS and not call.args and not has_timeout


def is_unbounded(call: ast.Call) -> bool:
    """A queue without a bound."""
    name = ast.unparse(call.func).rsplit(".", 1)[-1]
    if name == "deque":
        return len(call.args) < 2 and not any(k.arg == "maxlen" for k in call.keywords)
    return name == "SimpleQueue" or (name in ("Queue", "LifoQueue", "PriorityQueue") and not call.args and not call.keywords)


@cache
def found() -> dict[str, list[str]]:
    """Every such call of the package: "file function call" -> places."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "unbroken").rglob("*.py")):
        name = str(path.relative_to(ROOT / "unbroken"))
        for line, function, call in waits_of(path.read_text(encoding="utf-8")):
            places.setdefault(f"{name} {function} {call}", []).append(f"unbroken/{name}:{line}")
    return places


def test_I11_every_wait_has_a_timeout_and_every_queue_a_bound() -> None:
    wrong = [f"{' '.join(places)}: {what}" for what, places in found().items() if what not in ALLOWED]
    assert not wrong, "give it a timeout or a bound, or list it in ALLOWED with the reason:\n" + "\n".join(wrong)


def test_I11_nothing_is_allowed_that_is_not_there_and_everything_has_a_reason() -> None:
    assert sorted(ALLOWED.keys() - found().keys()) == []
    assert all(len(reason) > 10 for reason in ALLOWED.values())


@pytest.mark.parametrize(
    "call",
    [
        "process.wait()",
        "thread.join()",
        "queue.get()",
        "queue.get(block=True)",
        "event.wait()",
        "future.result()",
        "lock.acquire()",
        "process.communicate(data)",
        "condition.wait_for(lambda: done)",
        "subprocess.run(command, check=True)",
        "os.waitpid(pid, 0)",
        "os.waitid(os.P_PID, pid, os.WEXITED)",
        "select.select([a], [], [])",
        "selector.select()",
        "poll.poll()",
        "signal.sigwait({1})",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "sock.recv(10)",
        "listener.accept()",
        "sock.connect(path)",
        "connection.recv_bytes()",
        "os.read(fd, 10)",
        "store.get('key')",
        "dist.init_process_group('gloo')",
        "TCPStore('localhost', 0)",
        "deque()",
        "collections.deque([1])",
        "queue.Queue()",
        "SimpleQueue()",
    ],
)
def test_I11_each_kind_of_wait_is_found(call: str) -> None:
    assert next(waits_of(f"class A:\n    def f(self):\n        {call}\n"))[:2] == (3, "A.f")


@pytest.mark.parametrize(
    "call",
    [
        "process.wait(3)",
        "thread.join(timeout=3)",
        "', '.join(words)",
        "names.get('x')",
        "queue.get(timeout=1)",
        "condition.wait_for(lambda: done, 3)",
        "subprocess.run(command, timeout=30)",
        "os.waitpid(pid, os.WNOHANG)",
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)",
        "select.select([a], [], [], 1)",
        "poll.poll(10)",
        "process.poll()",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "process.communicate(timeout=5)",
        "TCPStore('localhost', 0, timeout=T)",
        "deque(maxlen=5)",
        "deque(values, 5)",
        "queue.Queue(5)",
    ],
)
def test_I11_what_has_a_timeout_or_a_bound_passes(call: str) -> None:
    assert not list(waits_of(call))
