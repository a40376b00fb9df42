"""The door for torch.distributed.checkpoint in one process: what is kept, what is refused, and what damage does."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import unbroken
from tests.rigs.dcp_ranks import counted
from tests.rigs.odd_tensors import bits, odd_tensors
from unbroken.archive import sharing
from unbroken.core.errors import CheckpointWarning, Fenced, Refused
from unbroken.core.ports import arm
from unbroken.core.records import Writer
from unbroken.integrations.dcp import StorageReader, StorageWriter, latest
from unbroken.store.lease import WriterLease

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def own_processes() -> Iterator[None]:
    """Each test is a process of its own, as far as folders go."""
    yield
    for one in sharing._shared.values():
        one.leave()
    sharing._shared.clear()


def state(k: int) -> dict[str, Any]:
    """S(k), the large tensor in several pieces and chunks."""
    x = float(k)
    tensors = {
        "w": torch.full((256, 1024), x),
        "half": torch.full((5, 3), x).bfloat16(),
        "zero": torch.tensor(x),
        "none": torch.empty(0, 3),
    }
    return {"model": tensors, "step": k, "list": [1, "x", (k, None)], "deep": {"a/b~": {"c": b"\xff"}}}


def save(folder: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        dcp.save(state(step), storage_writer=StorageWriter(folder, step=step, keep=keep))


def load(folder: Path, step: int | None = None) -> int:
    """The k of what was loaded, all of it S(k)."""
    found, reader = state(-1), StorageReader(folder, step)
    dcp.load(found, storage_reader=reader)
    k = found["step"]
    assert form(found) == form(state(k)) and reader.loaded_step == k
    return int(k)


def form(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: form(one) for key, one in value.items()}
    return bits(value) if isinstance(value, torch.Tensor) else value


def cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What went wrong on rank 0."""
    return caught.value.failures[0][0]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_everything_comes_back_bit_by_bit_and_typed(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    assert load(tmp_path) == 20 and load(tmp_path, 10) == 10 and latest(tmp_path) == 20


def test_B16_odd_tensors(tmp_path: Path) -> None:
    odd = {name: one for name, one in odd_tensors().items() if isinstance(one, torch.Tensor)}
    dcp.save(dict(odd), storage_writer=StorageWriter(tmp_path, step=0))
    blank = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in odd.items()}
    dcp.load(blank, storage_reader=StorageReader(tmp_path))
    assert {name: bits(one) for name, one in blank.items()} == {name: bits(one) for name, one in odd.items()}


