"""Loading into live objects: everything is compared first, differences are one error, and the target is then as it was."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unbroken.capture.restore import match_names
from unbroken.capture.tree import LoadReport, flatten, load_into, write_item
from unbroken.core.errors import Damaged, LayoutMismatch
from unbroken.core.records import Piece

Stored = dict[str, tuple[Piece, bytes]]


def saved(state: Any, pointer: str = "") -> Stored:
    out: Stored = {}
    for item in flatten(state, pointer):
        raw = bytearray(item.nbytes)
        write_item(item, memoryview(raw))
        out[item.piece.pointer] = (item.piece, bytes(raw))
    return out


def refused(state: Any, into: Any, **options: Any) -> LayoutMismatch:
    """The error of a load that must leave its target as it was."""
    before = saved(into)
    with pytest.raises(LayoutMismatch) as caught:
        load_into(saved(state), into, **options)
    assert saved(into) == before
    return caught.value


def test_tensors_are_filled_in_place_and_values_replaced() -> None:
    weight, array = torch.zeros(3), np.zeros(2)
    into = {"w": weight, "a": array, "list": [torch.zeros(1)], "pair": (torch.zeros(1), 0), "step": 0}
    inner, paired = into["list"][0], into["pair"][0]
    state = {"w": torch.arange(3.0), "a": np.ones(2), "list": [torch.ones(1)], "pair": (torch.ones(1), 7), "step": 20}
    assert load_into(saved(state), into) == LoadReport()
    assert into["w"] is weight and weight.tolist() == [0, 1, 2]
    assert into["a"] is array and array.tolist() == [1, 1]
    assert into["list"][0] is inner and inner.item() == 1
    assert into["pair"][0] is paired and paired.item() == 1 and into["pair"][1] == 7
    assert into["step"] == 20


def test_strided_targets_and_parameters_are_filled() -> None:
    base = torch.zeros(6)
    parameter = nn.Parameter(torch.zeros(2))
    load_into(saved({"s": torch.tensor([1.0, 2, 3]), "p": torch.ones(2)}), {"s": base[::2], "p": parameter})
    assert base.tolist() == [1, 0, 2, 0, 3, 0]
    assert parameter.requires_grad and parameter.tolist() == [1, 1]


# --- B18 ----------------------------------------------------------------------------------------------------------------------


def test_B18_a_a_narrower_dtype_is_an_error_and_cast_only_on_request() -> None:
    state = {"x": torch.tensor([1.0009765625, 3.0])}
    into = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    text = str(refused(state, into))
    assert "x: float32[2] in the checkpoint, bfloat16[2] in the target" in text
    assert load_into(saved(state), into, cast=True) == LoadReport()
    assert into["x"].tolist() == [1.0, 3.0]


def test_B18_a_a_cast_that_changes_the_kind_is_refused_even_on_request() -> None:
    refused({"x": torch.ones(2)}, {"x": torch.zeros(2, dtype=torch.int64)}, cast=True)
    refused({"x": np.ones(2)}, {"x": np.zeros(2, np.int64)}, cast=True)


def test_B18_a_arrays_too() -> None:
    state, into = {"x": np.ones(2, np.float64)}, {"x": np.zeros(2, np.float32)}
    assert "np.array:float64" in str(refused(state, into))
    load_into(saved(state), into, cast=True)
    assert into["x"].tolist() == [1, 1]


@pytest.mark.parametrize(("stored", "live"), [((4,), (2,)), ((1,), (4,)), ((4,), (2, 2)), ((), (1,)), ((0,), ())])
def test_B18_b_a_shape_is_never_cut_broadcast_or_reshaped(stored: tuple[int, ...], live: tuple[int, ...]) -> None:
    error = refused({"x": torch.ones(stored)}, {"x": torch.zeros(live)})
    assert error.mismatched == (f"x: float32{list(stored)} in the checkpoint, float32{list(live)} in the target",)


@pytest.mark.parametrize("make", [lambda v: torch.full((2,), float(v)), int], ids=["tensors", "plain values"])
def test_B18_c_one_error_lists_all_missing_and_unexpected(make: Any) -> None:
    state, into = {"a": make(1), "b": make(2)}, {"b": make(0), "c": make(0)}
    error = refused(state, into)
    assert (error.missing, error.unexpected) == (("c",), ("a",))
    report = load_into(saved(state), into, strict=False)
    assert (report.missing, report.unexpected, report.mismatched) == (("c",), ("a",), ())
    assert saved(into) == saved({"b": make(2), "c": make(0)})


def test_B18_d_the_target_is_untouched_when_the_last_of_many_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {"first": torch.ones(2), "model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "rng": random.Random(1), "n": 5}
    into = {"first": torch.zeros(2), "model": model, "rng": random.Random(2), "n": 1, "last": torch.zeros(1)}
    error = refused(state, into)
    assert error.missing == ("last",)
    state["last"] = torch.ones(3)
    assert refused(state, into).mismatched == ("last: float32[3] in the checkpoint, float32[1] in the target",)


def test_B18_d_damage_is_found_before_the_target_is_touched() -> None:
    pieces = saved({"a": torch.ones(2), "flag": torch.tensor([True]), "n": [1, "x"]})
    for pointer, raw in (("/flag", b"\7"), ("/n/1", b"\xff"), ("/a", b"\0" * 7)):
        into = {"a": torch.zeros(2), "flag": torch.tensor([False]), "n": [0, ""]}
        before = saved(into)
        with pytest.raises(Damaged, match=pointer):
            load_into({**pieces, pointer: (pieces[pointer][0], raw)}, into)
        assert saved(into) == before


WRAPS = ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."]


@pytest.mark.parametrize("stored", WRAPS)
@pytest.mark.parametrize("live", WRAPS)
def test_B18_e_wrapper_prefixes_are_seen_through(stored: str, live: str) -> None:
    def state(prefix: str, value: float) -> dict[str, torch.Tensor]:
        return {f"{prefix}0.weight": torch.full((2,), value), f"{prefix}1.weight": torch.full((2,), value + 1)}

    into = state(live, 0)
    assert load_into(saved(state(stored, 5)), into) == LoadReport()
    assert saved(into) == saved(state(live, 5))
    again = state(stored, 0)
    load_into(saved(into), again)
    assert saved(again) == saved(state(stored, 5))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_B18_e_wrapped_modules_and_inner_wrappers_load_each_other(name: str) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2), name))

    for a in (plain, inner, lambda: Wrapper(plain(), name)):
        for b in (plain, inner, lambda: Wrapper(plain(), name)):
            source, target = a(), b()
            keys = list(target.state_dict())
            assert load_into(saved({"m": source}), {"m": target}) == LoadReport()
            assert list(target.state_dict()) == keys
            for x, y in zip(source.parameters(), target.parameters(), strict=True):
                assert torch.equal(x, y)


class Holder(nn.Module):
    """A plain model with a real child called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


