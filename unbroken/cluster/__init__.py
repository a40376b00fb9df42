"""Starts the workers of a node, sees their death in milliseconds, and decides whether to start them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unbroken.core.errors import MissingExtra

if TYPE_CHECKING:
    from unbroken.cluster.launch import Outcome


def start(argv: Sequence[str], say: Callable[[str], None]) -> tuple[Outcome, bool]:
    """`cluster.launch.launch`, with a clear error when torch is not installed."""
    try:
        from unbroken.cluster.launch import launch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch") from error
    return launch(argv, say)
