"""The launcher with a real run: what it learns of the run's progress, what it leaves in its journal, and what that changes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.rigs.launched import launched
from unbroken.core.records import EventRecord, JournalLine

TRAIN = """
import torch, unbroken
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
points = torch.arange(256.0).reshape(64, 4) / 256
run = unbroken.Run(
    os.path.join(FOLDER, "run"), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data=unbroken.Batches(TensorDataset(points), global_batch=8, seed=7), lose_at_most="5 steps", total_steps=20, units=4,
)
for batch in run:
    for micro in batch:
        micro.backward((model(micro.x) ** 2).mean())
    fail(batch.step)
    run.step()
"""


def events(run: Path, name: str) -> list[EventRecord]:
    """The events of this name in all journals, oldest generation first."""
    found = []
    for path in sorted(run.glob("runs/main/journal/*.jsonl")):
        for line in path.read_bytes().splitlines()[1:]:
            record = msgspec.json.decode(line, type=JournalLine).record
            if isinstance(record, EventRecord) and record.name == name:
                found.append(record)
    return found


def test_B36_c_the_same_step_and_error_three_times_stops_and_names_both(tmp_path: Path) -> None:
    fail = "def fail(step):\n    if step == 13 and RANK == ATTEMPT % 3: raise ValueError('bad batch')\n"
    with launched(tmp_path, fail + TRAIN, "--nproc-per-node", "3") as job:
        assert job.wait(180) == 5, job.stderr
        outcome = job.outcome()
        assert outcome["restarts"] == 2
        assert [failure["step"] for failure in outcome["failures"]] == [13, 13, 13]
        assert [failure["rank"] for failure in outcome["failures"]] == [0, 1, 2]
        assert "step 13 failed 3 times with the same error" in job.stderr
        assert "ValueError: bad batch" in job.stderr


def test_B36_c_new_committed_steps_refill_the_budget(tmp_path: Path) -> None:
    fail = """
from unbroken.core.errors import NoCheckpoint
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier
def committed():
    try:
        repository = Repository.open(DiskTier(os.path.join(FOLDER, "run")))
    except NoCheckpoint:
        return 0
    return max((commit.step for commit in repository.visible()), default=0)
before = committed()
def fail(step):
    if RANK == 1 and step == 7 + 6 * ATTEMPT and ATTEMPT < 2:
        wait_for(lambda: committed() > before, seconds=20)
        os.kill(os.getpid(), signal.SIGKILL)
"""
    with launched(tmp_path, fail + TRAIN, "--nproc-per-node", "3", "--max-restarts", "1") as job:
        assert job.wait(180) == 0, job.stderr
        outcome = job.outcome()
        assert outcome["restarts"] == 2
        assert [failure["step"] for failure in outcome["failures"]] == [7, 13]
        first, second = (failure["committed"] for failure in outcome["failures"])
        assert 0 < first < second


def test_a_recovery_is_in_the_journal_with_its_moments_and_exit_codes(tmp_path: Path) -> None:
    fail = """
def fail(step):
    if ATTEMPT == 0 and step == 8 and RANK == 2:
        mark("killed"); os.kill(os.getpid(), signal.SIGKILL)
"""
    with launched(tmp_path, fail + TRAIN, "--nproc-per-node", "3") as job:
        assert job.wait(180) == 0, job.stderr
        assert job.outcome()["directory"] == str(tmp_path / "run")
        (killed,) = job.marks("killed")
        (recovery,) = events(tmp_path / "run", "recovery")
        codes = recovery.facts.pop("exit_codes")
        assert recovery.facts == {"attempt": 1, "rank": 2, "signals": {"2": "SIGKILL"}}
        assert codes["2"] == -9 and set(codes.values()) <= {-9, 1}, "others may have said why they end, too, before they were killed"
        assert killed["at"] < recovery.at["detect"] < recovery.at["respawn"]
        assert recovery.at["detect"] - killed["at"] < 0.5
        assert recovery.at["respawn"] - recovery.at["detect"] < 3.0
