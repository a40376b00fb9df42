"""At the end of a run: wait a while for its last checkpoint to be in the copy, too. Training is over, so nothing stands still for it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from unbroken.core.errors import UnbrokenError
from unbroken.core.messages import Status, StatusReply
from unbroken.core.ports import Clock
from unbroken.recover.link import Link

_LOOK_S = 0.1
_QUIET_S = 2.0


def wait_for_copy(link: Link, clock: Clock, timeout_s: float) -> None:
    """Return when the newest checkpoint is copied; say where it stands when that takes longer than a moment, or cannot be.

    Whatever goes wrong here is said, never raised: the run has ended well.
    """
    began_s, is_told = clock.monotonic(), False
    facts: dict[str, Any] = {}
    with suppress(OSError, UnbrokenError):
        while link.lost is None:
            facts = link.ask(Status(ends=True), StatusReply)[0].facts.get("copy", {})
            waited_s = clock.monotonic() - began_s
            if not facts.get("is_wanted") or waited_s >= timeout_s:
                break
            if waited_s >= _QUIET_S and not is_told:
                is_told = True
                _say(f"waiting up to {timeout_s:g} s for the last checkpoint to be in {facts.get('to')}")
            clock.sleep(_LOOK_S)
    if facts.get("is_wanted"):
        _say(f"the last checkpoint is not in {facts.get('to')} yet; the daemon goes on copying while this host lives")
    elif facts.get("error"):
        _say(f"the last checkpoint is not in {facts.get('to')}; the newest there is of step {facts.get('last_step')}: {facts['error']}")


def _say(text: str) -> None:
    print(f"unbroken: {text}", file=sys.stderr, flush=True)
