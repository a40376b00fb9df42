"""Work behind the caller's back, in order, in a thread that the interpreter's exit waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Background:
    """Runs jobs in order, in a thread that lives only while there are any: the interpreter's exit waits for them and for nothing else."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], None], bool]] = deque()
        self._num_awaited = 0
        self._changed = threading.Condition()
        self._is_running = False

    def submit(self, job: Callable[[], None], *, awaited: bool = True) -> None:
        """Run `job` after those submitted before it. It must not raise. One that is not `awaited` need not be over for `join`."""
        with self._changed:
            self._jobs.append((job, awaited))
            self._num_awaited += awaited
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="unbroken-store", daemon=False).start()

    def join(self, timeout_s: float, *, awaited: bool = True) -> bool:
        """Wait until no awaited job is left, or none at all; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._num_awaited if awaited else self._is_running), timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                job, awaited = self._jobs.popleft()
            try:
                job()
            except BaseException:  # raised again: a defect of ours ends this thread, and must not keep `join` waiting for it
                with self._changed:
                    self._is_running, self._num_awaited = False, 0
                    self._changed.notify_all()
                raise
            del job  # its staging memory must not be held by a waiting thread
            with self._changed:
                self._num_awaited -= awaited
                self._changed.notify_all()
