"""Faults planned in the environment, struck at the failpoints of the training loop.

`UNBROKEN_FAULTS` is a JSON list of faults, for example
`[{"at": "step.backward", "step": 12, "rank": 1, "generation": 0, "action": "kill"}]`. A fault strikes once per process, the first time
its rank passes `at` in its generation while it computes or captures `step` or a later step. Before it acts, a strike is written as
one JSON line to the file `UNBROKEN_FAULT_LOG`: later claims about detection and recovery are measured from there.

"drain" is no failpoint but a moment: the rank's slot for `step` (or a later one) is READY, and the daemon makes it durable while the
rank is already in the next forward. "preempt" asks like a scheduler does: SIGTERM for the launcher, or for the rank where there is none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from unbroken.core.ports import Clock, SystemClock, arm, environment, position
from unbroken.core.records import Count

FAILPOINTS = (
    "step.forward",
    "step.backward",
    "step.reduce",
    "exchange.scatter",
    "exchange.gather",
    "step.optimizer",
    "step.applied",
    "capture.begin",
    "capture.copied",
    "capture.ready",
    "rollback.begin",
    "rollback.opened",
)
"""Where the trainer passes, in this order within a step and its boundary; the last two where it goes back to an earlier checkpoint."""

DRAIN = "drain"
DRAIN_WAIT_S = 5.0
"""A drain strike waits this long for the daemon to start draining, then strikes anyway: every wait has an end."""


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned fault. `generation` None means every generation: a fault that comes back after each restart."""

    at: str
    step: Count
    rank: Count
    generation: Count | None = None
    action: Literal["kill", "raise", "stop", "preempt"] = "kill"

    def __post_init__(self) -> None:
        if self.at not in FAILPOINTS and self.at != DRAIN:
            raise ValueError(f"unknown place {self.at!r}; choose from {', '.join((*FAILPOINTS, DRAIN))}")


class Struck(Struct, frozen=True, kw_only=True):
    """One line of the fault log: what struck, where the trainer stood, when on the host's monotonic clock, and which process."""

    at: str
    step: Count
    rank: Count
    generation: Count
    action: str
    time_s: float
    pid: Count


class InjectedFault(RuntimeError):
    """What action "raise" raises: a RuntimeError like those of a failed collective."""


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The plan in `text`; "" is no plan. ValueError says what to mend."""
    if not text.strip():
        return ()
    try:
        return tuple(msgspec.json.decode(text, type=list[Fault]))
    except msgspec.MsgspecError as error:
        raise ValueError(f"UNBROKEN_FAULTS is not a JSON list of faults: {error}") from error


def record_strike(path: str, struck: Struck) -> None:
    """Append one line to the fault log in a single write, so that lines of several processes never mix; "" logs nothing."""
    if not path:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, msgspec.json.encode(struck) + b"\n")
    finally:
        os.close(fd)


def read_strikes(path: str) -> list[Struck]:
    """All strikes so far, in the order they were logged."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as f:
        return [msgspec.json.decode(line, type=Struck) for line in f.read().splitlines()]


class Injector:
    """The strikes of one rank in one generation. `phase` asks the daemon what it does now ("idle", "draining")."""

    def __init__(
        self,
        faults: tuple[Fault, ...],
        *,
        log: str = "",
        clock: Clock | None = None,
        phase: Callable[[], str] | None = None,
    ) -> None:
        self._pending = list(faults)
        self._frozen: set[Fault] = set()
        self._log = log
        self._clock = clock or SystemClock()
        self._phase = phase

    def arm(self) -> None:
        """Put a strike at every place that a fault waits for; nothing is armed, and nothing costs, without faults."""
        for fault in self._pending:
            for place in ("capture.ready", "step.forward") if fault.at == DRAIN else (fault.at,):
                arm(place, lambda place=place: self._pass(place))  # type: ignore[misc]

    def _pass(self, place: str) -> None:
        for fault in tuple(self._pending):
            if position[0] < fault.step:
                continue
            if fault.at == DRAIN:
                self._pass_drain(fault, place)
            elif fault.at == place:
                self._strike(fault)

    def _pass_drain(self, fault: Fault, place: str) -> None:
        if place == "capture.ready":
            self._frozen.add(fault)
        elif fault in self._frozen:
            self._await_draining()
            self._strike(fault)

    def _await_draining(self) -> None:
        if self._phase is None:
            return
        deadline = self._clock.monotonic() + DRAIN_WAIT_S
        while self._phase() != "draining" and self._clock.monotonic() < deadline:
            self._clock.sleep(0.0005)

    def _strike(self, fault: Fault) -> None:
        self._pending.remove(fault)
        struck = Struck(
            at=fault.at,
            step=position[0],
            rank=fault.rank,
            generation=position[1],
            action=fault.action,
            time_s=self._clock.monotonic(),
            pid=os.getpid(),
        )
        record_strike(self._log, struck)
        if fault.action == "raise":
            raise InjectedFault(f"injected at {fault.at} of step {position[0]} on rank {fault.rank}")
        if fault.action == "preempt":
            os.kill(int(environment("UNBROKEN_LAUNCHER_PID", str(os.getpid()))), signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)


def arm_from_environment(rank: int, generation: int, phase: Callable[[], str] | None = None) -> None:
    """Arm what `UNBROKEN_FAULTS` plans for this rank and generation; does nothing without a plan."""
    faults = tuple(
        fault for fault in parse_faults(environment("UNBROKEN_FAULTS")) if fault.rank == rank and fault.generation in (None, generation)
    )
    Injector(faults, log=environment("UNBROKEN_FAULT_LOG"), phase=phase).arm()
