"""From SIGKILL of a worker to the next finished step: `unbroken run` against torchrun with DCP, the same model on two ranks.

    python -m bench.recovery [--trials 7] [--arms ours,torchrun,torchft,nvrx] > bench/results/recovery.json

Each trial is a job of its own in which rank 1 kills itself in the forward of step 62, once; trials of the arms alternate. The clock
starts at the victim's last line and stops when rank 0 has finished the first step after it. All but torchft, which copies a living
peer's state, save every 5 steps. `total_s` is always the first step with two members again, their state restored; where the survivor
trains alone until then, `survivor_s` is its own next step. torchft and NVRx are skipped where they are not installed: bench/others.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench import others
from unbroken.demo.story import read_accounts
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

COMMON = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
STEPS, HIT, EVERY = 70, 62, 5  # late enough that standby processes are there, as they are in a real run

def strike(step):
    if step == HIT and rank == 1 and not (folder / "killed").exists():
        (folder / "killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

def finished(step):
    if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and not (folder / "back").exists():
        (folder / "back").write_text(repr(time.monotonic()))
"""

OURS = (
    COMMON
    + """
import torch, unbroken
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text
torch.manual_seed(0)
model = ByteGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = unbroken.Batches(ByteWindows(library_text()), global_batch=8, seed=0)
run = unbroken.Run(folder / "run", model=model, optimizer=optimizer, data=data, units=2, total_steps=STEPS, lose_at_most=f"{EVERY} steps")
for batch in run:
    strike(batch.step)
    for micro in batch:
        micro.backward(model(micro.x, micro.y))
    if run.step():
        finished(batch.step)
"""
)

TORCHRUN = (
    COMMON
    + """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(ByteGPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = ByteWindows(library_text())
loader = iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
step, latest = 0, folder / "latest"
if latest.exists():
    step = int(latest.read_text())
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
while step < STEPS:
    strike(step + 1)
    x, y = next(loader)
    model(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    finished(step)
    if step % EVERY == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
        dist.barrier()
        if rank == 0:
            latest.write_text(str(step))
"""
)

ARMS: dict[str, tuple[str, list[str]]] = {
    "unbroken": (OURS, [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", "2"]),
    "unbroken_cold": (OURS, [sys.executable, "-m", "unbroken", "run", "--preload", "", "--nproc-per-node", "2"]),
    "torchrun_dcp": (
        TORCHRUN,
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--monitor-interval", "0.1",
         "--nproc-per-node", "2"],
    ),
}  # fmt: skip

GROUPS = {
    "ours": ("unbroken", "unbroken_cold"),
    "torchrun": ("torchrun_dcp",),
    "torchft": ("torchft", "torchft_spare"),
    "nvrx": ("nvrx",),
}


def trial(arm: str, folder: Path) -> dict[str, float]:
    """One job; seconds from the kill to the next finished step, ours by phase."""
    if arm in others.ARMS:
        script, launch = others.ARMS[arm]
        (folder / "train.py").write_text(COMMON + script)
        return launch(folder)
    script, command = ARMS[arm]
    (folder / "train.py").write_text(script)
    # without this a restart under torchrun meets the addresses of dead processes in about half of the runs
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*command, str(folder / "train.py"), str(folder)], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{arm} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    killed_s, back_s = float((folder / "killed").read_text()), float((folder / "back").read_text())
    found = {"total_s": back_s - killed_s}
    if arm.startswith("unbroken"):
        account = read_accounts(Repository.open(DiskTier(str(folder / "run"))))[1]
        at: dict[str, float] = {}
        for event in account.events:
            if event.name in ("recovery", "start"):
                at |= event.at
        ends = [("detect", at["detect"]), ("respawn", at["process"]), ("rendezvous", at["rendezvous"]), ("rollback", at["rollback"])]
        before = killed_s
        for name, moment_s in [*ends, ("first_step", back_s)]:
            found[f"{name}_s"], before = moment_s - before, moment_s
    return found


def arguments() -> tuple[int, list[str]]:
    """Trials, and the groups of arms."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--arms", default=",".join(GROUPS), help="of %(default)s; what is not installed is skipped")
    options = parser.parse_args()
    groups = options.arms.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no arms {', '.join(sorted(unknown))}: choose from {', '.join(GROUPS)}")
    return options.trials, groups


def main() -> None:
    """Print one JSON document."""
    trials, groups = arguments()
    named = [arm for group in groups for arm in GROUPS[group]]
    skipped = {arm: reason for arm in named if arm in others.ARMS and (reason := others.missing(arm))}
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in named if arm not in skipped}
    load = os.getloadavg()[0]
    for number in range(trials):
        for arm, found in results.items():
            with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
                found.append(trial(arm, Path(folder)))
            print(f"trial {number + 1} of {trials}, {arm}: {found[-1]['total_s']:.2f} s", file=sys.stderr, flush=True)
    medians: dict[str, dict[str, Any]] = {
        arm: {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]} for arm, found in results.items()
    }
    document: dict[str, Any] = {
        "command": f"python -m bench.recovery --trials {trials} --arms {','.join(groups)}",
        "machine": {
            "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
            "load_before": load, "load_after": os.getloadavg()[0],
        },
        "medians": medians | {arm: {"skipped": reason} for arm, reason in skipped.items()},
    }  # fmt: skip
    if {"torchrun_dcp", "unbroken"} <= medians.keys():
        document["times_faster_than_torchrun"] = round(medians["torchrun_dcp"]["total_s"] / medians["unbroken"]["total_s"], 2)
    document |= {"settings": {arm: others.settings(arm) for arm in results if arm in others.ARMS}, "trials": results}
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
