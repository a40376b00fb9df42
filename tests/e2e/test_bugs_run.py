"""Public failure cases that concern a whole run: random streams, schedules, accumulation, several committers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.ranks import free_port, run_ranks
from tests.rigs.torture_runs import processes_of, wait_until
from unbroken.core.errors import LayoutMismatch


class Interrupted(Exception):
    """Stands for any end of the process inside the loop."""


class One(nn.Module):
    """One weight, float64."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))


def numbers(n: int) -> TensorDataset:
    """Samples 0..n-1."""
    return TensorDataset(torch.arange(n, dtype=torch.float64))


# -- B26 -----------------------------------------------------------------------------------------------------------------------

RATES = [0.025, 0.05, 0.075, 0.1, 0.1, 0.083333, 0.066667, 0.05, 0.033333, 0.016667]


def rates(directory: Path, stop_after: int | None, steps: int = 10, make: Any = None, scaler: Any = None) -> list[float]:
    """Train one life; the rates its steps used."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = make or (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: (s + 1) / 4 if s < 4 else (10 - s) / 6))
    scheduler = make(optimizer)
    used: list[float] = []
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        data=unbroken.Batches(numbers(64), global_batch=1),
        lose_at_most="1 steps",
        total_steps=steps,
    )
    if stop_after == 0:
        run.close()
        return used
    for batch in run:
        rate = optimizer.param_groups[0]["lr"]
        for micro in batch:
            micro.backward(model.w * micro.x.sum())
        run.step()
        used.append(rate)
        if len(used) == stop_after:
            run.save(wait=True)
            run.close()
            break
    return used


@pytest.mark.parametrize("k", range(11))
def test_B26_rates_after_an_interruption_at_every_step(tmp_path: Path, k: int) -> None:
    used = rates(tmp_path, k) + rates(tmp_path, None)
    assert used == pytest.approx(RATES, abs=1e-6)


def test_B26_step_drop_happens_at_four_not_five(tmp_path: Path) -> None:
    def drop(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1000.0 if s < 4 else 100.0)

    assert rates(tmp_path, 3, 6, drop) + rates(tmp_path, None, 6, drop) == pytest.approx([100.0] * 4 + [10.0] * 2)


def test_B26_cosine_resumed_at_45(tmp_path: Path) -> None:
    def cosine(optimizer: Any) -> Any:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0].setdefault("initial_lr", 1e-3)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    used = rates(tmp_path, 45, 47, cosine) + rates(tmp_path, None, 47, cosine)
    assert used[45] == pytest.approx(0.000578217233, rel=1e-6)
    assert used[46] == pytest.approx(0.000562666617, rel=1e-6)
    assert used[45] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 45 / 100)), rel=1e-6)


def test_B26_plateau_with_two_bad_counts_drops_as_without_interruption(tmp_path: Path) -> None:
    """Needs a metric, so it is the user's to step, as an extra."""
    metrics = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]

    def life(stop: int) -> list[float]:
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=3)
        with pytest.raises(TypeError, match="extras"):
            unbroken.Run(
                tmp_path / "x", model=model, optimizer=optimizer, scheduler=plateau, data=unbroken.Batches(numbers(4), global_batch=1)
            )
        run = unbroken.Run(
            tmp_path / "run", model=model, optimizer=optimizer, data=unbroken.Batches(numbers(64), global_batch=1),
            extras={"plateau": plateau}, lose_at_most="1 steps", total_steps=stop,
        )  # fmt: skip
        found = []
        for batch in run:
            for micro in batch:
                micro.backward(model.w * micro.x.sum())
            run.step()
            plateau.step(metrics[run.completed - 1])
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert life(3) + life(6) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_B26_a_missing_scheduler_entry_is_an_error(tmp_path: Path) -> None:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = unbroken.Batches(numbers(8), global_batch=1)
    unbroken.Run(tmp_path, model=model, optimizer=optimizer, data=data).close()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(LayoutMismatch, match="missing in the checkpoint: /scheduler"):
        unbroken.Run(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, data=data)


