"""Every class of state counts: a restored one that is left out is noticed, a compared one that changes is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.capture import facts
from unbroken.capture.stack import Stack
from unbroken.capture.tree import write_item
from unbroken.core.errors import CheckFailed, EnvironmentChanged

RESTORED = (
    "/model/parameters",
    "/model/buffers",
    "/model/modes",
    "/model/frozen",
    "/optimizer/groups",
    "/optimizer/state",
    "/scheduler",
    "/scaler",
    "/extras",
    "/rng/python",
    "/rng/numpy",
    "/rng/torch",
)


def train(directory: Path, steps: int, *, dropout: float = 0.1, seed: int = 3) -> tuple[list[float], unbroken.Run]:
    """A run in this very process, as in a notebook."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 2), nn.Linear(2, 2))
    model[4].requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[3].parameters()}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    extras = {"ema": {"weight": torch.zeros(8, 4)}, "chance": torch.Generator().manual_seed(seed)}
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    run = unbroken.Run(
        directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        extras=extras,
        data=unbroken.Batches(data, global_batch=8, seed=seed),
        lose_at_most="2 steps",
        total_steps=steps,
        units=2,
    )
    losses = []
    for batch in run:
        model[4].requires_grad_(True)
        model.train(run.completed % 2 == 0)
        for micro in batch:
            micro.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
        if run.step(clip_grad_norm=1.0):
            extras["ema"]["weight"].lerp_(model[0].weight.detach(), 0.1)
            torch.rand(3, generator=extras["chance"])
            torch.rand(run.completed)
        losses.append(run.loss)
    return losses, run


def test_several_runs_in_one_process_resume_exactly(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", 7)
    first, _ = train(tmp_path / "parts", 3)
    second, _ = train(tmp_path / "parts", 7)
    assert first + second == whole
    assert unbroken.open(str(tmp_path / "parts")).steps()[-1].root == unbroken.open(str(tmp_path / "whole")).steps()[-1].root
    certificate = unbroken.open(str(tmp_path / "parts")).certify(against=str(tmp_path / "whole"))
    assert certificate.grade == "exact"


def _forget(place: str) -> Callable[..., None]:
    """Stack.restore that keeps the fresh pieces under `place` instead of the stored ones."""
    genuine = Stack.restore

    def restore(self: Stack, pieces: Any, *, own_streams: bool) -> None:
        fresh = {}
        for item in self.collect({}, {}, {}):
            if (item.piece.pointer + "/").startswith(place + "/"):
                buffer = bytearray(item.nbytes)
                write_item(item, memoryview(buffer))
                fresh[item.piece.pointer] = (item.piece, bytes(buffer))
        kept = {p: value for p, value in pieces.items() if not (p + "/").startswith(place + "/")}
        genuine(self, kept | fresh, own_streams=own_streams)

    return restore


@pytest.mark.parametrize("place", RESTORED)
def test_I3_a_restored_class_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    train(tmp_path, 4)
    if place.startswith("/rng"):
        torch.rand(5), __import__("random").random(), __import__("numpy").random.rand()
    monkeypatch.setattr(Stack, "restore", _forget(place))
    with pytest.raises(CheckFailed, match=place):
        train(tmp_path, 6, seed=3)


def test_counters_are_the_position(tmp_path: Path) -> None:
    """Without the counters a run would start over: they and the data position are in the state root."""
    train(tmp_path, 4)
    names = {v["name"] for v in unbroken.open(str(tmp_path)).variables() if v["role"] == "restored" and v["scope"] == "logical"}
    assert {"/counters/step", "/counters/samples", "/data/step", "/data/consumed_samples", "/data/seed"} <= names


@pytest.mark.parametrize("what", ["structure", "versions", "kernels", "variables"])
def test_I13_a_compared_class_that_changes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    train(tmp_path, 2)
    dropout, expected = 0.1, ""
    if what == "structure":
        dropout, expected = 0.25, "Dropout"
    elif what == "versions":
        genuine = facts.versions()
        monkeypatch.setattr(facts, "versions", lambda: genuine | {"numpy": "0.0.1"})
        expected = "environment/versions/numpy"
    elif what == "kernels":
        monkeypatch.setattr(torch.backends.mkldnn, "deterministic", True)
        expected = "environment/kernels/mkldnn_deterministic"
    else:
        monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
        expected = "environment/variables/MKL_CBWR"
    with pytest.warns(EnvironmentChanged, match=expected):
        train(tmp_path, 4, dropout=dropout)
    certificate = unbroken.open(str(tmp_path)).certify()
    assert any(expected in d for d in certificate.differences), certificate


def test_nothing_changed_gives_no_warning(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path, 4)


def test_the_list_of_variables_is_long_enough(tmp_path: Path) -> None:
    """More than 200 without parameters, moments and per-parameter facts, at least half of them restored or compared."""
    train(tmp_path, 2)
    found = unbroken.open(str(tmp_path)).variables()
    counted = [v for v in found if v["kind"] not in ("parameter", "buffer", "optimizer_state", "layout", "container")]
    assert sum(v["role"] != "recorded" for v in counted) * 2 >= len(counted)
    assert {v["layer"] for v in counted} == {"hardware", "framework", "scheduling"}
    assert all({"name", "layer", "kind", "role", "size_bytes", "hash", "captured"} <= set(v) for v in counted)
