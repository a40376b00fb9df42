"""What people do in their loops, and in which order: nothing hangs, nothing is lost, the bits are the same."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import unbroken
from tests.rigs.launched import launched
from tests.rigs.tiny_run import Tiny, end_daemon, loss_of, open_run, samples, train
from unbroken.cluster.settings import PRELOAD

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture(autouse=True)
def no_daemon_stays(tmp_path: Path) -> Iterator[None]:
    yield
    for directory in tmp_path.iterdir():
        if directory.is_dir():
            end_daemon(directory)


# -- errors and the same loop again --------------------------------------------------------------------------------------------


class Failing(Dataset[Any]):
    """Raises once, at the n-th sample asked for."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.inner = samples()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError("the file server does not answer")
        return self.inner[index]


@pytest.mark.filterwarnings("ignore::unbroken.SaveWarning")  # a snapshot that the next one overtook may be called lost when the loop ended
@pytest.mark.parametrize("at", [1, 8, 9, 13, 17])
def test_a_loop_that_an_item_has_ended_is_begun_again_and_does_not_take_that_for_the_datas_end(tmp_path: Path, at: int) -> None:
    whole = train(tmp_path / "whole", STEPS)
    data = unbroken.Batches(Failing(at), global_batch=8, seed=1)
    run = open_run(tmp_path / "run", total_steps=STEPS, data=data)
    losses, lives = [], 0
    while len(losses) < STEPS and lives < 3:
        lives += 1
        try:
            for batch in run:
                for micro in batch:
                    micro.backward(loss_of(run.model, micro))
                run.step(clip_grad_norm=1.0)
                losses.append(run.loss)
        except OSError as error:
            assert "file server" in str(error)
    assert losses == whole
    assert lives == 2
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"


# -- B23: averages, scalers, counters ------------------------------------------------------------------------------------------


