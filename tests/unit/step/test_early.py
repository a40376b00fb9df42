"""Gradients that leave during backward: the same bits, whatever the user's model does with its backward (I14)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.rigs.step_rank import run_units, same_bits, stack_of, step, tensors_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.order.units import blocks
from unbroken.step import reduce
from unbroken.step.exchange import Exchange, ExchangeFailed
from unbroken.step.reduce import Flags
from unbroken.step.update import Update

NUM_UNITS = 5
BUCKET_BYTES = 300
"""Several buckets for a layer of 8 x 8."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "BUCKET_BYTES", BUCKET_BYTES)


class Tower(nn.Module):
    """Four layers, BatchNorm, one parameter without use, one that is frozen, one used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.norm(x * self.frozen) * self.scale


def loss_of(model: nn.Module) -> Callable[[int], torch.Tensor]:
    return lambda unit: model(torch.randn(6, 8, generator=torch.Generator().manual_seed(unit))).square().mean()


def two_steps(world_size: int, make: Callable[[], nn.Module] = Tower, **options: Any) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Each rank's model after two steps, and how many buckets had left before the second step's collective phase."""
    born = make()

    def rank(exchange: Exchange) -> tuple[dict[str, torch.Tensor], int]:
        model = copy.deepcopy(born)
        update = Update(stack_of(model, torch.optim.AdamW(model.parameters(), lr=0.1)), NUM_UNITS, exchange)
        step(update, exchange, loss_of(model), NUM_UNITS, **options)
        update.begin()
        run_units(update, loss_of(model), blocks(NUM_UNITS, world_size)[exchange.rank])
        left = update.reduction.num_started
        update.apply(update.reduce(Flags()), 1.0)
        update.close()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "the user's parameters are left as they were"
        return tensors_of(model), left

    return all_ranks(world_size, rank)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_I14_gradients_that_leave_during_backward_have_the_bits_of_those_that_wait(world_size: int) -> None:
    alone = two_steps(1)[0][0]
    found = two_steps(world_size)
    assert all(same_bits(state, alone) for state, _ in found)
    lefts = [left for _, left in found]
    assert all((left > 0) == (len(blocks(NUM_UNITS, world_size)[r]) > 0) for r, left in enumerate(lefts)), "they did leave"


def test_I14_a_rank_whose_last_unit_has_no_samples_sends_nothing_early() -> None:
    weights = {4: 0, 1: 0}
    alone = two_steps(1, weights=weights)[0][0]
    assert all(same_bits(state, alone) for state, _ in two_steps(3, weights=weights))


@pytest.mark.parametrize("world_size", [2, 3, 5, 7])
def test_I14_every_pass_over_a_batch_sends_early_and_nothing_of_the_pass_before(world_size: int) -> None:
    """Two passes with an optimizer after each, token weights of many powers of two, one of them 0."""
    born = Tower()
    weights = {0: 1007, 1: 3, 2: 0, 3: 4096, 4: 250}

    def rank(exchange: Exchange) -> tuple[dict[str, torch.Tensor], list[int], list[float | None]]:
        model = copy.deepcopy(born)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        update = Update(stack_of(model, optimizer), NUM_UNITS, exchange, 2 * NUM_UNITS)
        lefts, losses = [], []
        for _ in range(2):
            update.begin()
            for turn in range(2):
                update.own("with a closure")
                loss = loss_of(model) if turn == 0 else lambda unit: loss_of(model)(unit + 100) * 0.3
                run_units(update, loss, blocks(NUM_UNITS, exchange.world_size)[exchange.rank], weights, samples=2)
                lefts.append(update.reduction.num_started)
                reduced = update.reduce(Flags())
                update.deliver(reduced)
                update.begin_pass()
                update.own("yes")
                optimizer.step()
                losses.append(reduced.loss)
            update.finish(reduced, True)
        update.close()
        return tensors_of(model), lefts, losses

    ((alone, _, losses),) = all_ranks(1, rank)
    found = all_ranks(world_size, rank)
    assert all(same_bits(state, alone) and told == losses for state, _, told in found)
    for number, (_, lefts, _) in enumerate(found):
        block = blocks(NUM_UNITS, world_size)[number]
        assert lefts[:2] == [0, 0], "rehearsals"
        assert all((left > 0) == (len(block) > 0 and weights[block[-1]] > 0) for left in lefts[2:])


