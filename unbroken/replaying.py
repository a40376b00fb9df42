"""The half of a run that is there when steps are made again (`unbroken materialize`): each is held against what the journal recorded.

What parts from the record ends the process before anything of it is kept, and is told to the command that started it.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from unbroken.codec.digest import state_root
from unbroken.core.errors import Refused
from unbroken.core.limits import MAX_REASON_CHARS
from unbroken.core.records import StepRecord
from unbroken.core.replay import Replay
from unbroken.opening import Opening
from unbroken.proof.replaying import Check
from unbroken.recover.start import Counters, digests
from unbroken.step.update import Applied
from unbroken.store.repository import Repository


class Again:
    """From one start, or one going back, on. Every rank does the same, so that all end alike.

    Cost: the journal read twice; per step 20 us, at a step whose root is recorded one walk over the state and one pass of hashing.
    """

    def __init__(self, opening: Opening, replay: Replay, step: int) -> None:
        self._opening, self._replay = opening, replay
        self._check = Check(Repository.open(opening.start.tier, replay.source), step, replay.step)

    def stepped(self, step: int, applied: Applied, world_size: int) -> None:
        """A step has been applied or skipped. Refused where it is not what was recorded."""
        record = StepRecord(
            step=step,
            units=applied.units,
            num_samples=applied.num_samples,
            loss=applied.loss_bits,
            clock=((0, step, world_size),),
            status=applied.status,
            reason=applied.reason[:MAX_REASON_CHARS] or msgspec.UNSET,
            time_s=0.0,
        )
        if not self._check.step(record):
            self._part()

    def boundary(self, counters: Counters) -> None:
        """The state of this step is whole. Refused where its root is recorded and is another."""
        root = None
        if self._check.wants_root(counters.step):
            items = self._opening.pieces(counters)
            found = digests(items)
            root = state_root((item.piece, found[item.piece.pointer]) for item in items)
        if not self._check.boundary(counters.step, root):
            self._part()

    def keeps(self, step: int) -> bool:
        """May this step become a checkpoint?"""
        return self._check.keeps(step)

    def _part(self) -> NoReturn:
        found = self._check.found
        assert found is not None
        found = msgspec.structs.replace(found, differences=self._opening.start.differences)
        if self._opening.exchange.rank == 0:
            with open(self._replay.report, "wb") as file:
                file.write(msgspec.json.encode(found))
        raise Refused(f"{found}: this is not the run that was recorded, and nothing of it is kept")
