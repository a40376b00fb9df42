"""The demo's run as numbers: loss curves by generation, and every recovery cut into its phases. Read from the folder, not from memory."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from unbroken.chaos.inject import Struck
from unbroken.core.errors import Damaged
from unbroken.core.records import EventRecord
from unbroken.recover.history import History
from unbroken.store.journal import read_journal
from unbroken.store.repository import Repository

PHASES = ("detect", "respawn", "rendezvous", "rollback", "align", "compensate", "first_step")
"""What a recovery is made of, in order; each ends where the next begins."""


class Curve(Struct, frozen=True, kw_only=True):
    """The losses of one generation: `losses[i]` is that of step `first_step + i`; steps after `survives_to` were done again later."""

    generation: int
    world_size: int
    source: str
    first_step: int
    losses: list[float]
    survives_to: int


class Spread(Struct, frozen=True, kw_only=True):
    """Seconds: median and maximum of `n` measurements."""

    median: float
    max: float
    n: int


class Recovery(Struct, frozen=True, kw_only=True):
    """One recovery, from the strike to the moment the lost step was applied anew. The seven phases sum to `total_s`.

    `at` and `step` say where the strike hit, `kills` how many processes it took, `source` where the state came back from.
    """

    at: str
    step: int
    rank: int
    kills: int
    source: str
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


def read_events(repository: Repository) -> dict[int, list[EventRecord]]:
    """The events of each generation's journal; a damaged journal gives those before the damage (certify names it)."""
    found: dict[int, list[EventRecord]] = {}
    for generation in repository.log.state.generations:
        events = found.setdefault(generation.number, [])
        try:
            for line in read_journal(repository.tier, repository.lineage, generation.number, generation.nonce):
                if isinstance(line.record, EventRecord):
                    events.append(line.record)
        except (Damaged, FileNotFoundError):
            continue
    return found


def spread(events: Mapping[int, Sequence[EventRecord]], name: str, fact: str) -> Spread:
    """How `fact` of the events called `name` spreads over a run; all zero when there are none."""
    values = [float(e.facts[fact]) for group in events.values() for e in group if e.name == name and fact in e.facts]
    return Spread(median=statistics.median(values) if values else 0.0, max=max(values, default=0.0), n=len(values))


def recoveries(
    strikes: Sequence[Struck], events: Mapping[int, Sequence[EventRecord]], attempts: Mapping[int, Curve], kills: Mapping[float, int]
) -> list[Recovery]:
    """What each strike cost, from the moments in the journal of the generation that followed it.

    `kills` maps a strike's time to the number of processes it took (1 if not there). A strike whose recovery was itself cut short by the
    next one has no moments of its own and is left out.
    """
    found = []
    for struck in strikes:
        following = struck.generation + 1
        moments = _moments(events.get(following, ()))
        if struck.action != "kill" or following not in attempts or any(name not in moments for name in PHASES):
            continue
        times = [struck.time_s, *(moments[name] for name in PHASES)]
        seconds = {f"{name}_s": later - earlier for name, earlier, later in zip(PHASES, times[:-1], times[1:], strict=True)}
        found.append(
            Recovery(
                at=struck.at,
                step=struck.step,
                rank=struck.rank,
                kills=kills.get(struck.time_s, 1),
                source=attempts[following].source,
                world_size=attempts[following].world_size,
                total_s=times[-1] - times[0],
                **seconds,
            )
        )
    return found


def _moments(events: Sequence[EventRecord]) -> dict[str, float]:
    """The end of each phase on the host's monotonic clock, as launcher ("recovery") and trainer ("start", "caught_up") noted them."""
    at: dict[str, float] = {}
    for event in events:
        if event.name in ("recovery", "start", "caught_up"):
            at |= event.at
    if "process" in at:
        at["respawn"] = at["process"]
    ends = [(name, at[name]) for name in PHASES if name in at]
    latest = accumulate(
        (moment for _, moment in ends), max
    )  # noted by different ranks: a phase without work may seem to end before it began
    return {name: moment for (name, _), moment in zip(ends, latest, strict=True)}
