"""The whole state as pieces and back: in place, by name, refused as a whole where it does not fit, and bit for bit where it does."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rigs.step_rank import CPU, pieces_of, same_bits, stack_of, tensors_of
from unbroken.capture.stack import Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.core.errors import LayoutMismatch


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    streams = Streams(0, CPU)
    kept = streams.read()
    torch.manual_seed(0)
    yield
    streams.write(kept)


class Net(nn.Module):
    """Convolution, tied layers, statistics, a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.25)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("hidden", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.drop(self.first(self.norm(self.conv(x)).mean((2, 3)))))
        return out


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Some steps of torch's own."""
    for i in range(steps):
        x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def contents(stack: Stack) -> dict[str, bytes]:
    return {pointer: data for pointer, (_, data) in pieces_of(stack).items()}


# -- there and back ------------------------------------------------------------------------------------------------------------


def full(seed: int) -> tuple[Stack, Net]:
    """Everything a run can hold, advanced by a few steps."""
    torch.manual_seed(seed)
    model = Net()
    model.norm.bias.requires_grad_(False)
    later = [*model.norm.parameters(), *model.first.parameters()]
    optimizer = torch.optim.AdamW([{"params": list(model.conv.parameters())}, {"params": later}])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25 * seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * seed)
    stack = stack_of(model, optimizer, scheduler=scheduler, scaler=scaler, ema={"w": torch.rand(3)}, chance=random.Random(seed), best=seed)
    advance(model, optimizer, seed)
    model.drop.eval()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    return stack, model


def test_I3_what_is_restored_is_what_was_collected_bit_for_bit() -> None:
    stored = pieces_of(full(2)[0])
    stack, _ = full(3)
    assert contents(stack) != {p: data for p, (_, data) in stored.items()}
    stack.restore(stored, own_streams=True)
    assert contents(stack) == {p: data for p, (_, data) in stored.items()}


def test_restoring_fills_the_live_tensors_and_keeps_every_reference() -> None:
    stack, model = full(3)
    held = [*model.parameters(), *model.buffers(), stack.parts.extras["ema"]["w"], stack.parts.optimizers[""].param_groups[1]["lr"]]
    groups = stack.parts.optimizers[""].param_groups
    addresses = [t.data_ptr() for t in held]
    stack.restore(pieces_of(full(2)[0]), own_streams=True)
    now = [*model.parameters(), *model.buffers(), stack.parts.extras["ema"]["w"], stack.parts.optimizers[""].param_groups[1]["lr"]]
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert [t.data_ptr() for t in now] == addresses
    assert stack.parts.optimizers[""].param_groups is groups
    assert model.again.weight is model.first.weight


def test_B24_the_streams_of_another_rank_are_not_taken_over() -> None:
    stored = pieces_of(full(2)[0])
    stack, _ = full(3)
    expected = stack.streams.read()["torch"]["cpu"].clone()
    stack.restore(stored, own_streams=False)
    assert torch.equal(stack.streams.read()["torch"]["cpu"], expected)
    stack.restore(stored, own_streams=True)
    assert not torch.equal(stack.streams.read()["torch"]["cpu"], expected)


def test_modes_and_frozen_parameters_are_part_of_the_state() -> None:
    stored = pieces_of(full(2)[0])
    torch.manual_seed(1)
    model = Net()
    model.conv.requires_grad_(False)
    model.eval()
    stack = stack_of(model)
    others = {p: v for p, v in pieces_of(stack).items() if not p.startswith("/model")}
    stack.restore({p: v for p, v in stored.items() if p.startswith("/model")} | others, own_streams=False)
    assert {name: m.training for name, m in model.named_modules()} == {name: name != "drop" for name, _ in model.named_modules()}
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["norm.bias"]


# -- optimizers ----------------------------------------------------------------------------------------------------------------


