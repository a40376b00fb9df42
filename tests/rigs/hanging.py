"""A tiny run in which a rank hangs, is slow, or fails in a way that a test asks for. Prints the root of its last checkpoint.

argv: folder, steps. Environment: HANG is a JSON object: `how` (a name below), `rank`, `places` with the step from which
each strikes, `timeout` (of Run), `seconds`, `wait`: each step is saved aloud, `blind`: this rank finds no packs on disk. A place strikes
once per folder. When an error ends a rank, the moment is left in FOLDER.raised.RANK.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unbroken
from tests.rigs.tiny_run import Tiny, loss_of, samples
from unbroken.store.tiers.disk import DiskTier

RANK = int(os.environ.get("RANK", "0"))
ASKED: dict[str, Any] = json.loads(os.environ.get("HANG", "{}"))


def hold_the_lock() -> None:
    """Wait in C for a mutex that this thread holds already, and keep the interpreter's lock meanwhile."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def sleep_with_a_heartbeat() -> None:
    """The loop sleeps for ever; a thread that says all is well does not."""

    def beat() -> None:
        while True:
            time.sleep(0.05)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    time.sleep(10_000)


class Slow:
    """State that takes long to save on one rank, or cannot be saved."""

    def __init__(self, how: Callable[[], None] | None) -> None:
        self.how = how

    def state_dict(self) -> dict[str, int]:
        if self.how is not None:
            self.how()
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Locked(Exception):
    """Cannot be pickled or copied."""

    def __init__(self) -> None:
        super().__init__("the disk under the coffee machine is wet")
        self.lock = threading.Lock()


def fail() -> None:
    raise Locked


HANGS: dict[str, Callable[[], None]] = {
    "sleep": sleep_with_a_heartbeat,
    "lock": hold_the_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(ASKED["seconds"]),
    "pdb": breakpoint,
}


class Stuck(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set whose item never comes, once."""

    def __init__(self, mark: Path) -> None:
        self.data, self.mark, self.asked = samples(), mark, 0

    def is_here(self) -> bool:
        """In a worker process: it counts for itself, and the loop's step is not known there."""
        self.asked += 1
        return self.asked > 12 and is_struck("data", self.mark)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.is_here():
            time.sleep(10_000)
        return self.data[index]


reached = [0]


def is_struck(place: str, mark: Path) -> bool:
    """Is it now and here? True once per folder and place."""
    mark = mark.with_name(f"{mark.name}.{place}")
    if ASKED.get("rank") != RANK or place not in ASKED["places"] or reached[0] < ASKED["places"][place] or mark.exists():
        return False
    mark.write_text(f"{time.monotonic()}")
    return True


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    mark = Path(f"{directory}.struck.{RANK}")
    torch.manual_seed(3)
    model = Tiny()
    strike = HANGS.get(ASKED.get("how", ""), fail)
    slow = Slow(lambda: strike() if is_struck("start", mark) or is_struck("save", mark) else None)
    workers = int(os.environ.get("WORKERS", "0"))
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=unbroken.Batches(Stuck(mark), global_batch=12, seed=1, num_workers=workers),
        extras={"slow": slow},
        lose_at_most="1 steps",
        units=6,
        total_steps=steps,
        hang_timeout=ASKED.get("timeout", "auto"),
    )
    for batch in run:
        reached[0] = run.completed + 1
        for micro in batch:
            if is_struck("unit", mark):
                strike()
                time.sleep(1 if ASKED["how"] == "stop" else 0)  # on being woken up it shall not be far away at once
            micro.backward(loss_of(model, micro))
        assert run.step()
        if is_struck("eval", mark):
            with run.eval():
                strike()
        if is_struck("body", mark):
            strike()
        if ASKED.get("wait"):
            run.save(wait=True)
    if RANK == 0:
        print(json.dumps({"root": unbroken.open(directory).steps()[-1].root, "completed": run.completed}))


def go_blind(mark: Path) -> None:
    """From now on every pack is missing for this process."""
    read = DiskTier.read

    def without_packs(tier: DiskTier, path: str, *place: Any) -> bytes:
        if path.startswith("packs/"):
            mark.write_text(f"{time.monotonic()}")
            raise FileNotFoundError(2, "No such file or directory", path)
        return read(tier, path, *place)

    DiskTier.read = without_packs  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    if ASKED.get("blind") == RANK:
        go_blind(Path(f"{sys.argv[1]}.struck.{RANK}.load"))
    try:
        main()
    except Exception:
        Path(f"{sys.argv[1]}.raised.{RANK}").write_text(f"{time.monotonic()}")
        raise
