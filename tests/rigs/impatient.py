"""A person at an interactive prompt who interrupts the loop at random moments, and runs the cell, or only its loop, again.

python -m tests.rigs.impatient FOLDER SEED STEPS; prints where each try began.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import unbroken
from tests.rigs.tiny_run import loss_of, open_run

MAX_WAIT_S = 0.15


def main(folder: str, seed: int, steps: int) -> list[int]:
    """Steps that were done when each try began."""
    sys.ps1 = ">>> "  # what makes a session interactive
    dice, busy, begun = random.Random(seed), threading.Event(), []
    threading.Thread(target=press, args=(random.Random(seed + 1), busy), daemon=True).start()
    run: unbroken.Run | None = None
    while not begun or begun[-1] < steps:
        try:
            if run is None or dice.random() < 0.5:
                run = open_run(folder, total_steps=steps, lose_at_most="1000 steps")
            begun.append(run.completed)
            busy.set()
            for batch in run:
                for micro in batch:
                    micro.backward(loss_of(run.model, micro))
                run.step(clip_grad_norm=1.0)
        except KeyboardInterrupt as error:
            sys.last_value = error  # as an interactive session keeps it
        except RuntimeError as error:
            assert "make a new Run" in str(error)
            run = None
        quiet(busy)
    return begun


def quiet(busy: threading.Event) -> None:
    """Let an interrupt that is on its way arrive where it does no harm."""
    while busy.is_set():
        try:
            busy.clear()
            time.sleep(0.1)
        except KeyboardInterrupt:
            continue


def press(dice: random.Random, busy: threading.Event) -> None:
    while True:
        busy.wait()
        time.sleep(dice.random() * MAX_WAIT_S)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
