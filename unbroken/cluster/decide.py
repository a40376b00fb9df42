"""Whether failed workers are started again: a pure function of what has failed so far."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Decision = Literal["restart", "stop", "done"]

FINAL_EXIT_CODES = (3, 4, 5)
"""NoCheckpoint, Refused and GaveUp: starting again would meet the same folder in the same state."""


class Failure(Struct, frozen=True, kw_only=True):
    """One attempt's end. `codes` are (global rank, exit code) of the workers that failed by themselves, signals as negative numbers.

    `rank` is the one whose failure explains the others, `error` that failure in words. `step` is the step the attempt was working on,
    None when it reached none or is not known; `committed` the newest committed step at that moment. `asked_to_end`: a signal had
    already asked the whole job to end. `is_mistake`: no run has been opened in this launch, and every rank ended with an exception of
    a kind that comes again (a wrong argument, a missing module or file).
    """

    at_s: float
    codes: tuple[tuple[int, int], ...]
    rank: int
    error: str
    step: int | None = None
    committed: int | None = None
    asked_to_end: bool = False
    is_mistake: bool = False


class Options(Struct, frozen=True, kw_only=True):
    """`max_restarts` restarts without a new committed step; `same_step` failures with one error at one step end the job.

    `same_start`: so do failures with one error before any step was reached; None (a budget was given by hand): only the budget counts.
    """

    max_restarts: int = 100
    same_step: int = 3
    same_start: int | None = 3


DEFAULT_OPTIONS = Options()


def decide(now_s: float, history: Sequence[Failure], options: Options) -> tuple[Decision, str]:
    """What to do after the last failure of `history` (oldest first), and why. `now_s` is on the axis of `Failure.at_s`."""
    if not history:
        return "done", "all workers ended by themselves"
    last = history[-1]
    what = f"rank {last.rank} ended with {last.error}"
    if last.asked_to_end:
        return "stop", f"asked to end, and {what}"
    if any(code in FINAL_EXIT_CODES for _, code in last.codes):
        return "stop", f"{what}; starting again cannot change that"
    if _is_hopeless(last, options):
        return "stop", f"{what}; no run was opened, and starting again cannot change that"
    alike = _alike(history)
    if last.step is not None and alike >= options.same_step:
        return "stop", f"step {last.step} failed {alike} times with the same error: {what}"
    if last.step is None and options.same_start is not None and alike >= options.same_start and _is_programs_own(last):
        return "stop", f"failed {alike} times before any step with the same error: {what}"
    used, since_s = _spent(history)
    if used > options.max_restarts:
        return "stop", f"{options.max_restarts} restarts in {now_s - since_s:.0f} s brought no new committed step: {what}"
    return "restart", f"{what}; restart {used} of {options.max_restarts} without a new committed step"


def exit_code(history: Sequence[Failure], end_signal: int | None, options: Options = DEFAULT_OPTIONS) -> int:
    """What the launcher returns after it stopped: the code of a worker whose failure was final, 128 + the end signal, or 5."""
    for _, code in history[-1].codes:
        if code in FINAL_EXIT_CODES or (_is_hopeless(history[-1], options) and end_signal is None):
            return code
    return 128 + end_signal if end_signal is not None else 5


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _alike(history: Sequence[Failure]) -> int:
    """Failures that share step and error with the last one, itself included."""
    last = history[-1]
    return sum(1 for f in history if f.step == last.step and _fingerprint(f.error) == _fingerprint(last.error))


def _fingerprint(error: str) -> str:
    """A text without what changes from one life to the next (ports, addresses); exit codes and signal numbers stay."""
    head, _, text = error.partition(":")
    return head + re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)


def _is_hopeless(failure: Failure, options: Options) -> bool:
    """A budget given by hand is used as it was meant."""
    return failure.is_mistake and options.same_start is not None


def _is_programs_own(failure: Failure) -> bool:
    """True when the program itself gave up; a signal comes from outside and may not come again."""
    return all(code > 0 for _, code in failure.codes)


def _spent(history: Sequence[Failure]) -> tuple[int, float]:
    """Failures since the newest commit grew for the last time, and the moment of the first of them."""
    best, used, since = -1, 0, history[0].at_s
    for failure in history:
        if failure.committed is not None and failure.committed > best:
            best, used, since = failure.committed, 0, failure.at_s
        used += 1
    return used, since
