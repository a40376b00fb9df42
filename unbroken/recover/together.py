"""Ranks that do something together: all succeed, or all raise and say which rank failed and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from unbroken.core.errors import UnbrokenError
from unbroken.core.limits import MAX_DESCRIPTION_CHARS
from unbroken.core.messages import Error
from unbroken.recover.link import raise_error
from unbroken.step.exchange import Exchange

T = TypeVar("T")


class _Outcome(Struct, frozen=True):
    kind: str = ""
    text: str = ""
    code: int = 1


def together(exchange: Exchange, action: Callable[[], T]) -> T:
    """Run `action` on this rank, then learn how all others fared. Cost: one small gather; for start and recovery only."""
    outcome, failure, result = _Outcome(), None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  (kept and raised below, after the others have been told)
        failure = error
        code = error.exit_code if isinstance(error, UnbrokenError) else 1
        outcome = _Outcome(kind=type(error).__name__, text=str(error)[:MAX_DESCRIPTION_CHARS], code=code)
    outcomes = exchange.share(outcome, _Outcome)
    if failure is not None:
        raise failure
    for rank, other in enumerate(outcomes):
        if other.kind:
            raise_error(Error(kind=other.kind, text=f"rank {rank}: {other.text}", code=other.code))
    return result  # type: ignore[return-value]
