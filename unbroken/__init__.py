"""unbroken: training that cannot be broken, with proof. Names are loaded when first used, so importing costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbroken.checkpoints import Store as Store
    from unbroken.checkpoints import import_checkpoint as import_checkpoint
    from unbroken.checkpoints import open as open
    from unbroken.core.errors import AnomalyWarning as AnomalyWarning
    from unbroken.core.errors import CheckFailed as CheckFailed
    from unbroken.core.errors import CheckpointWarning as CheckpointWarning
    from unbroken.core.errors import Damaged as Damaged
    from unbroken.core.errors import EnvironmentChanged as EnvironmentChanged
    from unbroken.core.errors import Fenced as Fenced
    from unbroken.core.errors import ForeignFolder as ForeignFolder
    from unbroken.core.errors import GaveUp as GaveUp
    from unbroken.core.errors import LayoutMismatch as LayoutMismatch
    from unbroken.core.errors import MissingExtra as MissingExtra
    from unbroken.core.errors import NewerFormat as NewerFormat
    from unbroken.core.errors import NoCheckpoint as NoCheckpoint
    from unbroken.core.errors import Permanent as Permanent
    from unbroken.core.errors import Refused as Refused
    from unbroken.core.errors import SaveFailed as SaveFailed
    from unbroken.core.errors import SaveWarning as SaveWarning
    from unbroken.core.errors import StepLost as StepLost
    from unbroken.core.errors import StoreError as StoreError
    from unbroken.core.errors import Transient as Transient
    from unbroken.core.errors import UnbrokenError as UnbrokenError
    from unbroken.data.loader import Batches as Batches
    from unbroken.data.loader import Sampler as Sampler
    from unbroken.data.loader import keyed as keyed
    from unbroken.session import Run as Run
    from unbroken.step.anomalies import Anomalies as Anomalies
    from unbroken.step.anomalies import Spike as Spike

__version__ = "0.1.0"

_HOME = {
    "Run": "unbroken.session",
    "Batches": "unbroken.data.loader",
    "Sampler": "unbroken.data.loader",
    "keyed": "unbroken.data.loader",
    "Anomalies": "unbroken.step.anomalies",
    "Spike": "unbroken.step.anomalies",
    "Store": "unbroken.checkpoints",
    "open": "unbroken.checkpoints",
    "import_checkpoint": "unbroken.checkpoints",
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
        "StepLost",
        "SaveWarning",
        "AnomalyWarning",
        "EnvironmentChanged",
        "CheckpointWarning",
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
