"""Which buckets may leave while backward still runs: those whose gradients of the rank's last unit are all there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class EarlyStart:
    """Watches the gradients of a rank's last unit and starts each bucket, in order, when its last gradient has been accumulated.

    Cost: a Python call per parameter and backward, about 1 us. A parameter with hooks of the user's own, which may still change its
    gradient, holds its bucket back until the end of backward; so does one that gets no gradient.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Sequence[int]], start: Callable[[int], None]) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._start = start
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._hooks: dict[int, Any] = {}
        self._missing: list[set[int]] | None = None
        self._next = 0
        self.was_late = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around backward of the rank's last unit."""
        if not self._buckets:
            yield
            return
        self._missing = [{index for index in bucket if self._parameters[index].requires_grad} for bucket in self._buckets]
        self._next, self.was_late = 0, False
        for index in self._bucket_of:
            parameter = self._parameters[index]
            if index not in self._hooks and parameter.requires_grad:
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            others = parameter._post_accumulate_grad_hooks
            if others is not None and len(others) > (index in self._hooks):
                self._missing[self._bucket_of[index]].add(-1)  # never complete
        try:
            yield
        finally:
            self._missing = None

    def stop(self) -> None:
        """Start nothing early any more."""
        self._buckets = []
        self.was_late = False
        self.close()

    def close(self) -> None:
        """Leave the parameters as they were found."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        number = self._bucket_of[index]

        def accumulated(_: torch.Tensor) -> None:
            missing = self._missing
            if missing is None:
                return
            if number < self._next:
                self.was_late = True  # a second backward inside this one, as re-entrant activation checkpoints run it
            missing[number].discard(index)
            while self._next < len(missing) and not missing[self._next]:
                self._next += 1
                self._start(self._next - 1)

        return accumulated
