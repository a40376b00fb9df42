"""The check for a machine with an accelerator goes its whole way without one, on a small share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def part(name: str) -> dict[str, object]:
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_check", "--device", "cpu", "--share-gb", "0.005", "--part", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_capture_part_measures_snapshots_beside_plain_training() -> None:
    found = part("capture")
    assert found["state_bytes"] > 4e6 and found["capture_s"] > 0  # type: ignore[operator]


def test_the_script_finds_its_way_and_says_so_where_there_is_nothing_to_check(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(["sh", str(ROOT / "bench/gpu_check.sh"), str(tmp_path)], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode in (0, 1), done.stderr
    assert "no accelerator here" in done.stdout or (tmp_path / "gpu_check.json").exists()