def test_B18_optimizer_state_goes_by_name_whatever_the_order_within_a_group() -> None:
    """And the state has the same bytes then: otherwise the loaded state would not pass for the stored one."""

    def made(backwards: bool) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Net()
        parameters = list(model.parameters())
        return model, torch.optim.AdamW(parameters[::-1] if backwards else parameters, lr=0.01)

    model, optimizer = made(False)
    advance(model, optimizer)
    stored = pieces_of(stack_of(model, optimizer))
    other, reordered = made(True)
    stack = stack_of(other, reordered)
    stack.restore(stored, own_streams=False)
    for name, parameter in other.named_parameters():
        mine, theirs = reordered.state[parameter], optimizer.state[model.get_parameter(name)]
        assert same_bits(mine, theirs)
    logical = [p for p, (piece, _) in stored.items() if piece.scope == "logical"]
    assert {p: contents(stack)[p] for p in logical} == {p: stored[p][1] for p in logical}
    for one, its in ((model, optimizer), (other, reordered)):
        torch.manual_seed(4)
        advance(one, its)
    assert same_bits(tensors_of(model), tensors_of(other))


@pytest.mark.parametrize("fused", [False, True])
def test_I13_state_lies_in_memory_as_its_parameter_does(fused: bool) -> None:
    """Bytes are stored in logical order; a fused kernel, which walks memory, must find them as they lay before."""

    def made() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Net()
        model.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    model, optimizer = made()
    advance(model, optimizer)
    twin, resumed = made()
    stack_of(twin, resumed).restore(pieces_of(stack_of(model, optimizer)), own_streams=False)
    moment = resumed.state[twin.conv.weight]["exp_avg"]
    assert moment.stride() == twin.conv.weight.stride() == model.conv.weight.stride()
    for one, its in ((model, optimizer), (twin, resumed)):
        torch.manual_seed(4)
        advance(one, its)
    assert same_bits(tensors_of(model), tensors_of(twin))


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_the_step_counter_goes_to_the_device_only_for_kernels_that_read_it_there(options: dict[str, Any]) -> None:
    """No accelerator is needed to see the rule: the meta device is one."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stored = pieces_of(stack_of(model, optimizer))
    stack = stack_of(model, optimizer)
    optimizer.param_groups[0].update(options)
    stored = {p: v for p, v in stored.items() if not p.startswith("/optimizer/groups")} | {
        p: v for p, v in pieces_of(stack).items() if p.startswith("/optimizer/groups")
    }
    meta = nn.Linear(2, 2, device="meta")
    stack.parameters = lambda: dict(meta.named_parameters())  # type: ignore[method-assign]
    optimizer.param_groups[0]["params"] = list(meta.parameters())
    stack._restore_optimizers(stored)
    state = optimizer.state[meta.weight]
    assert state["step"].device.type == ("meta" if options else "cpu")
    assert state["exp_avg"].device.type == "meta"


def test_state_that_was_not_there_yet_is_taken_away_again() -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    stack = stack_of(model, optimizer)
    stored = pieces_of(stack)
    advance(model, optimizer)
    assert optimizer.state
    stack.restore(stored, own_streams=False)
    assert not optimizer.state


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
        lambda p: torch.optim.ASGD(p, lr=0.1),
        lambda p: torch.optim.RAdam(p, lr=0.1),
    ],
)
def test_I13_every_optimizer_goes_on_with_the_same_bits(make: Any) -> None:
    torch.manual_seed(1)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, resumed = make(model.parameters()), make(twin.parameters())
    advance(model, optimizer)
    stack_of(twin, resumed).restore(pieces_of(stack_of(model, optimizer)), own_streams=False)
    for one, its in ((model, optimizer), (twin, resumed)):
        torch.manual_seed(4)
        advance(one, its)
    assert same_bits(tensors_of(model), tensors_of(twin))


def test_a_rate_that_is_a_tensor_stays_one_and_stays_shared() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": list(model.parameters())[:1]}, {"params": list(model.parameters())[1:]}], lr=rate)
    optimizer.param_groups[1]["lr"] = rate
    stack = stack_of(model, optimizer)
    stored = pieces_of(stack)
    rate.fill_(9.0)
    stack.restore(stored, own_streams=False)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == 0.5
    optimizer.param_groups[0]["lr"] = 0.125
    stored = pieces_of(stack)
    optimizer.param_groups[0]["lr"] = 7.0
    stack.restore(stored, own_streams=False)
    assert optimizer.param_groups[0]["lr"] == 0.125


# -- refused as a whole --------------------------------------------------------------------------------------------------------


def changed(what: str) -> Stack:
    """A stack that differs from `full` in one respect."""
    stack, model = full(3)
    parts = stack.parts
    optimizer = parts.optimizers[""]
    if what == "shape":
        model.first.bias = nn.Parameter(torch.zeros(5))
        optimizer.param_groups[1]["params"][-1] = model.first.bias
    elif what == "type":
        model.hidden = model.hidden.double()
    elif what == "new parameter":
        model.extra = nn.Parameter(torch.zeros(1))
    elif what == "no buffer":
        del model.hidden
    elif what == "group":
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].append(moved)
    elif what == "number of groups":
        optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]
    elif what == "another optimizer":
        parts.optimizers["b"] = torch.optim.SGD(model.parameters(), lr=0.1)
        parts.optimizers["a"] = parts.optimizers.pop("")
    elif what == "no scheduler":
        parts.schedulers = {}
    elif what == "another scheduler":
        parts.schedulers = {"a": parts.schedulers[""], "b": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    elif what == "no scaler":
        parts.scaler = None
    elif what == "extra's shape":
        parts.extras["ema"]["w"] = torch.zeros(4)
    elif what == "extra":
        parts.extras["new"] = torch.zeros(4)
    elif what == "no extras":
        parts.extras = {}
    elif what == "untied":
        model.again.weight = nn.Parameter(torch.zeros(4, 4))
    elif what == "tied":
        model.norm.running_var = model.norm.running_mean
    return Stack(parts, stack.streams)


CHANGES = {
    "shape": "/model/parameters/first.bias: stored float32[4], live float32[5]",
    "type": "/model/buffers/hidden: stored float32[2], live float64[2]",
    "new parameter": "missing in the checkpoint: /model/parameters/extra",
    "no buffer": "not in the live state: /model/buffers/hidden",
    "group": "/optimizer/groups/0",
    "number of groups": "/optimizer/groups: stored 2 parameter groups, live 1",
    "another optimizer": "missing in the checkpoint: /optimizer/groups/b",
    "no scheduler": "not in the live state: /scheduler",
    "another scheduler": "missing in the checkpoint: /scheduler/b",
    "no scaler": "not in the live state: /scaler",
    "extra's shape": "extras",
    "extra": "new",
    "no extras": "not in the live state: extras.ema",
    "tied": "running_var",
}


@pytest.mark.parametrize("what", CHANGES)
def test_B18_a_difference_is_named_and_nothing_is_touched(what: str) -> None:
    stored = pieces_of(full(2)[0])
    stack = changed(what)
    before = contents(stack)
    with pytest.raises(LayoutMismatch) as refused:
        stack.restore(stored, own_streams=True)
    assert CHANGES[what] in str(refused.value)
    assert refused.value.missing + refused.value.unexpected + refused.value.mismatched
    assert contents(stack) == before, "not a bit of the live state may have changed"


def test_B18_a_layer_that_was_tied_and_is_no_longer_gets_the_value_under_both_names() -> None:
    stored_stack, model = full(2)
    stored = pieces_of(stored_stack)
    stack = changed("untied")
    stack.restore(stored, own_streams=True)
    live = stack.parts.models[""]
    assert isinstance(live, Net)
    assert torch.equal(live.again.weight, live.first.weight) and torch.equal(live.first.weight, model.first.weight)


def test_B18_all_differences_are_listed_at_once() -> None:
    stored = pieces_of(full(2)[0])
    stack, model = full(3)
    model.extra = nn.Parameter(torch.zeros(1))
    del model.hidden
    stack.parts.optimizers[""].param_groups[0]["params"].pop()
    stack.parts.scaler = None
    stack.parts.extras["ema"]["w"] = torch.zeros(4)
    with pytest.raises(LayoutMismatch) as refused:
        Stack(stack.parts, stack.streams).restore(stored, own_streams=True)
    for words in ("parameters/extra", "buffers/hidden", "/optimizer/groups/0", "/scaler", "ema"):
        assert words in str(refused.value)
    assert refused.value.missing == ("/model/parameters/extra",)
    assert refused.value.unexpected == ("/model/buffers/hidden", "/scaler")


# -- names and labels ----------------------------------------------------------------------------------------------------------


def test_several_models_and_optimizers_stand_under_their_keys() -> None:
    models = {"g": nn.Linear(1, 1, bias=False), "d": nn.Linear(1, 1, bias=False)}
    optimizers = {key: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for key, model in models.items()}
    for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    stack = stack_of(models, optimizers)
    stored = pieces_of(stack)
    assert {"/model/parameters/g/weight", "/model/parameters/d/weight", "/optimizer/state/d/d.weight/momentum_buffer"} <= stored.keys()
    before = contents(stack)
    with torch.no_grad():
        for model in models.values():
            model.weight.fill_(9.0)
    optimizers["d"].state.clear()
    stack.restore(stored, own_streams=False)
    assert contents(stack) == before
    assert list(stack.parameters()) == ["g.weight", "d.weight"]


def test_pieces_carry_the_labels_that_their_place_asks_for() -> None:
    stack, _ = full(2)
    items = stack.collect({"step": 4}, {"step": 4}, {"at": 1})
    labels = {"/".join(i.piece.pointer.split("/")[:2]): (i.piece.scope, i.piece.layer, i.piece.role) for i in items}
    logical, rank = ("logical", "framework", "restored"), ("rank", "framework", "restored")
    assert labels == {
        "/model": logical,
        "/optimizer": logical,
        "/scheduler": logical,
        "/scaler": logical,
        "/extras": logical,
        "/data": ("logical", "scheduling", "restored"),
        "/counters": ("logical", "scheduling", "restored"),
        "/loader": ("rank", "scheduling", "restored"),
        "/rng": rank,
    }
    names = [i.piece.pointer for i in items]
    assert len(set(names)) == len(names)
    assert not any(name.startswith("/loader") for name in contents(stack)), "a loader without a state leaves no piece"


def test_each_parameter_and_buffer_is_counted_once() -> None:
    model = Net()
    model.add_module("also", model.norm)
    stack = stack_of(model)
    assert list(stack.parameters()) == ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "first.weight", "first.bias"]
    assert list(stack.buffers()) == ["hidden", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_what_cannot_be_stored_is_named_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"extras\.?.*callback"):
        stack_of(nn.Linear(1, 1), callback={"f": print}).collect({}, {}, {})


def test_the_structure_knows_options_that_are_no_state() -> None:
    structure = stack_of(Net()).structure()
    assert structure["drop"] == "Dropout(p=0.25, inplace=False)"
    assert structure["conv"].startswith("Conv2d(2, 4, kernel_size=(2, 2)")
    linear = nn.Linear(1, 2)
    assert stack_of({"a": linear}, torch.optim.SGD(linear.parameters())).structure() == {
        "(optimizer)": "SGD",
        "a": "Linear(in_features=1, out_features=2, bias=True)",
    }


def test_an_optimizer_of_a_model_that_was_not_given_is_refused() -> None:
    model, stranger = nn.Linear(1, 1), nn.Linear(1, 1)
    groups: Any = [{"params": model.parameters()}, {"params": stranger.parameters()}]
    with pytest.raises(ValueError, match=r"the optimizer, group 1, holds a parameter of no model.*model=\{\.\.\.\}"):
        stack_of(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match=r"optimizer 'b', group 0"):
        stack_of(model, {"a": torch.optim.SGD(model.parameters()), "b": torch.optim.SGD(stranger.parameters())})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("x", {"": "x"}),
        (["x"], {"": "x"}),
        (("x", "y"), {"0": "x", "1": "y"}),
        ({"a": "x"}, {"a": "x"}),
        ([], {}),
    ],
)
def test_one_a_list_or_a_dict(given: Any, expected: dict[str, Any]) -> None:
    assert keyed_parts(given, "model") == expected


@pytest.mark.parametrize("key", ["", "a.b", 3, None])
def test_a_key_that_could_not_stand_in_a_name_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer: key .* non-empty string without dots"):
        keyed_parts({key: "x"}, "optimizer")
