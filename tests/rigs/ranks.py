"""Plain processes as the ranks of a job, joined by torch's env:// rendezvous; no launcher in between."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(
    command: Sequence[str], world_size: int, env: Mapping[str, str] | None = None, port: int | None = None
) -> list[subprocess.Popen[str]]:
    """Start `python *command` once per rank."""
    port = port or free_port()
    found = []
    for rank in range(world_size):
        own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
        if world_size > 1:
            own |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        found.append(subprocess.Popen([sys.executable, *command], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return found


def run_ranks(command: Sequence[str], world_size: int, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> list[str]:
    """Run to the end; every rank's standard output. AssertionError with the standard error of a rank that failed."""
    ranks = start_ranks(command, world_size, env)
    outputs, failures = [], []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=timeout_s)
            outputs.append(out)
            if process.returncode != 0:
                failures.append(f"rank {rank} exited with {process.returncode}:\n{out}\n{err}")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert not failures, "\n".join(failures)
    return outputs
