"""A script that our own refusal ends exits with that error's code, whoever started it: schedulers must not try again what cannot work."""

from __future__ import annotations

import sys
from types import TracebackType

from unbroken.core.errors import UnbrokenError


def use_exit_codes() -> None:
    """From now on an uncaught UnbrokenError ends this process with its exit code (see core.errors). Not in a notebook or prompt.

    Call it again after torch.distributed has started: that puts a hook of its own around ours, which swallows what we raise.
    """
    if hasattr(sys, "ps1") or "IPython" in sys.modules or getattr(sys.excepthook, "_unbroken", False):
        return
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        if isinstance(error, UnbrokenError) and sys.excepthook is hook:
            raise SystemExit(error.exit_code)  # the interpreter takes its exit code from here

    hook._unbroken = True  # type: ignore[attr-defined]
    sys.excepthook = hook
