"""Options of a run: explicit argument > UNBROKEN_* environment > unbroken.toml > default. Parsed once, then frozen.

`RUN` is the one table of them; `Options` and `RunConfig` are its types.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from msgspec import Struct

from unbroken.cluster.settings import LAUNCH
from unbroken.core.limits import KEEP_NEWEST, MAX_THREADS, MAX_UNITS, MIN_HANG_TIMEOUT_S
from unbroken.core.records import MAIN_LINEAGE, Best, Keep
from unbroken.core.replay import Replay, replay_in_force
from unbroken.core.settings import Found, Setting, Table, check, find_file, gather, number, one_of, read_file, strange_variables, whole
from unbroken.importing.spec import PARTS, StartFrom, check_start_from
from unbroken.loggers.choose import JSON_LINES, LogTo, Target, targets
from unbroken.order.streams import check_seed
from unbroken.step.anomalies import Anomalies
from unbroken.store import retention
from unbroken.store.paths import check_lineage
from unbroken.store.tiers.choose import check_place, shown

Resume = Literal["auto", "must", "never"]
Reduce = Literal["ordered", "ring"]


class Options(TypedDict, total=False):
    """What `Run(..., **options)` accepts besides its named arguments.

    total_steps: stop after this many steps. units: micro-batches per step, fixed at birth (default: smallest power of two that is at
    least the world size and divides the global batch). seed: of the random streams inside units (default: the data's). threads:
    intra-op threads per rank, fixed at birth (default 1 on CPU). keep: newest checkpoints kept besides milestones; besides them
    keep_every="1000 steps" keeps one every so many steps, keep_hours=24 one per hour for so many hours, and keep_best="val_loss" (or
    "accuracy max 3") the best by a metric given to `run.log`. milestone_every: "1000 steps" makes each such step's checkpoint a
    milestone, which stays (default: none). full_every: "1000 steps" or "6h" stores checkpoints as exact differences from the one
    before, and whole at least so often, counted across restarts (default: none; all are stored whole, but for what has not changed).
    copy_to: "s3://bucket/run" or "file:///other/disk/run", a second place that committed checkpoints are copied to in the background,
    and that a start goes on from where the folder has none as new (default: none). copy_every: "10m" or "100 steps" between copies
    (default: every checkpoint, as far as it keeps up). copy_keep: newest copies kept there besides milestones.
    scrub_every: "24h" has the daemon read stored checkpoints again so often (default: never). hang_timeout: how long a rank may stand
    still inside a step, such as "600s", before all are ended and started again; "auto" (default) learns it from the run's own steps: 5
    times their median and spread, at least 30 s; None: nobody watches. Evaluations (`run.eval`), saves, starts and first steps may take
    longer, and in a notebook or under a debugger nobody watches. log_to: sinks of metrics, "jsonl" (default: metrics.jsonl in the run
    folder), "jsonl:FILE", "tensorboard:DIR", "wandb:PROJECT", "mlflow:URI", "swanlab:PROJECT", a list of them (or none), an
    `unbroken.loggers.Sink` of your own. lineage: the branch to go on with, made by `unbroken branch` (default "main", the run itself).
    anomalies: what is done about NaN and loss spikes, an `unbroken.Anomalies`. start_from: where a run that is not there yet takes its
    state from: somebody else's checkpoint, or DIR@STEP; a dict {"source": ..., "take": ["model"]} for parts of it.
    """

    total_steps: int | None
    units: int | None
    seed: int | None
    threads: int | None
    keep: int
    keep_every: str | None
    keep_hours: int | None
    keep_best: str | None
    milestone_every: str | None
    scrub_every: str | None
    full_every: str | None
    copy_to: str | None
    copy_every: str | None
    copy_keep: int
    reduce: Reduce
    hang_timeout: str | None
    log_to: LogTo
    lineage: str
    anomalies: Anomalies | Literal["skip", "stop", "ignore"]
    start_from: str | os.PathLike[str] | dict[str, Any] | None


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
    keep_every: int | None = None
    keep_hours: int | None = None
    keep_best: Best | None = None
    hang_timeout: float | Literal["auto"] | None = "auto"
    log_to: tuple[Target, ...] = (Target(JSON_LINES),)
    milestone_every: int | None = None
    full_every: Interval | None = None
    scrub_every: float | None = None
    copy_to: str | None = None
    copy_every: Interval | None = None
    copy_keep: int = KEEP_NEWEST
    lineage: str = MAIN_LINEAGE
    anomalies: Anomalies = field(default_factory=Anomalies)
    replay: Replay | None = None
    start_from: StartFrom | None = None
    origins: tuple[str, ...] = field(default=(), compare=False)
    """What the script does not show: "keep=5 from UNBROKEN_KEEP"."""

    @property
    def rules(self) -> Keep:
        """Which checkpoints stay."""
        return Keep(
            newest=self.keep,
            every_steps=self.keep_every,
            hours=self.keep_hours or 0,
            best=self.keep_best,
            reach_back=self.anomalies.reach_back,
        )

    @property
    def copies_to(self) -> str | None:
        """Where copies of this lineage go: those of branches nowhere, yet."""
        return self.copy_to if self.lineage == MAIN_LINEAGE else None

    def is_milestone(self, step: int) -> bool:
        """Does the rule make the checkpoint of this step one that stays?"""
        return self.milestone_every is not None and step > 0 and step % self.milestone_every == 0


_UNITS_S = dict.fromkeys(("s", "sec", "second", "seconds"), 1.0)
_UNITS_S |= dict.fromkeys(("m", "min", "minute", "minutes"), 60.0) | dict.fromkeys(("h", "hour", "hours"), 3600.0)


def parse_interval(text: str, name: str = "lose_at_most") -> Interval:
    """ "30s", "5 min", "100 steps" -> Interval; ValueError names the option and says what is accepted."""
    try:
        return _interval(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def _interval(text: Any) -> Interval:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]+)\s*", text) if isinstance(text, str) else None
    if match:
        number, unit = float(match[1]), match[2]
        if unit in ("step", "steps") and number >= 1 and number == int(number):
            return Interval(steps=int(number))
        if unit in _UNITS_S and number > 0:
            return Interval(seconds=number * _UNITS_S[unit])
    raise ValueError('give a time such as "30s", "5 min", "1h", or "100 steps"')


def _milestone_steps(text: Any) -> int:
    with contextlib.suppress(ValueError):
        if (steps := _interval(text).steps) is not None:  # a time is not the same on every rank, nor in the run that is done again
            return steps
    raise ValueError('give a number of steps, such as "1000 steps"')


def _scrub_seconds(text: Any) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := _interval(text).seconds) is not None and seconds >= 1:
            return seconds
    raise ValueError('give a time of at least 1 s, such as "24h"')


def _hang_timeout(text: Any) -> float | Literal["auto"] | None:
    if text in (None, "none", "None"):
        return None
    if text == "auto":
        return "auto"
    with contextlib.suppress(ValueError):
        interval = _interval(text)
        if interval.seconds is not None and interval.seconds >= MIN_HANG_TIMEOUT_S:
            return interval.seconds
    raise ValueError(f'give "auto", a time of at least {MIN_HANG_TIMEOUT_S:g} s such as "600s", or None')


def _anomalies(value: Any) -> Anomalies:
    if isinstance(value, Anomalies):
        return value
    if value not in ("skip", "stop", "ignore"):
        raise ValueError('give unbroken.Anomalies(...), or "skip", "stop" or "ignore" for non-finite numbers')
    return Anomalies(nan=value)


def _sinks(text: str) -> list[str] | None:
    return None if text.strip() in ("", "none") else [part.strip() for part in text.split(",")]


RUN = Table(
    "run",
    (
        Setting(
            name="lose_at_most",
            default="60s",
            accepts='a time such as "30s", "5 min", "1h", or "100 steps"',
            help="How much work a failure may cost: a snapshot is taken so often.",
            check=_interval,
        ),
        Setting(
            name="resume",
            default="auto",
            accepts='"auto", "must" or "never"',
            help='"auto" starts fresh only where nothing is, "must" never does, "never" refuses a folder that holds a run. '
            "A restart by a launcher implies must.",
            check=lambda value: one_of(value, {"auto": "", "must": "", "never": ""}),
        ),
        Setting(
            name="reduce",
            default="ordered",
            accepts='"ordered" or "ring"',
            help="How gradients are summed. Fixed at birth.",
            check=lambda value: one_of(value, {"ordered": "bit-identical at any world size", "ring": "plain DDP loop"}),
        ),
        Setting(
            name="total_steps",
            default=None,
            accepts="a whole number",
            help="Stop after this many steps; without it the data end the run.",
            check=whole,
            from_text=number,
        ),
        Setting(
            name="units",
            default=None,
            accepts=f"a whole number up to {MAX_UNITS}",
            help="Micro-batches per step, fixed at birth. Default: the smallest power of two that is at least the world size and divides "
            "the global batch.",
            check=lambda value: whole(value, at_most=MAX_UNITS, what=" micro-batches make a step"),
            from_text=number,
        ),
        Setting(
            name="seed",
            default=None,
            accepts="an integer from 0 to 2**64 - 1",
            help="Of the random streams inside units, fixed at birth. Default: the data's.",
            check=check_seed,
            from_text=number,
        ),
        Setting(
            name="threads",
            default=None,
            accepts=f"a whole number up to {MAX_THREADS}",
            help="Intra-op threads per rank, fixed at birth. Default: 1 on CPU.",
            check=lambda value: whole(value, at_most=MAX_THREADS, what=" per rank"),
            from_text=number,
        ),
        Setting(
            name="keep",
            default=KEEP_NEWEST,
            accepts="a whole number",
            help="Newest checkpoints kept besides milestones.",
            check=retention.newest,
            from_text=number,
        ),
        Setting(
            name="keep_every",
            default=None,
            accepts='steps, such as "1000 steps"',
            help="The first checkpoint at or after each multiple of so many steps stays, too. Default: none.",
            check=retention.every,
        ),
        Setting(
            name="keep_hours",
            default=None,
            accepts="a whole number",
            help="The newest checkpoint of each hour (UTC) stays, too, for the newest so many hours that have one. Default: none.",
            check=retention.hours,
            from_text=number,
        ),
        Setting(
            name="keep_best",
            default=None,
            accepts='the name of a metric given to `run.log`, then "min" or "max", then how many: "val_loss", "accuracy max 3"',
            help="The best checkpoints by that metric stay, too. One of a step that has not logged it does not count. Default: none.",
            check=retention.best,
        ),
        Setting(
            name="milestone_every",
            default=None,
            accepts='steps, such as "1000 steps"',
            help="Each such step's checkpoint is a milestone, which stays for ever. Default: none.",
            check=_milestone_steps,
        ),
        Setting(
            name="full_every",
            default=None,
            accepts='steps such as "1000 steps" or a time such as "6h"',
            help="Checkpoints are stored as exact differences from the one before, and whole at least so often, as milestones are. "
            "Default: all are whole.",
            check=_interval,
        ),
        Setting(
            name="scrub_every",
            default=None,
            accepts='a time, such as "24h"',
            help="So often the daemon reads all stored checkpoints again, at most 32 MiB/s, and warns of damage. Default: never; what a "
            "start loads is verified in any case.",
            check=_scrub_seconds,
        ),
        Setting(
            name="copy_to",
            default=None,
            accepts='"s3://bucket/run", "gs://...", "az://..." or "file:///other/disk/run"',
            help="A second place: committed checkpoints are copied there in the background, and a start whose folder has none as new goes "
            "on from there. Credentials come from the environment, never from the URL. Default: none.",
            check=check_place,
            shown=shown,
        ),
        Setting(
            name="copy_every",
            default=None,
            accepts='a time such as "10m", or "100 steps"',
            help="How often a checkpoint is copied. Default: every one, as far as it keeps up; what a newer one overtakes is left out.",
            check=_interval,
        ),
        Setting(
            name="copy_keep",
            default=KEEP_NEWEST,
            accepts="a whole number",
            help="Newest copies kept there besides milestones.",
            check=whole,
            from_text=number,
        ),
        Setting(
            name="hang_timeout",
            default="auto",
            accepts='"auto", a time such as "600s", or None ("none")',
            help="How long a rank may stand still inside a step before all are ended and started again. "
            '"auto" learns it from the steps; None: nobody watches.',
            check=_hang_timeout,
        ),
        Setting(
            name="log_to",
            default=JSON_LINES,
            accepts='"jsonl", "jsonl:FILE", "tensorboard:DIR", "wandb:PROJECT", "mlflow:URI", "swanlab:PROJECT", a list of them, or None',
            help="Sinks of metrics. In the environment separated by commas, or none.",
            check=targets,
            from_text=_sinks,
        ),
        Setting(
            name="anomalies",
            default="skip",
            accepts='"skip", "stop" or "ignore"; in a script also unbroken.Anomalies(...)',
            help="What is done about steps with NaN or infinities; about spikes of the loss, too, if `unbroken.Anomalies` says so.",
            check=_anomalies,
        ),
        Setting(
            name="lineage",
            default=MAIN_LINEAGE,
            accepts="the name of a branch",
            help="The branch to go on with, made by `unbroken branch`.",
            check=check_lineage,
        ),
        Setting(
            name="start_from",
            default=None,
            accepts=f"the path of a checkpoint, or a table of source, step, take ({', '.join(PARTS)}), strict and cast",
            help="Where a run that is not there yet takes its state from, see importing.md. A run that is there goes on and says so.",
            check=check_start_from,
        ),
    ),
)
"""Every option of a Run. A new one is a row here, a key of `Options` and a field of `RunConfig`."""


def resolve(lose_at_most: str, resume: str, options: Options) -> RunConfig:
    """Check explicit options; ValueError or TypeError names the first that is wrong and what is accepted."""
    return _config(check(RUN, {"lose_at_most": lose_at_most, "resume": resume, **options}))


def configure(lose_at_most: str | None, resume: str | None, options: Options) -> RunConfig:
    """The options of a run from wherever they are given; None is not given. Errors name the argument, the variable or file:line."""
    explicit = {name: value for name, value in (("lose_at_most", lose_at_most), ("resume", resume)) if value is not None}
    found = gather(RUN, explicit | dict(options), read_file(find_file()))
    values = {name: one.value for name, one in found.items()} | _of_replay(replay_in_force())
    return _config(values, tuple(map(_told, filter(_is_foreign, found.values()))))


def _of_replay(replay: Replay | None) -> dict[str, Any]:
    """What a process that makes a step again does whatever its script says: up to that step, in that lineage, telling no sink."""
    if replay is None:
        return {}
    ends = {"total_steps": replay.step, "milestone_every": replay.step, "keep": 1}
    return {"replay": replay, "lineage": replay.lineage, "resume": "must", "log_to": (), **ends}


def _config(values: dict[str, Any], origins: tuple[str, ...] = ()) -> RunConfig:
    return RunConfig(interval=values.pop("lose_at_most"), origins=origins, **values)


def _is_foreign(found: Found) -> bool:
    return found.is_foreign


def _told(found: Found) -> str:
    return f"{found.setting.name}={found.given} from {found.origin}"


class InForce(Struct, frozen=True, kw_only=True):
    """One option as it stands outside of any script. `value` as it was written, None where it is left out."""

    section: str
    name: str
    value: Any
    origin: str
    variable: str
    help: str


class OptionsInForce(Struct, frozen=True, kw_only=True):
    """Everything that `unbroken doctor --config` shows. `strange_variables`: UNBROKEN_* that nothing reads, each with the nearest name."""

    file: str | None
    options: tuple[InForce, ...]
    strange_variables: dict[str, str]


def options_in_force(environment: dict[str, str]) -> OptionsInForce:
    """Options of runs and of the launcher as a script that gives none would get them. ValueError where one is wrong."""
    tables, file = (RUN, LAUNCH), read_file(find_file())
    rows = [(table.section, found) for table in tables for found in gather(table, {}, file).values()]
    return OptionsInForce(
        file=file.path if file is not None else None,
        options=tuple(
            InForce(
                section=section,
                name=found.setting.name,
                value=found.given,
                origin=found.origin,
                variable=found.setting.variable,
                help=found.setting.help,
            )
            for section, found in rows
        ),
        strange_variables=strange_variables(environment, *tables),
    )
