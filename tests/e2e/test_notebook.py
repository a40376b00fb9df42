"""A notebook, executed by a real kernel: cells run twice, interrupted, failing, and run again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import unbroken
from tests.rigs.tiny_run import end_daemon, train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
NEVER = "1000 steps"
"""No snapshot comes by itself: what goes on, goes on from what an interrupt kept."""

SET_UP = f"""
import os, sys, time, signal
sys.path.insert(0, {str(ROOT)!r})
import torch, unbroken
from tests.rigs.tiny_run import Tiny, samples, loss_of
def build():
    torch.manual_seed(3)
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
"""

OPEN = f"""
model, optimizer = build()
data = unbroken.Batches(samples(), global_batch=8, seed=1)
run = unbroken.Run("run", model=model, optimizer=optimizer, data=data, units=2, total_steps={STEPS}, lose_at_most="{NEVER}")
print("at", run.completed)
"""

LOOP = """
for batch in run:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
        {inside}
    run.step(clip_grad_norm=1.0)
    {after}
print("done", run.completed)
"""


def loop(inside: str = "pass", after: str = "pass") -> str:
    return LOOP.format(inside=inside, after=after)


class Notebook:
    """One kernel; `cell` executes code in it and returns what was printed."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._notebook = nbformat.v4.new_notebook()
        manager = AsyncKernelManager(kernel_name="python3")
        self.client = NotebookClient(self._notebook, km=manager, timeout=90, resources={"metadata": {"path": str(folder)}})
        self._loop.run_until_complete(self._start(str(folder)))

    async def _start(self, folder: str) -> None:
        await self.client.async_start_new_kernel(cwd=folder)
        await self.client.async_start_new_kernel_client()

    def cell(self, code: str) -> str:
        """Execute; CellExecutionError names the exception that came out of it."""
        made = nbformat.v4.new_code_cell(code)
        self._notebook.cells.append(made)
        self._loop.run_until_complete(self.client.async_execute_cell(made, len(self._notebook.cells) - 1))
        return "".join(text_of(output) for output in made.outputs)

    def interrupted(self, code: str) -> str:
        """Execute code that interrupts its own process, as the kernel's interrupt does: SIGINT to the kernel."""
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            self.cell(code)
        return "".join(text_of(output) for output in self._notebook.cells[-1].outputs)

    def close(self) -> None:
        """End the kernel in good order, as closing the notebook does."""
        manager: Any = self.client.km
        self.client.kc.stop_channels()
        self._loop.run_until_complete(manager.shutdown_kernel())
        self._loop.close()


def text_of(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain") or "")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder / "run", STEPS)
    end_daemon(folder / "run")
    return folder / "run"


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    made = Notebook(tmp_path)
    try:
        yield made
    finally:
        made.close()
        end_daemon(tmp_path / "run")


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def test_I8_cells_run_again_after_interrupts_and_errors_end_in_the_same_bits(notebook: Notebook, tmp_path: Path, reference: Path) -> None:
    notebook.cell(SET_UP)
    assert "at 0" in notebook.cell(OPEN)
    assert "unbroken.Run" in notebook.cell("run")
    # an interrupt inside a unit comes at once: the step is begun again, nothing else is lost
    notebook.interrupted(loop(inside=f"if run.completed == 2: {INTERRUPT}"))
    assert "at 2" in notebook.cell(OPEN), "the same cell again goes on where the first was"
    # between run.step and the boundary it waits: the step counts, with what the loop's body did after it
    notebook.interrupted(loop(after=f"if run.completed == 4: {INTERRUPT}; body_went_on = True"))
    assert "True" in notebook.cell("body_went_on")
    assert "2 steps done" not in (shown := notebook.cell("run"))
    assert "4 steps done" in shown
    # only the loop's cell again, on the same Run
    notebook.interrupted(loop(inside=f"if run.completed == 5 and micro.unit == 1: {INTERRUPT}"))
    # an error in the loop's body
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebook.cell(loop(inside="if run.completed == 6: 1 / 0"))
    assert "at 6" in notebook.cell(OPEN)
    # a break after run.step, then everything again
    notebook.cell(loop(after="if run.completed == 8: break"))
    assert "at 8" in notebook.cell(OPEN)
    # the same model in a new Run: what somebody has done to it meanwhile is not taken for the run's state
    notebook.cell(loop(after="if run.completed == 10: break"))
    notebook.cell("with torch.no_grad():\n    for p in model.parameters(): p.mul_(0.5)")
    opened = notebook.cell(OPEN.replace("model, optimizer = build()", ""))
    assert "at 8" in opened
    assert f"done {STEPS}" in notebook.cell(loop())
    assert "closed" in notebook.cell("run")
    with pytest.raises(CellExecutionError, match="this run is closed; make a new Run to go on"):
        notebook.cell(loop())
    assert f"at {STEPS}" in notebook.cell(OPEN), "a finished job, run again, has nothing to do"
    assert "nothing to do" in notebook.cell(loop())
    certificate = unbroken.open(tmp_path / "run").certify(reference)
    assert certificate.grade == "exact", certificate.problems


def test_a_break_and_a_closed_notebook_lose_nothing(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kernel's own interrupt, as the stop button sends it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    first = Notebook(tmp_path)
    first.cell(SET_UP + OPEN)
    pid = int(first.cell("print(os.getpid())"))

    async def stop_button() -> None:
        while "step 3" not in str(first._notebook.cells[-1].outputs):
            await asyncio.sleep(0.02)
        await first.client.km.interrupt_kernel()  # type: ignore[union-attr]

    pressed = first._loop.create_task(stop_button())
    first.interrupted(loop(inside="time.sleep(0.05)", after="print('step', run.completed)"))
    first._loop.run_until_complete(pressed)
    done = int(first.cell("print(run.completed)"))
    assert done >= 3
    assert f"at {done}" in first.cell(OPEN)
    first.close()
    assert not Path(f"/proc/{pid}").exists()
    end_daemon(tmp_path / "run")
    assert unbroken.open(tmp_path / "run").steps()[-1].step == done
    train(tmp_path / "run", STEPS)
    assert unbroken.open(tmp_path / "run").certify(reference).grade == "exact"
    end_daemon(tmp_path / "run")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_I8_interrupts_at_any_moment_lose_nothing_but_the_step_in_progress(tmp_path: Path, seed: int) -> None:
    steps = 40
    command = [sys.executable, "-W", "ignore", "-m", "tests.rigs.impatient", str(tmp_path / "run"), str(seed), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    begun = json.loads(done.stdout.splitlines()[-1])
    assert len(begun) > 1, "no interrupt has come in time: the test has shown nothing"
    assert begun == sorted(begun), "no step was done twice"
    train(tmp_path / "whole", steps)
    certificate = unbroken.open(tmp_path / "run").certify(tmp_path / "whole")
    assert certificate.grade == "exact", certificate.problems
    for name in ("run", "whole"):
        end_daemon(tmp_path / name)
