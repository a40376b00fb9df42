"""The local socket between trainers, launcher and node daemon: one JSON message per packet, descriptors beside it.

The socket's name comes from the user and the real path of the run folder, so that everybody who means the same folder meets the same
daemon. It lies in a directory that only this user can enter, and both ends ask the kernel who the other one is.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import unbroken
from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, Refused
from unbroken.core.limits import CONNECT_TIMEOUT_S, MAX_MESSAGE_BYTES, REPLY_TIMEOUT_S
from unbroken.core.messages import Message, Welcome
from unbroken.core.os import is_alive, peer_credentials, start_module, try_lock, wait_any
from unbroken.core.ports import SystemClock, environment, whole_environment
from unbroken.core.records import MAIN_LINEAGE

MAX_DESCRIPTORS = 128
"""Descriptors beside one message; the kernel allows 253."""

MAX_ADDRESS_BYTES = 107
"""Length of a Unix socket's path."""

BACKLOG = 128
RETRY_S = 0.01
MAX_STARTS = 3
MAX_LOG_BYTES = 1 << 20
LOG_TAIL_BYTES = 2000

_clock = SystemClock()

DAEMON_MODULE = "unbroken.agent"
_FOREIGN_PREFIXES = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH", "PYTORCH", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_",
    "KMP_", "CUDA_", "UNBROKEN_LAUNCH_FILE", "UNBROKEN_REPLAY",
)  # fmt: skip


def runtime_directory() -> str:
    """Where sockets, locks and logs of daemons lie: made with mode 0700 if missing; Refused if it is not safely ours."""
    base = environment("XDG_RUNTIME_DIR")
    path = os.path.join(base, "unbroken") if base and os.path.isdir(base) else ""
    if not path or len(os.fsencode(path)) > MAX_ADDRESS_BYTES - 30:
        path = f"/tmp/unbroken-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{path} is not a directory (a link is not followed): remove it, or set XDG_RUNTIME_DIR to a directory of yours")
    if found.st_uid != os.geteuid():
        raise Refused(f"{path} belongs to user {found.st_uid}, not to us: remove it, or set XDG_RUNTIME_DIR to a directory of yours")
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def address(directory: str, lineage: str = MAIN_LINEAGE) -> str:
    """Path of the socket of the daemon that serves this lineage of a run folder (which need not exist)."""
    more = () if lineage == MAIN_LINEAGE else (lineage,)
    name = text_digest(str(os.geteuid()), os.path.realpath(directory), *more)[:24]
    return os.path.join(runtime_directory(), f"{name}.sock")


def log_path(directory: str, lineage: str = MAIN_LINEAGE) -> str:
    """Path of the daemon's log."""
    return address(directory, lineage).removesuffix(".sock") + ".log"