def test_the_state_of_an_optimizer_under_full_names(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), betas=(0.5, 0.75))
        for _ in range(seed + 1):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(1)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), storage_writer=StorageWriter(tmp_path, step=3)
    )
    other, other_optimizer = made(0)
    found = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    set_state_dict(other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert form(other.state_dict()) == form(model.state_dict())
    assert form(other_optimizer.state_dict()["state"]) == form(optimizer.state_dict()["state"])
    assert other_optimizer.param_groups[0]["lr"] == 0.2 and other_optimizer.param_groups[0]["betas"] == (0.5, 0.75)


def test_a_folder_is_like_any_other_for_who_reads_it_without_ranks(tmp_path: Path) -> None:
    save(tmp_path / "c", 10, 20)
    archive = unbroken.open(tmp_path / "c")
    assert [(one.step, one.kind) for one in archive.steps()] == [(10, "sharded"), (20, "sharded")]
    assert form(archive.load(10)) == form(state(10)) and form(unbroken.Store(tmp_path / "c").load()) == form(state(20))
    assert form(archive.load(20, ["/model/w", "list"])) == form({"/model/w": state(20)["model"]["w"], "list": state(20)["list"]})
    assert archive.verify().ok
    names = {one["name"]: (one["dtype"], one["shape"]) for one in archive.variables(20)}
    assert names["/state/model.w"] == ("float32", [256, 1024]) and names["/state/step"] == ("py:int", [])
    assert set(archive.export(tmp_path / "out").files) >= {"model.safetensors", "state.json"}
    with pytest.raises(Refused, match="of which no branch can be made yet"):
        archive.branch(20, "hot")


def test_equal_values_have_one_root_and_one_changed_element_has_another(tmp_path: Path) -> None:
    for name, change in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        one = state(7)
        one["model"]["w"][17, 300] += change
        dcp.save(one, storage_writer=StorageWriter(tmp_path / name, step=1))
    a, b, c = (unbroken.open(tmp_path / name).steps()[0].root for name in "abc")
    assert a == b != c


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    one = state(1)
    dcp.save(one, storage_writer=StorageWriter(tmp_path, step=1))
    before = sum(path.stat().st_size for path in tmp_path.rglob("*.pack"))
    one["model"]["zero"] += 1
    dcp.save(one, storage_writer=StorageWriter(tmp_path, step=2))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pack")) < before + 20_000
    assert unbroken.open(tmp_path).verify().ok


def test_a_part_of_the_state_costs_the_bytes_of_that_part(tmp_path: Path) -> None:
    one = {"large": torch.randn(1024, 1024), "small": torch.randn(100), "step": 3}
    dcp.save(one, storage_writer=StorageWriter(tmp_path, step=1))
    wanted = {"small": torch.zeros(100)}
    with counted() as count:
        dcp.load(wanted, storage_reader=StorageReader(tmp_path))
    assert torch.equal(wanted["small"], one["small"]) and count[0] < 8_000


def test_a_state_is_made_anew_from_the_metadata_alone(tmp_path: Path) -> None:
    save(tmp_path, 10)
    found: dict[str, Any] = {}
    _load_state_dict(found, StorageReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert form(found) == form(state(10))


def test_an_older_checkpoint_of_another_state_is_passed_over_and_not_withdrawn(tmp_path: Path) -> None:
    save(tmp_path, 10)
    dcp.save({"other": torch.ones(3)}, storage_writer=StorageWriter(tmp_path, step=20))
    old = set(files(tmp_path))
    save(tmp_path, 30)
    pack = max((path for path in files(tmp_path) if path not in old and path.suffix == ".pack"), key=lambda path: path.stat().st_size)
    raw = bytearray(pack.read_bytes())
    raw[4096] ^= 1
    pack.write_bytes(raw)
    with pytest.warns(CheckpointWarning, match="loaded step 10 .* passed over: step 30: .*step 20: .*of the dtype and shape wanted"):
        assert load(tmp_path) == 10
    save(tmp_path, 40)
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [10, 20, 40]


def test_torchtitans_names_of_checkpoints_are_steps_of_one_folder(tmp_path: Path) -> None:
    writer = StorageWriter(keep=5)
    for step in (9, 999, 1000):
        dcp.save(state(step), checkpoint_id=str(tmp_path / f"step-{step}"), storage_writer=writer)
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [9, 999, 1000]
    found = state(0)
    dcp.load(found, checkpoint_id=str(tmp_path / "step-999"), storage_reader=StorageReader(tmp_path))
    assert found["step"] == 999


def test_B08_a_step_that_is_not_there_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    save(tmp_path, 100, 200)
    with pytest.raises(CheckpointException, match="no checkpoint of step 150; there are 100, 200"):
        load(tmp_path, 150)
    with pytest.raises(CheckpointException, match="no run here: the folder is missing or empty"):
        load(tmp_path / "other")
    assert latest(tmp_path / "other") is None


def test_a_save_without_a_step_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(1), storage_writer=StorageWriter(tmp_path / "x"))
    assert isinstance(cause(caught), ValueError) and "no step" in str(cause(caught)) and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("bad", "path"),
    [(object(), "opt.x[1]"), (lambda: 1, "opt.x[1]"), (io.BytesIO(b"x"), "opt.x[1]"), (torch.ones(2).to_sparse(), "opt.x.1")],
)
def test_what_would_need_a_pickle_is_named_before_anything_is_written(tmp_path: Path, bad: Any, path: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"model": torch.ones(3), "opt": {"x": [1, bad]}}, storage_writer=StorageWriter(tmp_path / "x", step=1))
    assert isinstance(cause(caught), TypeError) and f"{path}: cannot store" in str(cause(caught))
    assert not (tmp_path / "x").exists()


