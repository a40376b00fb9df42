"""The state S(k) of the failure cases, all of whose elements equal k, and ways to make the disk slow or failing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unbroken.core.ports import arm

BEFORE_FSYNC = "store.create.before_fsync"


def s(k: int) -> dict[str, Any]:
    """S(k)."""
    return {"w": torch.full((1000,), float(k)), "b": torch.full((7,), float(k)), "step": k}


def whole(state: dict[str, Any]) -> int:
    """The k of a state that is S(k) in every element."""
    k = state["step"]
    assert state["w"].min() == state["w"].max() == state["b"].min() == state["b"].max() == k
    return int(k)


@contextlib.contextmanager
def struck(strike: Callable[[], None], name: str = BEFORE_FSYNC) -> Iterator[None]:
    """While inside, whoever passes failpoint `name` meets `strike`."""
    arm(name, strike)
    try:
        yield
    finally:
        arm(name, None)


def no_space() -> None:
    """What a full disk says."""
    raise OSError(28, "No space left on device")


def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, warnings being errors; it must end well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