class Again(Tower):
    """A re-entrant activation checkpoint over a layer that is used twice: its gradient is accumulated in two inner backwards."""

    begins = 0
    """The first step in which it is so."""
    now = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.now < self.begins:
            return super().forward(x)
        x = x * self.scale
        for layer in [*self.layers, self.layers[3], self.layers[0], self.layers[3]]:
            x = checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-untyped-call]
        return self.norm(x * self.frozen)


@pytest.mark.parametrize(("begins", "num_refused"), [(0, 0), (1, 1)])
def test_I8_a_gradient_that_comes_after_its_bucket_has_left_makes_all_ranks_refuse_and_send_later(begins: int, num_refused: int) -> None:
    """Who is re-entrant from the first step on has shown it in the rehearsal."""
    born = Again()
    born.begins = begins

    def rank(exchange: Exchange) -> tuple[list[str], dict[str, torch.Tensor]]:
        model, refused = copy.deepcopy(born), []
        update = Update(stack_of(model), NUM_UNITS, exchange)
        for number in range(3):
            model.now = number
            for _attempt in range(2):
                try:
                    step(update, exchange, loss_of(model), NUM_UNITS)
                    break
                except ExchangeFailed as error:
                    refused.append(str(error))
                    update.undo()
        update.close()
        return refused, tensors_of(model)

    (alone_refused, alone), *_ = all_ranks(1, rank)
    assert alone_refused == []
    for refused, state in all_ranks(3, rank):
        assert len(refused) == num_refused and all("not this attempt's" in text for text in refused), "once, and never again"
        assert same_bits(state, alone)


def test_a_hook_of_the_users_own_holds_its_bucket_back_and_is_obeyed() -> None:
    born = Tower()

    def triple(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3.0)

    def rank(exchange: Exchange) -> tuple[dict[str, torch.Tensor], int]:
        model = copy.deepcopy(born)
        for parameter in model.layers[2].parameters():
            parameter.register_post_accumulate_grad_hook(triple)
        update = Update(stack_of(model), NUM_UNITS, exchange)
        step(update, exchange, loss_of(model), NUM_UNITS)
        update.begin()
        run_units(update, loss_of(model), blocks(NUM_UNITS, exchange.world_size)[exchange.rank])
        left = update.reduction.num_started
        update.apply(update.reduce(Flags()), None)
        return tensors_of(model), left

    alone = all_ranks(1, rank)[0][0]
    found = all_ranks(3, rank)
    assert all(same_bits(state, alone) for state, _ in found)
    buckets = [bucket.indices for bucket in Update(stack_of(Tower()), NUM_UNITS, _three_ranks()).reduction.buckets]
    names = [name for name, _ in Tower().named_parameters()]
    held = min(number for number, indices in enumerate(buckets) if any("layers.2" in names[i] for i in indices if i < len(names)))
    assert all(left <= held for _, left in found)


def _three_ranks() -> Exchange:
    exchange = Exchange(torch.device("cpu"))
    exchange.world_size = 3
    return exchange


def test_I8_an_attempt_given_up_while_gradients_are_on_their_way_is_refused_by_all_and_comes_again() -> None:
    """One rank of three leaves the step after backward and computes its units again, with other gradients than it has sent."""
    born = Tower()

    def rank(exchange: Exchange) -> tuple[list[str], dict[str, torch.Tensor]]:
        model, refused = copy.deepcopy(born), []
        update = Update(stack_of(model, torch.optim.AdamW(model.parameters(), lr=0.1)), NUM_UNITS, exchange)
        step(update, exchange, loss_of(model), NUM_UNITS)
        for number in range(2):
            update.begin()
            if exchange.rank == 1 and exchange.world_size > 1:
                run_units(update, lambda unit: loss_of(model)(unit) * 7, blocks(NUM_UNITS, 3)[1])
                assert update.reduction.num_started
                update.undo()
            try:
                step(update, exchange, loss_of(model), NUM_UNITS, clip=number or None)
            except ExchangeFailed as error:
                refused.append(str(error))
                exchange.abandon()
                update.undo()
                exchange.connect(f"again {number}")
                step(update, exchange, loss_of(model), NUM_UNITS, clip=number or None)
        return refused, tensors_of(model)

    ((_, alone),) = all_ranks(1, rank)
    for refused, state in all_ranks(3, rank):
        assert refused == ["gradients had been sent that are not this attempt's"] * 2
        assert same_bits(state, alone)