def test_nothing_that_is_stored_is_a_pickle(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert not [path for path in files(tmp_path) if b"\x80\x02" in path.read_bytes()[:64] or b"ctorch" in path.read_bytes()]


def test_B10_retention(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path, step=1, keep=2, milestone=True))
    save(tmp_path, 2, 3, 4, keep=2)
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [1, 3, 4]


def test_steps_ascend_unless_an_earlier_one_was_loaded(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, 25)
    assert isinstance(cause(caught), Refused) and "load the step to go back to first" in str(cause(caught))
    assert load(tmp_path, 10) == 10
    save(tmp_path, 25)
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [10, 25]
    with pytest.raises(CheckpointException):
        save(tmp_path, 22)


def test_B12_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    save(tmp_path, 10)
    sharing.shared(str(tmp_path)).leave()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        WriterLease.acquire(str(tmp_path), Writer(host="h", pid=os.getpid(), boot_id="b", since="now"))
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(CheckpointException) as caught:
            save(tmp_path, 20)
        assert isinstance(cause(caught), Fenced) and str(tmp_path) in str(cause(caught))
        assert load(tmp_path) == 10
    finally:
        os.write(done[1], b"x")
        os.waitpid(pid, 0)


def test_a_folder_that_was_removed_meanwhile_begins_anew(tmp_path: Path) -> None:
    save(tmp_path / "c", 10, 20)
    shutil.rmtree(tmp_path / "c")
    save(tmp_path / "c", 5)
    assert load(tmp_path / "c") == 5 and unbroken.open(tmp_path / "c").verify().ok


def test_many_small_tensors_and_values_cost_in_proportion(tmp_path: Path) -> None:
    many = {"t": {str(i): torch.full((4,), float(i)) for i in range(1500)}, "v": {str(i): [i] for i in range(1500)}}
    seconds = []
    for part in (0.2, 1.0):
        some = {key: dict(list(one.items())[: int(len(one) * part)]) for key, one in many.items()}
        blank = {"t": {key: torch.zeros(4) for key in some["t"]}, "v": dict.fromkeys(some["v"])}
        begun = time.process_time()
        dcp.save(some, storage_writer=StorageWriter(tmp_path / str(part), step=1))
        dcp.load(blank, storage_reader=StorageReader(tmp_path / str(part)))
        seconds.append(time.process_time() - begun)
        assert form(blank) == form(some)
    assert seconds[1] < 12 * seconds[0], seconds


def test_folders_of_others_are_neither_written_nor_read(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path / "store") as store:
        store.save(1, {"w": torch.ones(3)})
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "store", 2)
    assert isinstance(cause(caught), Refused) and "written by a Store, not by torch.distributed.checkpoint" in str(cause(caught))
    with pytest.raises(CheckpointException, match="was not saved by"):
        load(tmp_path / "store")
    save(tmp_path / "dcp", 1)
    sharing.shared(str(tmp_path / "dcp")).leave()
    with pytest.raises(Refused, match="not by a Store"), unbroken.Store(tmp_path / "dcp") as store:
        store.save(2, {"w": torch.ones(3)})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointException, match="holds 1 files such as"):
        save(tmp_path / "other", 1)
    assert files(tmp_path / "other") == [tmp_path / "other" / "thesis.txt"]


def test_B18_another_dtype_is_an_error_unless_it_is_to_be_converted(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((3,), 1.5)}, storage_writer=StorageWriter(tmp_path, step=1))
    other = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(other, storage_reader=StorageReader(tmp_path))
    assert isinstance(cause(caught), ValueError) and "w: stored as float32, wanted as bfloat16" in str(cause(caught))
    assert not other["w"].any()
    dcp.load(other, storage_reader=StorageReader(tmp_path, cast=True))
    assert other["w"].tolist() == [1.5] * 3 and other["w"].dtype is torch.bfloat16


