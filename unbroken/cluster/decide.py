"""Whether failed workers are started again, and where: a pure function of what has failed so far."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Decision = Literal["restart", "evict", "stop", "done"]

FINAL_EXIT_CODES = (3, 4, 5)
"""NoCheckpoint, Refused and GaveUp: starting again would meet the same folder in the same state."""

MAX_STEPS_NAMED = 4
"""Of the steps at which a device failed, the newest ones."""


class Place(Struct, frozen=True):
    """Where a rank ran: the name of its host, and of its device as the host's list of visible devices has it."""

    node: str
    device: str

    def __str__(self) -> str:
        return f"device {self.device} of {self.node}"


class Failure(Struct, frozen=True, kw_only=True):
    """One attempt's end. `codes` are (global rank, exit code) of the workers that failed by themselves, signals as negative numbers.

    `rank` is the one whose failure explains the others, `error` that failure in words. `step` is the step the attempt was working on,
    None when it reached none or is not known; `committed` the newest committed step at that moment. `asked_to_end`: a signal had
    already asked the whole job to end. `is_mistake`: no run has been opened in this launch, and every rank ended with an exception of
    a kind that comes again (a wrong argument, a missing module or file). `place`: where `rank` ran, None if it has no device of its own
    or its error is one that programs make and devices do not. `evicted`: the place was given up after this failure. `message`: the
    whole error, where `error` is only its first line.
    """

    at_s: float
    codes: tuple[tuple[int, int], ...]
    rank: int
    error: str
    step: int | None = None
    committed: int | None = None
    asked_to_end: bool = False
    is_mistake: bool = False
    place: Place | None = None
    evicted: bool = False
    message: str = ""


class Options(Struct, frozen=True, kw_only=True):
    """`max_restarts` restarts without a new committed step; `same_step` failures with one error at one step end the job.

    `same_start`: so do failures with one error before any step was reached; None (a budget was given by hand): only the budget counts.

    `same_place` failures in a row at one place, at different steps and within `same_place_s` seconds, are the place's: it is evicted.
    That leaves work for `devices` minus those evicted; at least `min_workers` must go on, at most `max_workers` are wanted. Failures that
    lie further apart than a day say little about a device: over a month, one of eight has two of the job's by chance.
    """

    max_restarts: int = 100
    same_step: int = 3
    same_start: int | None = 3
    same_place: int = 2
    same_place_s: float = 86400.0
    devices: int = 0
    min_workers: int = 1
    max_workers: int = 1


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
        return "stop", f"step {last.step} failed {alike} times with the same error{_on_devices(history)}: {what}"
    if last.step is None and options.same_start is not None and alike >= options.same_start and _is_programs_own(last):
        return "stop", f"failed {alike} times before any step with the same error: {what}"
    followed = _at_one_place(history, options)
    if followed and workers_without(history, options) >= options.min_workers:
        return "evict", f"{what}; {followed} while others did not, and is left out"
    used, since_s = _spent(history)
    if used > options.max_restarts:
        return "stop", f"{options.max_restarts} restarts in {now_s - since_s:.0f} s brought no new committed step: {what}"
    hint = f"; {followed} while others did not, and nothing can take its place" if followed else ""
    return "restart", f"{what}; restart {used} of {options.max_restarts} without a new committed step{hint}"


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


def workers_without(history: Sequence[Failure], options: Options) -> int:
    """How many workers can go on without the place of the last failure and without those evicted before."""
    return min(options.max_workers, options.devices - len(_evicted(history) | {history[-1].place}))


def _evicted(history: Sequence[Failure]) -> set[Place | None]:
    return {failure.place for failure in history if failure.evicted}


def _at_one_place(history: Sequence[Failure], options: Options) -> str:
    """In words, that the newest failures follow the place of the last one, "" if they do not.

    Failures of places that are gone already are passed over. Where one worker is all, its place cannot be told from the program.
    """
    last, gone = history[-1], _evicted(history)
    row: list[Failure] = []
    for failure in reversed(history):
        if failure.place in gone and failure.place is not None:
            continue
        if failure.place != last.place or last.at_s - failure.at_s > options.same_place_s:
            break
        row.append(failure)
    steps = {failure.step for failure in row}
    follows_step = len(steps) == 1 and None not in steps
    if last.place is None or options.max_workers < 2 or len(row) < options.same_place or follows_step:
        return ""
    named = ", ".join("before any" if failure.step is None else str(failure.step) for failure in reversed(row[:MAX_STEPS_NAMED]))
    return f"{last.place} failed {len(row)} times (steps: {named})"


def _on_devices(history: Sequence[Failure]) -> str:
    """That a step failed wherever it was computed, if that is known."""
    last = history[-1]
    places = {failure.place for failure in history if failure.step == last.step} - {None}
    return f" on {len(places)} devices" if len(places) > 1 else ""


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
    """Failures since the newest commit grew for the last time, and the moment of the first of them. Those of evicted places are free."""
    best, used, since, gone = -1, 0, history[0].at_s, _evicted(history)
    for failure in history:
        if failure.committed is not None and failure.committed > best:
            best, used, since = failure.committed, 0, failure.at_s
        used += failure.place is None or failure.place not in gone
    return used, since
