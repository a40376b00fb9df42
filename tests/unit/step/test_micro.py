"""What the loop sees of a unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unbroken.data.source import Unit
from unbroken.step.micro import Batch, Micro


def micro(data: Any, calls: list[torch.Tensor | None] | None = None) -> Micro:
    unit = Unit(3, 1, np.array([4, 5]), 2, data)
    return Micro(unit, lambda _, loss: (calls if calls is not None else []).append(loss))


def test_a_unit_says_which_it_is() -> None:
    made = micro(None)
    assert (made.step, made.unit, made.weight, made.ids.tolist(), made.done) == (3, 1, 2, [4, 5], False)


@pytest.mark.parametrize("data", [("a", "b", "c"), ["a", "b", "c"]])
def test_the_first_two_fields_have_short_names(data: Any) -> None:
    assert (micro(data).x, micro(data).y, micro(data).data) == ("a", "b", data)


@pytest.mark.parametrize("data", [torch.ones(2), {"a": 1}])
def test_a_batch_that_is_one_value_is_its_own_x(data: Any) -> None:
    assert micro(data).x is data


@pytest.mark.parametrize("data", [torch.ones(2), {"a": 1}, ("a",), []])
def test_a_missing_second_field_is_named(data: Any) -> None:
    with pytest.raises(AttributeError, match=r"no second field; use micro\.data"):
        _ = micro(data).y


def test_backward_is_once_per_unit() -> None:
    calls: list[torch.Tensor | None] = []
    made = micro(None, calls)
    made.backward(torch.ones((), requires_grad=True))
    assert made.done
    with pytest.raises(RuntimeError, match=r"unit 1 of step 3 has had its backward"):
        made.backward(torch.ones((), requires_grad=True))
    assert len(calls) == 1


@pytest.mark.parametrize("loss", [1.0, torch.ones(2), torch.ones(0)])
def test_a_loss_that_is_no_single_number_is_refused_before_anything_happens(loss: Any) -> None:
    calls: list[torch.Tensor | None] = []
    made = micro(None, calls)
    with pytest.raises(TypeError, match="one element, the mean"):
        made.backward(loss)
    assert not made.done and not calls


def test_a_loss_that_nothing_depends_on_is_refused() -> None:
    calls: list[torch.Tensor | None] = []
    with pytest.raises(RuntimeError, match="depends on no parameter that is trained"):
        micro(None, calls).backward(torch.ones(()))
    assert not calls


def test_a_backward_that_fails_may_be_tried_again() -> None:
    def fail(_: Micro, loss: torch.Tensor | None) -> None:
        raise MemoryError

    made = Micro(Unit(1, 0, np.array([0]), 1, None), fail)
    with pytest.raises(MemoryError):
        made.backward(torch.ones(1, 1, requires_grad=True))
    assert not made.done


def test_a_batch_asks_for_its_units_when_it_is_iterated_and_only_once() -> None:
    made = [micro(i) for i in range(3)]
    batch = Batch(3, lambda: iter(made))
    assert batch.step == 3
    assert list(batch) == made
    with pytest.raises(RuntimeError, match=r"batch of step 3 was iterated before.*in one pass"):
        list(batch)
