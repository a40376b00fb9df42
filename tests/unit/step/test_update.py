"""A step as a transaction: what is undone, how buffers follow the units, and what the optimizers get to see (I8, I14)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from tests.rigs.step_rank import CPU, Loss, run_units, same_bits, stack_of, step, tensors_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.step.exchange import Exchange, ExchangeFailed
from unbroken.step.reduce import Flags, bits, from_bits
from unbroken.step.update import Applied, Update, tensor_bytes

WORLDS = (1, 2, 3, 5)


def inputs(unit: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + unit))


class Normed(nn.Module):
    """BatchNorm, a mask of -inf, a constant with NaN, an integer and an empty buffer that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask: torch.Tensor
        self.table: torch.Tensor
        self.lower = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([0.0, -float("inf"), -0.0]))
        self.register_buffer("unknown", torch.cat([torch.tensor([float("nan")]), torch.linspace(0.01, 1, 50)]), persistent=False)
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.lower(x))
        return out


def square(model: nn.Module) -> Loss:
    return lambda unit: model(inputs(unit, 6, 3)).square().mean()


def everywhere(
    num_units: int, make: Callable[[], nn.Module], loss: Callable[[nn.Module], Loss], weights: dict[int, int] | None = None
) -> list[tuple[Applied, dict[str, torch.Tensor]]]:
    """One step at several world sizes; what it did and the model afterwards, which must be the same on all ranks."""
    found, born = [], make()
    for world_size in WORLDS:

        def rank(exchange: Exchange) -> tuple[Applied, dict[str, torch.Tensor]]:
            model = copy.deepcopy(born)  # threads share the stream that a constructor draws from
            update = Update(stack_of(model), num_units, exchange)
            return step(update, exchange, loss(model), num_units, weights), tensors_of(model)

        ranks = all_ranks(world_size, rank)
        assert all(one[0] == ranks[0][0] and same_bits(one[1], ranks[0][1]) for one in ranks)
        found.append(ranks[0])
    return found


# -- buffers -------------------------------------------------------------------------------------------------------------------


def test_I14_running_statistics_are_the_weighted_tree_mean_over_units() -> None:
    """Every unit starts from the step-begin statistics; three units of unequal weight, so that no plain mean fits."""
    weights = {0: 3, 1: 1, 2: 2}
    found = everywhere(3, Normed, square, weights)
    ends = []
    for unit in range(3):
        model = Normed()
        model(inputs(unit, 6, 3))
        ends.append(tensors_of(model))
    for name in ("norm.running_mean", "norm.running_var"):
        mean = ((ends[0][name] * 3 + ends[1][name] * 1) + ends[2][name] * 2) / 6
        assert torch.equal(found[0][1][name], mean)
    assert found[0][1]["norm.num_batches_tracked"] == 1
    assert all(applied == found[0][0] and same_bits(state, found[0][1]) for applied, state in found)


