"""Which checkpoints stay, and why: pure decisions over the log's state and logged values.

Rules add up: a checkpoint stays as long as one of them keeps it. No clock is asked: hours are counted over the checkpoints there are, so
that a run that has stood still for a week loses nothing, and whatever the clocks did, the same log gives the same answer.

    keep=3                      the newest 3
    keep_every="1000 steps"     the first one at or after each multiple of 1000 steps; once kept, it stays
    keep_hours=24               the newest one of each of the newest 24 hours (UTC) in which there is one
    keep_best="val_loss"        the best by a logged metric; "accuracy max 3": the 3 with the largest
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from unbroken.codec.metrics import check_name
from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.records import Best, CommitEntry, Keep, LogState
from unbroken.core.settings import whole
from unbroken.store.log import Key, key_of, reach, visible

Values = Mapping[Key, float | None]
"""What a metric was at each checkpoint. One that is not there was not logged; None: that cannot be known, and so the checkpoint stays."""

Why = dict[Key, list[str]]

_STEPS = re.compile(r"\s*(\d{1,18})\s*steps?\s*")
_BEST = re.compile(r"(.+?)(?:\s+(min|max))?(?:\s+(\d{1,9}))?")


class Verdict(NamedTuple):
    """What becomes of one commit, and why."""

    commit: CommitEntry
    stays: bool
    reasons: tuple[str, ...]


def judge(state: LogState, keep: Keep, values: Values, spared: Mapping[Key, str]) -> tuple[Verdict, ...]:
    """The verdict on every commit of a log, in the order of steps. `values`: of the metric of `keep.best`; `spared`: must stay anyway.

    Commits from before a fresh start are another history: they stay until somebody removes them on purpose.
    """
    seen = visible(state)
    why: Why = {key_of(commit): [] for commit in state.commits}
    for rule in (_newest, _milestones, _every, _hourly, _reach_back):
        rule(seen, keep, why)
    _best(seen, keep, values, why)
    for key, reason in spared.items():
        why.setdefault(key, []).append(reason)
    limits, there = reach(state), {key_of(commit) for commit in seen}
    gone = {key_of(entry) for entry in state.condemned}
    found = []
    for commit in sorted(state.commits, key=key_of):
        key = key_of(commit)
        if commit.generation not in limits:
            found.append(Verdict(commit, True, ("a history from before a fresh start",)))
        elif why[key]:
            found.append(Verdict(commit, True, tuple(why[key])))
        else:
            lost = "no rule keeps it" if key in there else "damaged" if key in gone else "the run went on from an earlier step"
            found.append(Verdict(commit, False, (lost,)))
    return tuple(found)


def _newest(seen: Sequence[CommitEntry], keep: Keep, why: Why) -> None:
    for commit in seen[-keep.newest :]:
        why[key_of(commit)].append("the newest" if keep.newest == 1 else f"among the newest {keep.newest}")


def _milestones(seen: Sequence[CommitEntry], keep: Keep, why: Why) -> None:
    for commit in seen:
        if commit.milestone:
            why[key_of(commit)].append("milestone")


def _every(seen: Sequence[CommitEntry], keep: Keep, why: Why) -> None:
    if keep.every_steps is None:
        return
    before = 0
    for commit in seen:
        multiple = commit.step // keep.every_steps
        if multiple > before:
            why[key_of(commit)].append(f"the first from step {multiple * keep.every_steps} on")
            before = multiple


def _hourly(seen: Sequence[CommitEntry], keep: Keep, why: Why) -> None:
    """From the newest step back: steps are in order whatever the clocks said. One without a time belongs to no hour."""
    hours: set[str] = set()
    for commit in reversed(seen):
        hour = _hour(commit.time)
        if len(hours) < keep.hours and hour and hour not in hours:
            hours.add(hour)
            why[key_of(commit)].append(f"the newest of the hour {hour}")


def _hour(time: str) -> str:
    """Such as 2026-01-31T13Z; "" for what is no time."""
    try:
        at = datetime.fromisoformat(time)
        return f"{at if at.tzinfo is None else at.astimezone(timezone.utc):%Y-%m-%dT%HZ}"
    except (ValueError, OverflowError):
        return ""


def _best(seen: Sequence[CommitEntry], keep: Keep, values: Values, why: Why) -> None:
    """Of equal ones the older is the better. NaN and infinities are never best."""
    if keep.best is None:
        return
    best, known = keep.best, []
    for commit in seen:
        value = values.get(key_of(commit), math.nan)
        if value is None:
            why[key_of(commit)].append(f"its {best.metric} cannot be read from the journal")
        elif math.isfinite(value):
            known.append((-value if best.largest else value, commit.step, commit))
    for place, (_, _, commit) in enumerate(sorted(known, key=lambda one: one[:2])[: best.num], 1):
        name = "the best" if best.num == 1 else f"number {place} of the best {best.num}"
        why[key_of(commit)].append(f"{name} by {best.metric}: {values[key_of(commit)]:g}")


def _reach_back(seen: Sequence[CommitEntry], keep: Keep, why: Why) -> None:
    if keep.reach_back:
        old = [commit for commit in seen if commit.step <= seen[-1].step - keep.reach_back]
        for commit in old[-1:] or seen[:1]:
            why[key_of(commit)].append(f"going back {keep.reach_back} steps may need it")


# What people write


def newest(value: Any) -> int:
    """A check of `keep`."""
    return whole(value)


def every(value: Any) -> int:
    """A check of `keep_every`: the number of steps."""
    match = _STEPS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) < 1:
        raise ValueError('give a number of steps, such as "1000 steps"')
    return int(match[1])


def hours(value: Any) -> int:
    """A check of `keep_hours`."""
    return whole(value, at_most=24 * 366 * 100, what=" hours")


def best(value: Any) -> Best:
    """A check of `keep_best`: a metric's name, then "min" (if left out) or "max", then how many."""
    match = _BEST.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[1] in ("min", "max") or (match[3] is not None and int(match[3]) < 1):
        raise ValueError('give the name of a logged metric, then "min" or "max", then how many, such as "val_loss" or "accuracy max 3"')
    check_name(match[1])
    return Best(metric=match[1], largest=match[2] == "max", num=int(match[3] or 1))


CHECKS: Mapping[str, Callable[[Any], Any]] = {"keep": newest, "keep_every": every, "keep_hours": hours, "keep_best": best}
"""Of each option; the value that is used, or a ValueError with the remedy alone."""


def rules(given: Mapping[str, Any]) -> Keep:
    """The rules from options by name; None is not given. ValueError names the option and the remedy."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            found[name] = CHECKS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
    return Keep(
        newest=found.get("keep", KEEP_NEWEST),
        every_steps=found.get("keep_every"),
        hours=found.get("keep_hours", 0),
        best=found.get("keep_best"),
    )


def told(keep: Keep) -> str:
    """The rules in words."""
    parts = [f"the newest {keep.newest}", "milestones"]
    parts += [f"one every {keep.every_steps} steps"] if keep.every_steps else []
    parts += [f"one per hour for {keep.hours} hours"] if keep.hours else []
    if keep.best is not None:
        parts.append(f"the best {keep.best.num} by {keep.best.metric} ({'largest' if keep.best.largest else 'smallest'})")
    parts += [f"one that is {keep.reach_back} steps older"] if keep.reach_back else []
    return ", ".join(parts)
