"""Hyper-parameters in a stored state: which pieces a name means, what a value must be, and what follows a learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unbroken.archive.settings import Pieces, change_settings
from unbroken.capture.flatten import flatten
from unbroken.capture.tree import rebuild, write_item


def pieces_of(groups: Any, scheduler: Any = None) -> Pieces:
    items = flatten(groups, "/optimizer/groups") + (flatten(scheduler, "/scheduler") if scheduler is not None else [])
    found = {}
    for item in items:
        raw = bytearray(item.nbytes)
        write_item(item, memoryview(raw))
        found[item.piece.pointer] = (item.piece, bytes(raw))
    return found


def group(**more: Any) -> dict[str, Any]:
    return {
        "params": ["a", "b"],
        "lr": 1e-2,
        "betas": (0.9, 0.999),
        "weight_decay": 0,
        "amsgrad": False,
        "foreach": None,
        "name": "x",
    } | more


def after(pieces: Pieces, wanted: dict[str, Any], pointer: str = "/optimizer/groups") -> Any:
    """The state there once the settings are changed."""
    changed = change_settings(pieces, wanted)
    return rebuild({p: (piece, changed.pieces.get(p, data)) for p, (piece, data) in pieces.items()}, pointer)


TWO = pieces_of([group(), group(lr=1.0)])
SEVERAL = pieces_of({"gen": [group(), group()], "disc": [group()]})


@pytest.mark.parametrize("value", ["1e-4", 1e-4])
def test_a_bare_name_means_every_group(value: Any) -> None:
    assert [g["lr"] for g in after(TWO, {"lr": value})] == [1e-4, 1e-4]


def test_a_group_is_chosen_by_its_number() -> None:
    assert [g["lr"] for g in after(TWO, {"1.lr": "0.5"})] == [1e-2, 0.5]


def test_an_optimizer_is_chosen_by_its_key() -> None:
    state = after(SEVERAL, {"disc.lr": "0.5", "gen.1.lr": "0.25"})
    assert [g["lr"] for g in state["gen"]] == [1e-2, 0.25]
    assert [g["lr"] for g in state["disc"]] == [0.5]
    assert [g["lr"] for one in after(SEVERAL, {"lr": "3"}).values() for g in one] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "value", "now"),
    [
        ("betas", "0.8,0.95", (0.8, 0.95)),
        ("betas", "(0.8, 0.95)", (0.8, 0.95)),
        ("betas", [0.8, 0.95], (0.8, 0.95)),
        ("weight_decay", "1", 1),
        ("amsgrad", "true", True),
        ("amsgrad", True, True),
        ("name", "y=z", "y=z"),
        ("lr", 1, 1.0),
    ],
)
def test_a_value_gets_the_type_that_is_stored(name: str, value: Any, now: Any) -> None:
    found = after(TWO, {f"0.{name}": value})[0][name]
    assert (found, type(found)) == (now, type(now))


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    pieces = pieces_of([group(lr=torch.tensor(1e-2))])
    found = after(pieces, {"lr": "0.25"})[0]["lr"]
    assert torch.equal(found, torch.tensor(0.25))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            {"lrr": "1"},
            "'lrr': no such setting in the checkpoint; options are amsgrad, betas, foreach, lr, name, weight_decay, groups 0, 1",
        ),
        ({"2.lr": "1"}, "groups 0, 1"),
        ({"params": "a"}, "no such setting"),
        ({"/optimizer/groups/0/params/0": "z"}, "no such setting"),
        ({"/model/parameters/w": "1"}, "there are /optimizer/groups/0/amsgrad, "),
        ({"lr": "fast"}, "lr=fast: a finite number is wanted, as 0.01 is now"),
        ({"lr": "nan"}, "a finite number is wanted"),
        ({"lr": True}, "a finite number is wanted"),
        ({"weight_decay": "0.1"}, "a int is wanted, as 0 is now"),
        ({"weight_decay": 0.1}, "a int is wanted"),
        ({"amsgrad": "yes"}, "a bool is wanted, as False is now"),
        ({"foreach": "true"}, "a NoneType is wanted, as None is now"),
        ({"betas": "0.9"}, "2 values are wanted, such as betas=0.9,0.999"),
        ({"betas": "0.9,x"}, "a finite number is wanted, as 0.999 is now"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        change_settings(TWO, wanted)
    assert words in str(refused.value)


def test_each_change_is_told_and_what_stays_is_not() -> None:
    told = change_settings(TWO, {"lr": "1.0", "0.amsgrad": "false"}).told
    assert [(c.pointer, c.before, c.after) for c in told] == [("/optimizer/groups/0/lr", "0.01", "1.0")]


def test_a_schedule_keeps_its_shape_when_the_rate_is_changed() -> None:
    schedule = {"base_lrs": [0.1], "_last_lr": [0.05], "last_epoch": 3}
    pieces = pieces_of([group(lr=0.05, initial_lr=0.1)], schedule)
    wanted = {"lr": "0.005"}
    (changed,) = after(pieces, wanted)
    moved = after(pieces, wanted, "/scheduler")
    assert (changed["lr"], changed["initial_lr"]) == (0.005, pytest.approx(0.01))
    assert (moved["base_lrs"], moved["_last_lr"], moved["last_epoch"]) == ([pytest.approx(0.01)], [0.005], 3)


def test_a_schedule_with_rates_of_its_own_must_be_told_each() -> None:
    pieces = pieces_of([group(initial_lr=1e-2, max_lr=1.0)], {"base_lrs": [1e-2], "_last_lr": [1e-2]})
    with pytest.raises(ValueError, match=r"keeps rates of its own \(max_lr\): name each value by its pointer"):
        change_settings(pieces, {"lr": "0.1"})
    wanted = {"/optimizer/groups/0/lr": "0.1", "/optimizer/groups/0/max_lr": "2", "/scheduler/base_lrs/0": "0.1"}
    assert after(pieces, wanted)[0]["max_lr"] == 2.0
    assert after(pieces, wanted, "/scheduler") == {"base_lrs": [0.1], "_last_lr": [1e-2]}


def test_a_rate_of_zero_cannot_be_scaled_to() -> None:
    pieces = pieces_of([group(lr=0.0, initial_lr=0.1)], {"base_lrs": [0.1], "_last_lr": [0.0]})
    with pytest.raises(ValueError, match="it is 0 at this step"):
        change_settings(pieces, {"lr": "0.1"})


@pytest.mark.parametrize("make", ["CosineAnnealingLR", "StepLR", "LambdaLR", "ExponentialLR", "LinearLR"])
def test_torchs_own_schedules_go_on_in_shape(make: str) -> None:
    arguments: dict[str, Any] = {
        "CosineAnnealingLR": {"T_max": 20},
        "StepLR": {"step_size": 4},
        "LambdaLR": {"lr_lambda": lambda s: 1 / (s + 1)},
        "ExponentialLR": {"gamma": 0.9},
        "LinearLR": {"total_iters": 10},
    }[make]

    def life(rate: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        return optimizer, getattr(torch.optim.lr_scheduler, make)(optimizer, **arguments)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, num: int) -> list[float]:
        found = []
        for _ in range(num):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = life(0.1)
    now = rates(optimizer, scheduler, 5)[-1]
    pieces = pieces_of([{"params": ["w"]} | {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}], scheduler.state_dict())
    wanted = {"lr": now / 4}
    optimizer.param_groups[0]["lr"] = after(pieces, wanted)[0]["lr"]
    optimizer.param_groups[0]["initial_lr"] = after(pieces, wanted)[0]["initial_lr"]
    state = after(pieces, wanted, "/scheduler")
    scheduler.load_state_dict(state)
    quarter, its = life(0.1 / 4)
    assert rates(optimizer, scheduler, 6) == pytest.approx(rates(quarter, its, 11)[5:])
