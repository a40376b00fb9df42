"""Runs of tests/rigs/torture.py, plain or under the launcher, and what came of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rigs.ranks import run_ranks

SCRIPT = "tests/rigs/torture.py"
ROOT = Path(__file__).resolve().parents[2]


def reference(directory: Path, steps: int, *, ranks: int = 1, seed: int = 1, **env: str) -> dict[str, Any]:
    """An uninterrupted run of plain processes; rank 0's last line of output."""
    out = run_ranks([str(ROOT / SCRIPT), str(directory), str(steps), str(seed)], ranks, env)
    return json.loads(out[0].splitlines()[-1])


def launch(
    directory: Path, steps: int, *, ranks: int, seed: int = 1, faults: Sequence[Mapping[str, Any]] = (), **env: str
) -> subprocess.Popen[str]:
    """The same under `unbroken run`, with faults."""
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env
    if faults:
        own |= {"UNBROKEN_FAULTS": json.dumps(list(faults)), "UNBROKEN_FAULT_LOG": str(directory) + ".faults"}
    command = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", str(ranks), str(ROOT / SCRIPT), str(directory), str(steps)]
    return subprocess.Popen(
        [*command, str(seed)], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
    """Exit code, standard output and error. Kills the whole session when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout_s} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def processes_of(directory: Path) -> list[str]:
    """Command lines of live processes that name this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except (OSError, IndexError):
                continue
            if str(directory) in line and state not in ("Z", "X"):
                found.append(f"{entry.name} {line}")
    return found


def wait_until(condition: Any, timeout_s: float, what: str) -> Any:
    """Poll until `condition()` is true; its value. AssertionError after the deadline."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def journal(directory: Path) -> list[dict[str, Any]]:
    """All records of all journals, in order; a torn last line is left out."""
    found = []
    for path in sorted((directory / "runs/main/journal").glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[1:-1]:
            found.append(json.loads(line)["record"])
    return found
