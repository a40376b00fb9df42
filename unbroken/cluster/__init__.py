"""Starts the workers of a node, sees their death in milliseconds, and decides whether to start them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unbroken.core.errors import MissingExtra

if TYPE_CHECKING:
    from unbroken.cluster.launch import Outcome


def start(argv: Sequence[str], say: Callable[[str], None]) -> tuple[Outcome, bool]:
    """`cluster.launch.launch`, with a clear error when torch is not installed."""
    with _clearly():
        from unbroken.cluster.launch import launch
    return launch(argv, say)


def check(argv: Sequence[str]) -> None:
    """ValueError where `start` would not understand the command line; MissingExtra when torch is not installed. Starts nothing."""
    with _clearly():
        from unbroken.cluster.launch import parse
    parse(argv, "")


@contextmanager
def _clearly() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch") from error
