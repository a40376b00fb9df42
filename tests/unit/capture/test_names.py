"""Names without the marks of wrappers, which are known by their class; everything else keeps its name (B18)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from unbroken.capture import names
from unbroken.core.limits import MAX_DEPTH


class Inner(nn.Module):
    """Two layers, a buffer that state_dict leaves out, and places that hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.nothing: nn.Module | None
        self.register_module("nothing", None)
        self.register_parameter("none", None)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.register_buffer("void", None)


PARAMETERS = ["first.weight", "first.bias"]
BUFFERS = ["hidden", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def compiled(module: nn.Module) -> nn.Module:
    """Wrapped for compilation, which happens at the first call only."""
    wrapped = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        DataParallel,
        compiled,
        DistributedDataParallel,
        lambda m: compiled(DistributedDataParallel(m)),
        lambda m: DistributedDataParallel(compiled(m)),
        lambda m: compiled(DistributedDataParallel(compiled(m))),
        lambda m: DataParallel(compiled(DataParallel(m))),
    ],
)
def test_B18_wrappers_leave_no_mark(wrap: Any, world_of_one: None) -> None:
    inner = Inner()
    model = wrap(inner)
    assert names.unwrap(model) is inner
    assert list(names.parameters(model)) == PARAMETERS
    assert list(names.buffers(model)) == BUFFERS
    assert [name for name, _ in names.modules(model)] == ["", "first", "norm"]
    assert names.parameters(model)["first.weight"] is inner.first.weight


def test_B18_a_compiled_submodule_leaves_no_mark_either() -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Sequential(DataParallel(nn.Linear(2, 1, bias=False))))
    assert list(names.parameters(model)) == ["0.weight", "0.bias", "1.0.weight"]


@pytest.mark.parametrize("child", ["module", "_orig_mod"])
def test_B18_f_a_real_child_with_a_wrappers_name_keeps_it(child: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(child, nn.Linear(2, 2))

    model = Plain()
    assert names.unwrap(model) is model
    assert list(names.parameters(DataParallel(model))) == [f"{child}.weight", f"{child}.bias"]


def test_B18_an_average_keeps_its_own_counter_and_the_name_of_what_it_averages() -> None:
    """It is no shell: without `n_averaged` a resumed average would start over."""
    average = AveragedModel(Inner(), use_buffers=True)
    assert list(names.parameters(average)) == [f"module.{name}" for name in PARAMETERS]
    assert list(names.buffers(average)) == ["n_averaged", *(f"module.{name}" for name in BUFFERS)]


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    model["again"] = model["body"]
    return model


def test_B18_a_tied_parameter_stands_under_each_name_and_is_called_by_the_first() -> None:
    model = tied()
    assert list(names.parameters(model)) == ["embedding.weight", "body.weight", "body.bias", "head.weight", "again.weight", "again.bias"]
    assert list(names.parameter_names({"": model}).values()) == ["embedding.weight", "body.weight", "body.bias"]


def test_several_models_are_told_apart_by_their_keys_and_share_under_the_first() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    found = names.parameter_names({"teacher": first, "student": second})
    assert found == {id(first.weight): "teacher.weight", id(second.bias): "student.bias"}


def test_wrappers_without_end_are_an_error() -> None:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(MAX_DEPTH):
        model = DataParallel(model)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} times"):
        names.unwrap(model)
    assert isinstance(model, DataParallel)
    assert isinstance(names.unwrap(model.module), nn.Linear)
