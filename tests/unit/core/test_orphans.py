"""What is asked of the system about other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rigs.torture_runs import wait_until
from unbroken.core.os import orphans


def test_a_helper_is_an_orphan_once_whom_it_helps_has_ended(tmp_path: Path) -> None:
    helper = tmp_path / "helper-of-tests"
    helper.symlink_to(sys.executable)
    owner = subprocess.Popen(["sleep", "60"])
    ours = subprocess.Popen([str(helper), "-c", "import time; time.sleep(60)", "--pid", str(owner.pid)])
    try:
        wait_until(lambda: b"helper-of-tests" in Path(f"/proc/{ours.pid}/cmdline").read_bytes(), 20, "start of the helper")
        assert orphans("helper-of-tests") == []
        owner.kill()
        owner.wait()
        assert orphans("helper-of-tests") == [ours.pid]
        assert orphans("helper") == []
    finally:
        owner.kill()
        ours.kill()
        owner.wait()
        ours.wait()
    assert orphans("helper-of-tests") == []
    assert os.getpid() not in orphans("python")