class One(nn.Module):
    """One weight, which a loss of -w moves by +1 per step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


def one_run(directory: Path, steps: int, extras: dict[str, Any], model: One) -> unbroken.Run:
    numbers = torch.utils.data.TensorDataset(torch.arange(64.0))
    return unbroken.Run(
        directory, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), extras=extras,
        data=unbroken.Batches(numbers, global_batch=1), total_steps=steps, lose_at_most="100 steps",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_B23_a_the_average_and_the_raw_weight_come_back_each_as_itself(tmp_path: Path, kind: str) -> None:
    """Saved after step 2 from inside an evaluation for which the average was swapped in, resumed, trained to step 4."""

    def life(steps: int, save_at: int) -> tuple[list[float], list[float]]:
        model, ema = One(), One()
        average = ema.w.data if kind == "tensor" else ema.w
        run = one_run(tmp_path / "run", steps, {"ema": {"w": average} if kind == "tensor" else ema}, model)
        raw, averaged = [model.w.item()], [average.item()]
        for batch in run:
            for micro in batch:
                micro.backward(-model.w)
            run.step()
            with torch.no_grad():
                average.mul_(0.9).add_(0.1 * model.w)
            if run.completed == save_at:
                with run.eval():
                    mine = model.w.detach().clone()
                    model.w.copy_(average)
                    run.save()
                    model.w.copy_(mine)
            raw.append(model.w.item())
            averaged.append(average.item())
        return raw, averaged

    life(2, save_at=2)
    assert float(unbroken.open(tmp_path / "run").load(2, keys=["/model/parameters/w"])["/model/parameters/w"]) == 2
    end_daemon(tmp_path / "run")
    raw, averaged = life(4, save_at=4)
    assert raw == [2, 3, 4]
    assert averaged == pytest.approx([0.29, 0.561, 0.9049])


def scaler_at(scale: float, tracker: int) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2000)
    made.load_state_dict(made.state_dict() | {"scale": scale, "_growth_tracker": tracker})
    return made


def test_B23_b_a_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, scaler=scaler_at(256.0, 1998))
    end_daemon(tmp_path / "run")
    fresh = torch.amp.GradScaler("cpu")
    train(tmp_path / "run", 2, scaler=fresh)
    assert (fresh.get_scale(), fresh._get_growth_tracker()) == (512.0, 0), "a fresh one would be at 65536"


@pytest.mark.parametrize("order", [("scaler", "optimizer"), ("optimizer", "scaler")])
def test_B23_b_in_either_order_of_loading(tmp_path: Path, order: tuple[str, str]) -> None:
    def objects(scaler: torch.amp.GradScaler) -> tuple[nn.Linear, dict[str, Any]]:
        model = nn.Linear(2, 1)
        made = {"scaler": scaler, "optimizer": torch.optim.AdamW(model.parameters())}
        return model, {name: made[name] for name in order}

    with unbroken.Store(tmp_path / "store") as store:
        store.save(0, objects(scaler_at(256.0, 1999))[1], wait=True)
        model, live = objects(torch.amp.GradScaler("cpu"))
        store.load(into=live)
    scaler, optimizer = live["scaler"], live["optimizer"]
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 0)


METRICS = [1.0, 0.5, 0.6, 0.6, 0.6, 0.4]


def early_stopping(directory: Path, interrupt_after: int = 0) -> tuple[int, dict[str, Any]]:
    """One evaluation per step, patience 3. Steps done in this life, and what the counters say at its end."""
    model = One()
    extras: dict[str, Any] = {"patience": {"best": float("inf"), "bad": 0, "stopped": False}}
    run, done = one_run(directory, 100, extras, model), 0
    for batch in run:
        patience = extras["patience"]
        if patience["stopped"]:
            break
        for micro in batch:
            micro.backward(-model.w)
        run.step()
        done += 1
        metric = METRICS[run.completed - 1]
        patience["bad"] = 0 if metric < patience["best"] else patience["bad"] + 1
        patience["best"] = min(metric, patience["best"])
        patience["stopped"] = patience["bad"] >= 3
        if run.completed == interrupt_after:
            break
    run.close()
    end_daemon(directory)
    return done, {"at": run.completed, **extras["patience"]}


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_B23_c_d_patience_goes_on_counting_and_a_job_that_has_stopped_trains_no_further(tmp_path: Path, k: int) -> None:
    first, _ = early_stopping(tmp_path / "run", interrupt_after=k)
    second, found = early_stopping(tmp_path / "run")
    assert (first + second, found) == (5, {"at": 5, "best": 0.5, "bad": 3, "stopped": True})
    assert early_stopping(tmp_path / "run") == (0, found)


# -- mixed precision -----------------------------------------------------------------------------------------------------------


def mixed(directory: Path, dtype: torch.dtype, stop: int, seen: list[float] | None = None) -> list[float]:
    """Autocast, and a scaler whose first scales overflow in float16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3) if dtype == torch.float16 else None
    run = open_run(directory, total_steps=stop, scaler=scaler)
    losses = []
    for batch in run:
        for micro in batch:
            with torch.autocast("cpu", dtype):
                loss = loss_of(run.model, micro)
            micro.backward(loss)
        assert run.step(clip_grad_norm=1.0)
        losses.append(run.loss)
        if seen is not None and scaler is not None:
            seen.append(scaler.get_scale())
    end_daemon(directory)
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_I13_mixed_precision_with_overflows_goes_on_exactly(tmp_path: Path, dtype: torch.dtype, k: int) -> None:
    scales: list[float] = []
    whole = mixed(tmp_path / "whole", dtype, 10, scales)
    assert mixed(tmp_path / "run", dtype, k) + mixed(tmp_path / "run", dtype, 10) == whole
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"
    if dtype == torch.float16:
        skipped = unbroken.open(tmp_path / "run").load(keys=["/counters"])["/counters"]["skipped"]
        assert skipped == sum(after < before for before, after in zip([2.0**22, *scales], scales, strict=False)) > 0
        assert any(after > before for before, after in itertools.pairwise(scales)), "it has grown as well"


# -- a debugger in the loop ----------------------------------------------------------------------------------------------------

DEBUGGED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.rigs.launched import launched
from tests.rigs.tiny_run import loss_of, open_run
run = open_run(sys.argv[1], total_steps={STEPS}, lose_at_most="100 steps")
for batch in run:
    for micro in batch:
        if run.completed == 2 and micro.unit == 1:
            breakpoint()
        micro.backward(loss_of(run.model, micro))
    run.step(clip_grad_norm=1.0)
    if run.completed == 4:
        breakpoint()
