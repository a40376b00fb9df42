"""`import unbroken` does nothing else: no thread, no file, no handler, no variable, no warning filter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys, threading, warnings
def picture():
    handlers = [signal.getsignal(s) for s in signal.valid_signals()]
    hooks = [sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook]
    files, threads = sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return handlers, hooks, files, threads, dict(os.environ), list(warnings.filters), os.getcwd()
before = picture()
import unbroken
assert picture() == before
dir(unbroken), unbroken.__version__
assert picture() == before
"""


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
