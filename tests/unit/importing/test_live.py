"""A source into live objects: all is checked before anything is touched, all misfits are one error, what was taken is told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.rigs.foreign_files import lightning_file, trainer_folder, training
from tests.rigs.odd_tensors import bits
from unbroken.capture.stack import Parts, Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.core.errors import LayoutMismatch
from unbroken.importing.live import StartReport, start_from
from unbroken.importing.spec import check_start_from


def fresh(seed: int = 9, order: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """As `training` makes them, other values, no step taken. `order`: of the optimizer's parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([parameters[i] for i in order], lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def stack_of(model: Any, optimizer: Any, scheduler: Any = None, **others: Any) -> Stack:
    parts = Parts(keyed_parts(model, "model"), keyed_parts(optimizer, "optimizer"), keyed_parts(scheduler, "scheduler"), **others)
    return Stack(parts, Streams(1, torch.device("cpu")))


def start(source: Path, stack: Stack, rank: int = 0, **options: Any) -> StartReport:
    spec = check_start_from({"source": source, **options})
    assert spec is not None
    return start_from(stack, spec, rank)


def same_state(a: Any, b: Any) -> bool:
    """Equal in all tensors and values."""
    if isinstance(a, torch.Tensor):
        return bool(a.dtype is b.dtype and bits(a) == bits(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same_state, a, b)) if isinstance(a, list) else bool(a == b)


def save(path: Path, **parts: Any) -> Path:
    torch.save(parts, path)
    return path


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model, optimizer, scheduler = training()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return save(tmp_path / "a.pt", **parts, step=2, best=0.5)


def test_everything_is_put_and_told(trained: Path) -> None:
    objects = fresh()
    report = start(trained, stack_of(*objects))
    for live, source in zip(objects, training(), strict=True):
        assert same_state(live.state_dict(), source.state_dict())
    assert report.taken == ["weights (4 tensors)", "optimizer state (4 of 4)", "scheduler"]
    assert (report.format, report.step, report.missing, report.left_over) == ("torch", 2, [], ["best"])
    assert any("matched by the order" in note for note in report.notes)
    assert any("counts its own steps from 0" in note for note in report.notes)


def test_what_the_source_lacks_starts_fresh_and_is_told(tmp_path: Path) -> None:
    model, optimizer, scheduler = fresh()
    report = start(save(tmp_path / "w.pt", **training()[0].state_dict()), stack_of(model, optimizer, scheduler))
    assert report.missing == ["optimizer state: not in the source, starts fresh", "scheduler: not in the source, starts fresh"]
    assert same_state(model.state_dict(), training()[0].state_dict()) and not optimizer.state


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "_orig_mod.module.", "module._orig_mod.", "model.module."])
def test_B18_marks_of_wrappers_are_seen_through_and_that_is_said(tmp_path: Path, prefix: str) -> None:
    weights = {prefix + name: value for name, value in training()[0].state_dict().items()}
    model, optimizer, _ = fresh()
    report = start(save(tmp_path / "w.pt", model=weights), stack_of(model, optimizer))
    assert same_state(model.state_dict(), training()[0].state_dict())
    assert any(f"names in the source lose {prefix}" in note for note in report.notes)


def test_B18_marks_inside_names_and_live_models_that_have_them(tmp_path: Path) -> None:
    weights = training()[0].state_dict()
    inner = save(tmp_path / "i.pt", model={name.replace("1.", "1._orig_mod."): value for name, value in weights.items()})
    model, optimizer, _ = fresh()
    start(inner, stack_of(model, optimizer))
    assert same_state(model.state_dict(), weights)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = inner

    model, optimizer, _ = fresh()
    report = start(save(tmp_path / "w.pt", model=weights), stack_of(Outer(model), optimizer))
    assert same_state(model.state_dict(), weights) and any("live names lose model." in note for note in report.notes)


