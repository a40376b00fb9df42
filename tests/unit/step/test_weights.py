"""Token weights: the step's gradient is that of one large batch, with the same bits at every number of ranks (I14)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.rigs.step_rank import CPU, same_bits, stack_of, tensors_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.core.limits import MAX_WEIGHT
from unbroken.data.source import Unit
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange
from unbroken.step.micro import Micro
from unbroken.step.partial import NO_SHIFT, shift_of
from unbroken.step.reduce import Flags, from_bits
from unbroken.step.ring import RingUpdate
from unbroken.step.update import NO_LOSS, Applied, Update, loss_bits

WORLDS = (1, 2, 3, 4)
TOKENS = [1007, 3, 0, 4096, 250, 1]
SAMPLES = 2
"""In each unit."""


class Tokens(nn.Module):
    """Embedding, BatchNorm and a head in float64 or float32; `rare` has a gradient in one unit only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.rare = nn.Parameter(torch.ones(2))
        self.to(dtype)

    def losses(self, unit: int, num: int) -> torch.Tensor:
        """The loss of each of `num` tokens of a unit."""
        chance = torch.Generator().manual_seed(unit)
        x, y = torch.randint(7, (num,), generator=chance), torch.randint(7, (num,), generator=chance)
        hidden = self.head(torch.tanh(self.table(x)))
        return nn.functional.cross_entropy(hidden, y, reduction="none") + (self.rare.sum() if unit == 4 else 0.0)


