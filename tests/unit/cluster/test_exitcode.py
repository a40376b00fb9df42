"""An uncaught refusal ends a script with its own exit code, and its traceback is seen, with torch.distributed's hook or without."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from unbroken.cluster.exitcode import use_exit_codes
from unbroken.core.errors import NoCheckpoint
use_exit_codes()
if sys.argv[1] == "torch":
    inner = sys.excepthook
    def around(kind, error, trace):
        import contextlib, io
        with contextlib.redirect_stderr(io.StringIO()) as buffer:
            inner(kind, error, trace)
        print("[rank0]", buffer.getvalue(), file=sys.stderr)
    sys.excepthook = around
    use_exit_codes()
use_exit_codes()
raise {"refusal": NoCheckpoint("nothing there"), "bug": KeyError("x")}[sys.argv[2]]
"""


@pytest.mark.parametrize("hooks", ["plain", "torch"])
@pytest.mark.parametrize(("what", "code"), [("refusal", 3), ("bug", 1)])
def test_exit_code_and_traceback(hooks: str, what: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, hooks, what], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" in done.stderr
    assert ("nothing there" in done.stderr) == (what == "refusal")
    assert ("[rank0]" in done.stderr) == (hooks == "torch")
