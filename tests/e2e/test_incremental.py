"""Checkpoints as differences, under a Run: less is written, every one is the state it was, and a run goes on from any of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.tiny_run import commits, end_daemon

pytestmark = pytest.mark.usefixtures("runtime")


class Net(nn.Module):
    """A backbone that is not trained, an embedding of which few rows are used, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 32)
        self.backbone = nn.Linear(32, 1500).requires_grad_(False)
        self.head = nn.Linear(1500, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.backbone(self.table(x).mean(1))))


def train(directory: Path, steps: int, **options: object) -> str:
    """The rest of a run up to `steps`; the root of its last checkpoint."""
    torch.manual_seed(3)
    model = Net()
    words = torch.randint(200, (256, 6), generator=torch.Generator().manual_seed(1))
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        data=unbroken.Batches(TensorDataset(words, words[:, 0] % 40), global_batch=8, seed=1),
        lose_at_most="1 steps",
        units=2,
        total_steps=steps,
        keep=100,
        **options,  # type: ignore[arg-type]
    )
    for batch in run:
        for micro in batch:
            micro.backward(nn.functional.cross_entropy(run.model(micro.x), micro.y))
        run.step()
        run.save(wait=True)
    return commits(directory)[-1].state_root


def written(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "packs").rglob("*") if path.is_file())


def test_a_run_with_differences_ends_in_the_same_bits_from_any_of_its_checkpoints(tmp_path: Path) -> None:
    root = train(tmp_path / "plain", 14)
    for steps in (5, 9, 14):
        found = train(tmp_path / "run", steps, full_every="6 steps")
        end_daemon(tmp_path / "run")
    assert found == root
    end_daemon(tmp_path / "plain")
    archive = unbroken.open(str(tmp_path / "run"))
    kinds = {step.step: step.kind for step in archive.steps()}
    assert [step for step, kind in kinds.items() if kind == "full"] == [0, 6, 12], "restarts at 5 and 9 do not begin anew"
    assert archive.verify().ok
    assert archive.certify(str(tmp_path / "plain")).grade == "exact"
    whole = unbroken.open(str(tmp_path / "plain"))
    for step in (1, 5, 8, 13):
        ours, theirs = archive.load(step)["model"]["parameters"], whole.load(step)["model"]["parameters"]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert written(tmp_path / "run") < 0.6 * written(tmp_path / "plain")


def test_a_milestone_stands_alone(tmp_path: Path) -> None:
    train(tmp_path / "run", 6, full_every="100 steps", milestone_every="4 steps")
    end_daemon(tmp_path / "run")
    kinds = {step.step: step.kind for step in unbroken.open(str(tmp_path / "run")).steps()}
    assert [step for step, kind in kinds.items() if kind == "full"] == [0, 4]


def test_what_full_every_accepts_is_said() -> None:
    with pytest.raises(ValueError, match=r'full_every.*"100 steps"'):
        train(Path("never-made"), 1, full_every="often")


def test_I3_B10_a_run_that_is_pruned_and_compacted_in_between_ends_in_the_same_bits(tmp_path: Path) -> None:
    root = train(tmp_path / "plain", 10)
    folder = tmp_path / "run"
    train(folder, 6, full_every="1000 steps")
    end_daemon(folder)
    archive = unbroken.open(folder)
    assert [one.step for one in archive.prune(keep=2).stays] == [5, 6]
    before = written(folder)
    made = archive.compact()
    assert made.steps == [5, 6] and made.num_whole > 0
    assert written(folder) < before and archive.verify().ok
    assert train(folder, 10, full_every="1000 steps") == root
    certificate = unbroken.open(folder).certify(tmp_path / "plain")
    assert certificate.grade == "exact", certificate.problems