class Channel:
    """One end of a connection. Packets keep their borders; every wait has a bound. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(REPLY_TIMEOUT_S)
        self._owner = os.getpid()

    def fileno(self) -> int:
        """Descriptor, for selectors; -1 when closed."""
        return self._socket.fileno()

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the other end as the kernel knows them."""
        return peer_credentials(self._socket)

    def send(self, message: Message, fds: Sequence[int] = (), timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Send one message and copies of `fds`. TimeoutError if the other end does not read, ConnectionError if it is gone.

        ValueError if the message is larger than MAX_MESSAGE_BYTES or has too many descriptors: nothing is sent then.
        """
        raw = encode(message)
        if len(fds) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(fds)} descriptors beside one message, at most {MAX_DESCRIPTORS} are allowed: send several messages")
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendmsg([raw], beside, socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise TimeoutError("the other end of the channel does not read") from error

    def wait(self, timeout_s: float) -> bool:
        """True as soon as `receive` has something to say, False after `timeout_s`."""
        return bool(wait_any([self._socket.fileno()], timeout_s))

    def receive(self, timeout_s: float) -> tuple[Message, list[int]]:
        """The next message and the descriptors beside it, which the caller owns. Inheritable they are not.

        TimeoutError when none came in time, ConnectionError when the other end is gone, Damaged when what came is no message.
        """
        self._socket.settimeout(max(0.0, timeout_s))
        try:
            try:
                raw, beside, flags = self._receive_packet()
            except ConnectionResetError:
                # It ended without having read everything. The kernel says that once, before it hands out what it had sent.
                raw, beside, flags = self._receive_packet()
        except BlockingIOError as error:
            raise TimeoutError("no message") from error
        fds = _descriptors(beside)
        try:
            if not raw and not fds:
                raise ConnectionResetError("the other end of the channel is gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Damaged("channel", f"a message is larger than {MAX_MESSAGE_BYTES} bytes or {MAX_DESCRIPTORS} descriptors")
            return decode(raw), fds
        except (ConnectionError, Damaged):
            for fd in fds:
                os.close(fd)
            raise

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        return self._socket.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)[:3]

    def close(self) -> None:
        """End the connection; the other end sees that at once, even if a forked child still has a copy of the descriptor."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def encode(message: Message) -> bytes:
    """The packet of a message; ValueError if it is too large."""
    raw = msgspec.json.encode(message)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message {type(message).__name__} of {len(raw)} bytes is larger than {MAX_MESSAGE_BYTES}: send it in parts")
    return raw


def decode(raw: bytes) -> Message:
    """The message in a packet; Damaged if there is none."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged("channel", f"a packet of {len(raw)} bytes is no message: {error}") from error


_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def _descriptors(beside: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, raw in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return list(fds)


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, non-blocking. A socket left there by a dead daemon is replaced: hold the daemon's lock."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> Channel | None:
    """The next waiting connection, greeted; None if there is none. Another user's is closed at once."""
    while True:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        channel = Channel(connection)
        if channel.peer()[1] == os.geteuid():
            with contextlib.suppress(OSError):  # gone already: its first read says so
                channel.send(Welcome(pid=os.getpid(), directory=""), timeout_s=0.0)
                return channel
        channel.close()


def connect(directory: str, start: bool, lineage: str = MAIN_LINEAGE) -> Channel:
    """Reach the daemon of a lineage of a run folder; with `start`, start one if none answers and wait up to CONNECT_TIMEOUT_S for it.

    The daemon has greeted us when this returns: the kernel also connects to one that is just dying.
    ConnectionError without a daemon: at once without `start`, else with the daemon's log path and its last lines.
    """
    path = address(directory, lineage)
    channel = _dial(path)
    if channel is not None:
        return channel
    if not start:
        raise ConnectionRefusedError(f"no daemon serves {directory}")
    deadline_s = _clock.monotonic() + CONNECT_TIMEOUT_S
    num_starts = 0
    while channel is None and num_starts < MAX_STARTS and _clock.monotonic() < deadline_s:
        with _only_starter(path) as mine:
            if mine:
                num_starts += 1
                channel = _dial(path) or _start(directory, lineage, path, deadline_s)
            else:
                _clock.sleep(RETRY_S)
                channel = _dial(path)
    if channel is None:
        raise ConnectionRefusedError(
            f"the daemon of {directory} did not answer after {num_starts} starts within {CONNECT_TIMEOUT_S:.0f} s; "
            f"its log is {log_path(directory, lineage)}:\n{_tail(log_path(directory, lineage))}"
        )
    return channel


def _dial(path: str) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(connection)
    connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        connection.connect(path)
        _, uid = channel.peer()
        if uid != os.geteuid():
            raise Refused(f"{path} is served by user {uid}, not by us")
        channel.receive(CONNECT_TIMEOUT_S)
    except (FileNotFoundError, ConnectionError):
        channel.close()
        return None
    except BaseException:  # raised again
        channel.close()
        raise
    return channel


@contextlib.contextmanager
def _only_starter(path: str) -> Iterator[bool]:
    """True for one of the processes that want to start the same daemon now: the ranks of a job must not all start one."""
    fd = os.open(path.removesuffix(".sock") + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def _start(directory: str, lineage: str, path: str, deadline_s: float) -> Channel | None:
    log = log_path(directory, lineage)
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(log) > MAX_LOG_BYTES:
            os.unlink(log)
    try:
        pid = start_module(DAEMON_MODULE, [os.path.realpath(directory), lineage], daemon_environment(), log)
    except subprocess.SubprocessError as error:
        raise ConnectionRefusedError(f"the daemon of {directory} could not be started; its log would be {log}: {error}") from error
    while _clock.monotonic() < deadline_s:
        lives = is_alive(pid)
        channel = _dial(path)
        if channel is not None or not lives:
            return channel
        _clock.sleep(RETRY_S)
    return None


def daemon_environment() -> dict[str, str]:
    """The environment of the daemon: ours without what belongs to a rank, and with this very package on its path.

    PYTHONSAFEPATH keeps files in the working directory from standing in for modules. NumPy's BLAS gets no threads of its own: they would
    not yield to training.
    """
    env = {name: value for name, value in whole_environment().items() if not name.startswith(_FOREIGN_PREFIXES)}
    package = str(Path(unbroken.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package, env.get("PYTHONPATH", ""))))
    env["PYTHONSAFEPATH"] = "1"
    env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return env


def _tail(log: str) -> str:
    try:
        raw = Path(log).read_bytes()
    except OSError as error:
        return f"(no log: {error})"
    return raw[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(it is empty)"