def test_B18_f_a_real_child_called_module_keeps_its_name() -> None:
    source, target = Holder(), Holder()
    pieces = saved(source)
    assert "/module.weight" in pieces
    load_into(pieces, target)
    assert torch.equal(source.module.weight, target.module.weight) and torch.equal(source.head.weight, target.head.weight)
    wrapped = Wrapper(Holder())
    load_into(pieces, wrapped)
    assert torch.equal(wrapped.module.module.weight, source.module.weight)
    refused(source, nn.ModuleDict({"other": nn.Linear(2, 2), "head": nn.Linear(2, 2)}))


def test_B18_names_that_would_fall_together_do_not_match() -> None:
    assert match_names(["a", "module.a"], ["module.a", "_orig_mod.a"]) is None
    assert match_names(["module.a", "a"], ["module.module.a", "module.a"]) == {"module.a": "module.module.a", "a": "module.a"}
    assert match_names([], []) == {}
    assert match_names(["a"], []) is None


def test_B18_zero_keys_are_never_a_success() -> None:
    for strict in (True, False):
        refused({"x.w": torch.ones(1)}, {"y.w": torch.zeros(1)}, strict=strict)
        refused({"m": {"x.w": torch.ones(1)}}, {"m": nn.Linear(1, 1)}, strict=strict)
        refused({}, {"w": torch.zeros(1)}, strict=strict)


def test_B18_a_kind_of_value_is_not_turned_into_another() -> None:
    refused({"x": 1}, {"x": torch.zeros(1)})
    refused({"x": torch.ones(())}, {"x": 0.0})
    refused({"x": [torch.ones(1)]}, {"x": {"a": torch.ones(1)}})
    refused({"x": random.Random(1)}, {"x": torch.Generator()})
    refused({"x": np.random.default_rng(1)}, {"x": np.random.Generator(np.random.MT19937(1))})
    refused({"x": 5}, {"x": nn.Linear(1, 1)})
    assert load_into(saved({"x": torch.ones(2)}), into := {"x": None}) == LoadReport()
    assert into["x"].tolist() == [1, 1]


