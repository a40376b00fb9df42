"""Which Run may open the lineage of a step that is made again: the one that makes it, and no other."""

from __future__ import annotations

import os

from unbroken.core.errors import Refused
from unbroken.core.ports import Tier
from unbroken.core.replay import Replay
from unbroken.store.log import Log, replay_of


def require_place(tier: Tier, directory: str, lineage: str, replay: Replay | None) -> None:
    """Refused where this Run is not the one that makes the step again, or would train on from it. Reads the lineage's log."""
    if replay is not None and os.path.realpath(directory) != os.path.realpath(replay.directory):
        raise Refused(
            f"this process makes step {replay.step} of {replay.directory} again, but opens a Run in {directory}, which it would train on: "
            "give `unbroken materialize` the script and the arguments of that run"
        )
    step = replay_of(Log.open(tier, lineage).state)
    if replay is None and step is not None:
        raise Refused(
            f"lineage {lineage!r} holds step {step} made again and goes no further: "
            f"`unbroken branch {directory} {step} NAME --lineage {lineage}` begins one that does"
        )
