"""Every kind of tier, bare and behind each wrapper, for what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.core.ports import SystemNonces, Tier
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.fault import Fault, FaultTier
from unbroken.store.tiers.limit import LimitTier
from unbroken.store.tiers.memory import MemoryTier
from unbroken.store.tiers.retry import RetryTier

KINDS = ("disk", "memory", "object-memory", "object-s3")
WRAPPED = ("", "retry", "limit", "fault", "all")

Maker = Callable[[], Tier]


def maker(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Makes tiers that all show one place, as those of several processes do."""
    if kind == "disk":
        return lambda: DiskTier(str(tmp_path / "root"))
    if kind == "memory":
        memory = MemoryTier()
        return lambda: memory
    server = request.getfixturevalue("s3") if kind == "object-s3" else None
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unbroken[object]'")
    from unbroken.store.tiers.object import ObjectTier

    url = f"memory://{SystemNonces().nonce()}"
    if server is not None:
        url = server.place()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
    return lambda: ObjectTier(url)


def wrapped(tier: Tier, wrapper: str) -> Tier:
    """The tier behind a wrapper; "all": each call first fails once, or loses its answer, and is tried again."""
    if wrapper == "retry":
        return RetryTier(tier, total_s=5, first_s=0.01)
    if wrapper == "limit":
        return LimitTier(tier, 1 << 30)
    if wrapper == "fault":
        return FaultTier(tier)
    if wrapper == "all":
        calls = ("read", "size", "list", "folders", "sweep")
        faults = [Fault(call, "transient", count=1) for call in calls]  # type: ignore[arg-type]
        faults += [Fault(call, "applied", count=1) for call in ("create", "append", "delete")]  # type: ignore[arg-type]
        return RetryTier(LimitTier(FaultTier(tier, faults), 1 << 30), total_s=5, first_s=0.01)
    return tier