class Unknown(SavePlanner):
    """A planner of torch's interface alone."""

    def __init__(self) -> None:
        self._own = dcp.DefaultSavePlanner()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._own.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self._own.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return self._own.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._own.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._own.resolve_data(write_item)


class Unpickling(dcp.DefaultLoadPlanner):
    """A planner that reads what torch would have written."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise AssertionError("called")


def test_planners_that_insist_on_pickles_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"Unknown has no lookup_object\(index\)"):
        dcp.save(state(1), storage_writer=StorageWriter(tmp_path / "x", step=1), planner=Unknown())
    save(tmp_path, 1)
    with pytest.raises(CheckpointException, match="Unpickling has a load_bytes of its own"):
        dcp.load(state(0), storage_reader=StorageReader(tmp_path), planner=Unpickling())
    with pytest.raises(ValueError, match="use_collectives=False"):
        dcp.save(state(2), storage_writer=StorageWriter(tmp_path, step=2), use_collectives=False)


def test_a_planner_that_caches_its_plans_saves_the_new_values(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state(step), storage_writer=StorageWriter(tmp_path, step=step), planner=planner)
    assert [load(tmp_path, step) for step in (1, 2, 3)] == [1, 2, 3]


def test_B05_an_async_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    w, n, history = torch.zeros(100_000), torch.tensor(0), []
    for k in (1, 2, 3):
        w.fill_(k), n.fill_(k), history.append(k)
        future = dcp.async_save({"w": w, "n": n, "history": history}, storage_writer=StorageWriter(tmp_path, step=k))
        w.fill_(-1), n.fill_(-1), history.append(-1)
        future.result()  # type: ignore[union-attr]
    for k in (1, 2, 3):
        found = unbroken.open(tmp_path).load(k)
        assert found["w"].min() == found["w"].max() == found["n"] == k and len(found["history"]) == 2 * k - 1


def test_B03_B07_a_save_that_fails_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def strike() -> None:
        raise OSError(28, "No space left on device")

    arm("store.create.before_fsync", strike)
    try:
        future = dcp.async_save(state(20), storage_writer=StorageWriter(tmp_path, step=20))
        with pytest.raises(CheckpointException, match="No space left"):
            future.result()  # type: ignore[union-attr]
    finally:
        arm("store.create.before_fsync", None)
    assert load(tmp_path) == 10
    save(tmp_path, 30)
    assert [one.step for one in unbroken.open(tmp_path).steps()] == [10, 30] and unbroken.open(tmp_path).verify().ok


@pytest.mark.parametrize("how", ["deleted", "halved"])
def test_B01_a_torn_file_of_the_newest_is_passed_over_with_one_warning(tmp_path: Path, how: str) -> None:
    save(tmp_path / "a", 10, 20)
    old = set(files(tmp_path / "a"))
    save(tmp_path / "a", 30)
    new = [path.relative_to(tmp_path / "a") for path in files(tmp_path / "a") if path not in old]
    assert len(new) == 5, "a pack and a manifest of the share, and of the index, and the log entry"
    for name in new:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        if how == "deleted":
            (tmp_path / "b" / name).unlink()
        else:
            os.truncate(tmp_path / "b" / name, (tmp_path / "b" / name).stat().st_size // 2)
        with pytest.warns(CheckpointWarning, match="loaded step 20 .*step 30"):
            assert load(tmp_path / "b") == 20, name
        shutil.rmtree(tmp_path / "b")


def test_B04_I3_no_changed_bit_of_any_file_is_read_silently(tmp_path: Path) -> None:
    save(tmp_path / "a", 10, 20)
    for path in files(tmp_path / "a"):
        whole = path.read_bytes()
        places = range(0, len(whole), max(1, len(whole) // 6))
        for place in places:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            for step in (None, 20):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with contextlib.suppress(CheckpointException):
                        assert load(tmp_path / "a", step) in (10, 20), "only ever what was saved: `load` compares all bits"
        path.write_bytes(whole)
    assert load(tmp_path / "a") == 20
