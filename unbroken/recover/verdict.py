"""May a refused step be tried again in place? Only when every member has said that it applied nothing (pure)."""

from __future__ import annotations

from collections.abc import Collection

from unbroken.core.messages import Refuse, Verdict

VERDICT_TIMEOUT_S = 30.0
"""Members that have not spoken by then are hanging or have applied the step."""

Attempt = tuple[int, int, int]
"""(generation, step, attempt)."""


class Refusals:
    """The refused attempt that is being judged. Every call returns the verdict once there is one, and whom it goes to."""

    def __init__(self) -> None:
        self._open: Attempt | None = None
        self._reasons: dict[int, str] = {}
        self._deadline_s = 0.0
        self._denied: tuple[Attempt, str] | None = None
        self._applied = (-1, -1)

    @property
    def deadline_s(self) -> float | None:
        """When patience ends; None while nothing is being judged."""
        return self._deadline_s if self._open is not None else None

    @property
    def reasons(self) -> dict[int, str]:
        """Why each rank refused, of the attempt being judged or judged last."""
        return dict(self._reasons)

    def refuse(self, message: Refuse, members: Collection[int], world_size: int, now_s: float) -> tuple[Verdict, list[int]] | None:
        """A member applied nothing of an attempt. `members` are the ranks connected now."""
        attempt = (message.generation, message.step, message.attempt)
        if self._denied is not None and self._denied[0] == attempt:
            return _deny(message.attempt, self._denied[1]), [message.rank]
        if self._open is not None and self._open != attempt:
            return self._close(f"ranks refused different attempts: {self._open[1:]} and {attempt[1:]}", also=message.rank)
        if self._open is None:
            self._open, self._reasons, self._deadline_s = attempt, {}, now_s + VERDICT_TIMEOUT_S
        self._reasons[message.rank] = message.reason
        absent = [rank for rank in range(world_size) if rank not in members]
        if absent:
            return self._close(f"rank {absent[0]} is gone")
        if self._applied >= (message.generation, message.step):
            return self._close(f"step {message.step} was applied elsewhere")
        if len(self._reasons) < world_size:
            return None
        self._open = None
        reason = f"all {world_size} ranks refused attempt {message.attempt} of step {message.step}"
        return Verdict(retry=True, attempt=message.attempt + 1, reason=reason), sorted(self._reasons)

    def applied(self, generation: int, step: int) -> tuple[Verdict, list[int]] | None:
        """A member has applied `step`."""
        self._applied = max(self._applied, (generation, step))
        if self._open is not None and (generation, step) >= self._open[:2]:
            return self._close(f"step {step} was applied elsewhere")
        return None

    def left(self, rank: int) -> tuple[Verdict, list[int]] | None:
        """A member is gone."""
        return self._close(f"rank {rank} is gone") if self._open is not None else None

    def expire(self, now_s: float) -> tuple[Verdict, list[int]] | None:
        """Time has passed."""
        if self._open is None or now_s < self._deadline_s:
            return None
        return self._close(f"not all ranks spoke within {VERDICT_TIMEOUT_S:.0f} s")

    def opened(self) -> None:
        """A new generation begins: nothing of the old one counts."""
        self.__init__()  # type: ignore[misc]

    def _close(self, reason: str, also: int | None = None) -> tuple[Verdict, list[int]]:
        assert self._open is not None
        attempt, self._open = self._open, None
        self._denied = attempt, reason
        ranks = set(self._reasons) | ({also} if also is not None else set())
        return _deny(attempt[2], reason), sorted(ranks)


def _deny(attempt: int, reason: str) -> Verdict:
    return Verdict(retry=False, attempt=attempt, reason=reason)