"""

LAUNCHERS = {
    "python": [sys.executable],
    "unbroken run": [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", "1"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_debugger_in_the_loop_reads_from_the_launchers_input_and_costs_nothing(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "debugged.py"
    script.write_text(DEBUGGED)
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(script), str(tmp_path / "run")],
        input="p 'at', run.completed\nc\np 'at', run.completed\np run\nc\n",
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "('at', 2)" in done.stdout
    assert "('at', 4)" in done.stdout
    assert "4 steps done" in done.stdout
    train(tmp_path / "whole", STEPS)
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"
    assert len(unbroken.open(tmp_path / "run").steps()) == 2, "no restart: the first and the last step only"


def test_a_debugger_without_an_input_ends_the_job_and_nothing_hangs(tmp_path: Path) -> None:
    script = tmp_path / "debugged.py"
    script.write_text(DEBUGGED)
    done = subprocess.run(
        [*LAUNCHERS["unbroken run"], str(script), str(tmp_path / "run")],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 5
    assert "BdbQuit" in done.stderr
    assert unbroken.open(tmp_path / "run").verify().ok


# -- compiled, in mixed precision, two models with two optimizers: killed, at three ranks ----------------------------------------

BODY = """
def finish(run, scaler, dtype, before_step):
    for batch in run:
        for micro in batch:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = loss_of(run.model, micro)
            micro.backward(loss)
            before_step(run)
        run.step(clip_grad_norm=1.0)

class Maker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.2))
        self.judge = [Tiny()]
    def forward(self, x):
        return self.judge[0](self.body(x))

def begin_two(folder):
    maker = Maker()
    models = {"maker": maker, "judge": maker.judge[0]}
    optimizers = [torch.optim.AdamW(models["judge"].parameters(), lr=1e-2), torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5), torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 10)]
    run = open_run(folder, model=models, optimizer=optimizers, scheduler=schedulers, total_steps=10, units=4, lose_at_most="3 steps")
    run.model = maker
    return run, None

def begin(folder, backend, dtype):
    torch.manual_seed(3)
    if backend == "two models":
        return begin_two(folder)
    model = torch.compile(Tiny(), backend=backend) if backend else Tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3) if dtype == torch.float16 else None
    return open_run(folder, model=model, scaler=scaler, total_steps=10, units=4, lose_at_most="3 steps"), scaler
"""

LAUNCHED = f"""
sys.path.insert(0, {str(ROOT)!r})
import torch
from tests.rigs.tiny_run import Tiny, loss_of, open_run
{BODY}
def kill(run):
    if ATTEMPT == 0 and RANK == 1 and run.completed == 5:
        os.kill(os.getpid(), signal.SIGKILL)
backend, dtype = os.environ["HABIT_BACKEND"], getattr(torch, os.environ["HABIT_DTYPE"])
run, scaler = begin(os.path.join(FOLDER, "run"), backend, dtype)
mark("opened", done=run.completed)
finish(run, scaler, dtype, kill)
"""


def uninterrupted(folder: Path, backend: str, dtype: str) -> str:
    """The state root that one rank ends in, in this process."""
    names: dict[str, Any] = {"torch": torch, "Tiny": Tiny, "loss_of": loss_of, "open_run": open_run}
    exec(BODY, names)
    run, scaler = names["begin"](folder, backend, getattr(torch, dtype))
    names["finish"](run, scaler, getattr(torch, dtype), lambda _: None)
    return str(unbroken.open(folder).steps()[-1].root)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", "float32"),
        ("", "float16"),
        ("two models", "float32"),
        pytest.param("inductor", "float32", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param("inductor", "bfloat16", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_I13_every_habit_killed_at_three_ranks_ends_in_the_same_root(tmp_path: Path, backend: str, dtype: str) -> None:
    """Against one rank that nobody kills; forked workers, so that compiling in a forked process is covered, too."""
    env = {"HABIT_BACKEND": backend, "HABIT_DTYPE": dtype, "OMP_NUM_THREADS": "1"}
    with launched(tmp_path, LAUNCHED, "--nproc-per-node", "3", "--preload", PRELOAD, env=env) as job:
        assert job.wait(500) == 0, job.stderr
        done = {mark["attempt"]: mark["done"] for mark in job.marks("opened")}
    end_daemon(tmp_path / "run")
    assert done[0] == 0
    assert done[1] >= 3, "it went on, it did not begin again"
    found = unbroken.open(tmp_path / "run")
    assert found.verify().ok
    assert not any("_orig_mod" in variable["name"] for variable in found.variables())
    assert str(found.steps()[-1].root) == uninterrupted(tmp_path / "one", backend, dtype)
