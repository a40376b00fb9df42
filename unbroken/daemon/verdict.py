"""May a refused step be tried again in place? Only when every member has said that it applied nothing (pure)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from unbroken.core.limits import VERDICT_TIMEOUT_S
from unbroken.core.messages import Refuse, Verdict

MAX_REASON_CHARS = 300
"""Of one rank's reason: those of all ranks stand in one journal line."""

Attempt = tuple[int, int, int]
"""(generation, step, attempt)."""


class Decision(NamedTuple):
    """A verdict on `attempt` of `step`, the ranks it goes to, and why each rank refused."""

    verdict: Verdict
    step: int
    attempt: int
    ranks: list[int]
    reasons: dict[str, str]


class Refusals:
    """The refused attempt that is being judged. Every call returns the decision once there is one."""

    def __init__(self) -> None:
        self._open: Attempt | None = None
        self._reasons: dict[int, str] = {}
        self._deadline_s = 0.0
        self._denied: tuple[Attempt, str] | None = None
        self._applied = (-1, -1)
        self._why_gone: dict[int, str] = {}

    @property
    def deadline_s(self) -> float | None:
        """When patience ends; None while nothing is being judged."""
        return self._deadline_s if self._open is not None else None

    def refuse(self, message: Refuse, members: Collection[int], world_size: int, now_s: float) -> Decision | None:
        """A member applied nothing of an attempt. `members` are the ranks connected now."""
        attempt = (message.generation, message.step, message.attempt)
        if self._open is None and self._denied is not None and self._denied[0] == attempt:
            self._open, self._reasons = attempt, {message.rank: message.reason}
            return self._deny(self._denied[1])
        if self._open is None:
            self._open, self._reasons, self._deadline_s = attempt, {}, now_s + VERDICT_TIMEOUT_S
        self._reasons[message.rank] = message.reason
        if self._open != attempt:
            return self._deny(f"ranks refused different attempts: {self._open[1:]} and {attempt[1:]}")
        absent = [rank for rank in range(world_size) if rank in self._why_gone or rank not in members]
        if absent:
            return self._deny(self._gone(min(absent, key=lambda rank: rank not in self._why_gone)))
        if self._applied >= attempt[:2]:
            return self._deny(f"step {message.step} was applied elsewhere")
        if len(self._reasons) < world_size:
            return None
        return self._decide(True, message.attempt + 1, f"all {world_size} ranks refused attempt {message.attempt} of step {message.step}")

    def applied(self, generation: int, step: int) -> Decision | None:
        """A member has applied `step`."""
        self._applied = max(self._applied, (generation, step))
        if self._open is not None and (generation, step) >= self._open[:2]:
            return self._deny(f"step {step} was applied elsewhere")
        return None

    def left(self, rank: int, why: str = "") -> Decision | None:
        """A member is gone, or on its way out because of an error."""
        if why:
            self._why_gone[rank] = why
        return self._deny(self._gone(rank)) if self._open is not None else None

    def expire(self, now_s: float) -> Decision | None:
        """Time has passed."""
        if self._open is None or now_s < self._deadline_s:
            return None
        return self._deny(f"not all ranks spoke within {VERDICT_TIMEOUT_S:.0f} s")

    def opened(self) -> None:
        """A new generation begins: nothing of the old one counts."""
        self._open, self._denied, self._applied = None, None, (-1, -1)
        self._why_gone.clear()

    def _gone(self, rank: int) -> str:
        why = self._why_gone.get(rank, "")
        return f"rank {rank} is gone" + (f": {why}" if why else "")

    def _deny(self, reason: str) -> Decision:
        assert self._open is not None
        self._denied = self._open, reason
        return self._decide(False, self._open[2], reason)

    def _decide(self, retry: bool, next_attempt: int, reason: str) -> Decision:
        assert self._open is not None
        (_, step, attempt), self._open = self._open, None
        verdict = Verdict(retry=retry, attempt=next_attempt, reason=reason)
        return Decision(
            verdict, step, attempt, sorted(self._reasons), {str(r): text[:MAX_REASON_CHARS] for r, text in self._reasons.items()}
        )