def test_B26_a_skipped_step_does_not_advance_and_the_end_stays(tmp_path: Path) -> None:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = unbroken.Run(
        tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler,
        data=unbroken.Batches(numbers(8), global_batch=1, shuffle=False), total_steps=3,
    )  # fmt: skip
    seen = []
    for batch in run:
        for micro in batch:
            factor = float("inf") if run.completed == 1 else 1.0
            micro.backward(model.w * (micro.x.sum() + 1.0) * factor)
        assert run.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.05, 0.05, 0.025]
    assert scaler.get_scale() == 2.0
    kinds = [v["name"] for v in unbroken.open(str(tmp_path)).variables()]
    assert "/counters/skipped" in kinds
    assert unbroken.open(str(tmp_path)).load(keys=["/counters"])["/counters"]["skipped"] == 1


# -- B27 -----------------------------------------------------------------------------------------------------------------------


def accumulate(directory: Path, samples: int, epochs: int, stop_at: int | None = None) -> Iterator[float]:
    """One life of 'loss w*x, SGD 0.01 on the mean of four'; interrupted inside micro-batch `stop_at`."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = unbroken.Batches(numbers(samples), global_batch=4, shuffle=False, epochs=epochs)
    run = unbroken.Run(directory, model=model, optimizer=optimizer, data=data, units=4, lose_at_most="1 steps")
    seen = run.completed * 4
    for batch in run:
        for micro in batch:
            if seen == stop_at:
                raise Interrupted
            micro.backward(model.w * micro.x.mean())
            seen += 1
        run.step()
    yield float(model.w.detach())
    yield float(run.completed)


@pytest.mark.parametrize("k", range(24))
def test_B27_interrupted_at_every_micro_batch(tmp_path: Path, k: int) -> None:
    with pytest.raises(Interrupted):
        list(accumulate(tmp_path, 24, 1, k))
    w, steps = accumulate(tmp_path, 24, 1)
    assert w == pytest.approx(0.31, abs=1e-12)
    assert steps == 6
    assert unbroken.open(str(tmp_path)).certify().samples_exactly_once


@pytest.mark.parametrize("k", [3, 9, 10, 11, 17])
def test_B27_a_window_that_crosses_the_epoch(tmp_path: Path, k: int) -> None:
    expected = list(accumulate(tmp_path / "whole", 10, 2))
    with pytest.raises(Interrupted):
        list(accumulate(tmp_path / "cut", 10, 2, k))
    assert list(accumulate(tmp_path / "cut", 10, 2)) == expected
    assert expected[1] == 5


# -- B24 -----------------------------------------------------------------------------------------------------------------------

STREAMS = """
import json, os, random, sys
import numpy as np, torch
from torch import nn
import unbroken
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
random.seed(100 + rank); np.random.seed(100 + rank); torch.manual_seed(100 + rank)
generator = np.random.default_rng(7)
def draw(n):
    return [[random.random() for _ in range(n)], np.random.rand(n).tolist(), generator.random(n).tolist(), torch.rand(n).tolist()]
run = unbroken.Run(sys.argv[1], model=model, optimizer=optimizer, extras={"generator": generator},
                   data=unbroken.Batches(torch.utils.data.TensorDataset(torch.ones(64, 1)), global_batch=4), units=4,
                   lose_at_most="1 steps", total_steps=int(sys.argv[2]))
if sys.argv[3] == "disturbed":
    torch.utils.data.DataLoader(range(10), shuffle=True).__iter__()
    [random.random() + np.random.rand() + float(torch.rand(1)) for _ in range(100)]
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
out = []
for batch in run:
    for micro in batch:
        micro.backward(model(micro.x).sum())
    run.step()
    out.append(draw(3 + 4 * rank if run.completed == 1 else 5)[:2 if False else 4])
print(json.dumps(out))
"""


def streams(tmp_path: Path, name: str, steps: int, ranks: int, how: str = "plain") -> list[Any]:
    script = tmp_path / "streams.py"
    script.write_text(STREAMS.replace('extras={"generator": generator}', "extras={}").replace("generator.random(n).tolist()", "0"))
    outs = run_ranks([str(script), str(tmp_path / name), str(steps), how], ranks)
    return [json.loads(out.splitlines()[-1]) for out in outs]


@pytest.fixture(scope="module")
def whole_streams(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks draw in two uninterrupted steps."""
    return streams(tmp_path_factory.mktemp("streams"), "whole", 2, 2)


