"""unbroken: training that cannot be broken, with proof. Names are loaded when first used, so importing costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbroken.capture.loader import Batches, Sampler, keyed
    from unbroken.checkpoints import Archive, Store, open
    from unbroken.core.errors import (
        CheckFailed,
        Damaged,
        Fenced,
        ForeignFolder,
        GaveUp,
        LayoutMismatch,
        MissingExtra,
        NewerFormat,
        NoCheckpoint,
        Permanent,
        Refused,
        SaveFailed,
        StoreError,
        Transient,
        UnbrokenError,
    )
    from unbroken.session import Run

__version__ = "0.1.0"

_HOME = {
    "Run": "unbroken.session",
    "Batches": "unbroken.capture.loader",
    "Sampler": "unbroken.capture.loader",
    "keyed": "unbroken.capture.loader",
    "Store": "unbroken.checkpoints",
    "open": "unbroken.checkpoints",
} | dict.fromkeys(
    (
        "UnbrokenError",
        "CheckFailed",
        "Damaged",
        "NoCheckpoint",
        "Refused",
        "Fenced",
        "NewerFormat",
        "ForeignFolder",
        "LayoutMismatch",
        "GaveUp",
        "SaveFailed",
        "StoreError",
        "Permanent",
        "Transient",
        "MissingExtra",
    ),
    "unbroken.core.errors",
)

__all__ = sorted(_HOME)  # noqa: PLE0605  (the table above is the one list of public names)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unbroken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
