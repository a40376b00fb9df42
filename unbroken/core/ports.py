"""The doors to the world: clock, randomness, files, and named failpoints. Everything that acts takes them as arguments.

Tests pass their own; the model checker passes an in-memory tier whose every call is one atomic step.
"""

from __future__ import annotations

import builtins
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Wall time for people, monotonic time (one axis per host) for phases and timeouts."""

    def monotonic(self) -> float:
        """Seconds; comparable between processes of one host."""

    def utc(self) -> str:
        """Now, as RFC 3339 with milliseconds and Z."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The host's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def utc(self) -> str:
        now = datetime.now(timezone.utc)
        return now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03d}Z"

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Nonces(Protocol):
    """Source of names that are never reused."""

    def nonce(self) -> str:
        """32 hex digits."""


class SystemNonces:
    """Nonces from the operating system."""

    def nonce(self) -> str:
        return secrets.token_hex(16)


class Tier(Protocol):
    """Named objects under one root. Paths are relative, '/'-separated, checked against escaping the root.

    Errors: FileNotFoundError, FileExistsError (`create` only), else `Permanent` or `Transient` with the OS error chained.
    Any call may run concurrently with any other. `create` is atomic: readers see nothing or the whole object.
    """

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        """Put-if-absent, durable on return; bytes written. The concatenation of `parts` is the object."""

    def append(self, path: str, data: Buffer) -> None:
        """Add to the end of an object (made if absent), durable on return; with no `data`, what is there. One writer per path.

        Objects that `create` made with content need not take any more (Permanent).
        """

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes [offset, offset+length) or to the end; shorter when the object is."""

    def size(self, path: str) -> int:
        """Size in bytes."""

    def sweep(self) -> list[str]:
        """Remove what interrupted `create` calls of ended writers left behind; the paths removed."""

    def list(self, prefix: str) -> builtins.list[str]:
        """Paths of all objects under the folder `prefix`, sorted; [] when there is none. Temporaries are never listed."""

    def folders(self, prefix: str) -> builtins.list[str]:
        """Names of the folders directly under the folder `prefix`, sorted; [] when there is none. It may lag like `list`."""

    def delete(self, path: str) -> None:
        """Remove; no error when it is not there."""


_armed: dict[str, Callable[[], None]] = {}

position: list[int] = [0, 0]
"""[step being computed or captured, generation] of this process, kept by the trainer so that a strike knows where it is."""


def failpoint(name: str) -> None:
    """A named place where a test or the fault injector may strike. Cost when nothing is armed: one dict lookup."""
    strike = _armed.get(name)
    if strike is not None:
        strike()


def arm(name: str, strike: Callable[[], None] | None) -> None:
    """Put `strike` at failpoint `name`, or take it away (None)."""
    if strike is None:
        _armed.pop(name, None)
    else:
        _armed[name] = strike


def environment(name: str, default: str = "") -> str:
    """One environment variable; the only place that reads UNBROKEN_* and the launcher's."""
    return os.environ.get(name, default)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a trainer to finish its step and end: SIGTERM, SIGUSR1, and what the launcher was told besides."""
    more = (name for name in environment("UNBROKEN_STOP_SIGNALS").split(",") if name in signal.Signals.__members__)
    return tuple(dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, *(signal.Signals[name] for name in more))))


def whole_environment() -> dict[str, str]:
    """A copy of the environment, for processes that are started."""
    return dict(os.environ)
