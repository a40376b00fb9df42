"""What the training loop sees: a step's batch on this rank, made of units."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unbroken.core.limits import MAX_WEIGHT
from unbroken.data.source import Unit


class Micro:
    """One unit: `x` and `y` are the first two fields of a sample, `data` all of it as the loader collated it.

    `ids` are the sample ids that came out of the loader; `step` counts from 1, `unit` from 0.
    """

    __slots__ = ("_backward", "_weight", "data", "done", "ids", "step", "unit")

    def __init__(self, unit: Unit, backward: Callable[[Micro, torch.Tensor | None], None]) -> None:
        self.step = unit.step
        self.unit = unit.unit
        self.ids = unit.ids
        self._weight = unit.weight
        self.data = unit.data
        self.done = False
        self._backward = backward

    @property
    def weight(self) -> int:
        """How much this unit's mean loss counts in the step's: its number of samples, unless set before `backward`.

        Set it to what the loss is the mean over, such as the number of tokens that are not masked: `micro.weight = (y != -100).sum()`.
        The step's gradient is then sum(w_u g_u) / sum(w_u), as over one large batch. With 0 the unit counts for nothing, whatever its
        loss is. ValueError or TypeError for anything but a whole number up to 2**32. A tensor on an accelerator is waited for.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: Any) -> None:
        if self.done:
            raise RuntimeError(f"micro.weight of unit {self.unit} comes too late: set it before micro.backward(loss)")
        try:
            number = operator.index(weight)
        except TypeError:
            raise TypeError(f"micro.weight={weight!r:.100}: give a whole number, such as a count of tokens") from None
        if isinstance(weight, bool) or not 0 <= number <= MAX_WEIGHT:
            raise ValueError(f"micro.weight={weight!r:.100}: give a whole number from 0 to {MAX_WEIGHT}")
        self._weight = number

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

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run backward for the mean loss over this unit's samples (see `weight`) and set gradient and loss aside. Once per unit.

        loss: None where you have called backward yourself (several times, or with a GradScaler's scale): then what is in `.grad` is
        taken for the gradient of this unit's mean loss, and the step has no loss. With weight 0 nothing is run.
        Cost: backward, then one addition of gradients for each unit but the first; on accelerators no synchronisation.
        """
        if self.done:
            raise RuntimeError(f"unit {self.unit} of step {self.step} has had its backward; add several losses up before calling it")
        if loss is not None and (not torch.is_tensor(loss) or loss.numel() != 1):
            raise TypeError("micro.backward(loss): loss must be a tensor with one element, the mean over the unit's samples, or None")
        if loss is not None and self.weight and not loss.requires_grad:
            raise RuntimeError(
                "micro.backward(loss): loss depends on no parameter that is trained (detached, made under no_grad, or all are frozen)"
            )
        self._backward(self, loss if self.weight else None)
        self.done = True


class Batch:
    """This rank's units of one step, in order; to be iterated once, and once more after each `update.reduce()` in `run.update()`."""

    def __init__(self, step: int, units: Callable[[], Iterator[Micro]]) -> None:
        self.step = step
        self.begun = False
        self._units = units

    def __iter__(self) -> Iterator[Micro]:
        if self.begun:
            raise RuntimeError(
                f"the batch of step {self.step} was iterated before: its units come once, so do all with a unit in one pass, "
                "or open `with run.update() as update:`, where they come again after update.reduce()"
            )
        self.begun = True
        return self._units()
