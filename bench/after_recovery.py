"""How fast a run is after a recovery: the first 100 steps after a killed worker against the 100 before it.

    python -m bench.after_recovery [--trials 5] > bench/results/after_recovery.json

Each trial is a job of its own on two ranks, in which rank 1 kills itself in the forward of step 112. The journal says when steps were
applied; the first 10 of the job are left out, the first ones after the recovery are not.
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

import torch

from bench.recovery import OURS
from unbroken.demo.story import read_accounts
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

STEPS, HIT, WARM, NUM = 215, 112, 10, 100
SCRIPT = OURS.replace("STEPS, HIT, EVERY = 70, 62, 5", f"STEPS, HIT, EVERY = {STEPS}, {HIT}, 5")


def trial(folder: Path) -> tuple[float, float]:
    """Seconds of NUM steps before the kill, and of the first NUM after it, from the moment at which the state is back."""
    assert SCRIPT != OURS
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unbroken", "run", "--nproc-per-node", "2", str(folder / "train.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    before, after = list(read_accounts(Repository.open(DiskTier(str(folder / "run")))).values())[:2]
    opened_s = next(event.at["align"] for event in after.events if event.name == "start")
    return before.applied[WARM + NUM] - before.applied[WARM], after.applied[min(after.applied) + NUM - 1] - opened_s


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    found, load = [], os.getloadavg()[0]
    for number in range(trials):
        with tempfile.TemporaryDirectory(prefix="after-") as folder:
            found.append(trial(Path(folder)))
        print(f"trial {number + 1} of {trials}: {found[-1][0] / found[-1][1]:.3f}", file=sys.stderr, flush=True)
    ratios = sorted(before / after for before, after in found)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    document = {
        "command": f"python -m bench.after_recovery --trials {trials}",
        "machine": machine | {"load_before": load},
        "steps": NUM,
        "speed_after_to_before": {"median": round(statistics.median(ratios), 4), "all": [round(ratio, 4) for ratio in ratios]},
        "seconds": found,
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
