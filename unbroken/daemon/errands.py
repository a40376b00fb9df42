"""Work for a start that takes long: a checkpoint is brought back from the copy in a thread, while the daemon serves everybody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unbroken.core import messages as m
from unbroken.core.limits import ERRAND_NEWS_S
from unbroken.core.ports import Clock
from unbroken.shm.server import Client, Server

Refusal = Callable[[Client, m.Message, Exception], m.Error]


@dataclass
class _Errand:
    client: Client
    message: Any
    work: Callable[[], Any]
    then: Callable[[Client, Any, Any], None]
    news_s: float = 0.0
    result: Any = None
    error: Exception | None = None
    thread: threading.Thread = field(init=False)

    def run(self) -> None:
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001  it is raised in the event loop, which tells whoever asked
            self.error = error


class Errands:
    """At most one at a time. Who comes while one is under way (the rank 0 before has died) waits for its end, and then for its own."""

    def __init__(self, server: Server, clock: Clock, refusal: Refusal) -> None:
        self._server = server
        self._clock = clock
        self._refusal = refusal
        self._errand: _Errand | None = None
        self._next: _Errand | None = None

    @property
    def is_under_way(self) -> bool:
        """Does somebody wait?"""
        return self._errand is not None

    def ask(self, client: Client, message: Any, work: Callable[[], Any], then: Callable[[Client, Any, Any], None]) -> None:
        """Do `work` in a thread, then `then(client, message, its result)` in the event loop, which answers the client."""
        errand = _Errand(client, message, work, then)
        if self._errand is None:
            self._begin(errand)
        else:
            self._next = errand

    def turn(self) -> None:
        """Answer whoever waits if the work is done; else tell now and then that it goes on."""
        errand = self._errand
        if errand is None:
            return
        if errand.thread.is_alive():
            if self._clock.monotonic() >= errand.news_s:
                errand.news_s = self._clock.monotonic() + ERRAND_NEWS_S
                self._server.send((self._next or errand).client, m.Wait(text="a checkpoint is being brought back from the copy"))
            return
        self._errand = None
        if self._next is not None:
            coming, self._next = self._next, None
            self._begin(coming)
            return
        if self._server.worker(errand.client.rank) is not errand.client:  # it is gone
            return
        try:
            if errand.error is not None:
                raise errand.error
            errand.then(errand.client, errand.message, errand.result)
        except ConnectionError:
            return
        except Exception as error:  # noqa: BLE001  the client is told and may end; the daemon must outlive any request (I9)
            self._server.send(errand.client, self._refusal(errand.client, errand.message, error))

    def _begin(self, errand: _Errand) -> None:
        self._errand = errand
        errand.news_s = self._clock.monotonic() + ERRAND_NEWS_S
        errand.thread = threading.Thread(target=errand.run, name="errand", daemon=True)
        errand.thread.start()
