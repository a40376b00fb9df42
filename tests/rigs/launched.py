"""A launcher under test: `unbroken run` as a process of its own, with toy scripts that leave marks in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

MARK = """
import json, os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FOLDER = os.path.dirname(os.path.abspath(__file__))
def mark(name, **facts):
    line = json.dumps(dict(facts, name=name, rank=RANK, attempt=ATTEMPT, pid=os.getpid(), at=time.monotonic()))
    with open(os.path.join(FOLDER, "marks.jsonl"), "a") as f:
        f.write(line + "\\n")
def marks(name):
    with open(os.path.join(FOLDER, "marks.jsonl")) as f:
        return [m for m in map(json.loads, f) if m["name"] == name]
def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit("the toy script waited in vain")
        time.sleep(0.005)
mark("start")
"""


COLD = ("--preload", "")
"""Toys import nothing that is worth keeping warm; flags of a test come later and win."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`, or a failure that says what did not happen."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.005)
    return value


class Launched:
    """One `unbroken run`. `script` is the toy's body after MARK; `marks()` what its processes left behind."""

    def __init__(self, folder: Path, script: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.script = folder / "toy.py"
        self.script.write_text(MARK + script)
        (folder / "marks.jsonl").touch()
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unbroken", "run", "--json", *COLD, *flags, str(self.script)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(folder), **(env or {})},
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 60.0) -> int:
        """The launcher's exit code."""
        return self.process.wait(timeout_s)

    def marks(self, name: str = "start") -> list[dict[str, Any]]:
        """Whole lines written so far, in order."""
        lines = (self.folder / "marks.jsonl").read_text().split("\n")[:-1]
        return [mark for mark in map(json.loads, lines) if mark["name"] == name]

    def wait_for_marks(self, name: str, num: int) -> list[dict[str, Any]]:
        """The marks of this name once there are `num`."""
        return wait_until(lambda: found if len(found := self.marks(name)) >= num else None, f"{num} marks {name!r}; {self.stderr}")

    def outcome(self) -> dict[str, Any]:
        """The JSON object the launcher prints last."""
        return json.loads((self.folder / "out").read_text().splitlines()[-1])

    @property
    def stderr(self) -> str:
        return (self.folder / "err").read_text()

    def signal(self, sig: signal.Signals) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(sig)


@contextmanager
def launched(folder: Path, script: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Launched]:
    """A launcher, and the end of everything it started whatever the test does."""
    one = Launched(folder, script, *flags, env=env)
    try:
        yield one
    finally:
        family = psutil.Process(one.process.pid).children(recursive=True) if one.process.poll() is None else []
        if one.process.poll() is None:
            one.process.kill()
        for process in family:
            if process.is_running():
                process.kill()
        one.process.wait(30)


def gone(pids: list[int], timeout_s: float = 5.0) -> None:
    """Fail unless all of these processes end in time."""
    wait_until(lambda: not any(is_running(pid) for pid in pids), f"end of {pids}", timeout_s)


def is_running(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
