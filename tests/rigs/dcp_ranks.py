"""Ranks of jobs that save and load through torch.distributed.checkpoint, forked from one process that has imported torch.

`Jobs().run(what, folder, num_ranks)` gives what every rank found.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from tests.rigs.odd_tensors import bits, odd_tensors
from unbroken.core.ports import arm
from unbroken.integrations.dcp import StorageReader, StorageWriter, latest
from unbroken.store.tiers.disk import DiskTier

LAYOUTS: dict[str, tuple[int, ...]] = {
    "fsdp 4": (4,),
    "tp 4": (4,),
    "hsdp 2x2": (2, 2),
    "fsdp-tp 2x2": (2, 2),
    "fsdp 3": (3,),
    "tp 2": (2,),
    "fsdp 1": (1,),
}
LARGE = {"large": (300, 130), "wide": (64, 1024)}
HUGE = (2048, 4096)
PAIRS = ("fsdp 4", "fsdp-tp 2x2", "fsdp 1", "fsdp 3", "fsdp 4", "tp 4", "tp 2", "hsdp 2x2")


def sharded_tensors(k: int) -> dict[str, torch.Tensor]:
    """Whole tensors as a function of one number; on every mesh some are cut unevenly, and some have empty shards."""
    chance = torch.Generator().manual_seed(k)
    found = {name: torch.randn(shape, generator=chance) for name, shape in LARGE.items()}
    found["uneven"] = torch.randn(7, 5, generator=chance).to(torch.bfloat16)
    found["three"] = torch.arange(3) + k
    found["void"] = torch.empty(0, 3)
    found["eight"] = torch.randn(65, 9, generator=chance).to(torch.float8_e4m3fn)
    found["flags"] = torch.rand(5, 3, generator=chance) > 0.5
    found["waves"] = torch.randn(6, 4, 2, generator=chance, dtype=torch.complex64)
    return found


def values(k: int) -> dict[str, Any]:
    """What is no sharded tensor: nested, typed, with keys that look like paths."""
    plain = {name: one for name, one in odd_tensors().items() if isinstance(one, torch.Tensor)}
    return {
        "step": k,
        "lr": [0.1 * k, (1, None)],
        "a/b": {"c.d": b"\x00\xff", "~": True},
        "odd": plain,
        "deep": {"list": [torch.ones(2) * k, k]},
    }


def placed(name: str, ndim: int) -> list[Any]:
    """Placements of a tensor in a layout."""
    inner = Shard(1) if ndim > 1 else Replicate()
    return {"fsdp": [Shard(0)], "tp": [inner], "hsdp": [Replicate(), Shard(0)], "fsdp-tp": [Shard(0), inner]}[name.split(maxsplit=1)[0]]


def meshed(name: str, k: int, mesh: DeviceMesh, *, blank: bool = False) -> dict[str, Any]:
    """The state of k on a mesh; `blank` has its form and other values."""

    tensors = {key: (torch.zeros_like(one) if blank else one) for key, one in sharded_tensors(k).items()}
    model = {key: distribute_tensor(one, mesh, placed(name, one.ndim), src_data_rank=None) for key, one in tensors.items()}
    rest = values(0 if blank else k)
    if blank:
        rest["odd"] = {key: torch.zeros_like(one) for key, one in rest["odd"].items() if key != "expanded"} | {"expanded": torch.zeros(4)}
    return {"model": model, **rest}


def form(value: Any) -> Any:
    """Anything as something that can be compared by bits."""
    if isinstance(value, DTensor):
        return bits(value.to_local())
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: form(one) for key, one in value.items()}
    return [form(one) for one in value] if isinstance(value, list) else value


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that are read of packs meanwhile."""
    found = [0]
    whole = DiskTier.read

    def read(self: DiskTier, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = whole(self, path, offset, length)
        found[0] += len(data) if path.startswith("packs/") else 0
        return data

    DiskTier.read = read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DiskTier.read = whole  # type: ignore[method-assign]


def groups() -> dict[str, tuple[DeviceMesh | None, Any]]:
    """Each layout's mesh and group, for ranks that are part of it; made by all ranks in one order."""
    found: dict[str, tuple[DeviceMesh | None, Any]] = {}
    for name, shape in LAYOUTS.items():
        num = torch.Size(shape).numel()
        if num > dist.get_world_size():
            continue
        group = dist.new_group(list(range(num)))
        mesh = DeviceMesh("cpu", torch.arange(num).reshape(shape))
        found[name] = (mesh if dist.get_rank() < num else None, group)
    return found


def shares(folder: str) -> dict[str, Any]:
    """From mesh to mesh with one large tensor: bytes read by this rank, in shares of its own."""
    found: dict[str, float] = {}
    meshes, whole = groups(), torch.arange(torch.Size(HUGE).numel(), dtype=torch.float32).reshape(HUGE)
    for step, (before, after) in enumerate(itertools.pairwise(PAIRS)):
        state = {name: distribute_tensor(whole, mesh, placed(name, 2), src_data_rank=None) for name, (mesh, _) in meshes.items() if mesh}
        if before in state:
            dcp.save({"w": state[before]}, storage_writer=StorageWriter(folder, step=step), process_group=meshes[before][1])
        dist.barrier()
        if after in state:
            blank = {"w": torch.zeros_like(state[after])}
            with counted() as count:
                dcp.load(blank, storage_reader=StorageReader(folder), process_group=meshes[after][1])
            assert torch.equal(blank["w"].to_local(), state[after].to_local())
            found[f"{before} -> {after}"] = count[0] / blank["w"].to_local().nbytes
    return found


def reshard(folder: str) -> dict[str, Any]:
    """Save on every mesh and load on every other: what came back otherwise."""
    wrong: list[str] = []
    meshes = groups()
    for k, (name, (mesh, group)) in enumerate(meshes.items(), start=1):
        if mesh is not None:
            dcp.save(meshed(name, k, mesh), storage_writer=StorageWriter(os.path.join(folder, name), step=k), process_group=group)
        dist.barrier()
    for k, saved in enumerate(meshes, start=1):
        for name, (mesh, group) in meshes.items():
            if mesh is None:
                continue
            state, reader = meshed(name, k, mesh, blank=True), StorageReader(os.path.join(folder, saved))
            dcp.load(state, storage_reader=reader, process_group=group)
            if form(state) != form(meshed(name, k, mesh)) or reader.loaded_step != k:
                wrong.append(f"{saved} -> {name}")
    return {"wrong": wrong}


def save(folder: str) -> dict[str, Any]:
    """Three more steps, each 10 later than the one before, on all ranks; `UNBROKEN_TEST_DIE` = "rank:failpoint:step" kills a rank there."""
    dies = os.environ.get("UNBROKEN_TEST_DIE", "").split(":")
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    begin = latest(folder) or 0
    dist.barrier()
    for step in (begin + 10, begin + 20, begin + 30):
        if dies != [""] and int(dies[0]) == dist.get_rank() and int(dies[2]) == step:
            arm(dies[1], lambda: os.kill(os.getpid(), 9))
        dcp.save(meshed("fsdp", step, mesh), storage_writer=StorageWriter(folder, step=step, keep=2))
    return {}


def load(folder: str) -> dict[str, Any]:
    """The newest one that is good, or the step in `UNBROKEN_TEST_STEP`: the step, whether all bits are right, warnings, the error."""
    wanted = os.environ.get("UNBROKEN_TEST_STEP")
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    state, reader = meshed("fsdp", 0, mesh, blank=True), StorageReader(folder, step=int(wanted) if wanted else None)
    before, error = form(state), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as failure:
            error = str(failure)
    step = None if error else reader.loaded_step
    is_right = form(state) == (before if step is None else form(meshed("fsdp", step, mesh)))
    told = [str(one.message) for one in caught if one.category.__name__ == "CheckpointWarning"]
    return {"step": step, "is_right": is_right, "warnings": told, "error": error[-2000:]}


def fail(folder: str) -> dict[str, Any]:
    """A save of what only the last rank cannot store, then a good one: the error on every rank, and the steps that are there."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    state = meshed("fsdp", 10, mesh)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    bad = state | ({"only here": {"x": [object()]}} if is_last else {})
    error = ""
    try:
        dcp.save(bad, storage_writer=StorageWriter(folder, step=10))
    except CheckpointException as failure:
        error = str(failure)
    there = os.path.exists(os.path.join(folder, "runs", "main", "log", "00000001.json"))
    dist.barrier()
    dcp.save(state, storage_writer=StorageWriter(folder, step=20))
    return {"error": error[-1000:], "was_committed": there}


WHAT: dict[str, Callable[[str], dict[str, Any]]] = {"reshard": reshard, "shares": shares, "save": save, "load": load, "fail": fail}


def _rank(order: dict[str, Any], rank: int, place: str) -> None:
    """One rank of a job, in a forked process; its result is a file."""
    warnings.simplefilter("ignore")
    os.environ.update(order["env"])
    store = dist.FileStore(os.path.join(place, "store"), order["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order["num_ranks"], timeout=timedelta(seconds=60))
    result = WHAT[order["what"]](order["folder"])
    with open(os.path.join(place, str(rank)), "w") as file:
        json.dump(result, file)
    dist.barrier()


def _job(order: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Each rank's result; None of one that has failed."""
    with tempfile.TemporaryDirectory() as place:
        pids = []
        for rank in range(order["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                try:
                    _rank(order, rank, place)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        return [json.loads(Path(place, str(rank)).read_text()) if code == 0 else None for rank, code in enumerate(codes)]


class Jobs:
    """Starts jobs of forked ranks, one after another, from one process that has imported torch."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.dcp_ranks"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, what: str, folder: str | os.PathLike[str], num_ranks: int, **env: str) -> list[Any]:
        """Every rank's result, None of those that failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"what": what, "folder": os.fspath(folder), "num_ranks": num_ranks, "env": env}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        found: list[Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=60)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_job(json.loads(line))), flush=True)