class Watched(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [None if p.grad is None else p.grad.detach().clone() for group in self.param_groups for p in group["params"]]


def run_step(
    exchange: Exchange, born: Tokens, weights: Mapping[int, int], *, full: int = 0, own_backward: bool = False
) -> tuple[Applied, list[torch.Tensor | None]]:
    """One step over as many units as there are weights."""
    model = copy.deepcopy(born)
    optimizer = Watched(model.parameters(), lr=1.0)
    num = len(weights)
    update = Update(stack_of(model, optimizer), num, exchange, full or num * SAMPLES)
    update.begin()
    for unit in blocks(num, exchange.world_size)[exchange.rank]:
        update.start_unit()
        weight = weights[unit]
        if not weight:
            update.finish_unit(unit, "d", 0, None, SAMPLES)
            continue
        loss = model.losses(unit, weight).mean()
        if own_backward:
            loss.backward()  # type: ignore[no-untyped-call]
            update.take_over(weight, SAMPLES)
        else:
            update.backward(loss, weight, SAMPLES)
        update.finish_unit(unit, "d", weight, None if own_backward else loss, SAMPLES)
    return update.apply(update.reduce(Flags()), None), optimizer.seen


def exact_bits(gradients: list[torch.Tensor | None]) -> list[bytes | None]:
    return [None if g is None else g.numpy().tobytes() for g in gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("full", [0, 8, 3 * 2**20])
def test_I14_token_weights_give_the_gradient_of_one_large_batch_at_every_world_size(dtype: torch.dtype, full: int) -> None:
    born, weights = Tokens(dtype), dict(enumerate(TOKENS))
    found = [one for world_size in WORLDS for one in all_ranks(world_size, lambda exchange: run_step(exchange, born, weights, full=full))]
    assert all(exact_bits(seen) == exact_bits(found[0][1]) and applied == found[0][0] for applied, seen in found)
    whole = copy.deepcopy(born)
    torch.cat([whole.losses(unit, num) for unit, num in weights.items()]).mean().backward()  # type: ignore[no-untyped-call]
    for mine, parameter in zip(found[0][1], whole.parameters(), strict=True):
        assert (mine is None) == (parameter.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4 if dtype == torch.float32 else 1e-11, atol=1e-7)
    mean = torch.cat([whole.losses(unit, num) for unit, num in weights.items()]).mean().item()
    assert found[0][0].loss == pytest.approx(mean, rel=1e-5)
    assert found[0][0].num_samples == len(TOKENS) * SAMPLES, "samples are counted, not tokens"


def test_the_mean_of_means_is_another_gradient() -> None:
    """What the usual accumulation does: the test above must be able to tell."""
    born = Tokens(torch.float64)
    _, right = run_step(Exchange(CPU), born, dict(enumerate(TOKENS)))
    model = copy.deepcopy(born)
    for unit, num in enumerate(TOKENS):
        if num:
            (model.losses(unit, num).mean() / len(TOKENS)).backward()
    assert right[4] is not None and model.head.weight.grad is not None
    assert not torch.allclose(right[4], model.head.weight.grad, rtol=1e-2)


def test_I14_own_backward_calls_count_like_the_loss_and_leave_no_loss() -> None:
    born, weights = Tokens(torch.float64), {0: 5, 1: 64, 2: 7}
    told, gradients = run_step(Exchange(CPU), born, weights)
    for world_size in WORLDS:
        for applied, seen in all_ranks(world_size, lambda exchange: run_step(exchange, born, weights, own_backward=True)):
            assert math.isnan(applied.loss) and applied.loss_bits == NO_LOSS != told.loss_bits
            for mine, other in zip(seen, gradients, strict=True):
                assert (mine is None) == (other is None)
                if mine is not None:
                    torch.testing.assert_close(mine, other)


def test_equal_powers_of_two_cost_no_rounding_at_all() -> None:
    """Tokens a power of two times the samples: the bits are those of unweighted units."""
    born = Tokens(torch.float32)
    model = copy.deepcopy(born)
    halves = [torch.autograd.grad(model.losses(unit, 512).mean() * 0.5, model.table.weight)[0] for unit in range(2)]
    _, seen = run_step(Exchange(CPU), born, {0: 512, 1: 512})
    assert seen[1] is not None and torch.equal(seen[1], halves[0] + halves[1])


def test_a_loss_scale_is_not_driven_up_by_tokens() -> None:
    """4096 tokens in one sample: the scaled loss stays within a factor of two of the unweighted one, so that float16 does not overflow."""
    weights = torch.nn.Parameter(torch.ones(1))
    model = nn.Module()
    model.w = weights
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    update = Update(stack_of(model, torch.optim.SGD([weights], lr=1.0), scaler=scaler), 2, Exchange(CPU), 2)
    update.begin()
    for unit in range(2):
        update.start_unit()
        loss = weights.half().sum()
        update.backward(loss, 4095 + unit, 1)
        assert weights.grad is not None and 2.0**12 < float(weights.grad) < 2.0**15
        update.finish_unit(unit, "d", 4095 + unit, loss, 1)
    assert update.apply(update.reduce(Flags()), None).status == "applied"


def test_buffers_are_the_mean_by_tokens_and_a_unit_that_weighs_nothing_leaves_none() -> None:
    born = nn.BatchNorm1d(3, dtype=torch.float64)
    weights = {0: 100, 1: 0, 2: 28}

    def rank(exchange: Exchange) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(born)
        update = Update(stack_of(model), 3, exchange, 6)
        update.begin()
        for unit in blocks(3, exchange.world_size)[exchange.rank]:
            update.start_unit()
            loss = model(inputs(unit)).square().mean()
            if weights[unit]:
                update.backward(loss, weights[unit], SAMPLES)
            update.finish_unit(unit, "d", weights[unit], loss if weights[unit] else None, SAMPLES)
        update.apply(update.reduce(Flags()), None)
        return tensors_of(model)

    ends = []
    for unit in (0, 2):
        model = copy.deepcopy(born)
        model(inputs(unit))
        ends.append(model.running_mean)
    assert ends[0] is not None and ends[1] is not None
    found = [state for world_size in WORLDS for state in all_ranks(world_size, rank)]
    assert all(same_bits(state, found[0]) for state in found)
    torch.testing.assert_close(found[0]["running_mean"], (ends[0] * 100 + ends[1] * 28) / 128)
    assert found[0]["num_batches_tracked"] == 1


def inputs(unit: int) -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(unit)) + unit


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_in_which_nothing_weighs_anything_changes_nothing_and_has_no_loss(world_size: int) -> None:
    for applied, seen in all_ranks(world_size, lambda exchange: run_step(exchange, Tokens(torch.float32), dict.fromkeys(range(3), 0))):
        assert seen == [None] * len(seen)
        assert (applied.loss_bits, applied.status, applied.num_samples) == (NO_LOSS, "applied", 6)


@given(weight=st.integers(1, MAX_WEIGHT), samples=st.integers(1, 2**24))
def test_the_shift_is_the_floor_of_the_logarithm(weight: int, samples: int) -> None:
    shift = shift_of(weight, samples)
    assert 1 <= Fraction(weight, samples) / Fraction(2) ** shift < 2
    assert shift_of(samples, samples) == 0 and shift_of(0, samples) == NO_SHIFT and math.ldexp(1.0, NO_SHIFT) == 0.0


def test_a_told_nan_is_not_a_loss_that_nobody_told() -> None:
    assert loss_bits(None) == NO_LOSS != loss_bits(math.nan) == loss_bits(-math.nan)
    assert math.isnan(from_bits(NO_LOSS)) and math.isnan(from_bits(loss_bits(math.nan)))


def test_ring_knows_no_weights() -> None:
    update = RingUpdate(stack_of(nn.Linear(1, 1)), 1, Exchange(CPU))
    with pytest.raises(ValueError, match=r"micro\.weight needs the default reduction"):
        update.finish_unit(0, "d", 5, None, 2)


# -- as the loop sets them -------------------------------------------------------------------------------------------------------


def micro(calls: list[Any] | None = None) -> Micro:
    return Micro(Unit(3, 1, np.array([4, 5]), 2, None), lambda unit, loss: None if calls is None else calls.append((unit.weight, loss)))


@pytest.mark.parametrize("given_weight", [7, np.int64(7), torch.tensor(7), torch.tensor([7], dtype=torch.int32), MAX_WEIGHT, 0])
def test_a_weight_is_any_whole_number(given_weight: Any) -> None:
    made = micro()
    assert made.weight == 2
    made.weight = given_weight
    assert made.weight == int(given_weight) and type(made.weight) is int


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (1.5, TypeError),
        (torch.tensor(1.5), TypeError),
        ("3", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (True, ValueError),
        (2**33, ValueError),
    ],
)
def test_other_weights_are_refused(wrong: Any, error: type[Exception]) -> None:
    made = micro()
    with pytest.raises(error, match=r"micro\.weight=.*whole number"):
        made.weight = wrong
    assert made.weight == 2


def test_a_weight_after_backward_comes_too_late() -> None:
    made = micro()
    made.backward(torch.ones((), requires_grad=True))
    with pytest.raises(RuntimeError, match="comes too late"):
        made.weight = 3


def test_a_masked_unit_may_have_any_loss_or_none() -> None:
    for loss in (torch.tensor(math.nan), None, torch.tensor(math.nan, requires_grad=True)):
        calls: list[Any] = []
        made = micro(calls)
        made.weight = 0
        made.backward(loss)
        assert calls == [(0, None)] and made.done
