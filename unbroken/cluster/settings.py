"""Settings of the launcher, besides torchrun's own flags: explicit flag > UNBROKEN_* environment > [launch] of unbroken.toml > default."""

from __future__ import annotations

from typing import Any

from unbroken.core.settings import Setting, Table, find_file, gather, number, read_file, whole

GRACE_S = 25.0
"""Slurm and Kubernetes kill everything 30 s after their signal: by then the daemon must have written what workers left in memory."""

PRELOAD = "torch,torch._dynamo,unbroken.session"
"""What takes longest to import in a worker, `torch._dynamo` with the first optimizer: seconds that a restart need not wait for."""


def _seconds(value: Any) -> float:
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError("give a number of seconds, 0 or more")
    return seconds


def _modules(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError('give names of modules in one text, separated by commas, such as "torch,mypackage.data"')
    return value


LAUNCH = Table(
    "launch",
    (
        Setting(
            name="preload",
            default=PRELOAD,
            accepts="names of modules, separated by commas",
            help="Modules that the warm fork server imports once. In the file an empty text starts each worker from nothing.",
            check=_modules,
        ),
        Setting(
            name="max_restarts",
            default=None,
            accepts="a whole number from 0",
            help="Restarts without a new committed step before the launcher gives up. Default: 100, and 3 equal errors before any step.",
            check=lambda value: whole(value, at_least=0),
            from_text=number,
        ),
        Setting(
            name="grace_s",
            default=GRACE_S,
            accepts="seconds, 0 or more",
            help="What workers get to finish their step and commit after a signal, before they are killed.",
            check=_seconds,
        ),
    ),
)
"""Every setting of the launcher."""


def preload_in_force() -> tuple[str, ...]:
    """The modules that a launch without flags imports in its fork server. ValueError where a setting is wrong."""
    return modules(gather(LAUNCH, {}, read_file(find_file()))["preload"].value)


def modules(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in (word.strip() for word in text.split(",")) if name)
