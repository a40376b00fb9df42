"""A tier that fails as planned, for tests and for chaos: by call, path and count. Nothing here is random."""

from __future__ import annotations

import builtins
import fnmatch
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from unbroken.core.errors import Permanent, Transient
from unbroken.core.ports import Buffer, Clock, SystemClock, Tier
from unbroken.store.tiers.traits import traits_of

Call = Literal["create", "append", "read", "size", "sweep", "list", "folders", "delete"]
Kind = Literal["transient", "permanent", "short", "delay", "applied", "unconditional", "lag"]
_KINDS: dict[str, tuple[str, ...]] = {
    "transient": (),
    "permanent": (),
    "delay": (),
    "applied": ("create", "append", "delete"),
    "short": ("create", "append", "read"),
    "unconditional": ("create",),
    "lag": ("list", "folders"),
}


@dataclass(frozen=True)
class Fault:
    """What happens to calls of one kind whose path matches `pattern` (as in a shell; '*' matches '/'), after `skip` of them, `count` times.

    transient, permanent: the error, and nothing is done. delay: `seconds` first. applied: done, then Transient, as when the answer is
    lost. short: half of the bytes, then Transient (a read: half of the bytes). unconditional: a create replaces what is there, as in a
    store that ignores the condition. lag: what was created through this tier at most `seconds` ago (0: ever) is not listed.
    """

    call: Call
    kind: Kind
    pattern: str = "*"
    count: int = 1
    skip: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        calls = _KINDS.get(self.kind)
        if calls is None:
            raise ValueError(f"fault {self.kind!r}: use one of {', '.join(_KINDS)}")
        if calls and self.call not in calls:
            raise ValueError(f"fault {self.kind!r} is one of {', '.join(calls)}, not of {self.call!r}")


class FaultTier:
    """`tier`, with `faults`. Of several that are due at one call the first strikes, and the others have passed."""

    def __init__(self, tier: Tier, faults: Iterable[Fault] = (), *, clock: Clock | None = None) -> None:
        self.traits = traits_of(tier)
        self._tier = tier
        self._clock = clock or SystemClock()
        self._faults = list(faults)
        self._matched = [0] * len(self._faults)
        self._lock = threading.Lock()
        self._created: dict[str, float] = {}
        self.struck: builtins.list[tuple[str, str, str]] = []
        """(call, path, kind) of every strike, in order."""

    def __repr__(self) -> str:
        return f"FaultTier({self._tier!r})"

    def add(self, fault: Fault) -> None:
        """One more fault, from now on."""
        with self._lock:
            self._faults.append(fault)
            self._matched.append(0)

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        fault = self._due("create", path)
        if _is(fault, "short"):
            data = b"".join(parts)
            raise Transient(f"{path}: planned: broken off after {len(data) // 2} bytes")
        if _is(fault, "unconditional"):
            self._tier.delete(path)
        size = self._tier.create(path, parts)
        with self._lock:
            self._created[path] = self._clock.monotonic()
        _lose_answer(fault, path)
        return size

    def append(self, path: str, data: Buffer) -> None:
        fault = self._due("append", path)
        if _is(fault, "short"):
            view = memoryview(data).cast("B")
            self._tier.append(path, view[: len(view) // 2])
            raise Transient(f"{path}: planned: broken off after {len(view) // 2} bytes")
        self._tier.append(path, data)
        _lose_answer(fault, path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        fault = self._due("read", path)
        data = self._tier.read(path, offset, length)
        return data[: len(data) // 2] if _is(fault, "short") else data

    def size(self, path: str) -> int:
        self._due("size", path)
        return self._tier.size(path)

    def sweep(self) -> list[str]:
        self._due("sweep", "")
        return self._tier.sweep()

    def list(self, prefix: str) -> list[str]:
        hidden = self._hidden("list", prefix)
        return [path for path in self._tier.list(prefix) if path not in hidden]

    def folders(self, prefix: str) -> builtins.list[str]:
        hidden = self._hidden("folders", prefix)
        found = self._tier.folders(prefix)
        if not hidden:
            return found
        return [name for name in found if any(path not in hidden for path in self._tier.list(f"{prefix}/{name}"))]

    def delete(self, path: str) -> None:
        fault = self._due("delete", path)
        self._tier.delete(path)
        _lose_answer(fault, path)

    def _due(self, call: Call, path: str) -> Fault | None:
        """The fault of this call, with its delay over; its error is raised here when nothing is to be done before."""
        fault = self._struck(call, path)
        if fault is None:
            return None
        if fault.kind == "delay":
            self._clock.sleep(fault.seconds)
        if fault.kind == "transient":
            raise Transient(f"{path}: planned")
        if fault.kind == "permanent":
            raise Permanent(f"{path}: planned")
        return fault

    def _struck(self, call: Call, path: str) -> Fault | None:
        struck = None
        with self._lock:
            for i, fault in enumerate(self._faults):
                if fault.call != call or not fnmatch.fnmatchcase(path, fault.pattern):
                    continue
                self._matched[i] += 1
                if struck is None and fault.skip < self._matched[i] <= fault.skip + fault.count:
                    struck = fault
                    self.struck.append((call, path, fault.kind))
        return struck

    def _hidden(self, call: Call, prefix: str) -> set[str]:
        """What a listing does not know yet."""
        fault = self._due(call, prefix)
        if not _is(fault, "lag"):
            return set()
        since = self._clock.monotonic() - (fault.seconds if fault is not None and fault.seconds else math.inf)
        with self._lock:
            return {path for path, at in self._created.items() if at >= since}


def _is(fault: Fault | None, kind: Kind) -> bool:
    return fault is not None and fault.kind == kind


def _lose_answer(fault: Fault | None, path: str) -> None:
    if _is(fault, "applied"):
        raise Transient(f"{path}: planned: the answer is lost")
