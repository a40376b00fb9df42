"""Export: what other tools read has the bits of the checkpoint, under the names torch expects; there whole or not at all."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import unbroken
from tests.rigs.odd_tensors import MAKERS, bits, odd_tensors
from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.ports import arm


class Module(nn.Module):
    """Tied weights, a buffer that state_dict leaves out, batch statistics, extra state, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)
        self.notes = {"seen": 3}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.notes)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embedding(x)) * self.scale.float())
        return out


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Groups whose order is not that of the names, nor of the registration."""
    by_name = dict(model.named_parameters())
    order = [["scale", "norm.weight"], ["norm.bias", "embedding.weight"]]
    return torch.optim.AdamW([{"params": [by_name[name] for name in names], "lr": 0.01 * (i + 1)} for i, names in enumerate(order)])


def trained(folder: Path, wrap: Any = lambda model: model) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three steps; the model and the optimizer as they are at the end."""
    torch.manual_seed(1)
    model = Module()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = TensorDataset(torch.arange(64) % 8, torch.arange(64) % 8)
    run = unbroken.Run(
        folder,
        model=wrap(model),
        optimizer=optimizer,
        scheduler=scheduler,
        data=unbroken.Batches(data, global_batch=8, seed=1),
        extras={"ema": torch.optim.swa_utils.AveragedModel(model), "note": "x\ny"},
        total_steps=3,
        units=2,
    )
    for batch in run:
        for micro in batch:
            micro.backward(nn.functional.cross_entropy(run.model(micro.x), micro.y))
        run.step()
    return model, optimizer


def optimizers_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The same numbers, tensors by their bits, groups by their values."""
    assert a["state"].keys() == b["state"].keys()
    for number, values in a["state"].items():
        assert {name: bits(value) for name, value in values.items()} == {name: bits(v) for name, v in b["state"][number].items()}
    return bool(a["param_groups"] == b["param_groups"])


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel], ids=["plain", "wrapped"])
def test_a_torch_file_loads_into_model_and_optimizer(tmp_path: Path, wrap: Any) -> None:
    model, optimizer = trained(tmp_path / "run", wrap)
    made = unbroken.open(tmp_path / "run").export(tmp_path / "out.pt", format="torch")
    assert (made.path, made.files, made.step, made.notes) == (str(tmp_path / "out.pt"), ["out.pt"], 3, [])
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    fresh = Module()
    assert fresh.load_state_dict(state["model"]) == ([], [])
    assert {n: bits(v) for n, v in fresh.named_parameters()} == {n: bits(v) for n, v in model.named_parameters()}
    assert {n: bits(v) for n, v in fresh.named_buffers()} == {n: bits(v) for n, v in model.named_buffers()}
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embedding.weight"].data_ptr(), "stored once"
    assert fresh.notes == {"seen": 3}
    its = optimizer_of(fresh)
    its.load_state_dict(state["optimizer"])
    assert optimizers_equal(its.state_dict(), optimizer.state_dict())
    assert state["optimizer_parameters"] == ["scale", "norm.weight", "norm.bias", "embedding.weight"]
    assert state["scheduler"]["last_epoch"] == 3
    assert state["extras"]["note"] == "x\ny"
    assert state["counters"]["step"] == 3
    torch.optim.swa_utils.AveragedModel(Module()).load_state_dict(state["extras"]["ema"])


def test_safetensors_load_into_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "run")
    made = unbroken.open(tmp_path / "run").export(tmp_path / "out")
    assert set(made.files) == {"model.safetensors", "optimizer.safetensors", "extras.safetensors", "state.json"}
    assert set(os.listdir(tmp_path / "out")) == set(made.files)
    weights, sidecar = load_file(tmp_path / "out/model.safetensors"), read_sidecar(tmp_path / "out")
    fresh = Module()
    missing, unexpected = fresh.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["_extra_state"], [])
    fresh.load_state_dict(sidecar["state"]["model"])
    assert {n: bits(v) for n, v in fresh.state_dict().items() if n != "_extra_state"} == {
        n: bits(v) for n, v in model.state_dict().items() if n != "_extra_state"
    }
    its = optimizer_of(fresh)
    its.load_state_dict(sidecar["state"]["optimizer"])
    assert optimizers_equal(its.state_dict(), optimizer.state_dict())
    assert sidecar["source"]["step"] == 3
    assert sidecar["source"]["root"] == unbroken.open(tmp_path / "run").steps()[-1].root


def test_several_models_and_optimizers_have_a_file_each(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = {"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 1)}
    optimizers = {key: torch.optim.AdamW(model.parameters()) for key, model in models.items()}
    data = TensorDataset(torch.ones(64, 2), torch.zeros(64))
    run = unbroken.Run(
        tmp_path / "run",
        model=models,
        optimizer=optimizers,
        data=unbroken.Batches(data, global_batch=4, seed=1),
        total_steps=2,
        units=1,
    )
    for batch in run:
        for micro in batch:
            micro.backward(models["disc"](models["gen"](micro.x)).square().mean())
        run.step()
    archive = unbroken.open(tmp_path / "run")
    archive.export(tmp_path / "out")
    archive.export(tmp_path / "out.pt", format="torch")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    for key, model in models.items():
        for weights in (load_file(tmp_path / f"out/model.{key}.safetensors"), state["model"][key]):
            assert {n: bits(v) for n, v in weights.items()} == {n: bits(v) for n, v in model.state_dict().items()}
        assert optimizers_equal(state["optimizer"][key], optimizers[key].state_dict())
        assert optimizers_equal(read_sidecar(tmp_path / "out")["state"][f"optimizer.{key}"], optimizers[key].state_dict())


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Store's checkpoint of every odd tensor, exported both ways."""
    folder = tmp_path_factory.mktemp("odd")
    with unbroken.Store(folder / "store") as store:
        store.save(1, {"odd": odd_tensors()})
    archive = unbroken.open(folder / "store")
    archive.export(folder / "out")
    archive.export(folder / "out.pt", format="torch")
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_B16_an_odd_tensor_is_exported_with_its_bits(odd: Path, name: str) -> None:
    wanted = MAKERS[name]()
    plain = torch.load(odd / "out.pt", weights_only=True)["odd"][name]
    assert bits(plain) == bits(torch.from_numpy(wanted.copy()) if isinstance(wanted, np.ndarray) else wanted)
    assert bits(read_sidecar(odd / "out")["state"]["odd"][name]) == bits(wanted)