def test_B18_a_real_child_called_module_keeps_its_name(tmp_path: Path) -> None:
    class WithChild(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, live = WithChild(), WithChild()
    report = start(save(tmp_path / "w.pt", **source.state_dict()), stack_of(live, torch.optim.SGD(live.parameters(), lr=1)))
    assert same_state(live.state_dict(), source.state_dict()) and not any("lose" in note for note in report.notes)


def test_B18_all_misfits_are_one_error_and_nothing_is_touched(trained: Path, tmp_path: Path) -> None:
    model, optimizer, scheduler = fresh()
    state = torch.load(trained, weights_only=True)
    weights = state["model"]
    weights["2.weight"] = weights.pop("1.weight")
    weights["0.bias"] = torch.zeros(1)
    weights["0.weight"] = weights["0.weight"].bfloat16()
    state["optimizer"]["state"][1]["exp_avg"] = torch.zeros(3)
    state["scheduler"] = {"T_max": 5, "last_epoch": 1}
    before = [bits(value) for value in model.state_dict().values()]
    random.seed(4)
    drawn = random.getstate()
    with pytest.raises(LayoutMismatch) as error:
        start(save(tmp_path / "b.pt", **state), stack_of(model, optimizer, scheduler))
    found = error.value
    assert (found.missing, found.unexpected) == (("1.weight",), ("2.weight",))
    told = str(found)
    for words in (
        "missing in the source: 1.weight",
        "0.bias: float32[1] in the source, float32[8] live",
        "0.weight: bfloat16[8, 4] in the source, float32[8, 4] live; cast=True converts it",
        "exp_avg is float32[3] in the source, the parameter [8]",
        "scheduler: another class or version",
        "T_max",
    ):
        assert words in told
    assert [bits(value) for value in model.state_dict().values()] == before and not optimizer.state and random.getstate() == drawn


def test_B18_casting_and_partial_loads_on_request_only(tmp_path: Path) -> None:
    weights = {name: value.bfloat16() for name, value in training()[0].state_dict().items()}
    model, optimizer, _ = fresh()
    start(save(tmp_path / "b.pt", model=weights), stack_of(model, optimizer), cast=True)
    assert torch.equal(model[0].weight, weights["0.weight"].float())
    model, optimizer, _ = fresh()
    kept = model[0].weight.clone()
    part = save(tmp_path / "p.pt", model={"0.bias": torch.full((8,), 5.0), "other": torch.ones(1), "1.bias": torch.ones(7)})
    report = start(part, stack_of(model, optimizer), strict=False)
    assert model[0].bias.tolist() == [5] * 8 and torch.equal(model[0].weight, kept)
    assert report.left_over == ["other"] and len(report.missing) == 3 and any("1.bias: float32[7]" in note for note in report.notes)
    with pytest.raises(LayoutMismatch, match="no name in the source is one of the live model's"):
        start(save(tmp_path / "n.pt", model={"nothing": torch.ones(1)}), stack_of(model, optimizer), strict=False)


def test_tied_weights_need_one_of_their_names_and_may_not_differ(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    for weights in (
        {"a.weight": torch.ones(2, 2)},
        {"b.weight": torch.ones(2, 2)},
        {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)},
    ):
        live = Tied()
        start(save(tmp_path / "t.pt", model=weights), stack_of(live, torch.optim.SGD(live.parameters(), lr=1)))
        assert live.a.weight.tolist() == [[1, 1], [1, 1]]
    other = {"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}
    with pytest.raises(LayoutMismatch, match=r"b\.weight: is one tensor with a\.weight here"):
        start(save(tmp_path / "t.pt", model=other), stack_of(live, torch.optim.SGD(live.parameters(), lr=1)))


def test_optimizer_state_goes_by_name_where_there_are_names(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    named = {
        "state": {f"module.{names[i]}": one for i, one in state["state"].items()},
        "param_groups": [state["param_groups"][0] | {"params": [f"module.{name}" for name in names]}],
    }
    listed = {**state, "param_groups": [state["param_groups"][0] | {"param_names": names}]}
    for number, saved in enumerate((named, listed)):
        live, other, _ = fresh(order=(3, 0, 2, 1))
        report = start(save(tmp_path / f"{number}.pt", model=model.state_dict(), optimizer=saved), stack_of(live, other))
        for name, parameter in live.named_parameters():
            assert same_state(other.state[parameter], optimizer.state[dict(model.named_parameters())[name]])
        assert not any("by the order" in note for note in report.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["param_groups"][0]["params"].pop(), "groups of [3] parameters in the source, of [4] live"),
        (lambda s: s["param_groups"].append({"params": []}), "groups of [4, 0] parameters"),
        (lambda s: s["state"].update({77: {}}), "state for 77, which is no parameter"),
        (lambda s: s["param_groups"][0].update(momentum=0.9), "an option 'momentum', which the live optimizer does not know"),
        (lambda s: s["param_groups"][0].update(lr="fast"), "lr is 'fast' in the source, 0.1 live: not of one kind"),
        (lambda s: s["param_groups"][0].update(params=[0, 0, 1, 2]), "parameters without a number or name, or one twice"),
        (lambda s: s["state"].update({0: 5}), "0.weight: its state is no dict"),
        (lambda s: s.update(state=[]), "its state is no dict"),
        (lambda s: s["state"][1].update(exp_avg="x"), "0.bias: exp_avg is 'x' in the source, the parameter [8]"),
        (lambda s: s["state"][1].update(exp_avg_sq=torch.zeros(8).long()), "0.bias: exp_avg_sq is int64[8] in the source"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(8)), "0.weight: exp_avg is float32[8] in the source, the parameter [8, 4]"),
        (lambda s: s["state"][1].update(step=None), "0.bias: step is 'None'"),
        (lambda s: s["state"][1].update(other=torch.zeros(7)), "0.bias: other is float32[7]"),
        (lambda s: s["param_groups"][0].update(betas=(0.9,)), "betas is '(0.9,)' in the source"),
        (lambda s: s["param_groups"][0].update(eps=None), "eps is 'None' in the source"),
        (lambda s: s["param_groups"][0].update(lr=torch.ones(3)), "lr is 'tensor([1., 1., 1.])' in the source"),
        (
            lambda s: s["param_groups"][0].update(params=["a", "b", "c", "d"]),
            "has ['a', 'b', 'c', 'd'] in the source where the live one has",
        ),
        (lambda s: s.update(param_groups=[5]), "its param_groups are no list"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused_in_words(tmp_path: Path, change: Any, words: str) -> None:
    model, optimizer, _ = training()
    state = optimizer.state_dict()
    change(state)
    live, other, _ = fresh()
    before = other.state_dict()
    path = save(tmp_path / "a.pt", model=model.state_dict(), optimizer=state)
    with pytest.raises(LayoutMismatch) as error:
        start(path, stack_of(live, other))
    assert words in str(error.value) and other.state_dict() == before
    report = start(path, stack_of(live, other), take=["model"])
    assert report.taken == ["weights (4 tensors)"] and "optimizer state (not asked for)" in report.left_over


def test_how_to_compute_stays_the_scripts_and_what_is_overridden_is_told(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"foreach": True, "lr": 0.5}
    live, other, _ = fresh()
    report = start(save(tmp_path / "a.pt", model=model.state_dict(), optimizer=state), stack_of(live, other))
    assert (other.param_groups[0]["foreach"], other.param_groups[0]["lr"]) == (None, 0.5)
    assert "optimizer, group 0: lr=0.1 in the script is not used, the source has 0.5" in report.notes


def test_a_trainers_folder_brings_its_random_state_to_the_rank_that_it_is_of(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    folder = trainer_folder(tmp_path / "c")
    expected = (random.random(), np.random.rand(), torch.get_rng_state())
    for rank in (0, 1):
        random.seed(8)
        np.random.seed(8)
        model, optimizer, scheduler = fresh()
        report = start(folder, stack_of(model, optimizer, scheduler), rank)
        assert same_state(optimizer.state_dict(), training()[1].state_dict())
        is_mine = random.random() == expected[0] and np.random.rand() == expected[1]
        assert is_mine == (rank == 0) == ("random state" in report.taken)
    state = torch.load(folder / "rng_state.pth", weights_only=False)
    for part, value in (
        ("python", (3, (1, 2), None)),
        ("python", (torch.ones(2), (1, 2), None)),
        ("numpy", (*state["numpy"][:3], None, 0.0)),
        ("numpy", (*state["numpy"][:4], [])),
        ("numpy", ("MT19937", np.zeros(3, np.uint32), 0, 0, 0.0)),
        ("cpu", torch.zeros(3, dtype=torch.uint8)),
    ):
        torch.save(state | {part: value}, folder / "rng_state.pth")
        with pytest.raises(LayoutMismatch, match=f"random state of rank 0: {part}: is no state"):
            start(folder, stack_of(*fresh()))


def test_a_lightning_file_and_a_loss_scaler(tmp_path: Path) -> None:
    model, optimizer, scheduler = fresh()
    report = start(lightning_file(tmp_path / "a.ckpt"), stack_of(model, optimizer, scheduler))
    assert same_state(model.state_dict(), training()[0].state_dict()) and scheduler.last_epoch == 2
    assert report.taken == ["weights (4 tensors)", "optimizer state (4 of 4)", "scheduler"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    saved = scaler.state_dict() | {"scale": 256.0, "_growth_tracker": 7}
    path = save(tmp_path / "s.pt", model=training()[0].state_dict(), scaler=saved)
    start(path, stack_of(model, optimizer, scaler=scaler))
    assert scaler.state_dict() == saved
    for change in ({"scale": "x"}, {5: 1}, {None: 1}):
        path = save(tmp_path / "s.pt", model=training()[0].state_dict(), scaler=saved | change)
        with pytest.raises(LayoutMismatch, match="scaler: "):
            start(path, stack_of(model, optimizer, scaler=scaler))


def test_names_in_the_report_cannot_move_a_terminals_cursor(tmp_path: Path) -> None:
    model, optimizer, _ = fresh()
    path = save(tmp_path / "a.pt", **{"model": training()[0].state_dict(), "\x1b[2Jgone": 1})
    assert not any("\x1b" in line for line in start(path, stack_of(model, optimizer)).lines())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "give the path"),
        ({"path": "x"}, "with 'source'"),
        ({"source": "x", "parts": 1}, "not 'parts'"),
        ({"source": "x", "take": ["weights"]}, "take="),
        ({"source": "x", "take": []}, "take="),
        ({"source": "x", "step": -1}, "step=-1"),
        ({"source": "x", "cast": 1}, "cast=1"),
    ],
)
def test_wrong_options_are_refused_with_what_is_accepted(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_start_from(value)
