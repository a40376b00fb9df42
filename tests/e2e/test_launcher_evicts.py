"""A device that fails again and again is left out: on a spare, or with fewer workers, to the same bits. Ranks compute on the CPU here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import unbroken
from tests.e2e.test_launcher_progress import TRAIN, events
from tests.rigs.launched import launched

DEVICE = """
DEVICE = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
mark("has", device=DEVICE, world=int(os.environ["WORLD_SIZE"]))
"""

STRIKES = """
def fail(step):
    if DEVICE == "b" and step == (5, 9, 13)[ATTEMPT]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def last_root(run: Path) -> str:
    """The state root of the newest checkpoint, which must be the last step's."""
    newest = unbroken.open(str(run)).steps()[-1]
    assert newest.step == 20
    return str(newest.root)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The root of a run of one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("reference")
    script = folder / "toy.py"
    script.write_text(f"import os\nFOLDER = {str(folder)!r}\ndef fail(step): pass\n{TRAIN}")
    subprocess.run([sys.executable, str(script)], check=True, timeout=120, capture_output=True)
    return last_root(folder / "run")


@pytest.mark.parametrize(
    ("workers", "devices", "after"), [("1:3", "a,b,c", ["a", "c"]), ("3", "a,b,c,d", ["a", "c", "d"])], ids=["fewer", "spare"]
)
def test_B36_a_device_that_fails_twice_is_left_out_and_the_bits_stay(
    tmp_path: Path, expected: str, workers: str, devices: str, after: list[str]
) -> None:
    flags = ("--nproc-per-node", workers, "--max-restarts", "1")
    with launched(tmp_path, DEVICE + STRIKES + TRAIN, *flags, env={"CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": "1"}) as job:
        assert job.wait(180) == 0, job.stderr
        outcome = job.outcome()
        lives = [sorted((mark["rank"], mark["device"]) for mark in job.marks("has") if mark["attempt"] == n) for n in range(3)]
        assert lives == [[(0, "a"), (1, "b"), (2, "c")]] * 2 + [list(enumerate(after))]
        assert {mark["world"] for mark in job.marks("has") if mark["attempt"] == 2} == {len(after)}
        assert (outcome["restarts"], [failure["step"] for failure in outcome["failures"]]) == (2, [5, 9])
        assert [place.partition(" of ")[0] for place in outcome["evicted"]] == ["device b"]
        assert "device b of" in job.stderr and f"is left out, {len(after)} workers go on" in job.stderr
        *_, recovery = events(tmp_path / "run", "recovery")
        assert recovery.facts["workers"] == len(after) and recovery.facts["evicted"].startswith("device b of ")
    assert last_root(tmp_path / "run") == expected


def test_B36_where_nothing_can_take_its_place_the_budget_decides_and_that_is_said(tmp_path: Path) -> None:
    script = DEVICE + "time.sleep(600) if DEVICE != 'b' else os.kill(os.getpid(), signal.SIGKILL)"
    with launched(tmp_path, script, "--nproc-per-node", "2:2", "--max-restarts", "2", env={"CUDA_VISIBLE_DEVICES": "a,b"}) as job:
        assert job.wait() == 5
        assert job.outcome()["evicted"] == []
        assert "failed 2 times (steps: before any, before any) while others did not, and nothing can take its place" in job.stderr


@pytest.mark.parametrize(
    ("workers", "words"),
    [("0:2", "1 <= MIN <= MAX, not 0:2"), ("3:2", "1 <= MIN <= MAX, not 3:2"), (":2", "MIN:MAX"), ("1:", "nproc"), ("a:2", "MIN:MAX")],
)
def test_a_range_of_workers_that_is_none_is_a_usage_error(tmp_path: Path, workers: str, words: str) -> None:
    with launched(tmp_path, "", "--nproc-per-node", workers) as job:
        assert job.wait() == 2
        assert words in job.stderr and words in job.outcome()["error"]["text"]
        assert "Traceback" not in job.stderr
