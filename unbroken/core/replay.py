"""A step that is made again: what `unbroken materialize` tells the training processes it starts, and what they tell it.

It travels in one environment variable, because the user's script is started as it is.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from unbroken.core.ports import environment
from unbroken.core.records import Count

REPLAY = "UNBROKEN_REPLAY"
"""The variable; without it a process trains as ever."""


class Replay(Struct, frozen=True, kw_only=True):
    """Make `step` of lineage `source` of the run in `directory` again, in `lineage`; `report`: the file to tell in that it cannot be."""

    directory: str
    source: str
    lineage: str
    step: Count
    report: str


class Parted(Struct, frozen=True, kw_only=True):
    """Where what is computed again parts from what was recorded: the first step, of what kind, both values as text.

    `differences`: facts of the environment that are not what they were when the state it began with was saved.
    """

    step: Count
    what: str
    recorded: str
    replayed: str
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step}: the {self.what} is {self.replayed}, recorded is {self.recorded}"


def replay_in_force() -> Replay | None:
    """What this process is to make again, None where it trains as ever. ValueError where the variable was not made by us."""
    text = environment(REPLAY)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Replay)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{REPLAY} is {text[:80]!r}, which `unbroken materialize` has not written ({error}): unset it") from None
