"""Branches on several ranks: the same bits at 2, 3 and 4, and under the launcher a killed worker of a branch goes on with the branch."""

from __future__ import annotations

import json
from pathlib import Path

import unbroken
from tests.rigs.launched import launched
from tests.rigs.ranks import run_ranks

TORTURE = str(Path(__file__).parents[1] / "rigs" / "torture.py")


def root(directory: Path, steps: int, ranks: int, lineage: str = "main") -> str:
    """Train up to `steps` on so many ranks; the state root there."""
    outputs = run_ranks([TORTURE, str(directory), str(steps)], ranks, env={"TORTURE_LINEAGE": lineage})
    told = json.loads(next(out for out in outputs if out.strip()).splitlines()[-1])
    assert told["step"] == steps
    return str(told["root"])


def test_I13_a_branch_of_a_branch_ends_in_the_same_bits_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    root(run, 3, 3)
    unbroken.open(run).branch(3, "one")
    root(run, 6, 4, "one")
    unbroken.open(run, "one").branch(6, "two")
    assert root(run, 9, 4) == root(run, 9, 2, "one") == root(run, 9, 3, "two")
    for lineage, parents in (("one", ["main"]), ("two", ["main", "one"])):
        certificate = unbroken.open(run, lineage).certify(run)
        assert certificate.grade == "exact", certificate.problems
        assert [branched.parent for branched in certificate.branches] == parents
        assert (certificate.steps, certificate.samples_exactly_once) == (9, True)
        found = unbroken.open(run, lineage).diff(run)
        assert (found.state_equal, found.journal.steps, found.journal.is_equal) == (True, 9, True)


SCRIPT = f"""
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.rigs.tiny_run import *
run = open_run(Path(FOLDER) / "run", total_steps=8, lineage="hot", units=2)
for batch in run:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
    run.step()
    if ATTEMPT == 0 and RANK == 1 and run.completed == 5:
        os.kill(os.getpid(), signal.SIGKILL)
mark("ended")
"""


def test_I10_a_killed_worker_of_a_branch_goes_on_with_the_branch_under_the_launcher(tmp_path: Path) -> None:
    from tests.rigs.tiny_run import train

    train(tmp_path / "run", 3)
    unbroken.open(tmp_path / "run").branch(2, "hot", set={"lr": 1e-3})
    with launched(tmp_path, SCRIPT, "--nproc-per-node", "2") as launcher:
        assert launcher.wait(110) == 0, launcher.stderr
        assert {mark["attempt"] for mark in launcher.marks("ended")} == {1}
    hot = unbroken.open(tmp_path / "run", "hot")
    assert hot.steps()[-1].step == 8
    assert hot.certify().certified
    assert unbroken.open(tmp_path / "run").steps()[-1].step == 3
