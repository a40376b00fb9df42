"""The demo's run as numbers: loss curves by generation, and every recovery cut into its phases. Read from the folder, not from memory."""

from __future__ import annotations

import contextlib
import statistics
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec
from msgspec import Struct

from unbroken.chaos.inject import Struck
from unbroken.core.errors import Damaged
from unbroken.core.records import BeginRecord, EventRecord, Record, StepRecord
from unbroken.proof.history import History
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository

PHASES = ("detect", "respawn", "rendezvous", "rollback", "align", "compensate", "first_step")
"""What a recovery is made of, in order; each ends where the next begins."""

POWER = "power"
"""Where a strike hit that took everything at once."""


class Curve(Struct, frozen=True, kw_only=True):
    """The losses of one generation: `losses[i]` is that of step `first_step + i`; steps after `survives_to` were done again later."""

    generation: int
    world_size: int
    source: str
    first_step: int
    losses: list[float]
    survives_to: int


class Account(Struct, kw_only=True):
    """One generation as its journal tells it: what it started from, its events, and when each step was applied (monotonic seconds)."""

    world_size: int
    base_step: int
    source: str = "unknown"
    events: list[EventRecord] = msgspec.field(default_factory=list)
    applied: dict[int, float] = msgspec.field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Add one record of the journal."""
        if isinstance(record, BeginRecord):
            self.source = record.source
        elif isinstance(record, EventRecord):
            self.events.append(record)
        elif isinstance(record, StepRecord):
            self.applied[record.step] = record.time_s


class PowerLoss(Struct, frozen=True, kw_only=True):
    """How many processes died at once, and when it was noticed: no launcher was left to see it."""

    num_killed: int
    noticed_s: float


class Spread(Struct, frozen=True, kw_only=True):
    """Seconds: median and maximum of `n` measurements."""

    median: float
    max: float
    n: int


class Recovery(Struct, frozen=True, kw_only=True):
    """One recovery, from the strike to the moment the step that was struck is applied by all. The seven phases sum to `total_s`.

    `at` and `step` say where the strike hit, `kills` how many processes it took; the state came back from `source` as of `base_step`.
    """

    at: str
    step: int
    rank: int
    kills: int
    source: str
    base_step: int
    world_size: int
    detect_s: float
    respawn_s: float
    rendezvous_s: float
    rollback_s: float
    align_s: float
    compensate_s: float
    first_step_s: float
    total_s: float

    def phases(self) -> list[tuple[str, float]]:
        return [(name, float(getattr(self, f"{name}_s"))) for name in PHASES]


def moment(at: str) -> str:
    """A failpoint's name in the words of the story: forward, backward, reduce, optimizer, capture, drain."""
    return at.removeprefix("step.").removesuffix(".copied")


def curves(history: History) -> list[Curve]:
    """One curve per generation, in order of their numbers."""
    return [
        Curve(
            generation=attempt.generation.number,
            world_size=attempt.generation.world_size,
            source=attempt.begin.source if attempt.begin else "unknown",
            first_step=attempt.base + 1,
            losses=[struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in attempt.losses],
            survives_to=attempt.end,
        )
        for attempt in history.attempts
    ]


def read_accounts(repository: Repository) -> dict[int, Account]:
    """What each generation's journal says; a damaged journal gives what stands before the damage (certify names it)."""
    found: dict[int, Account] = {}
    for generation in repository.log.state.generations:
        account = found.setdefault(generation.number, Account(world_size=generation.world_size, base_step=generation.base_step))
        with contextlib.suppress(Damaged, FileNotFoundError):
            for line in read_journal(repository.tier, repository.lineage, generation.number, generation.nonce):
                account.take(line.record)
    return found


def spread(accounts: Mapping[int, Account], name: str, fact: str) -> Spread:
    """How `fact` of the events called `name` spreads over a run; all zero when there are none."""
    events = [event for account in accounts.values() for event in account.events]
    values = [float(event.facts[fact]) for event in events if event.name == name and fact in event.facts]
    return Spread(median=statistics.median(values) if values else 0.0, max=max(values, default=0.0), n=len(values))


def recoveries(strikes: Sequence[Struck], accounts: Mapping[int, Account], power: PowerLoss | None = None) -> list[Recovery]:
    """What each kill cost, from the injector's log and the journal of the generation that followed.

    The clock starts at the strike and stops when all ranks have applied the step that was struck. A strike whose recovery was cut short
    by the next one has no moments of its own and is left out.
    """
    found = []
    for struck in strikes:
        account = accounts.get(struck.generation + 1)
        if struck.action != "kill" or account is None:
            continue
        lost = power if power is not None and struck.at == POWER else None
        moments = _moments(account, struck.step, lost)
        if any(name not in moments for name in PHASES):
            continue
        times = [struck.time_s, *(moments[name] for name in PHASES)]
        seconds = {f"{name}_s": later - earlier for name, (earlier, later) in zip(PHASES, pairwise(times), strict=True)}
        found.append(
            Recovery(
                at=struck.at,
                step=struck.step,
                rank=struck.rank,
                kills=1 if lost is None else lost.num_killed,
                source=account.source,
                base_step=account.base_step,
                world_size=account.world_size,
                total_s=times[-1] - times[0],
                **seconds,
            )
        )
    return found


def _moments(account: Account, step: int, lost: PowerLoss | None) -> dict[str, float]:
    """The end of each phase on the host's monotonic clock: as launcher ("recovery") and trainer ("start", each step) noted it."""
    at = {} if lost is None else {"detect": lost.noticed_s}
    for event in account.events:
        if event.name in ("recovery", "start"):
            at |= event.at
    if "process" in at:
        at["respawn"] = at["process"]
    if step in account.applied:
        at |= {"compensate": account.applied.get(step - 1, 0.0), "first_step": account.applied[step]}
    ends = [(name, at[name]) for name in PHASES if name in at]
    # noted by different ranks: a phase without work may seem to end before it began
    latest = accumulate((moment for _, moment in ends), max)
    return {name: moment for (name, _), moment in zip(ends, latest, strict=True)}
