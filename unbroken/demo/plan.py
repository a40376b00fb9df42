"""What goes wrong in the demo, and when: drawn from a seed, sensible for every seed."""

from __future__ import annotations

import random

from msgspec import Struct

from unbroken.chaos.inject import DRAIN, Fault

INTERVAL_STEPS = 5
"""Steps between snapshots."""

TOTAL_STEPS = 80

_IN_STEP = ("step.forward", "step.backward", "step.reduce", "step.optimizer")
_AT_BOUNDARY = ("capture.copied", DRAIN)
_WINDOWS = (12, 27, 42)
"""Where the windows of the three kills begin, each ten steps long; the power fails in a fourth."""
_POWER_WINDOW = 57
_WINDOW_STEPS = 10


class Plan(Struct, frozen=True, kw_only=True):
    """Three kills, each in a generation of its own, then the power: `power` stops a worker there, and the driver does the rest."""

    seed: int
    ranks: int
    ranks_after: int
    total_steps: int
    kills: tuple[Fault, ...]
    power: Fault

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (*self.kills, self.power)


def plan_faults(seed: int, ranks: int) -> Plan:
    """The plan of `seed` for `ranks` ranks: three different moments out of forward, backward, reduce, optimizer, capture and drain.

    At least one kill loses steps: it hits a step's middle, two or more steps after the last snapshot. ValueError for ranks not 2, 3 or 4.
    """
    others = {2: (3,), 3: (2, 4), 4: (3,)}
    if ranks not in others:
        raise ValueError(f"the demo runs with 2, 3 or 4 ranks, not {ranks}")
    dice = random.Random(f"unbroken demo {seed} {ranks}")
    moments = dice.sample(_IN_STEP + _AT_BOUNDARY, 3)
    kills = []
    for generation, (moment, start) in enumerate(zip(moments, _WINDOWS, strict=True)):
        window = range(start, start + _WINDOW_STEPS)
        steps = (
            [s for s in window if s % INTERVAL_STEPS == 0]
            if moment in _AT_BOUNDARY
            else [s for s in window if s % INTERVAL_STEPS not in (0, 1, 2)]
        )
        kills.append(Fault(at=moment, step=dice.choice(steps), rank=dice.randrange(ranks), generation=generation))
    power = Fault(
        at="step.forward",
        step=dice.randrange(_POWER_WINDOW, _POWER_WINDOW + _WINDOW_STEPS),
        rank=dice.randrange(ranks),
        generation=len(kills),
        action="stop",
    )
    return Plan(seed=seed, ranks=ranks, ranks_after=dice.choice(others[ranks]), total_steps=TOTAL_STEPS, kills=tuple(kills), power=power)