def test_buffers_that_no_unit_writes_keep_their_bits() -> None:
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1, and -inf or NaN times a weight of 0 is NaN."""
    born = tensors_of(Normed())
    for _, state in everywhere(3, Normed, square, {0: 3, 1: 7, 2: 0}):
        for name in ("mask", "unknown", "table", "empty"):
            assert same_bits({name: state[name]}, {name: born[name]})


class Largest(nn.Module):
    """Keeps the largest input seen, from -inf on."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.largest: torch.Tensor
        self.register_buffer("largest", torch.full((2,), -float("inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.copy_(torch.maximum(self.largest, x))
        return (self.w * x).sum()


def test_I14_a_unit_without_samples_adds_nothing_to_a_buffer_whoever_holds_it() -> None:
    """Its own buffers are those of the step's beginning, or of the unit before on the same rank: neither may count, not even as NaN."""
    for _, state in everywhere(2, Largest, lambda model: lambda unit: model(torch.tensor([1.0, -0.0])), {1: 0}):
        assert same_bits({"largest": state["largest"]}, {"largest": torch.tensor([1.0, 0.0])})


def test_a_gradient_that_lies_about_is_not_that_of_a_unit_without_samples() -> None:
    model = Partial()
    optimizer = Watched(model.parameters(), lr=0.1)
    update = Update(stack_of(model, optimizer), 2, Exchange(CPU))
    update.begin()
    run_units(update, model, range(1))
    model.c.grad = torch.ones(2)
    run_units(update, model, range(1, 2), {1: 0})
    update.apply(update.reduce(Flags()), None)
    assert optimizer.seen[2] is None


class Counting(nn.Module):
    """Integer buffers of several widths, a boolean and a complex one; `by` adds to the counter in unit u."""

    def __init__(self, by: Callable[[int], int]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.by = by
        self.counter: torch.Tensor
        self.small: torch.Tensor
        self.seen: torch.Tensor
        self.register_buffer("counter", torch.tensor(5))
        self.register_buffer("small", torch.zeros(2, 3, dtype=torch.int8))
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("phase", torch.tensor([1j, complex(math.nan, 0.0)]))

    def forward(self, unit: int) -> torch.Tensor:
        self.counter.add_(self.by(unit))
        self.small[1, 2] = -7
        self.seen[1] = True
        return self.w.sum()


def test_integer_buffers_on_which_all_units_agree_are_taken_over() -> None:
    for applied, state in everywhere(3, lambda: Counting(lambda unit: 2), lambda model: model):
        assert applied.status == "applied"
        assert state["counter"] == 7
        assert state["small"].tolist() == [[0, 0, 0], [0, 0, -7]]
        assert state["seen"].tolist() == [False, True]
        assert state["phase"][0] == 1j


def test_integer_buffers_stay_when_only_units_without_samples_are_on_a_rank() -> None:
    for _, state in everywhere(4, lambda: Counting(lambda unit: 1), lambda model: model, {2: 0, 3: 0}):
        assert state["counter"] == 6


@pytest.mark.parametrize("by", [lambda unit: unit, lambda unit: int(unit == 1)], ids=["each another", "one only"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_integer_buffers_that_differ_between_units_are_refused_by_name(by: Callable[[int], int], world_size: int) -> None:
    def rank(exchange: Exchange) -> None:
        model = Counting(by)
        update = Update(stack_of(model), 3, exchange)
        with pytest.raises(ValueError, match=r"'counter'.*'seen'.*'small'.*came out different"):
            step(update, exchange, model, 3)
        assert model.w.item() == 1.0, "nothing may have been applied"

    all_ranks(world_size, rank)


# -- undo ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1, 2])
def test_I8_undo_puts_everything_back_bit_for_bit(done: int) -> None:
    model = Normed()
    update = Update(stack_of(model), 2, Exchange(CPU))
    update.begin()
    before = tensors_of(model)
    run_units(update, square(model), range(done))
    model(inputs(9, 6, 3)).sum().backward()
    model.table.add_(1)
    model.mask.fill_(3.0)
    assert not same_bits(tensors_of(model), before)
    update.undo()
    assert same_bits(tensors_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert update.collected == []
    assert not any(update.reduction.present)


def test_I8_a_refused_step_repeated_ends_like_one_that_was_not_refused() -> None:
    born = Normed()

    def rank(exchange: Exchange, refused: bool) -> tuple[Applied, dict[str, torch.Tensor]]:
        model = copy.deepcopy(born)
        update = Update(stack_of(model, torch.optim.AdamW(model.parameters())), 4, exchange)
        first = step(update, exchange, square(model), 4)
        if refused:
            update.begin()
            run_units(update, lambda unit: model(inputs(unit + 50, 6, 3)).exp().sum(), range(2 * exchange.rank, 2 * exchange.rank + 2))
            exchange.abandon()
            with pytest.raises(ExchangeFailed):
                update.reduce(Flags())
            update.undo()
            exchange.connect("second")
        second = step(update, exchange, square(model), 4)
        assert first.loss != second.loss
        return second, tensors_of(model)

    plain = all_ranks(2, lambda exchange: rank(exchange, refused=False))
    refused = all_ranks(2, lambda exchange: rank(exchange, refused=True))
    assert all(a[0] == b[0] and same_bits(a[1], b[1]) for a, b in zip(plain, refused, strict=True))


def test_I8_reduce_leaves_the_state_of_the_steps_beginning_when_it_fails() -> None:
    born = Normed()

    def rank(exchange: Exchange) -> None:
        model = copy.deepcopy(born)
        update = Update(stack_of(model), 2, exchange)
        update.begin()
        before = tensors_of(model)
        run_units(update, square(model), range(exchange.rank, exchange.rank + 1))
        exchange.abandon()
        with pytest.raises(ExchangeFailed):
            update.reduce(Flags())
        assert same_bits(tensors_of(model), before)

    all_ranks(2, rank)


# -- gradients -----------------------------------------------------------------------------------------------------------------


class Partial(nn.Module):
    """Parameter a in every unit, b in odd ones, c in none; d is frozen, e an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Parameter(torch.randn(3))
        self.b = nn.Parameter(torch.randn(2))
        self.c = nn.Parameter(torch.randn(2))
        self.d = nn.Parameter(torch.randn(2), requires_grad=False)
        self.e = nn.Embedding(6, 2, sparse=True)

    def forward(self, unit: int) -> torch.Tensor:
        out: torch.Tensor = (self.a * inputs(unit, 3)).sum() + self.d.sum() + self.e(torch.tensor([unit, unit, 3])).square().sum()
        return out + (self.b * inputs(unit, 2)).sum() if unit % 2 else out


class Watched(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [None if p.grad is None else p.grad.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step()


@pytest.mark.parametrize("full", [6, 8])
def test_I14_gradients_are_the_tree_mean_and_none_stays_none(full: int) -> None:
    """A full step has six samples, or eight: then this one is the short last step."""
    weights = {0: 2, 1: 3, 2: 1}

    born = Partial()

    def rank(exchange: Exchange) -> list[torch.Tensor | None]:
        model = copy.deepcopy(born)
        optimizer = Watched(model.parameters(), lr=0.1)
        update = Update(stack_of(model, optimizer), 3, exchange, full)
        step(update, exchange, model, 3, weights)
        assert all(p.grad is None for p in model.parameters()), "zero_grad is the step's business"
        return optimizer.seen

    gradients = []
    for unit in range(3):
        model = copy.deepcopy(born)
        (model(unit) * (weights[unit] / full)).backward()
        gradients.append([p.grad.to_dense() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
    names = [name for name, _ in Partial().named_parameters()]
    mean = {n: (g0 + g1) + g2 for n, g0, g1, g2 in zip(names, *gradients, strict=True)}
    mean = {n: g if full == 6 else g / (6 / full) for n, g in mean.items()}
    for world_size in WORLDS:
        for seen in all_ranks(world_size, rank):
            given = dict(zip(names, seen, strict=True))
            assert given.pop("c") is None and given.pop("d") is None
            assert same_bits({n: g for n, g in given.items() if g is not None}, {n: mean[n] for n in ("a", "b", "e.weight")})


def test_a_parameter_that_only_the_step_before_used_gets_no_gradient() -> None:
    model = Partial()
    optimizer = Watched(model.parameters(), lr=0.1)
    exchange = Exchange(CPU)
    update = Update(stack_of(model, optimizer), 2, exchange)
    step(update, exchange, model, 2)
    assert optimizer.seen[1] is not None
    step(update, exchange, lambda unit: model(2 * unit), 2)
    assert optimizer.seen[1] is None


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_the_clip_norm_is_torchs_own_on_the_mean_gradient(limit: float) -> None:
    model, twin = Partial(), Partial()
    optimizer = Watched(model.parameters(), lr=0.1)
    exchange = Exchange(CPU)
    step(Update(stack_of(model, optimizer), 2, exchange), exchange, model, 2, clip=limit)
    for unit in range(2):
        (twin(unit) / 2).backward()
    twin.e.weight.grad = twin.e.weight.grad.to_dense() if twin.e.weight.grad is not None else None
    nn.utils.clip_grad_norm_(twin.parameters(), limit)
    for seen, parameter in zip(optimizer.seen, twin.parameters(), strict=True):
        assert (seen is None) == (parameter.grad is None)
        if seen is not None and parameter.grad is not None:
            torch.testing.assert_close(seen, parameter.grad)


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_with_other_strides_are_updated_as_torch_updates_them(fused: bool) -> None:
    """A fused kernel walks memory, not elements: the gradient must lie as the parameter does."""

    def make() -> tuple[nn.Conv2d, torch.optim.Optimizer]:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return conv, torch.optim.AdamW(conv.parameters(), lr=0.1, fused=fused)

    (conv, optimizer), (twin, plain) = make(), make()
    exchange = Exchange(CPU)
    update = Update(stack_of(conv, optimizer), 1, exchange)
    for _ in range(3):
        step(update, exchange, lambda unit: conv(inputs(unit, 2, 3, 5, 5)).square().mean(), 1)
        twin(inputs(0, 2, 3, 5, 5)).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert same_bits(tensors_of(conv), tensors_of(twin))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_gradient_has_its_parameters_type_and_half_ones_are_summed_in_float32(dtype: torch.dtype) -> None:
    """256 + 1 is 256 in bfloat16, and 2048 + 1 is 2048 in float16: summed there, the small units would vanish."""
    big = {torch.float16: 2048.0, torch.bfloat16: 256.0, torch.float64: 2.0**53}[dtype]
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    optimizer = Watched(model.parameters(), lr=0.1)
    exchange = Exchange(CPU)
    update = Update(stack_of(model, optimizer), 4, exchange)
    step(update, exchange, lambda unit: (model.weight * (big if unit == 0 else 1.0)).sum(), 4)
    (seen,) = optimizer.seen
    assert seen is not None and seen.dtype == dtype
    exact = torch.tensor([[(big + 3) / 4]], dtype=torch.float32).to(dtype)
    assert torch.equal(seen, exact if dtype != torch.float64 else torch.tensor([[(big + 2) / 4]], dtype=dtype))


# -- applying ------------------------------------------------------------------------------------------------------------------


def test_I14_losses_are_the_weighted_tree_mean_in_float64_with_the_same_bits_everywhere() -> None:
    weights = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}
    losses = [1e16, 3.3, -1e16, 7.7, 0.1]

    def loss(model: nn.Module) -> Loss:
        return lambda unit: next(model.parameters()).double().sum() * 0 + losses[unit]

    expected = (((1e16 * 1 + 3.3 * 2) + (-1e16 * 3 + 7.7 * 4)) + 0.1 * 5) / 15
    for applied, _ in everywhere(5, Largest, loss, weights):
        assert applied.loss == expected and applied.loss_bits == bits(expected)
        assert applied.num_samples == 15
        assert applied.units == tuple(f"{unit:032x}" for unit in range(5))


def test_bits_of_a_loss_come_back() -> None:
    for value in (0.0, -0.0, 1 / 3, math.inf, -math.inf, 5e-324):
        assert bits(from_bits(bits(value))) == bits(value)
    assert math.isnan(from_bits(bits(math.nan)))
    assert bits(1.0) == "3ff0000000000000"


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_a_skipped_step_and_the_scheduler_stands_still(fused: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    exchange = Exchange(CPU)
    update = Update(stack_of(model, optimizer, scheduler=scheduler, scaler=scaler), 2, exchange)
    before = tensors_of(model)

    def one(factor: float) -> str:
        loss: Loss = lambda unit: model(torch.ones(1, 2)).sum() * (factor if unit else 1.0)  # noqa: E731
        return step(update, exchange, loss, 2, clip=1.0).status

    assert one(math.inf) == "skipped"
    assert same_bits(tensors_of(model), before)
    assert (scaler.get_scale(), scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (4.0, 0, 0.1)
    assert all(p.grad is None for p in model.parameters())
    assert one(1.0) == "applied"
    assert not same_bits(tensors_of(model), before)
    assert (scaler.get_scale(), scheduler.last_epoch) == (4.0, 1)


def bad_step(update: Update, exchange: Exchange, model: nn.Module, factor: float, clip: float | None, **how: Any) -> Applied:
    """One step of two units, the second with its gradient multiplied."""
    update.begin()
    spoiled = lambda unit: Times.apply(model(inputs(unit, 6, 3)), factor if unit else 1.0).square().mean()  # noqa: E731
    run_units(update, spoiled, range(2))
    return update.apply(update.reduce(Flags()), clip, **how)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.by, None


@pytest.mark.parametrize(
    ("factor", "clip", "how", "reason"),
    [
        (math.nan, 1.0, {"check_norm": True}, "the norm of the gradient is nan"),
        (math.inf, None, {"careful": True}, "the gradient of lower.weight holds NaN"),
        (1.0, None, {"skip": "told so"}, "told so"),
        (1.0, 1.0, {"check_norm": True, "careful": True}, ""),
        (math.nan, None, {"check_norm": True}, ""),
        (math.nan, 1.0, {}, ""),
    ],
)
def test_B38_a_step_that_is_skipped_changes_nothing(factor: float, clip: float | None, how: dict[str, Any], reason: str) -> None:
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    exchange = Exchange(CPU)
    update = Update(stack_of(model, optimizer, scheduler=scheduler), 2, exchange)
    before = tensors_of(model)
    applied = bad_step(update, exchange, model, factor, clip, **how)
    assert (applied.status, applied.reason) == ("skipped" if reason else "applied", reason)
    assert same_bits(tensors_of(model), before) == bool(reason)  # statistics of batches among them
    assert (scheduler.last_epoch, bool(optimizer.state)) == ((0, False) if reason else (1, True))
    assert all(p.grad is None for p in model.parameters())
    assert math.isfinite(applied.loss)


def test_B38_where_reading_waits_the_norm_is_told_with_the_next_step() -> None:
    model, exchange = Normed(), Exchange(CPU)
    update = Update(stack_of(model), 2, exchange)
    update.optimizers.reads_norm = False  # as on an accelerator
    assert bad_step(update, exchange, model, 1.0, 1.0, check_norm=True).reason == ""
    assert not update.has_bad_norm()
    assert bad_step(update, exchange, model, math.nan, 1.0, check_norm=True).reason == ""
    assert update.has_bad_norm()
    for _ in range(2):  # a step that is tried again says so again
        update.undo()
        run_units(update, square(model), range(2))
        assert update.reduce(Flags()).facts[0].flags.bad_norm
    update.close()


def test_B38_a_careful_step_waits_for_its_norm() -> None:
    """Here the squares of finite gradients overflow."""
    model, exchange = Normed(), Exchange(CPU)
    update = Update(stack_of(model), 2, exchange)
    update.optimizers.reads_norm = False
    reason = bad_step(update, exchange, model, 1e30, 1.0, check_norm=True, careful=True).reason
    assert reason == "the norm of the gradient is inf"


def test_the_scale_does_not_change_the_update() -> None:
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = Normed()
        exchange = Exchange(CPU)
        step(Update(stack_of(model, scaler=scaler), 2, exchange), exchange, square(model), 2, clip=0.1)
        ends.append(tensors_of(model))
    assert same_bits(*ends)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_whose_parameters_no_unit_used_is_passed_over(scaled: bool) -> None:
    """As in adversarial training, where one step is the generator's and the next the discriminator's."""
    models = {"g": nn.Linear(1, 1, bias=False), "d": nn.Linear(1, 1, bias=False)}
    optimizers = {key: torch.optim.SGD(model.parameters(), lr=1.0) for key, model in models.items()}
    before = {key: model.weight.item() for key, model in models.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None
    exchange = Exchange(CPU)
    update = Update(stack_of(models, optimizers, scaler=scaler), 1, exchange)
    for model in (models["g"], models["d"], models["d"]):
        loss = model(torch.ones(1, 1)).sum()
        assert step(update, exchange, {0: loss}.__getitem__, 1).status == "applied"
    assert {key: before[key] - model.weight.item() for key, model in models.items()} == pytest.approx({"g": 1.0, "d": 2.0}, abs=1e-6)
    assert step(update, exchange, lambda unit: torch.zeros((), requires_grad=True) * 1, 1).status == "applied"


def test_several_optimizers_and_schedulers_all_take_the_step() -> None:
    models = {"g": nn.Linear(1, 1), "d": nn.Linear(1, 1)}
    optimizers = {key: torch.optim.SGD(model.parameters(), lr=1.0) for key, model in models.items()}
    schedulers = {key: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for key, optimizer in optimizers.items()}
    before = {key: model.weight.detach().clone() for key, model in models.items()}
    exchange = Exchange(CPU)
    update = Update(stack_of(models, optimizers, scheduler=schedulers), 1, exchange)
    step(update, exchange, lambda unit: models["g"](torch.ones(1, 1)).sum() + 2 * models["d"](torch.ones(1, 1)).sum(), 1)
    assert {key: float((before[key] - model.weight).detach()) for key, model in models.items()} == pytest.approx({"g": 1.0, "d": 2.0})
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == [0.5, 0.5]


def test_the_bytes_of_a_tensor_are_those_of_its_elements_in_order() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    assert tensor_bytes(tensor) == b"".join(n.to_bytes(2, "little") for n in (0, 3, 1, 4, 2, 5))
    assert tensor_bytes(torch.tensor(True)) == b"\1"
    assert tensor_bytes(torch.zeros(0)) == b""


# -- DistributedDataParallel ---------------------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_I14_a_model_in_ddp_ends_like_the_same_model_without(world_of_one: None) -> None:
    plain, wrapped = Normed(), DistributedDataParallel(Normed())
    ends = []
    for model in (plain, wrapped):
        exchange = Exchange(CPU)
        update = Update(stack_of(model, torch.optim.AdamW(model.parameters())), 3, exchange)
        for _ in range(2):
            step(update, exchange, square(model), 3, {1: 2})
        ends.append(tensors_of(model.module if isinstance(model, DistributedDataParallel) else model))
    assert same_bits(*ends)
    assert not wrapped.require_backward_grad_sync and not wrapped.broadcast_buffers
