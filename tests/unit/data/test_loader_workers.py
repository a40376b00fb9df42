"""Worker processes of a loader: they end with their trainer, survive signals meant for it, and go when the source goes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.rigs.launched import wait_until
from tests.rigs.loader_lives import Augmented
from unbroken.data.loader import Batches, as_source
from unbroken.data.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
ROOT = Path(__file__).resolve().parents[3]

HANGING_TRAINER = """
import time
from tests.rigs.loader_lives import Setting, make
source = make(Setting("{kind}", num_workers=2, epochs=None))
units = source.units()
next(units)
print("ready", flush=True)
time.sleep(600)
"""


class Slow(Augmented):
    """Every item takes a while, so that a signal finds the workers in the middle of it."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


def slow_source(kind: str = "batches") -> Source:
    data: Any = Batches(Slow(), global_batch=4, epochs=2, num_workers=2)
    if kind == "torchdata":
        data = StatefulDataLoader(Slow(), batch_size=1, num_workers=2)
    source = as_source(data, units=4)
    source.bind(units=4, block=range(4), rank=0, world_size=1)
    return source


def workers_of(pid: int) -> list[psutil.Process]:
    """Forked children only: a fork server or resource tracker has another command line."""
    mother = psutil.Process(pid)
    return [child for child in mother.children() if child.is_running() and child.cmdline() == mother.cmdline()]


@pytest.mark.parametrize("kind", ["batches", "torchdata"])
def test_a_signal_to_the_whole_job_leaves_the_workers_to_their_trainer(kind: str) -> None:
    source = slow_source(kind)
    units = source.units()
    seen = [next(units)]
    workers = workers_of(os.getpid())
    assert len(workers) == 2
    others = [
        sys.executable,
        "-c",
        f"import os, signal\nfor p in {[w.pid for w in workers]}:\n  os.kill(p, signal.SIGTERM); os.kill(p, signal.SIGUSR1)",
    ]
    subprocess.run(others, check=True, timeout=60)
    seen += islice(units, 199)
    assert len(seen) == 200
    source.close()
    wait_until(lambda: not any(worker.is_running() for worker in workers), "the workers' end", 10)


def test_the_trainer_itself_can_end_a_worker() -> None:
    source = slow_source()
    next(source.units())
    workers = workers_of(os.getpid())
    os.kill(workers[0].pid, signal.SIGTERM)
    wait_until(lambda: not workers[0].is_running() or workers[0].status() == psutil.STATUS_ZOMBIE, "the worker's end", 10)
    source.close()


@pytest.mark.parametrize("kind", ["batches", "torchdata"])
def test_workers_end_at_once_when_their_trainer_is_killed(kind: str) -> None:
    script = HANGING_TRAINER.replace("{kind}", kind)
    trainer = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        workers = workers_of(trainer.pid)
        assert len(workers) == 2
    finally:
        trainer.kill()
        trainer.wait(30)  # not communicate(): the workers hold the pipe too
    wait_until(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers), "the workers' end", 2)
    trainer.stdout.close()


@pytest.mark.alone
@pytest.mark.parametrize(("closing", "kind"), [("close", "batches"), ("drop", "batches"), ("close", "torchdata")])
def test_workers_go_with_their_source(closing: str, kind: str) -> None:
    source = slow_source(kind)
    units = source.units()
    next(units)
    workers = workers_of(os.getpid())
    assert len(workers) == 2
    gc.disable()  # nothing may need a collection of cycles
    try:
        began = time.monotonic()
        if closing == "close":
            source.close()
            source.close()
        else:
            del source, units
        assert time.monotonic() - began < 4, "torch waits 5 s for a worker it cannot reach"
    finally:
        gc.enable()
    wait_until(lambda: not any(worker.is_running() for worker in workers), "the workers' end", 10)
