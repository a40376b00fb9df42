"""What the training loop sees: a step's batch on this rank, made of units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unbroken.data.source import Unit


class Micro:
    """One unit: `x` and `y` are the first two fields of a sample, `data` all of it as the loader collated it.

    `ids` are the sample ids that came out of the loader, `weight` their number; `step` counts from 1, `unit` from 0.
    """

    __slots__ = ("_backward", "data", "done", "ids", "step", "unit", "weight")

    def __init__(self, unit: Unit, backward: Callable[[Micro, torch.Tensor], None]) -> None:
        self.step = unit.step
        self.unit = unit.unit
        self.ids = unit.ids
        self.weight = unit.weight
        self.data = unit.data
        self.done = False
        self._backward = backward

    @property
    def x(self) -> Any:
        """The first field of the batch (the batch itself when it is one tensor)."""
        return self.data[0] if isinstance(self.data, list | tuple) else self.data

    @property
    def y(self) -> Any:
        """The second field of the batch."""
        if not isinstance(self.data, list | tuple) or len(self.data) < 2:
            raise AttributeError("this dataset's samples have no second field; use micro.data")
        return self.data[1]

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward for the mean loss over this unit's samples and set gradient and loss aside. Once per unit.

        Cost: backward, then one addition of gradients for each unit but the first; on accelerators no synchronisation.
        """
        if self.done:
            raise RuntimeError(f"unit {self.unit} of step {self.step} has had its backward; add several losses up before calling it")
        if not torch.is_tensor(loss) or loss.numel() != 1:
            raise TypeError("micro.backward(loss): loss must be a tensor with one element, the mean over the unit's samples")
        if not loss.requires_grad:
            raise RuntimeError(
                "micro.backward(loss): loss depends on no parameter that is trained (detached, made under no_grad, or all are frozen)"
            )
        self._backward(self, loss)
        self.done = True


class Batch:
    """This rank's units of one step, to be iterated once, in order."""

    def __init__(self, step: int, units: Callable[[], Iterator[Micro]]) -> None:
        self.step = step
        self._units = units
        self._begun = False

    def __iter__(self) -> Iterator[Micro]:
        if self._begun:
            raise RuntimeError(f"the batch of step {self.step} was iterated before: its units come once, so do all with a unit in one pass")
        self._begun = True
        return self._units()
