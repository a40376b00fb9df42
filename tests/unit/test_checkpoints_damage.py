"""A Store in bad company: files missing, cut or changed, writers killed at any moment, two writers in one folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import unbroken
from tests.rigs.states import s, whole
from unbroken.checkpoints import Store
from unbroken.core.errors import CheckpointWarning, Damaged, Fenced, NoCheckpoint, SaveFailed, UnbrokenError
from unbroken.core.ports import arm
from unbroken.core.records import Writer

DEADLINE_S = 30.0


def paths(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    """A folder with S(10), S(20), S(30), and the files that each save added."""
    folder = tmp_path_factory.mktemp("template") / "run"
    added: dict[int, list[str]] = {}
    with Store(folder, keep=9) as store:
        store.save(0, {}, wait=True)
        before = paths(folder)
        for k in (10, 20, 30):
            store.save(k, s(k), wait=True)
            added[k] = sorted(paths(folder) - before)
            before = paths(folder)
    assert [name.split("/")[0] for name in added[30]] == ["manifests", "packs", "runs"]
    return folder, added


@pytest.fixture
def copy(template: tuple[Path, dict[int, list[str]]], tmp_path: Path) -> tuple[Path, dict[int, list[str]]]:
    shutil.copytree(template[0], tmp_path / "run")
    return tmp_path / "run", template[1]


def loads_with_one_warning(store: Store, *words: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state: dict[str, Any] = store.load()
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert issubclass(caught[0].category, UserWarning)
    assert caught[0].filename == __file__
    for word in words:
        assert word in str(caught[0].message)
    return state


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("which", range(3), ids=["manifest", "pack", "log entry"])
@pytest.mark.parametrize("harm", [delete, cut, empty, folder_instead])
def test_B01_a_b_c_any_file_missing_or_cut_falls_back_with_one_warning(
    harm: Callable[[Path], None], which: int, copy: tuple[Path, dict[int, list[str]]]
) -> None:
    folder, added = copy
    harm(folder / added[30][which])
    store = Store(folder)
    assert store.latest() == 20
    state = loads_with_one_warning(store, "loaded step 20", "step 30", added[30][which] if which < 2 else "log entry")
    assert whole(state) == 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.save(30, s(33), wait=True)
        assert store.latest() == 30 and store.load()["step"] == 33
        store.close()


def test_B01_c_an_empty_folder_in_its_place_is_no_checkpoint(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, added = copy
    for name in added[30]:
        (folder / name).unlink()
    (folder / "manifests" / "000000000030").mkdir()
    assert Store(folder).latest() == 20 and whole(Store(folder).load()) == 20


def test_B01_d_left_over_temporary_names_are_ignored_and_removed(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, _ = copy
    child = os.fork()
    if child == 0:
        arm("store.create.before_link", lambda: os.kill(os.getpid(), signal.SIGKILL))
        Store(folder).save(40, s(40), wait=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert [p for p in paths(folder) if ".tmp-" in p]
    store = Store(folder)
    assert store.latest() == 30
    with pytest.warns(CheckpointWarning, match="took the folder over"):
        store.save(40, s(40), wait=True)
    store.close()
    assert not [p for p in paths(folder) if ".tmp-" in p]
    assert [info.step for info in unbroken.open(folder).steps()] == [20, 30, 40]


def _save_until_killed(folder: Path, begun: int, returned: int) -> None:
    """In a child: save n, n+1, ... and tell each step begun and returned as 8 bytes on its pipe."""
    warnings.simplefilter("ignore")
    store = Store(folder, keep=2)
    step = (store.latest() or 0) + 1
    while True:
        os.write(begun, step.to_bytes(8, "little"))
        store.save(step, s(step), wait=True)
        os.write(returned, step.to_bytes(8, "little"))
        step += 1


def _last(fd: int) -> int:
    with os.fdopen(fd, "rb") as pipe:
        raw = pipe.read()
    return int.from_bytes(raw[-8:], "little") if raw else 0


def test_B01_e_I1_I9_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    folder, rng, promised = tmp_path / "run", random.Random(7), 0
    for life in range(30):
        begun, returned = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                _save_until_killed(folder, begun[1], returned[1])
            os._exit(1)
        os.close(begun[1])
        os.close(returned[1])
        first = os.read(begun[0], 8)
        done = os.read(returned[0], 8) if life % 3 == 2 else b""  # every third life is struck after its first save, the others in it
        time.sleep(rng.uniform(0.001, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        highest = _last(begun[0]) or int.from_bytes(first, "little")
        promised = max(promised, int.from_bytes(done, "little"), _last(returned[0]))
        store = Store(folder)
        latest = store.latest()
        if latest is None:
            assert promised == 0
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            k = whole(store.load())
        assert k == latest and promised <= k <= max(highest, promised)
    assert promised > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Store(folder, keep=2).save(10**6, s(10**6), wait=True)
    report = unbroken.open(folder).verify()
    assert report.ok and report.num_checkpoints == 2
    assert not [p for p in paths(folder) if ".tmp-" in p]


def test_B01_f_I10_all_damaged_is_an_error_that_lists_them_never_a_fresh_start(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, added = copy
    for name in paths(folder):
        if name.startswith("packs/") and name in added[10] + added[20] + added[30]:
            cut(folder / name)
    for name in paths(folder):
        if name.startswith("manifests/000000000000-"):
            cut(folder / name)
    store = Store(folder)
    for call in (store.load, store.latest):
        with pytest.raises(NoCheckpoint) as caught:
            call()
        for k in (10, 20, 30):
            assert f"step {k}: packs/" in str(caught.value)
        assert caught.value.exit_code == 3
    with pytest.raises(Damaged, match="packs/"):
        store.load(20)


def test_I10_a_lost_log_is_no_fresh_start(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, _ = copy
    shutil.rmtree(folder / "runs")
    with pytest.raises(NoCheckpoint, match="step 30: its log entry is missing"):
        Store(folder).load()
    (folder / "run.json").unlink()
    for call in (Store(folder).load, Store(folder).latest, lambda: Store(folder).save(1, s(1))):
        with pytest.raises(Damaged, match=r"run\.json"):
            call()


def test_I3_a_flipped_byte_never_gives_other_values(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, added = copy
    seen = set()
    for name in added[30]:
        path = folder / name
        raw = path.read_bytes()
        for at in range(0, len(raw), max(1, len(raw) // 64)):
            changed = bytearray(raw)
            changed[at] ^= 0x20
            path.write_bytes(changed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                k = whole(Store(folder).load())
            seen.add(k)
            assert k in (20, 30)
            if k == 20:
                with pytest.raises((Damaged, NoCheckpoint)):
                    Store(folder).load(30)
        path.write_bytes(raw)
    assert seen == {20, 30}


def test_a_checkpoint_found_damaged_by_its_writer_is_condemned_and_written_anew(tmp_path: Path) -> None:
    folder, shared = tmp_path / "run", torch.arange(100_000.0)
    store = Store(folder)
    store.save(20, s(20), wait=True)
    before = paths(folder)
    store.save(30, s(30) | {"large": shared}, wait=True)
    (bad,) = (name for name in paths(folder) - before if name.startswith("packs/"))
    store.save(40, s(40) | {"large": shared}, wait=True)
    raw = bytearray((folder / bad).read_bytes())
    raw[4096 + 100] ^= 1  # a byte of `large`, which steps 30 and 40 share
    (folder / bad).write_bytes(raw)
    assert whole(loads_with_one_warning(store, "loaded step 20", "step 40", "step 30", bad)) == 20
    assert [info.step for info in unbroken.open(folder).steps()] == [20]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(store.load()) == 20
        store.save(30, s(30) | {"large": shared}, wait=True)
        assert store.latest() == 30 and torch.equal(store.load()["large"], shared)
    store.close()
    report = unbroken.open(folder).verify()
    assert report.ok and [step for step, _, _ in report.condemned] == [40, 30]


def test_a_reader_that_falls_back_changes_nothing_until_it_writes(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, added = copy
    cut(folder / added[30][1])
    before = {name: (folder / name).read_bytes() for name in paths(folder)}
    store = Store(folder)
    assert whole(loads_with_one_warning(store, "step 30")) == 20
    assert {name: (folder / name).read_bytes() for name in paths(folder)} == before
    store.save(30, s(30), wait=True)
    assert unbroken.open(folder).verify().condemned[0][0] == 30
    store.close()


def test_an_archive_falls_back_too_and_names_what_it_passed_over(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, added = copy
    cut(folder / added[30][1])
    archive = unbroken.open(folder)
    with pytest.warns(CheckpointWarning, match=f"loaded step 20 .*step 30: {added[30][1]}"):
        assert whole(archive.load()) == 20
    assert not archive.verify().ok
    cut(folder / added[20][2])
    assert unbroken.open(folder).damage


# --- B12: two writers ---------------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            work()
        except UnbrokenError as error:
            os._exit(error.exit_code)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return child


def code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def all_of(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((10_000,), value), "y": torch.full((5,), value)}


def test_B12_a_a_second_job_is_refused_by_name_and_every_load_is_of_one_job(tmp_path: Path) -> None:
    folder, ready = tmp_path / "run", os.pipe()

    def first() -> None:
        with Store(folder) as store:
            for step in range(1, 51):
                store.save(step, all_of(1.0), wait=True)
                if step == 1:
                    os.write(ready[1], b"x")

    def reader() -> None:
        for _ in range(40):
            state = Store(folder).load()
            assert {*state["x"].tolist(), *state["y"].tolist()} == {1.0}

    writing = forked(first)
    assert os.read(ready[0], 1) == b"x"
    reading = forked(reader)
    with pytest.raises(
        Fenced, match=rf"process {writing} on .* \(since .*\) is writing this run: stop it, or choose another folder"
    ) as caught:
        Store(folder).save(1000, all_of(2.0))
    assert caught.value.exit_code == 4
    assert code(writing) == 0 and code(reading) == 0
    store = Store(folder)
    store.save(51, all_of(2.0), wait=True)
    assert set(store.load()["x"].tolist()) == {2.0}
    store.close()


def test_B12_a_a_reader_is_not_alarmed_by_a_save_under_way(copy: tuple[Path, dict[int, list[str]]]) -> None:
    folder, ready, go_on = copy[0], os.pipe(), os.pipe()

    def slow() -> None:
        def strike() -> None:
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)

        arm("saving.before_commit", strike)
        with Store(folder) as store:
            store.save(40, s(40))

    writing = forked(slow)
    assert os.read(ready[0], 1) == b"x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(Store(folder).load()) == 30
    os.write(go_on[1], b"x")
    assert code(writing) == 0
    assert whole(Store(folder).load()) == 40


def test_I6_a_writer_whose_run_went_on_elsewhere_stays_fenced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    old = Store(folder)
    old.save(1, s(1), wait=True)

    def elsewhere() -> None:
        (folder / "writer.json").unlink()  # as a person does who believes the old writer gone
        with Store(folder) as store:
            store.save(2, s(2))

    assert code(forked(elsewhere)) == 0
    with pytest.raises(SaveFailed, match="Fenced"):
        old.save(3, s(3), wait=True)
    with pytest.raises(Fenced):
        old.save(4, s(4), wait=True)
    assert old.latest() == 2
    old.close()


def test_B12_c_a_folder_that_somebody_else_made_first_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("makedirs", "mkdir"):
        real, failed = getattr(os, name), []

        def made_first(path: Any, *args: Any, real: Any = real, failed: list[int] = failed, **kwargs: Any) -> None:
            real(path, *args, **kwargs)
            if not failed:
                failed.append(1)
                raise FileExistsError(17, "File exists", path)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, made_first)
            with Store(tmp_path / name) as store:
                store.save(1, s(1))
        assert failed and whole(Store(tmp_path / name).load()) == 1


def test_B12_d_a_dead_writer_of_this_host_is_taken_over_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def killed() -> None:
        Store(folder).save(1, s(1), wait=True)
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(killed)
    assert code(child) == -signal.SIGKILL
    store = Store(folder)
    assert whole(store.load()) == 1
    with pytest.warns(CheckpointWarning, match=f"took the folder over from process {child} on "):
        store.save(2, s(2), wait=True)
    assert store.latest() == 2
    store.close()


def test_B12_d_a_writer_of_another_host_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Store(folder) as store:
        store.save(1, s(1))
    other = Writer(host="another-host", pid=1, boot_id="b", since="2026-01-01T00:00:00.000Z")
    (folder / "writer.json").write_bytes(msgspec.json.encode(other))
    store = Store(folder)
    begun = time.monotonic()
    with pytest.raises(Fenced, match=r"another-host .*delete .*writer\.json"):
        store.save(2, s(2))
    assert time.monotonic() - begun < DEADLINE_S
    assert whole(store.load()) == 1
    (folder / "writer.json").unlink()
    store.save(2, s(2), wait=True)
    store.close()


def test_B12_the_same_process_takes_over_its_own_folder_and_the_older_store_is_fenced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    old = Store(folder)
    old.save(1, s(1), wait=True)
    new = Store(folder)
    new.save(2, s(2), wait=True)
    with pytest.raises(Fenced, match="another Store of this process"):
        old.save(3, s(3))
    new.save(3, s(30) | {"step": 30}, wait=True)
    assert whole(new.load()) == 30
    old.close()
    new.save(4, s(4), wait=True)
    new.close()


def test_I6_a_save_in_flight_of_the_older_store_does_not_become_visible(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    old, new = Store(folder), Store(folder)
    old.save(1, s(1), wait=True)

    def strike() -> None:
        arm("saving.before_commit", None)
        new.save(2, s(22) | {"step": 22}, wait=True)

    arm("saving.before_commit", strike)
    try:
        with pytest.raises(SaveFailed, match="Fenced"):
            old.save(2, s(2), wait=True)
    finally:
        arm("saving.before_commit", None)
    assert whole(new.load()) == 22
    with pytest.raises(Fenced):
        old.save(3, s(3))
    old.close()
    new.close()
    assert unbroken.open(folder).verify().ok


def test_I10_nothing_is_saved_over_a_log_that_has_lost_its_checkpoints(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        store.save(1, {"w": 1.0})
    shutil.rmtree(tmp_path / "run" / "runs")
    with pytest.raises(NoCheckpoint, match="its log has lost their entries: restore runs/main/log from a copy"):
        Store(tmp_path / "run").save(1, {"w": 2.0})
    assert not list((tmp_path / "run").glob("runs/main/log/*"))
