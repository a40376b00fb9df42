"""Run every benchmark of this folder and keep its JSON under bench/results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHES = ("reduce", "step_path", "ordered")


def main() -> None:
    """One after the other, so that none disturbs another."""
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    for name in BENCHES:
        print(f"bench/{name}.py ...", flush=True)
        done = subprocess.run([sys.executable, "-W", "ignore", "-m", f"bench.{name}"], stdout=subprocess.PIPE, text=True, check=True)
        (results / f"{name}.json").write_text(done.stdout[done.stdout.index("{") :])
        print(done.stdout)


if __name__ == "__main__":
    main()