def test_B24_a_b_each_rank_continues_its_own_streams(tmp_path: Path, whole_streams: list[Any]) -> None:
    streams(tmp_path, "parts", 1, 2)
    second = streams(tmp_path, "parts", 2, 2, "disturbed")
    for rank in range(2):
        assert second[rank][-1] == whole_streams[rank][-1], "(a) the streams, (b) even if warm-up and seed() came in between"
    assert second[0][-1] != second[1][-1]


@pytest.mark.parametrize(
    ("ranks", "rule"),
    [
        (1, "random streams of ranks 1..1 of the checkpoint are not continued: there are fewer ranks now"),
        (3, "ranks beyond the 2 of the checkpoint start random streams of their own"),
    ],
)
def test_B24_d_other_numbers_of_ranks(tmp_path: Path, whole_streams: list[Any], ranks: int, rule: str) -> None:
    """Ranks that are known continue, others have streams of their own, and the rule is said."""
    streams(tmp_path, "run", 1, 2)
    script = tmp_path / "streams.py"
    script.write_text(script.read_text().replace("import unbroken", "import unbroken\nsys.stderr = sys.stdout", 1))
    outs = run_ranks([str(script), str(tmp_path / "run"), "2", "plain"], ranks)
    draws = [json.loads(out.splitlines()[-1])[-1] for out in outs]
    assert draws[:2] == [whole_streams[rank][-1] for rank in range(min(ranks, 2))]
    assert len({json.dumps(draw) for draw in draws}) == ranks, "every rank has a stream of its own"
    assert rule in outs[0]


# -- B12 -----------------------------------------------------------------------------------------------------------------------

COMMITTERS = """
import sys, torch, unbroken
from torch import nn
torch.manual_seed(0)
model = nn.Linear(2, 2)
data = unbroken.Batches(torch.utils.data.TensorDataset(torch.ones(400, 2)), global_batch=4)
run = unbroken.Run(sys.argv[1], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=data,
                   lose_at_most="1000 steps", total_steps=50)
for batch in run:
    for micro in batch:
        micro.backward(model(micro.x).sum())
    run.step()
    run.save(wait=True)
print("ok")
"""


def test_B12_b_four_ranks_commit_together_fifty_times(tmp_path: Path) -> None:
    script = tmp_path / "committers.py"
    script.write_text(COMMITTERS)
    outs = run_ranks([str(script), str(tmp_path / "run")], 4)
    assert all(out.splitlines()[-1] == "ok" for out in outs)
    archive = unbroken.open(str(tmp_path / "run"))
    assert [c.step for c in archive.steps()] == [48, 49, 50]
    assert archive.verify().ok
    left = [p for p in (tmp_path / "run").rglob("*") if ".tmp" in p.name]
    assert not left


# -- B08 -----------------------------------------------------------------------------------------------------------------------


def test_B08_f_a_rank_that_does_not_see_the_folder_stops_all(tmp_path: Path) -> None:
    """Rank 1 has an empty file system over the run's folder: nobody may start, and all say why."""
    folder = tmp_path / "seen"
    folder.mkdir()
    script = tmp_path / "committers.py"
    script.write_text(COMMITTERS.replace("total_steps=50", "total_steps=int(sys.argv[2])"))
    run_ranks([str(script), str(folder / "run"), "2"], 2)
    hidden = f"mount -t tmpfs tmpfs {folder} && exec {sys.executable} {script} {folder / 'run'} 4"
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    wait_until(lambda: not processes_of(folder), 10, "the daemon of the first life has ended")
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    seeing = subprocess.Popen(
        [sys.executable, str(script), str(folder / "run"), "4"], env=env | {"RANK": "0"}, stderr=subprocess.PIPE, text=True
    )
    blind = subprocess.Popen(["unshare", "-m", "sh", "-c", hidden], env=env | {"RANK": "1"}, stderr=subprocess.PIPE, text=True)
    errors = [process.communicate(timeout=60)[1] for process in (seeing, blind)]
    assert seeing.returncode != 0 and blind.returncode != 0
    assert "rank 1: " in errors[0], errors[0]
    assert [c.step for c in unbroken.open(str(folder / "run")).steps()][-1] == 2
