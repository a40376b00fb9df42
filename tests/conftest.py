"""What every test shares: the checkout on the path, an environment without a launcher's traces, and campaigns only when asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("OMP_NUM_THREADS", "1")

LAUNCHERS_TRACES = ("UNBROKEN_", "TORCHELASTIC_", "PET_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "GROUP_RANK", "ROLE_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run under a launcher; what they start must not believe that it does."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS_TRACES):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaigns run by `-m slow` only."""
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="a campaign: runs with -m slow"))
