"""Is a rank hanging? A pure decision over what the ranks' pages say, how long nothing has changed, and what steps took before.

A rank hangs when it has made no mark for longer than its place allows. A rank that waits in the step's collective waits for another one:
it is that one that is looked at. While a rank evaluates or saves, the others may be waiting for it in ways that we cannot see, so their
time does not count; while a debugger holds a rank, or somebody has stopped the whole job, nobody's does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from unbroken.core.limits import (
    EVAL_TIMEOUT_S,
    FIRST_STEPS,
    HANG_FACTOR,
    HANG_FLOOR_S,
    MIN_STEP_TIMES,
    STEP_TIMEOUT_S,
)
from unbroken.shm.pulse import Phase, Reading

DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/_pydevd_bundle/", "/IPython/core/debugger.py", "/IPython/terminal/embed.py")
"""In the paths of files in which a thread sits that waits for somebody to type."""

COLLECTIVES = "/torch/distributed/"
"""A main thread whose innermost frames lie here waits for other ranks."""

DEVIATION = 1.4826
"""Median absolute deviations in a standard deviation."""

_PAUSES = {Phase.EVAL: EVAL_TIMEOUT_S, Phase.SAVE: STEP_TIMEOUT_S, Phase.VERDICT: STEP_TIMEOUT_S, Phase.OUTSIDE: float("inf")}


class View(NamedTuple):
    """One rank at one look: its page, its process's state as in ps, the process that traces it (0: none)."""

    rank: int
    reading: Reading
    state: str = "S"
    tracer: int = 0

    @property
    def is_stopped(self) -> bool:
        """Stopped by a signal."""
        return self.state == "T"

    @property
    def is_paused(self) -> bool:
        """Doing something whose length says nothing."""
        return self.reading.phase in _PAUSES and not self.is_stopped


class Patience(NamedTuple):
    """`timeout_s` as the user gave it, None: learned. `times` what is learned is multiplied by: it has been wrong about this step."""

    timeout_s: float | None = None
    times: float = 1.0


class Idle(NamedTuple):
    """Marks of a rank at the last look, and for how long they have been that, as far as it counts."""

    marks: int
    seconds: float


class Judgement(NamedTuple):
    """`ranks` are those that hang; none where all wait for each other in one collective."""

    decision: Literal["wait", "alarm"]
    reason: str
    ranks: tuple[int, ...] = ()


def held_by(views: Sequence[View]) -> str:
    """Why nobody's time counts now; "" if it does."""
    for view in views:
        if view.reading.traced or view.tracer:
            return f"rank {view.rank} is under a debugger"
    if views and all(view.is_stopped for view in views):
        return "all ranks are stopped"
    return ""


def advance(before: Mapping[int, Idle], views: Sequence[View], since_s: float) -> dict[int, Idle]:
    """How long each rank has made no mark, `since_s` seconds after the look `before`."""
    held = bool(held_by(views))
    somebody_pauses = any(view.is_paused for view in views)
    idle = {}
    for view in views:
        marks, seconds = view.reading.marks, 0.0
        if view.rank in before and before[view.rank].marks == marks:
            counts = not held and (view.is_paused or view.is_stopped or not somebody_pauses)
            seconds = before[view.rank].seconds + (since_s if counts else 0.0)
        idle[view.rank] = Idle(marks, seconds)
    return idle


def limit(times: Sequence[float], patience: Patience) -> tuple[float, str]:
    """Seconds that a part of a step may take, and why, from what whole steps took."""
    if patience.timeout_s is not None:
        return patience.timeout_s, "hang_timeout"
    if len(times) < MIN_STEP_TIMES:
        return STEP_TIMEOUT_S, "too few steps to know better"
    median = statistics.median(times)
    spread = DEVIATION * statistics.median(abs(t - median) for t in times)
    seconds = max(HANG_FLOOR_S, HANG_FACTOR * (median + spread)) * patience.times
    return seconds, f"steps take {median:.3g} s, give or take {spread:.2g} s"


