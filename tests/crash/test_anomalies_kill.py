"""Killed while poison is being dealt with: the same steps are skipped, and the end has the bits of a run that nobody killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import unbroken
from tests.rigs.anomalous_run import Case
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import commits
from tests.rigs.torture_runs import finish, journal
from unbroken.chaos.inject import read_strikes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/rigs/anomalous_run.py"


def launch(directory: Path, case: Case, faults: Sequence[dict[str, Any]], ranks: int = 3) -> tuple[int, str, str]:
    """One `unbroken run` of the case with faults."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {"UNBROKEN_FAULTS": json.dumps(faults), "UNBROKEN_FAULT_LOG": f"{directory}.faults"}
    command = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", str(ranks), str(SCRIPT), str(directory)]
    process = subprocess.Popen(
        [*command, msgspec.json.encode(case).decode()],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    return finish(process, 200)


def fault(at: str, step: int, rank: int, generation: int, action: str = "kill") -> dict[str, Any]:
    return {"at": at, "step": step, "rank": rank, "generation": generation, "action": action}


POISON = [
    fault("rollback.begin", 14, 1, 0),  # poison has been seen: 1 starts again from 10
    fault("rollback.opened", 0, 2, 1),  # 1 has seen it again and opened 2; then 3 starts, and goes back to 4
    fault("step.applied", 13, 0, 4),  # in the careful replay, after the skip: then 5 starts, and goes back to 6
    fault("exchange.gather", 12, 2, 6, "raise"),  # a refused step in the careful replay is repeated in place
    fault("capture.ready", 15, 1, 6),  # a poisoned snapshot, in memory on all ranks: 7 does not start from it, but goes back to 8 and 9
]

OWN = [
    fault("rollback.begin", 13, 1, 0),  # the loop's first pass has applied poison, the loss of its second has told: 1 starts again
    fault("step.applied", 13, 0, 2),  # in the careful replay, before anybody knows which step it is: 3 starts, and goes back to 4 and 5
]

WINDOW = [
    fault("rollback.begin", 13, 0, 0),
    fault("step.applied", 12, 1, 2),  # inside the window that is passed over
    fault("capture.copied", 16, 2, 4),
]


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        (Case(bad={7: "loss", 13: "gradient", 15: "gradient"}, units=3, unit=1, adam=True, asks=(15,)), POISON),
        (
            Case(
                bad={13: "spike"},
                units=3,
                adam=True,
                asks=(16,),
                spike={"action": "rollback", "threshold": 100.0, "window": 6, "warmup": 4, "back": 3, "ahead": 2},
            ),
            WINDOW,
        ),
        (Case(bad={13: "gradient"}, units=3, unit=1, adam=True, passes=2), OWN),
    ],
    ids=["poison", "window", "own"],
)
def test_B38_I13_killed_while_it_goes_back_and_replays(tmp_path: Path, case: Case, faults: list[dict[str, Any]]) -> None:
    code, out, err = launch(tmp_path / "run", case, faults)
    assert code == 0, f"{out}\n{err}"
    struck = [(s.at, s.generation) for s in read_strikes(f"{tmp_path / 'run'}.faults")]
    assert struck == [(f["at"], f["generation"]) for f in faults], err
    run_ranks([str(SCRIPT), str(tmp_path / "whole"), msgspec.json.encode(case).decode()], 1, {"PYTHONPATH": str(ROOT)})
    assert commits(tmp_path / "run")[-1].state_root == commits(tmp_path / "whole")[-1].state_root
    certificate = unbroken.open(str(tmp_path / "run")).certify(str(tmp_path / "whole"))
    assert (certificate.grade, certificate.problems) == ("exact", [])
    expected = sorted(case.bad) if not case.spike else [11, 12, 13, 14, 15]
    assert [one.step for one in certificate.skipped] == expected
    assert sum(record.get("name") == "rollback" for record in journal(tmp_path / "run")) >= 2


def test_B38_a_run_that_gives_up_is_not_started_again(tmp_path: Path) -> None:
    case = Case(bad=dict.fromkeys(range(13, 21), "loss"), units=2)
    code, out, err = launch(tmp_path / "run", case, [], ranks=2)
    assert code == 5, f"{out}\n{err}"
    assert "starting again cannot change that" in err
    assert "6 steps in a row could not be applied, the last is step 18" in err
    assert commits(tmp_path / "run")[-1].step == 10
    assert unbroken.open(str(tmp_path / "run")).certify().certified
