"""A plain loop under the user's own DDP: what is accepted, and that Run leaves gradients and buffers to DDP."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from tests.rigs.step_rank import CPU, same_bits, stack_of, tensors_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.step.exchange import Exchange
from unbroken.step.reduce import Flags
from unbroken.step.ring import RingUpdate, require_fixed_buckets
from unbroken.step.update import Applied


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_ddp_with_fixed_buckets_is_accepted_on_several_ranks(world_of_one: None) -> None:
    fixed = DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
    loose = DistributedDataParallel(nn.Linear(1, 1))
    plain = nn.Linear(1, 1)
    require_fixed_buckets({"": fixed}, 3)
    require_fixed_buckets({"": plain}, 1)
    with pytest.raises(ValueError, match=r"the model would add.*DDP\(model, find_unused_parameters=True\)"):
        require_fixed_buckets({"": loose}, 1)
    with pytest.raises(ValueError, match=r"model 'b' is not wrapped.*DDP\(model, find_unused_parameters=True\)"):
        require_fixed_buckets({"a": fixed, "b": plain}, 2)


def test_ddp_is_left_as_it_is(world_of_one: None) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
    RingUpdate(stack_of(model), 1, Exchange(CPU))
    assert model.require_backward_grad_sync and model.broadcast_buffers


class Buffered(nn.Module):
    """One weight, and buffers of three types, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.seen: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("seen", torch.zeros(2, 3, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0))


def test_the_gradients_in_grad_are_applied_and_buffers_become_those_of_rank_0() -> None:
    """Units may write them differently: no mean, no check of integers."""
    born = Buffered()

    def rank(exchange: Exchange) -> tuple[Applied, dict[str, torch.Tensor]]:
        model = copy.deepcopy(born)
        update = RingUpdate(stack_of(model, torch.optim.SGD(model.parameters(), lr=1.0)), 3, exchange)
        update.begin()
        update.start_unit()
        model.seen.fill_(exchange.rank + 1)
        model.count.fill_(exchange.rank + 10)
        model.w.grad = torch.tensor([0.25, -0.5])
        update.finish_unit(exchange.rank, f"{exchange.rank:032x}", 2 + exchange.rank, torch.tensor(float(exchange.rank)))
        reduced = update.reduce(Flags(stop=exchange.rank == 1))
        assert [told.flags.stop for told in reduced.facts] == [False, True, False]
        return update.apply(reduced, None), tensors_of(model)

    for applied, state in all_ranks(3, rank):
        assert state["w"].tolist() == [0.75, 1.5]
        assert (set(state["seen"].flatten().tolist()), state["count"].item()) == ({1.0}, 10)
        assert (applied.loss, applied.num_samples) == ((0 * 2 + 1 * 3 + 2 * 4) / 9, 9)


@pytest.mark.parametrize(("told", "weights", "loss"), [(True, (1, 1), 2.0), (False, (1, 1), math.nan), (True, (1, 0), 1.0)])
def test_a_loss_that_nobody_told_is_nan_but_a_unit_without_samples_has_none(told: bool, weights: tuple[int, int], loss: float) -> None:
    model = Buffered()
    update = RingUpdate(stack_of(model), 2, Exchange(CPU))
    update.begin()
    for unit, weight in enumerate(weights):
        update.finish_unit(unit, "", weight, torch.tensor(1.0 + 2 * unit) if told and weight else None)
    applied = update.apply(update.reduce(Flags()), None)
    assert applied.loss == pytest.approx(loss, nan_ok=True)


def test_I8_undo_puts_buffers_back_and_drops_gradients() -> None:
    model = Buffered()
    update = RingUpdate(stack_of(model), 1, Exchange(CPU))
    update.begin()
    before = tensors_of(model)
    model.count.add_(3)
    model.w.grad = torch.ones(2)
    update.finish_unit(0, "", 1, torch.tensor(1.0))
    update.undo()
    assert same_bits(tensors_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert update.collected == []
