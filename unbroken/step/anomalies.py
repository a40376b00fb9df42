"""What is done about steps that go wrong in their numbers: NaN, infinities and spikes of the loss (pure).

One sentence holds all of it: *a step is applied if and only if its loss, its gradient and the state it leaves are finite*, and its loss
no spike where a rule is set. It speaks of the step's own numbers only. Whether poison is seen at once or steps later, how often the
run is killed meanwhile and how many ranks there are cannot change which steps are applied (I13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from unbroken.core.limits import MAX_SKIPPED_WINDOWS

NanAction = Literal["skip", "stop", "ignore"]
SpikeAction = Literal["warn", "skip", "rollback"]
Action = Literal["apply", "warn", "skip", "rollback", "stop"]

_NORMAL = 1.4826
"""Median absolute deviations of a normal distribution that make its standard deviation."""

_FLOOR = 1e-3
"""Of the median: losses that hardly vary would make a spike of every rounding."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """When the loss of a step is a spike, and what then. Off unless given: `Anomalies(spike=Spike())`.

    A spike is more than `threshold` robust standard deviations (from the median absolute deviation) above the median of the last
    `window` applied losses; none is judged before `warmup` of them. action "warn": say so. "skip": the step is not applied.
    "rollback": as if the last `back` steps, this one and the next `ahead` had been skipped: go back before them and pass over their data.
    """

    action: SpikeAction = "skip"
    threshold: float = 10.0
    window: int = 128
    warmup: int = 32
    back: int = 100
    ahead: int = 100

    def __post_init__(self) -> None:
        if self.action not in get_args(SpikeAction):
            raise ValueError(f'Spike(action={self.action!r}): give "warn", "skip" or "rollback"')
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float) or not 0 < self.threshold < math.inf:
            raise ValueError(f"Spike(threshold={self.threshold!r}): give a number of deviations above 0")
        _whole("Spike", self, window=2, warmup=2, back=1, ahead=0)
        if self.warmup > self.window:
            raise ValueError(f"Spike(warmup={self.warmup}, window={self.window}): warmup must be at most window")


@dataclass(frozen=True, kw_only=True)
class Anomalies:
    """What a run does about non-finite numbers and spikes.

    nan: "skip" commits a step with a non-finite loss or gradient as skipped, weights untouched, and goes back where a state has become
    non-finite; "stop" ends the run there (GaveUp, exit 5); "ignore" looks at nothing, and poisoned checkpoints are committed. More than
    `max_skipped` skipped steps in a row, or more than `max_rollbacks` without a new checkpoint, end the run. Overflows of a GradScaler
    with a finite loss stay its own business and do not count.
    """

    nan: NanAction = "skip"
    spike: Spike | None = None
    max_skipped: int = 5
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.nan not in get_args(NanAction):
            raise ValueError(f'Anomalies(nan={self.nan!r}): give "skip", "stop" or "ignore"')
        if self.spike is not None and not isinstance(self.spike, Spike):
            raise TypeError(f"Anomalies(spike={self.spike!r}): give unbroken.Spike(...), or leave it out")
        _whole("Anomalies", self, max_skipped=0, max_rollbacks=0)

    def as_facts(self) -> dict[str, Any]:
        """What decides which steps are applied, as far as it is not the default: a run that goes on with other rules is told so."""
        found: dict[str, Any] = {} if self.nan == "skip" else {"nan": self.nan}
        return found if self.spike is None else found | {"spike": asdict(self.spike)}

    @property
    def reach_back(self) -> int:
        """How many steps before the newest checkpoint one must stay for a rollback."""
        return self.spike.back if self.spike is not None and self.spike.action == "rollback" else 0


def _whole(what: str, options: Any, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{what}({name}={value!r}): give a whole number of at least {smallest}")


class Window(NamedTuple):
    """Steps first..last are committed as skipped without being computed, because of `reason`."""

    first: int
    last: int
    reason: str


@dataclass
class Watch:
    """What the rules remember; a piece of the run's state, so that a run that goes on elsewhere decides alike.

    streak: steps in a row that were not applied. losses: of the newest applied steps, for the spike rule. windows: the newest ones that
    steps have been passed over in. Empty, and no piece at all, in a run without anomalies and without a spike rule.
    """

    streak: int = 0
    losses: list[float] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What there is to keep, {} if nothing."""
        found: dict[str, Any] = {"streak": self.streak} if self.streak else {}
        if self.losses:
            found["losses"] = np.array(self.losses, dtype=np.float64)
        if self.windows:
            found["windows"] = np.array(self.windows, dtype=np.int64)
        return found

    @classmethod
    def restored(cls, kept: Mapping[str, Any]) -> Watch:
        """From what `as_dict` gave."""
        windows = [(int(first), int(last)) for first, last in kept.get("windows", ())]
        return cls(int(kept.get("streak", 0)), [float(loss) for loss in kept.get("losses", ())], windows)

    def applied(self, loss: float, spike: Spike | None) -> None:
        """A step was applied."""
        self.streak = 0
        if spike is None:
            self.losses = []
        elif math.isfinite(loss):  # unknown where a plain loop does not tell it
            self.losses = [*self.losses, loss][-spike.window :]

    def entered(self, window: Window) -> None:
        """A step of this window was passed over."""
        if (window.first, window.last) not in self.windows:
            self.windows = [*self.windows, (window.first, window.last)][-MAX_SKIPPED_WINDOWS:]


def judge(loss: float | None, losses: Sequence[float], rules: Anomalies) -> tuple[Action, str]:
    """What becomes of a step with this loss (None: the script did not tell it) that was computed from a finite state, and why.

    Cost: 6 us; 30 us with a spike rule and its default window.
    """
    if loss is None:
        return "apply", ""
    if not math.isfinite(loss):
        if rules.nan == "ignore":
            return "apply", ""
        if rules.nan == "stop":
            return "stop", f"the loss is {loss}"
        return "skip", f"the loss is {loss}"
    if rules.spike is None:
        return "apply", ""
    height = spike_height(loss, losses, rules.spike)
    if height is None:
        return "apply", ""
    return rules.spike.action, f"the loss {loss:.6g} is a spike, {height:.1f} deviations above the median of {len(losses)} steps"


def spike_height(loss: float, losses: Sequence[float], spike: Spike) -> float | None:
    """By how many robust standard deviations this loss lies above the median of `losses`; None if it is no spike."""
    if len(losses) < spike.warmup:
        return None
    middle = _median(losses)
    deviation = max(_NORMAL * _median([abs(value - middle) for value in losses]), _FLOOR * abs(middle), math.ulp(1.0))
    height = (loss - middle) / deviation
    return height if height > spike.threshold else None


def window_of(step: int, spike: Spike, windows: Sequence[tuple[int, int]], reason: str) -> Window:
    """What is passed over because of a spike at `step`; it begins after every earlier window, so that none is entered twice."""
    end = max((last for _, last in windows), default=0)
    return Window(max(step - spike.back + 1, end + 1, 1), step + spike.ahead, reason)


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
