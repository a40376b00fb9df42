"""Collectives beside the computation: one after another, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from unbroken.step.exchange import ExchangeFailed

T = TypeVar("T")


class Lane:
    """Every rank must hand in the same work in the same order. After a failure nothing more is started: the order would be broken.

    The thread is a daemon: a collective that waits for a rank which never comes must not keep the process from ending. At most as much
    work waits here as a step has buckets.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._failed: ExchangeFailed | None = None
        threading.Thread(target=self._run, name="unbroken exchange", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when all that was handed in before is done."""
        future: Future[T] = Future()
        self._work.put((future, work))  # type: ignore[arg-type]
        return future

    def abandon(self) -> None:
        """Begin nothing more; the thread ends after what it does now. Idempotent."""
        self._failed = self._failed or ExchangeFailed("the attempt was given up")
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            item = None  # what it holds must not live until the next one comes
            try:
                if self._failed is not None:
                    raise self._failed
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  (handed on to whoever waits for the result)
                self._failed = error if isinstance(error, ExchangeFailed) else ExchangeFailed(f"an earlier bucket failed: {error!r}")
                future.set_exception(error)
