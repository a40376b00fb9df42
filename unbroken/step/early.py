"""Which buckets may leave while backward still runs: those whose gradients of the rank's last unit are all there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class EarlyStart:
    """Watches the gradients of a rank's last unit and starts each bucket, in order, when its last gradient has been accumulated.

    take(index): called with each gradient that is final, if given; start(bucket): the bucket is complete. Cost: 0.6 us per parameter in a
    watched backward, 0.2 us in any other. The first backward in each pass over a batch is a rehearsal: nothing leaves, and where a
    gradient comes twice in it (re-entrant activation checkpoints), nothing ever will. A parameter with hooks of the user's own, which
    may still change its gradient, holds its bucket back until the end of backward; so does one that gets no gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Sequence[int]],
        start: Callable[[int], None],
        take: Callable[[int], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._start = start
        self._take = take
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._hooks: dict[int, Any] = {}
        self._foreign: set[int] = set()
        self._missing: list[set[int]] | None = None
        self._next = 0
        self._rehearsed: set[int] = set()
        self._is_rehearsal = self._comes_twice = False
        self.was_late = False

    @contextmanager
    def watch(self, turn: int) -> Iterator[None]:
        """Around backward of the rank's last unit, in this pass over the batch."""
        if not self._buckets:
            yield
            return
        self._missing = [{index for index in bucket if self._parameters[index].requires_grad} for bucket in self._buckets]
        self._next, self.was_late = 0, False
        self._is_rehearsal = turn not in self._rehearsed
        self._foreign.clear()
        for index in self._bucket_of:
            self._hook(index)
        try:
            yield
            self._rehearsed.add(turn)
        finally:
            self._missing = None
        if self._comes_twice:
            self.stop()

    def stop(self) -> None:
        """Start nothing early any more."""
        self._buckets = []
        self.was_late = False
        self.close()

    def close(self) -> None:
        """Leave the parameters as they were found."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _hook(self, index: int) -> None:
        parameter = self._parameters[index]
        if index not in self._hooks and parameter.requires_grad:
            hook = partial(self._accumulated, index, self._bucket_of[index])
            self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if len(parameter._post_accumulate_grad_hooks or ()) > (index in self._hooks):
            self._foreign.add(index)

    def _accumulated(self, index: int, bucket: int, _: torch.Tensor) -> None:
        missing = self._missing
        if missing is None or index in self._foreign:
            return
        if index not in missing[bucket]:
            # a second backward inside this one, as re-entrant activation checkpoints run it
            self._comes_twice = self._comes_twice or self._is_rehearsal
            self.was_late = self.was_late or (not self._is_rehearsal and (self._take is not None or bucket < self._next))
            return
        missing[bucket].remove(index)
        if self._is_rehearsal:
            return
        if self._take is not None:
            self._take(index)
        while self._next < len(missing) and not missing[self._next]:
            self._next += 1
            self._start(self._next - 1)