STATE = {
    "plain": [1, -0.5, "text\n\u20ac", True, None],
    "typed": {
        "tuple": (1, (2,)),
        "big": 2**70,
        "nan": float("nan"),
        "inf": -float("inf"),
        "bytes": b"\x00\xff",
        "array": bytearray(b"\x01"),
        "complex": 1 - 2j,
        "surrogate": "a\ud800",
        "numpy": np.float32(0.1),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "set": {1, 2},
        "deque": deque([1, 2], 5),
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        25: "int key",
        (1, "x"): "tuple key",
        "$dollar": {"$type": "mine"},
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
    },
    "../../x": {"w": torch.ones(2)},
    "generator": torch.Generator().manual_seed(3),
}


def test_values_that_json_does_not_know_are_typed(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path / "store") as store:
        store.save(1, STATE)
    unbroken.open(tmp_path / "store").export(tmp_path / "out")
    found = read_sidecar(tmp_path / "out")["state"]
    assert found["plain"] == STATE["plain"]
    typed: Any = STATE["typed"]
    assert found["typed"].keys() == typed.keys()
    for key, value in typed.items():
        got = found["typed"][key]
        if key in ("nan", "dates"):
            assert repr(got) == repr(value)
        elif key not in ("dtype", "size"):
            assert (type(got), got) == (type(value), value), key
    assert set(os.listdir(tmp_path)) == {"store", "out"}
    assert set(os.listdir(tmp_path / "out")) == {"state.json", "part-2.safetensors", "generator.safetensors"}
    unbroken.open(tmp_path / "store").export(tmp_path / "out.pt", format="torch")
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(plain["../../x"]["w"], torch.ones(2))
    assert plain["typed"]["dates"] == ["2020-01-01"]
    assert (plain["typed"]["dtype"], plain["typed"]["size"], plain["typed"]["set"]) == ("bfloat16", (1, 2), [1, 2])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with unbroken.Store(tmp_path / "store") as made:
        for step in (1, 2):
            made.save(step, {"w": torch.full((4,), float(step))})
    return tmp_path / "store"


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_an_asked_step_is_exported_and_never_another(store: Path, tmp_path: Path, format: str) -> None:
    unbroken.open(store).export(tmp_path / "out", 1, format)
    found = read_sidecar(tmp_path / "out")["state"] if format == "safetensors" else torch.load(tmp_path / "out", weights_only=True)
    assert torch.equal(found["w"], torch.full((4,), 1.0))
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7; there are 1, 2"):
        unbroken.open(store).export(tmp_path / "other", 7, format)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_nothing_is_overwritten(store: Path, tmp_path: Path, format: str, there: str) -> None:
    target = tmp_path / "out"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
        (target / "x").write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(Refused, match="is there already, and nothing is overwritten"):
        unbroken.open(store).export(target, format=format)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert there != "file" or target.read_text() == "mine"


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_what_comes_to_be_there_meanwhile_is_not_overwritten(store: Path, tmp_path: Path, format: str) -> None:
    target = tmp_path / "out"

    def race() -> None:
        target.mkdir() if format == "safetensors" else target.touch()
        if format == "safetensors":
            (target / "x").write_text("mine")

    arm("export.written", race)
    try:
        with pytest.raises(Refused, match="has been made meanwhile"):
            unbroken.open(store).export(target, format=format)
    finally:
        arm("export.written", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
    assert target.stat().st_size == 0 or [path.name for path in target.iterdir()] == ["x"]


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_fault_leaves_nothing(store: Path, tmp_path: Path, format: str) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    arm("export.written", fail)
    try:
        with pytest.raises(OSError, match="No space left"):
            unbroken.open(store).export(tmp_path / "out", format=format)
    finally:
        arm("export.written", None)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_runs_own_folder_is_no_target(store: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store)
    for target in (store / "out", store / "packs/out", tmp_path / "link/out"):
        with pytest.raises(Refused, match="inside the run's folder"):
            unbroken.open(store).export(target)
    with pytest.raises(ValueError, match="does not exist: make it first"):
        unbroken.open(store).export(tmp_path / "a/b")
    with pytest.raises(ValueError, match="give 'safetensors' or 'torch'"):
        unbroken.open(store).export(tmp_path / "out", format="pickle")


def test_modes_follow_the_umask(store: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        unbroken.open(store).export(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o640}, modes


def read_sidecar(folder: Path) -> dict[str, Any]:
    """state.json with its types, and its tensors out of the files: what the docstring of `portable` says, told backwards."""
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    raw = json.loads((folder / "state.json").read_text())
    assert raw["format"] == "unbroken.export/1"
    return {**raw, "state": {name: _value(value, files) for name, value in raw["state"].items()}}


def _value(told: Any, files: dict[str, dict[str, torch.Tensor]]) -> Any:
    if isinstance(told, list):
        return [_value(one, files) for one in told]
    if not isinstance(told, dict):
        return told
    if "$tensor" in told:
        tensor = files[told["file"]][told["$tensor"]]
        if told.get("dtype") == "complex128":
            tensor = torch.view_as_complex(tensor)
        return tensor.numpy() if "$type" in told else tensor
    if "$type" not in told:
        return {key: _value(one, files) for key, one in told.items()}
    kind = told["$type"]
    if kind in ("py:dict", "py:OrderedDict", "py:Counter"):
        make: Any = {"py:dict": dict, "py:OrderedDict": OrderedDict, "py:Counter": Counter}[kind]
        return make({_value(key, files): _value(one, files) for key, one in told["items"]})
    if "items" in told:
        items = [_value(one, files) for one in told["items"]]
        return (
            deque(items, told["maxlen"])
            if kind == "py:deque"
            else {"py:tuple": tuple, "py:set": set, "py:frozenset": frozenset}[kind](items)
        )
    if kind.startswith(("np:", "np.array:")):
        array = np.frombuffer(base64.b64decode(told["value"]), np.dtype(kind.partition(":")[2])).reshape(told["shape"])
        return array if kind.startswith("np.array:") else array[()]
    if kind == "py:tuple":
        return tuple(_value(one, files) for one in told["value"])
    if "state" in told:
        return _value(told["state"], files)
    read: dict[str, Any] = {
        "py:int": int,
        "py:float": float.fromhex,
        "py:complex": lambda v: complex(float.fromhex(v[0]), float.fromhex(v[1])),
        "py:str": lambda v: base64.b64decode(v).decode("utf-8", "surrogatepass"),
        "py:bytes": base64.b64decode,
        "py:bytearray": lambda v: bytearray(base64.b64decode(v)),
    }
    return read.get(kind, lambda v: v)(told["value"])
