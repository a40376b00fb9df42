"""B16: odd tensors through a Store and through a Run, saved at each world size and loaded at each other one.

State is replicated in this version: every rank holds every tensor. Sharded tensors (and so a rank with an empty shard) do not exist yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.odd_tensors import MAKERS, bits, odd_tensors
from tests.rigs.tiny_run import open_run, train

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "store"
    with unbroken.Store(folder) as made:
        made.save(1, odd_tensors())
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_B16_a_store_keeps_dtype_shape_and_bits(store: Path, name: str) -> None:
    back = unbroken.Store(store).load()[name]
    assert bits(back) == bits(MAKERS[name]())
    assert isinstance(back, torch.Tensor) is isinstance(MAKERS[name](), torch.Tensor)


def test_B16_a_transposed_one_has_its_values_in_logical_order(store: Path) -> None:
    assert unbroken.Store(store).load()["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "expanded"])
def test_B16_a_store_loads_them_in_place(store: Path, name: str) -> None:
    """Strides are the target's, values the checkpoint's."""
    wanted, target = MAKERS[name](), MAKERS[name]()
    if isinstance(target, torch.Tensor):
        target.zero_()
    else:
        target = np.zeros_like(target)
    into = {name: target}
    unbroken.Store(store).load(into=into, strict=False)
    assert into[name] is target
    assert bits(target) == bits(wanted)


SPARSE = torch.eye(3).to_sparse()


def test_B16_what_cannot_be_stored_is_named_before_a_store_writes(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    writer = unbroken.Store(store)
    with pytest.raises(TypeError, match=r"layer\.sparse: cannot store a tensor of layout torch.sparse_coo; store tensor.to_dense\(\)"):
        writer.save(2, {"layer": {"sparse": SPARSE}})
    writer.close()
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert unbroken.Store(store).latest() == 1


def test_B16_what_cannot_be_stored_is_named_before_a_run_begins_and_harms_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extras\.sparse: cannot store a tensor of layout torch.sparse_coo"):
        open_run(tmp_path / "new", extras={"sparse": SPARSE})
    assert not (tmp_path / "new").exists()
    train(tmp_path / "run", 1)
    with pytest.raises(TypeError, match=r"extras\.sparse"):
        open_run(tmp_path / "run", extras={"sparse": SPARSE})
    assert [one.step for one in unbroken.open(tmp_path / "run").steps()][-1] == 1


SCRIPT = """
import json, os, shutil, sys, time, torch, torch.distributed as dist
from pathlib import Path
import unbroken
from tests.rigs.odd_tensors import bits, odd_tensors
from tests.rigs.tiny_run import Tiny, open_run, loss_of
import itertools
import numpy as np
from unbroken import opening
from unbroken.step import exchange

folder, rank = Path(sys.argv[1]), int(sys.argv[2])

class Odd(Tiny):
    def __init__(self):
        super().__init__()
        for number, value in enumerate(odd_tensors().values()):
            if isinstance(value, torch.Tensor) and not value.dtype.is_complex and value.stride() != (0,):
                self.register_buffer(f"odd{number}", value)

def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.005)

def life(where, world_size, name, steps, fill):
    if rank == 0:
        (folder / f"{name}.go").touch()  # the folder is there
    wait_for(folder / f"{name}.go")
    if rank < world_size:
        rendezvous = folder / f"{name}.store"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        exchange._times_named.clear()  # as in processes of their own: those who were in no world before count like the others
        opening._openings = itertools.count()
        torch.manual_seed(1)
        model = Odd()
        odd = {key: torch.zeros_like(v, memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else np.zeros_like(v)
               for key, v in odd_tensors().items()} if not fill else {
               key: v.clone() if isinstance(v, torch.Tensor) and v.stride() == (0,) else v for key, v in odd_tensors().items()}
        if not fill:
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.startswith("odd"):
                    buffer.copy_(torch.zeros_like(buffer))
        run = open_run(where, model=model, units=4, total_steps=steps, extras={"odd": odd, "note": name})
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
            run.step()
        wanted = odd_tensors()
        assert {k: bits(v) for k, v in odd.items()} == {k: bits(v) for k, v in wanted.items()}, (where, world_size)
        for number, (key, value) in enumerate(wanted.items()):
            if hasattr(model, f"odd{number}"):
                assert bits(getattr(model, f"odd{number}")) == bits(value), (key, world_size)
        if world_size > 1:
            dist.destroy_process_group()
    (folder / f"{name}.done{rank}").touch()
    for other in range(4):
        wait_for(folder / f"{name}.done{other}")

for a in (1, 2, 3, 4):
    life(folder / f"run{a}", a, f"{a}save", 1, True)
    for b in (1, 2, 3, 4):
        if rank == 0:
            shutil.copytree(folder / f"run{a}", folder / f"run{a}{b}")
        life(folder / f"run{a}{b}", b, f"{a}{b}load", 2, False)
print(json.dumps("all"))
"""


def test_B16_a_run_saves_them_at_each_world_size_and_loads_them_at_each(tmp_path: Path) -> None:
    """Sixteen pairs, in four processes that form worlds of 1 to 4; each also trains a step on, so uneven blocks take part."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], cwd=CHECKOUT, **pipes) for rank in range(4)]
    watch = threading.Timer(110, lambda: [process.kill() for process in ranks])
    watch.start()
    ended = [(*process.communicate(), process.returncode) for process in ranks]
    watch.cancel()
    assert all(code == 0 and json.loads(out.splitlines()[-1]) == "all" for out, _, code in ended), ended
    for a in (1, 2, 3, 4):
        assert {unbroken.open(tmp_path / f"run{a}{b}").steps()[-1].step for b in (1, 2, 3, 4)} == {2}
