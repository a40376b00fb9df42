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

_KILLS = (range(11, 19), range(24, 32), range(37, 45))
_POWER = range(50, 58)
_PREEMPTION = range(66, 73)
"""The steps out of which each event is drawn, so far apart that a recovery is over and a checkpoint made before the next one strikes."""


class Plan(Struct, frozen=True, kw_only=True):
    """Three kills, then the power, then a polite end: each strikes in a generation of its own.

    `power` only halts a rank: the driver damages the folder and kills everything there. `preemption` is a SIGTERM for the launcher;
    what comes after it runs on `ranks_after` ranks.
    """

    seed: int
    ranks: int
    ranks_after: int
    total_steps: int
    kills: tuple[Fault, ...]
    power: Fault
    preemption: Fault

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All of them, in the order in which they strike."""
        return (*self.kills, self.power, self.preemption)


def plan_faults(seed: int, ranks: int) -> Plan:
    """The plan of `seed` for `ranks` ranks: three different moments out of forward, backward, reduce, optimizer, capture and drain.

    At least one kill loses steps: it hits a step's middle, two or more steps after the last snapshot. ValueError for ranks not 2, 3 or 4.
    """
    others = {2: (3,), 3: (2, 4), 4: (3,)}
    if ranks not in others:
        raise ValueError(f"the demo runs with 2, 3 or 4 ranks, not {ranks}")
    dice = random.Random(f"unbroken demo {seed} {ranks}")
    moments = dice.sample(_IN_STEP + _AT_BOUNDARY, len(_KILLS))

    def fault(at: str, steps: list[int] | range, generation: int, action: str = "kill") -> Fault:
        return Fault(at=at, step=dice.choice(steps), rank=dice.randrange(ranks), generation=generation, action=action)  # type: ignore[arg-type]

    kills = tuple(fault(at, _sensible(at, steps), i) for i, (at, steps) in enumerate(zip(moments, _KILLS, strict=True)))
    power = fault("step.forward", _POWER, len(kills), "stop")
    preemption = fault("step.forward", _PREEMPTION, len(kills) + 1, "preempt")
    ranks_after = dice.choice(others[ranks])
    return Plan(seed=seed, ranks=ranks, ranks_after=ranks_after, total_steps=TOTAL_STEPS, kills=kills, power=power, preemption=preemption)


def _sensible(at: str, steps: range) -> list[int]:
    """Of these steps: those with a snapshot for what strikes a snapshot, those well after one for what strikes a step."""
    if at in _AT_BOUNDARY:
        return [step for step in steps if step % INTERVAL_STEPS == 0]
    return [step for step in steps if step % INTERVAL_STEPS not in (0, 1, 2)]
