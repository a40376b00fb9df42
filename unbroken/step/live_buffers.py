"""A model's buffers within a step: every unit starts from the values of the step's beginning, whatever the units before have written.

A forward may write a buffer in place or bind another tensor to its name (`self.count = self.count + 1`); both are followed. A buffer
that `state_dict` leaves out and that grows is taken for a cache: the tensor of the step's beginning comes back, and the next forward
makes its cache anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from unbroken.capture import names


class LiveBuffers:
    """Cost: a lookup per buffer and unit, and where there are buffers one copy of them per step and one per unit."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        found: dict[int, torch.Tensor] = {}
        for model in models.values():
            for _, module in names.modules(model):
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        self._places.append((module, name, buffer))
                        found.setdefault(id(buffer), buffer)
        self.floats = [b for b in found.values() if b.is_floating_point()]
        self.integers = [b for b in found.values() if not b.is_floating_point()]
        self._began: list[torch.Tensor] = []

    @property
    def all(self) -> list[torch.Tensor]:
        """Each buffer once, floating ones first."""
        return [*self.floats, *self.integers]

    @torch.no_grad()
    def remember(self) -> None:
        """This is the step's beginning."""
        self.settle()
        self._began = [buffer.detach().clone() for buffer in self.all]

    @torch.no_grad()
    def rewind(self) -> None:
        """Be as at the step's beginning."""
        for module, name, buffer in self._places:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
        for buffer, began in zip(self.all, self._began, strict=True):
            buffer.copy_(began)

    @torch.no_grad()
    def settle(self) -> None:
        """Take over what was bound to a buffer's name since. RuntimeError where that is no value of this buffer."""
        for module, name, buffer in self._places:
            now = module._buffers.get(name)
            if now is buffer:
                continue
            if now is not None and (now.shape, now.dtype) == (buffer.shape, buffer.dtype):
                buffer.copy_(now)
            elif name not in module._non_persistent_buffers_set:
                what = "removed" if now is None else f"replaced by one of {now.dtype}{list(now.shape)}"
                raise RuntimeError(
                    f"buffer {name!r} of {type(module).__name__}, {buffer.dtype}{list(buffer.shape)}, was {what} inside a step: keep its "
                    "shape and type, or register it with persistent=False if it is a cache"
                )
            module._buffers[name] = buffer

    def changed(self) -> list[torch.Tensor]:
        """Of each buffer whether it differs from the step's beginning; the answers stay on the device.

        No one bumps the version of BatchNorm's statistics: only a comparison tells whether a unit wrote a buffer.
        """
        return [_differs(now, began) for now, began in zip(self.all, self._began, strict=True)]


def _differs(now: torch.Tensor, began: torch.Tensor) -> torch.Tensor:
    """Whether any element has another value (NaN equals NaN)."""
    if now.is_floating_point() and now.element_size() == 1:  # float8 has no comparison of its own
        return (now.view(torch.uint8) != began.view(torch.uint8)).any()
    if now.is_floating_point() or now.is_complex():
        return ((now != began) & ~(now.isnan() & began.isnan())).any()
    return (now != began).any()
