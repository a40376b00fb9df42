"""A run whose steps are made again: `python replay_run.py FOLDER STEPS`, on any number of ranks, told by its environment what goes wrong.

REPLAY_KILL "STEP:RANK": that rank kills itself once that step is applied, once in the run and once where it is made again. REPLAY_CHANGED
"STEP:WHAT": from that step on the script is another one, in its "loss", its "data", its "average" (which no loss shows) or because it
"ends". REPLAY_SLEEP: seconds per step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import unbroken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is a script, started from anywhere
from tests.rigs.tiny_run import DATA_SEED, Tiny, loss_of, samples


def asked(name: str) -> tuple[int, str]:
    step, _, what = os.environ.get(name, "").partition(":")
    return int(step or 10**9), what


def kill_once(folder: Path, step: int) -> None:
    """End this process like a power switch, unless it has been done."""
    at, rank = asked("REPLAY_KILL")
    mark = folder.with_name(f"killed-{at}-{os.environ.get('UNBROKEN_REPLAY') is not None}")
    if step == at and os.environ.get("RANK", "0") == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train up to so many steps in all."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    since, change = asked("REPLAY_CHANGED")
    torch.manual_seed(3)
    model = Tiny()
    average = {"mean": torch.zeros(150, 150), "beta": 0.9}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = unbroken.Run(
        folder,
        model=model,
        optimizer=optimizer,
        data=unbroken.Batches(samples(), global_batch=8, seed=DATA_SEED + 1 if change == "data" else DATA_SEED),
        extras={"average": average},
        lose_at_most=os.environ.get("REPLAY_INTERVAL", "1 steps"),
        keep=1,
        units=2,
        total_steps=steps,
        log_to=f"jsonl:{folder.with_name('log.jsonl')}",
    )
    for batch in run:
        time.sleep(float(os.environ.get("REPLAY_SLEEP", "0")))
        for micro in batch:
            micro.backward(loss_of(run.model, micro) * (1.5 if change == "loss" and batch.step >= since else 1.0))
        run.step(clip_grad_norm=1.0)
        run.log(loss=run.loss)
        average["mean"].mul_(average["beta"]).add_(
            model.body[0].weight.sum() * (2.0 if change == "average" and batch.step >= since else 1.0)
        )
        if run.once("seven"):
            folder.with_name("once").open("a").write("once\n")
        kill_once(folder, run.completed)
        if batch.step in (5, 7, 8, 10):
            run.save(milestone=batch.step in (5, 10), wait=True)
        if change == "ends" and batch.step >= since:
            break
    else:
        folder.with_name("final").write_text(str(run.completed))
    run.close()


if __name__ == "__main__":
    main()
