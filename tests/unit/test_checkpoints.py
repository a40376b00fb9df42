"""Store and open: the step that is loaded is the one that was meant, and what was saved comes back or is refused by name."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.states import no_space, run_script, s, struck, whole
from unbroken.checkpoints import Store
from unbroken.core.errors import ForeignFolder, LayoutMismatch, NoCheckpoint, Refused, SaveFailed

DEADLINE_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "writer.json"}


def test_a_state_comes_back(folder: Path) -> None:
    with Store(folder) as store:
        assert store.latest() is None
        store.save(10, s(10), wait=True)
        assert store.latest() == 10
        assert whole(store.load()) == 10
        store.save(20, s(20))
        assert whole(store.load(20)) == 20
    assert whole(Store(f"file://{folder}").load()) == 20


def test_nothing_is_made_before_the_first_save(folder: Path) -> None:
    store = Store(folder)
    assert store.latest() is None
    with pytest.raises(NoCheckpoint):
        store.load()
    store.close()
    assert not folder.exists()


def test_switches_are_named_where_they_are_set(folder: Path) -> None:
    store: Any = Store(folder)
    with pytest.raises(TypeError, match="positional"):
        store.save(10, s(10), True)
    with pytest.raises(TypeError, match="positional"):
        store.load(10, {})
    assert not folder.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host/x", "path"),
        ("file://host/x", "path"),
        ("", "path"),
        ("gs://b", "name bucket and prefix"),
        ("s3://k:s@b/x", "holds a key"),
    ],
)
def test_urls_of_other_kinds_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Store(url)
    with pytest.raises(ValueError, match=words):
        unbroken.open(url)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_B10_c_keep_below_one_is_refused(keep: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        Store(folder, keep=keep)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 10**12])
def test_a_step_is_a_whole_number(step: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="step="):
        Store(folder).save(step, {})
    assert not folder.exists()


# --- B08: the step that is meant ------------------------------------------------------------------------------------------------


def saved(folder: Path, *steps: int, keep: int = 9) -> Store:
    with Store(folder, keep=keep) as store:
        for k in steps:
            store.save(k, s(k))
    return Store(folder, keep=keep)


def test_B08_a_steps_are_numbers(folder: Path) -> None:
    store = saved(folder, 9, 999, 1000)
    assert store.latest() == 1000 and whole(store.load()) == 1000
    assert [info.step for info in unbroken.open(folder).steps()] == [9, 999, 1000]


def test_B08_b_wider_numbers_come_after_narrower_ones(folder: Path) -> None:
    store = saved(folder, 99_999, 100_000, 900_000, 10_000_000, 10**11)
    assert store.latest() == 10**11


def test_B08_c_strays_change_nothing(folder: Path) -> None:
    store = saved(folder, 10, 20)
    for name in ("handpicked", "step_abc", "step_-5", ".step_2000.tmp", "manifests/step_5000", "packs/zz", "runs/other"):
        (folder / name).mkdir(parents=True)
    for name in (
        "5000",
        "step_5000",
        "manifests/000000005000-0-x-0.json",
        "manifests/5000.json",
        "runs/main/log/x.json",
        "packs/notes.txt",
    ):
        (folder / name).write_text("stray")
    assert store.latest() == 20 and whole(store.load()) == 20
    store.save(30, s(30), wait=True)
    assert whole(store.load()) == 30 and (folder / "handpicked").is_dir() and (folder / "packs/notes.txt").exists()
    store.close()


def test_B08_d_an_explicit_step_is_that_step_or_an_error(folder: Path) -> None:
    store = saved(folder, 100, 200)
    assert whole(store.load(step=100)) == 100
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 150; there are 100, 200"):
        store.load(step=150)


@pytest.mark.parametrize("what", ["missing", "empty", "only strays"])
def test_B08_e_I10_nothing_to_load_is_an_error_with_exit_code(what: str, folder: Path) -> None:
    if what != "missing":
        folder.mkdir()
    if what == "only strays":
        (folder / "model.pt").write_text("stray")
    store = Store(folder)
    before = sorted(folder.rglob("*"))
    for call in (store.load, lambda: store.load(5), lambda: unbroken.open(folder)):
        with pytest.raises((NoCheckpoint, ForeignFolder), match=str(folder)) as caught:
            call()
        assert caught.value.exit_code == (4 if what == "only strays" else 3)
    if what == "only strays":
        with pytest.raises(ForeignFolder):
            store.save(1, s(1))
    assert sorted(folder.rglob("*")) == before


def test_B08_f_B12_b_only_rank_0_writes_and_every_rank_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [Store(folder) for _ in range(4)]
    for step in range(1, 6):
        for rank, store in enumerate(stores):
            monkeypatch.setenv("RANK", str(rank))
            store.save(step, {"rank": rank, **s(step)}, wait=True)
    for rank, store in enumerate(stores):
        monkeypatch.setenv("RANK", str(rank))
        back = store.load()
        assert back["rank"] == 0 and whole(back) == 5
        store.close()
    monkeypatch.setenv("RANK", "1")
    other = Store(folder / "nowhere")
    other.save(1, s(1), wait=True)
    assert not (folder / "nowhere").exists()
    with pytest.raises(NoCheckpoint):
        other.load()


# --- going back ---------------------------------------------------------------------------------------------------------------------


def test_I10_a_run_that_starts_over_in_a_used_folder_is_refused(folder: Path) -> None:
    store = saved(folder, 500, 600, 700)
    for step in (100, 600, 700):
        with pytest.raises(Refused, match=f"step {step} does not follow step 700"):
            store.save(step, s(step))
    assert [info.step for info in unbroken.open(folder).steps()] == [500, 600, 700]
    store.close()


def test_going_back_leaves_the_later_steps_behind(folder: Path) -> None:
    store = saved(folder, 10, 20, 30)
    assert whole(store.load(10)) == 10
    store.save(15, s(15))
    store.save(25, s(25), wait=True)
    assert [info.step for info in unbroken.open(folder).steps()] == [10, 15, 25]
    with pytest.raises(Refused):
        store.save(20, s(20))
    store.close()
    assert unbroken.open(folder).verify().ok


def test_reading_an_older_step_while_going_on_hides_nothing(folder: Path) -> None:
    with saved(folder, 10, 20, 30) as store:
        store.load(10)
        store.save(40, s(40), wait=True)
        assert [info.step for info in unbroken.open(folder).steps()] == [10, 20, 30, 40]


def test_I10_a_load_counts_for_the_next_save_only(folder: Path) -> None:
    with saved(folder, 8, 9, 10) as store:
        store.load()
        for step in (11, 12, 13):
            store.save(step, s(step), wait=True)
        for step in (10, 11, 13):
            with pytest.raises(Refused, match=f"step {step} does not follow step 13"):
                store.save(step, s(step))
        assert [info.step for info in unbroken.open(folder).steps()][-3:] == [11, 12, 13]


def test_a_failed_going_back_does_not_let_the_next_save_slip_under_the_old_steps(folder: Path) -> None:
    store = saved(folder, 10, 20, 30)
    store.load(10)
    fail = [no_space]

    def strike() -> None:
        if fail:
            fail.pop()()

    with struck(strike, "store.log.before_create"):
        store.save(15, s(15))
        store.save(18, s(18))
        with pytest.raises(SaveFailed) as caught:
            store.wait()
    assert "step 18" in str(caught.value.__notes__)
    assert [info.step for info in unbroken.open(folder).steps()] == [10, 20, 30]
    store.close()


def test_retention_keeps_the_newest_and_milestones(folder: Path) -> None:
    with Store(folder, keep=2) as store:
        counts = []
        for k in range(1, 7):
            store.save(k, s(k), milestone=k == 2, wait=True)
            counts.append([info.step for info in unbroken.open(folder).steps()])
    assert counts == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert [info.milestone for info in unbroken.open(folder).steps()] == [True, False, False]


# --- loading in place, and what cannot be stored ------------------------------------------------------------------------------------


def test_B17_ties_and_slices_survive_the_disk(folder: Path) -> None:
    weight, large = torch.arange(10.0), torch.arange(1_000_000.0)
    with Store(folder) as store:
        store.save(1, {"emb": weight, "head": weight, "slice": large[:10]})
    back = Store(folder).load()
    back["emb"].add_(1)
    assert torch.equal(back["head"], weight + 1) and torch.equal(back["slice"], large[:10])
    assert sum(len(raw) for name, raw in files(folder).items() if name.startswith("packs/")) < 10_000


def test_B18_c_one_error_lists_all_and_not_strict_reports(folder: Path) -> None:
    with Store(folder) as store:
        store.save(7, {"a": torch.ones(1), "b": torch.ones(1)})
    into = {"b": torch.zeros(1), "c": torch.zeros(1)}
    with pytest.raises(LayoutMismatch) as caught:
        store.load(into=into)
    assert (caught.value.missing, caught.value.unexpected) == (("c",), ("a",))
    assert into["b"].item() == 0
    report = store.load(into=into, strict=False)
    assert (report.step, report.missing, report.unexpected) == (7, ("c",), ("a",))
    assert into["b"].item() == 1


def test_B18_a_cast_on_request_only(folder: Path) -> None:
    with Store(folder) as store:
        store.save(1, {"x": torch.tensor([1.0009765625, 3.0])})
    into = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(LayoutMismatch, match=r"x: float32\[2\] in the checkpoint, bfloat16\[2\] in the target"):
        store.load(into=into)
    store.load(into=into, cast=True)
    assert into["x"].tolist() == [1.0, 3.0]


def test_B19_a_types_survive_two_cycles_through_the_disk(folder: Path) -> None:
    state = {
        "ms": {25: 1, 50: 2},
        1.5: "y",
        True: "x",
        "t": (1, 2),
        "none": None,
        "el": [],
        "by": b"\x00\xff",
        "big": 2**70,
        "np": np.int64(3),
    }
    with Store(folder) as store:
        store.save(1, state)
        once = store.load()
        store.save(2, once)
    twice = Store(folder).load()
    assert twice == once == state and list(twice["ms"]) == [25, 50] and type(twice["np"]) is np.int64
    roots = [info.root for info in unbroken.open(folder).steps()]
    assert roots[0] == roots[1]


def test_B19_d_what_cannot_be_stored_is_named_and_nothing_is_written(folder: Path) -> None:
    bad = {"sched": {"fns": [lambda: 0]}}
    with pytest.raises(TypeError, match=r"^sched\.fns\[0\]"):
        Store(folder).save(1, bad)
    assert not folder.exists()
    store = saved(folder, 1)
    before = files(folder)
    with pytest.raises(TypeError, match=r"^sched\.fns\[0\]"):
        store.save(2, bad)
    assert files(folder) == before
    store.close()


def test_a_model_and_its_optimizer_go_on_from_the_disk(folder: Path) -> None:
    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}

    def train(state: dict[str, Any]) -> None:
        for _ in range(3):
            state["optimizer"].zero_grad()
            state["model"](torch.full((4, 3), float(state["step"]))).square().sum().backward()
            state["optimizer"].step()
            state["step"] += 1

    reference, resumed = parts(1), parts(2)
    train(reference)
    with Store(folder) as store:
        store.save(3, reference)
        train(reference)
        store.load(into=resumed)
    train(resumed)
    assert resumed["step"] == 6 and torch.equal(resumed["model"].weight, reference["model"].weight)


# --- the reading side ---------------------------------------------------------------------------------------------------------------


def test_an_archive_lists_loads_parts_and_variables(folder: Path) -> None:
    weight = torch.arange(4.0)
    with Store(folder) as store:
        store.save(5, {"model": {"w": weight, "v": torch.ones(2)}, "tied": weight, "n/a": 1}, milestone=True)
    archive = unbroken.open(folder)
    (info,) = archive.steps()
    assert (info.step, info.generation, info.kind, info.milestone) == (5, 0, "full", True)
    assert info.created.endswith("Z") and len(info.root) == 64
    assert archive.load(5)["n/a"] == 1
    assert set(archive.load(keys=["n/a"])) == {"n/a"}
    parts = archive.load(keys=["/model/w", "tied", "model"])
    assert parts["/model/w"] is parts["tied"] is parts["model"]["w"]
    assert torch.equal(archive.load(keys=["tied"])["tied"], weight)
    with pytest.raises(KeyError, match="no part 'gone'"):
        archive.load(keys=["gone"])
    by_name = {v["name"]: v for v in archive.variables()}
    assert by_name["/model/w"]["dtype"] == "float32" and by_name["/model/w"]["shape"] == [4] and by_name["/model/w"]["size_bytes"] == 16
    assert by_name["/n~1a"]["role"] == "restored" and len(by_name["/n~1a"]["hash"]) == 64
    assert archive.verify().ok and archive.damage == [] and archive.facts.options == {"writer": "store"}


def test_an_archive_sees_later_commits_and_writes_nothing(folder: Path) -> None:
    store = saved(folder, 1)
    archive = unbroken.open(folder)
    before = files(folder)
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        archive.load()
        archive.verify()
        archive.variables()
        assert files(folder) == before
    finally:
        folder.chmod(mode)
    store.save(2, s(2), wait=True)
    assert [info.step for info in archive.steps()] == [1, 2] and whole(archive.load()) == 2
    store.close()


def test_reading_needs_no_torch_until_a_state_is_loaded(folder: Path) -> None:
    saved(folder, 1)
    run_script(
        """
        import sys, unbroken
        archive = unbroken.open(sys.argv[1])
        assert archive.steps() and archive.variables() and archive.verify().ok
        archive.certify()
        assert unbroken.Store(sys.argv[1]).latest() == 1
        assert "torch" not in sys.modules
        archive.load()
        assert "torch" in sys.modules
        """,
        str(folder),
    )


def test_a_closed_store_saves_no_more_but_a_dropped_one_finishes(folder: Path) -> None:
    store = Store(folder)
    store.save(1, s(1))
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.save(2, s(2))
    assert whole(store.load()) == 1
    dropped = Store(folder)
    dropped.save(2, s(2))
    background = dropped._background
    del dropped
    gc.collect()
    assert background.join(DEADLINE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(Store(folder).load()) == 2