def allowed(view: View, known: tuple[float, str], patience: Patience) -> tuple[float, str]:
    """Seconds without a mark that this rank's place allows, and why. `known` is `limit` over all ranks."""
    phase, reading = view.reading.phase, view.reading
    if view.is_stopped:
        return known
    if phase in _PAUSES:
        return _PAUSES[phase], "the longest for this"
    if phase == Phase.COLLECTIVE:
        return STEP_TIMEOUT_S, "the longest in a collective"
    if reading.steps < FIRST_STEPS:
        return max(STEP_TIMEOUT_S, known[0]), "one of the first steps"
    if phase == Phase.BODY and patience.timeout_s is None:
        return max(STEP_TIMEOUT_S, known[0]), "outside the step"
    return known


def judge(views: Sequence[View], idle: Mapping[int, Idle], patience: Patience) -> Judgement:
    """Alarm when a rank has made no mark for longer than allowed; the reason names it, where it is, and who waits."""
    held = held_by(views)
    if held or not views:
        return Judgement("wait", held or "nobody is watched")
    known = max((limit(view.reading.times, patience) for view in views), key=lambda found: found[0])
    late = []
    for view in views:
        most_s, why = allowed(view, known, patience)
        if idle[view.rank].seconds > most_s:
            late.append((view, most_s, why))
    if not late:
        return Judgement("wait", "all ranks make progress, or may take their time")
    behind = [entry for entry in late if entry[0].reading.phase != Phase.COLLECTIVE or entry[0].is_stopped]
    parts = [
        f"rank {view.rank} has made no progress for {idle[view.rank].seconds:.1f} s (limit {most_s:g} s: {why}): it {doing(view)}"
        for view, most_s, why in behind or late
    ]
    ranks = tuple(view.rank for view, _, _ in behind)
    waiting = [view for view in views if view.reading.phase == Phase.COLLECTIVE and view.rank not in ranks]
    if waiting and behind:
        names = ", ".join(str(view.rank) for view in waiting)
        parts.append(f"waiting for it in the collective of step {waiting[0].reading.step}: rank {names}")
    return Judgement("alarm", "; ".join(parts), ranks)


def doing(view: View) -> str:
    """Where a rank is, in words that follow "it"."""
    reading = view.reading
    where = {
        Phase.OUTSIDE: "is outside the loop",
        Phase.DATA: f"waits for its data, unit {reading.unit} of step {reading.step}",
        Phase.UNIT: f"computes unit {reading.unit} of step {reading.step}",
        Phase.COLLECTIVE: f"waits in the collective of step {reading.step}",
        Phase.UPDATE: f"applies step {reading.step}",
        Phase.BODY: f"is in the loop's body after step {reading.step}",
        Phase.EVAL: f"evaluates, in or after step {reading.step}",
        Phase.SAVE: f"saves, at the boundary of step {reading.step}",
        Phase.VERDICT: f"waits for a verdict on step {reading.step}, which failed",
    }[reading.phase]
    how = {"T": ", stopped by a signal", "D": ", in a system call that cannot be interrupted", "Z": ", dead"}
    return where + how.get(view.state, "")


def main_frames(stacks: str) -> list[str]:
    """Files of the main thread's frames in what `faulthandler` wrote, innermost first: the main thread is the last one written."""
    frames: list[str] = []
    for line in stacks.splitlines():
        if "most recent call first" in line:
            frames = []
        elif line.startswith('  File "') and line.count('"') > 1:
            frames.append(line.split('"')[1])
    return frames


def is_typing(stacks: str) -> bool:
    """Does some thread sit at a debugger's prompt?"""
    return any(line.startswith('  File "') and part in line for line in stacks.splitlines() for part in DEBUGGERS)


def blamed(ranks: Sequence[int], stacks: Mapping[int, str]) -> tuple[int, ...]:
    """Of the ranks that hang, those whose stacks do not show them in a collective of the user's own: the others wait for these."""
    waiting = {rank for rank in ranks if any(COLLECTIVES in file for file in main_frames(stacks.get(rank, ""))[:3])}
    return tuple(rank for rank in ranks if rank not in waiting) or tuple(ranks)