def test_not_strict_keeps_what_does_not_fit_and_reports_it() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    before = copy.deepcopy(model.state_dict())
    state = {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3), "c": nn.Linear(1, 1)}), "n": 3}
    into = {"model": model, "n": 0}
    report = load_into(saved(state), into, strict=False)
    assert report.unexpected == ('model["c.weight"]', 'model["c.bias"]')
    assert len(report.mismatched) == 2 and 'model["b.weight"]' in report.mismatched[0]
    assert torch.equal(model["a"].weight, state["model"]["a"].weight) and into["n"] == 3
    assert torch.equal(model["b"].weight, before["b.weight"])


def test_targets_that_cannot_be_filled_are_named() -> None:
    readonly = np.zeros(2)
    readonly.flags.writeable = False
    assert "read-only" in str(refused({"x": np.ones(2)}, {"x": readonly}))
    assert "expanded" in str(refused({"x": torch.ones(3)}, {"x": torch.zeros(1).expand(3)}))
    with torch.inference_mode():
        frozen = torch.zeros(2)
    assert "inference" in str(refused({"x": torch.ones(2)}, {"x": frozen}))
    with pytest.raises(LayoutMismatch, match="cannot be filled"):
        load_into(saved({"x": torch.ones(2)}), {"x": torch.zeros(2, device="meta")})
    with pytest.raises(TypeError, match="into= is a int"):
        load_into(saved(1), 0)


# --- B17 on the way back --------------------------------------------------------------------------------------------------------


def test_B17_a_a_tie_loads_into_tied_and_untied_targets() -> None:
    shared = torch.arange(3.0)
    pieces = saved({"emb": shared, "head": shared})
    one = torch.zeros(3)
    tied, untied = {"emb": one, "head": one}, {"emb": torch.zeros(3), "head": torch.zeros(3)}
    load_into(pieces, tied)
    load_into(pieces, untied)
    assert tied["emb"] is tied["head"] and one.tolist() == [0, 1, 2]
    assert untied["emb"].tolist() == untied["head"].tolist() == [0, 1, 2]


def test_B17_b_two_values_for_one_tensor_are_an_error_not_the_last_one() -> None:
    emb = torch.arange(3.0)
    one = torch.zeros(3)
    error = refused({"emb": emb, "head": emb + 1}, {"emb": one, "head": one})
    assert error.mismatched == ("head: values other than those of emb in the checkpoint, one tensor with emb in the target",)
    assert load_into(saved({"emb": emb, "head": emb.clone()}), {"emb": one, "head": one}) == LoadReport()

    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.emb, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            if tie:
                self.head.weight = self.emb.weight

    assert "one tensor with" in refused({"m": Tied(False)}, {"m": Tied(True)}).mismatched[0]
    load_into(saved({"m": Tied(True)}), {"m": Tied(True)})


def test_tensors_made_for_one_look_are_no_ties() -> None:
    class Fresh(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}

    state, into = ({str(i): Fresh(64, 64) for i in range(4)} for _ in range(2))
    assert load_into(saved(state), into) == LoadReport()
    assert all(torch.equal(state[name].weight, into[name].weight) for name in state)


# --- B19 on the way back ----------------------------------------------------------------------------------------------------------


def test_B19_b_lists_become_exactly_the_saved_ones_both_ways() -> None:
    hist: list[Any] = []
    into = {"hist": hist, "w": torch.zeros(1)}
    load_into(saved({"hist": [{"a": 1}, {"b": 2}], "w": torch.ones(1)}), into)
    assert into["hist"] is hist and hist == [{"a": 1}, {"b": 2}]
    load_into(saved({"hist": [], "w": torch.ones(1)}), into)
    assert into["hist"] is hist and hist == []


def test_B19_b_dicts_sets_counters_and_deques_too() -> None:
    into = {
        "d": {25: 1},
        "o": OrderedDict(x=1),
        "c": Counter("ab"),
        "q": deque([1], 3),
        "s": {1},
        "t": (1,),
        "w": torch.zeros(1),
    }
    state = {
        "d": {50: 2, 25: 1},
        "o": OrderedDict(y=1, x=2),
        "c": Counter("bbc"),
        "q": deque([7, 8], 3),
        "s": {2, 3},
        "t": (1, 2),
        "w": torch.ones(1),
    }
    load_into(saved(state), into)
    assert into == state
    assert saved(into) == saved(state)


