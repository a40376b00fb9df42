"""Checkpoints of a real Stack, written to the store without a trainer or a daemon."""

from __future__ import annotations

from typing import Any

from tests.rigs.step_rank import raw
from tests.rigs.synthetic_run import SyntheticRun
from unbroken.capture.stack import Stack
from unbroken.capture.tree import Item
from unbroken.core.messages import Plan
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry
from unbroken.recover.start import fact_items
from unbroken.store.repository import Part


def items_of(stack: Stack, step: int, rank: int = 0) -> list[Item]:
    """Every piece of a stack at `step`: counters as after that many steps, and one compared fact per rank."""
    counters = {"step": step, "samples": 8 * step, "applied": step, "skipped": 0}
    facts = fact_items({"/environment": ({"threads": 1, "host": f"host{rank}"}, "compared", "rank", "hardware")})
    return [*stack.collect({"step": step}, counters, {"at": [rank, step]}), *facts]


class StackRun(SyntheticRun):
    """`save` writes what the stack holds now; every rank's own pieces are this process's."""

    def __init__(self, tier: Tier, stack: Stack) -> None:
        super().__init__(tier)
        self.stack = stack

    def _parts(self, step: int) -> list[Part]:
        return [Part(i.piece, memoryview(raw(i))) for i in items_of(self.stack, step) if i.piece.scope == "logical"]

    def _rank_parts(self, rank: int) -> list[Part]:
        return [Part(i.piece, memoryview(raw(i))) for i in items_of(self.stack, self.step, rank) if i.piece.scope == "rank"]


def plan_for(commit: CommitEntry, *, generation: int = 1, world_size: int = 1, **more: Any) -> Plan:
    """The plan that starts from this checkpoint on disk."""
    facts: dict[str, Any] = {
        "source": "disk",
        "stored_generation": commit.generation,
        "state_root": commit.state_root,
        "stored_world_size": world_size,
    }
    return Plan(generation=generation, step=commit.step, **facts | more)
