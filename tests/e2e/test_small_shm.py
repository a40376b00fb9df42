"""A container gives 64 MB of /dev/shm: snapshots do not need it, loader workers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHM_BYTES = 1 << 20

SCRIPT = """
import os, sys
import torch
from tests.rigs.tiny_run import Tiny, open_run, loss_of
found = os.statvfs("/dev/shm")
assert found.f_blocks * found.f_frsize <= 1 << 20, "the test's own mount is not there"
run = open_run(sys.argv[1], width=400_000, total_steps=3)
for batch in run:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
    run.step()
    run.save(wait=True)
"""


def within_small_shm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, whose /dev/shm is small. Skips where that is not allowed."""
    mount = f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"'
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        allowed = subprocess.run([*unshare, "sh", "-c", mount, "sh", "true"], capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no mount namespaces here")
    return subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", *command],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_I4_snapshots_larger_than_dev_shm_are_taken_and_stored(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = within_small_shm(sys.executable, str(script), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "unbroken", "ls", "--json", str(tmp_path / "run")], capture_output=True, check=True, timeout=60
    )
    newest = json.loads(shown.stdout)[-1]
    assert newest["step"] == 3
    assert newest["size_bytes"] > 8 * SHM_BYTES


def test_the_doctor_says_who_needs_dev_shm(tmp_path: Path) -> None:
    done = within_small_shm("env", "UNBROKEN_PRELOAD=json", sys.executable, "-m", "unbroken", "doctor", "--json")
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["name"] == "/dev/shm"]
    assert found["status"] == "warning"
    assert "num_workers=0" in found["remedy"]
    assert "snapshots do not" in found["seen"]