def test_B19_b_a_list_that_holds_tensors_must_keep_its_length() -> None:
    error = refused({"l": [torch.ones(1)]}, {"l": [torch.zeros(1), torch.zeros(1)]})
    assert error.mismatched == ("l: 1 items in the checkpoint, 2 in the target",)


def test_B19_c_a_plain_value_takes_the_saved_one() -> None:
    into = {"epoch": 0, "name": None, "best": math.inf}
    load_into(saved({"epoch": 20, "name": "x", "best": 0.5}), into)
    assert into == {"epoch": 20, "name": "x", "best": 0.5}


def test_the_order_of_a_dict_is_that_of_the_checkpoint() -> None:
    into = {"b": torch.zeros(1), "a": torch.zeros(1)}
    state = {"a": torch.ones(1), "b": torch.ones(1)}
    load_into(saved(state), into)
    assert saved(into) == saved(state)


# --- objects ------------------------------------------------------------------------------------------------------------------------


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": torch.Generator().manual_seed(seed), "epoch": 0}


def train(parts: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        parts["optimizer"].zero_grad()
        x = torch.randn(5, 3, generator=parts["rng"])
        parts["model"](x).square().mean().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["epoch"] += 1


@pytest.mark.parametrize("used", [0, 1], ids=["into fresh objects", "into used objects"])
def test_a_training_goes_on_to_the_same_bits(used: int) -> None:
    reference = trained(1)
    train(reference, 2)
    pieces = saved(reference)
    train(reference, 3)
    resumed = trained(2)
    train(resumed, used)
    load_into(pieces, resumed)
    assert saved(resumed) == pieces
    train(resumed, 3)
    assert saved(resumed) == saved(reference)


def test_an_optimizer_for_another_model_is_named() -> None:
    stored, live = trained(1), trained(2)
    live["optimizer"] = torch.optim.AdamW([{"params": live["model"][0].parameters()}, {"params": live["model"][2].parameters()}])
    train(stored, 1)
    error = refused(stored, live)
    assert error.mismatched == ("optimizer.param_groups: groups of [6] parameters in the checkpoint, groups of [2, 2] in the target",)


def test_optimizer_state_of_another_shape_is_named() -> None:
    stored, live = trained(1), trained(2)
    train(stored, 1)
    live["model"][2] = nn.Linear(4, 2)
    live["optimizer"] = torch.optim.AdamW(live["model"].parameters())
    live["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(live["optimizer"], [1])
    live["model"](torch.randn(5, 3)).mean().backward()
    live["optimizer"].step()
    names = [text.partition(":")[0] for text in refused(stored, live).mismatched]
    assert names == [
        'model["2.weight"]',
        'model["2.bias"]',
        "optimizer.state[4].exp_avg",
        "optimizer.state[4].exp_avg_sq",
        "optimizer.state[5].exp_avg",
        "optimizer.state[5].exp_avg_sq",
    ]


def test_B18_a_optimizer_state_wider_than_its_parameter_is_not_narrowed() -> None:
    def parts() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        return parameter, torch.optim.SGD([parameter], momentum=0.9)

    parameter, optimizer = parts()
    optimizer.state[parameter]["momentum_buffer"] = torch.tensor([1.0009765625])
    pieces = saved(optimizer)
    _, fresh = parts()
    load_into(pieces, fresh)
    assert saved(fresh) == pieces


def test_a_missing_scheduler_is_an_error_not_a_fresh_warm_up() -> None:
    stored, live = trained(1), trained(1)
    del stored["scheduler"]
    assert refused(stored, live).missing == ("scheduler",)


def test_extra_keys_of_a_loaded_part_are_named_beneath_its_pointer() -> None:
    pieces = saved({"ema": {"w": torch.ones(1)}}, "/extras")
    with pytest.raises(LayoutMismatch) as caught:
        load_into(pieces, {"ema": {"v": torch.zeros(1)}}, pointer="/extras")
    assert caught.value.missing == ("ema.v",) and caught.value.unexpected == ("ema.w",)
    into = {"ema": {"w": torch.zeros(1)}}
    load_into(pieces, into, pointer="/extras")
    assert into["ema"]["w"].item() == 1
