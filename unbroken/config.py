"""Options of a run: explicit argument > default. Parsed once, then frozen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypedDict, cast, get_args

from unbroken.core.limits import KEEP_NEWEST, MAX_THREADS, MAX_UNITS
from unbroken.core.records import MAIN_LINEAGE
from unbroken.order.streams import check_seed
from unbroken.store.paths import check_lineage

Resume = Literal["auto", "must", "never"]
Reduce = Literal["ordered", "ring"]


class Options(TypedDict, total=False):
    """What `Run(..., **options)` accepts besides its named arguments.

    total_steps: stop after this many steps. units: micro-batches per step, fixed at birth (default: smallest power of two that is at
    least the world size and divides the global batch). seed: of the random streams inside units (default: the data's). threads:
    intra-op threads per rank, fixed at birth (default 1 on CPU). keep: newest checkpoints kept besides milestones.
    milestone_every: "1000 steps" makes each such step's checkpoint a milestone, which stays for ever (default: none).
    lineage: the branch to go on with, made by `unbroken branch` (default "main", the run itself).
    """

    total_steps: int | None
    units: int | None
    seed: int | None
    threads: int | None
    keep: int
    milestone_every: str | None
    reduce: Reduce
    lineage: str


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How much work may be lost: in steps or in seconds; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"a snapshot every {self.steps} steps" if self.steps is not None else f"a snapshot every {self.seconds:g} s"

    def due(self, step: int, since_s: float, step_s: float) -> bool:
        """Snapshot at the boundary of `step`? `since_s`: seconds from the last one to this boundary, `step_s`: length of a step."""
        if self.steps is not None:
            return step % self.steps == 0
        assert self.seconds is not None
        return since_s + step_s >= self.seconds


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about a run that is not an object of the user's."""

    interval: Interval
    resume: Resume
    reduce: Reduce = "ordered"
    total_steps: int | None = None
    units: int | None = None
    seed: int | None = None
    threads: int | None = None
    keep: int = KEEP_NEWEST
    milestone_steps: int | None = None
    lineage: str = MAIN_LINEAGE

    def is_milestone(self, step: int) -> bool:
        """Does the rule make the checkpoint of this step one that stays?"""
        return self.milestone_steps is not None and step > 0 and step % self.milestone_steps == 0


_UNITS_S = dict.fromkeys(("s", "sec", "second", "seconds"), 1.0)
_UNITS_S |= dict.fromkeys(("m", "min", "minute", "minutes"), 60.0) | dict.fromkeys(("h", "hour", "hours"), 3600.0)


def parse_interval(text: str) -> Interval:
    """ "30s", "5 min", "100 steps" -> Interval; ValueError says what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text) if isinstance(text, str) else None
    if match:
        number, unit = float(match[1]), match[2]
        if unit in ("step", "steps") and number >= 1 and number == int(number):
            return Interval(steps=int(number))
        if unit in _UNITS_S and number > 0:
            return Interval(seconds=number * _UNITS_S[unit])
    raise ValueError(f'lose_at_most={text!r}: give a time such as "30s", "5 min", "1h", or "100 steps"')


def _milestone_steps(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        steps = parse_interval(text).steps
    except ValueError:
        steps = None
    if steps is None:  # a time is not the same on every rank, nor in the run that is done again
        raise ValueError(f'milestone_every={text!r}: give a number of steps, such as "1000 steps"')
    return steps


def resolve(lose_at_most: str, resume: str, options: Options) -> RunConfig:
    """Check every option; ValueError or TypeError names the first that is wrong and what is accepted."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"Run() got unknown options {unknown}; known are {sorted(Options.__annotations__)}")
    if resume not in get_args(Resume):
        raise ValueError(f'resume={resume!r}: give "auto", "must" or "never"')
    reduce = options.get("reduce", "ordered")
    if reduce not in ("ordered", "ring"):
        raise ValueError(f'reduce={reduce!r}: give "ordered" (bit-identical at any world size) or "ring" (plain DDP loop)')
    for name in ("total_steps", "units", "threads", "keep"):
        value = options.get(name, KEEP_NEWEST if name == "keep" else None)
        left_out = value is None and name != "keep"
        if not left_out and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    if (options.get("threads") or 0) > MAX_THREADS:
        raise ValueError(f"threads={options['threads']!r}: at most {MAX_THREADS} per rank")
    if (options.get("units") or 0) > MAX_UNITS:
        raise ValueError(f"units={options['units']!r}: at most {MAX_UNITS} micro-batches make a step")
    if options.get("seed") is not None:
        check_seed(options["seed"])  # type: ignore[arg-type]
    return RunConfig(
        interval=parse_interval(lose_at_most),
        resume=cast(Resume, resume),
        reduce=reduce,
        total_steps=options.get("total_steps"),
        units=options.get("units"),
        seed=options.get("seed"),
        threads=options.get("threads"),
        keep=options.get("keep", KEEP_NEWEST),
        milestone_steps=_milestone_steps(options.get("milestone_every")),
        lineage=check_lineage(options.get("lineage", MAIN_LINEAGE)),
    )
