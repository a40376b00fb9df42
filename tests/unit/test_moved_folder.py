"""B13: a folder that is moved, copied, linked, read while it changes, made under another umask, or mounted read-only; Store and Run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import unbroken
from tests.rigs.states import s, whole
from tests.rigs.tiny_run import end_daemon, train


def made(folder: Path | str, *steps: int) -> None:
    with unbroken.Store(folder, keep=99) as store:
        for k in steps:
            store.save(k, s(k))


def newest(folder: Path) -> int:
    step = unbroken.Store(folder).latest()
    assert step is not None and whole(unbroken.open(folder).load()) == step
    return step


def links(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink()]


def mentions(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_B13_a_a_relative_folder_outlives_chdir_and_mv_and_nothing_in_it_names_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "a place of its own"
    old.mkdir()
    monkeypatch.chdir(old)
    store = unbroken.Store("ckpt")
    store.save(1, s(1), wait=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.save(2, s(2), wait=True)
    store.close()
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == []
    assert mentions(old / "ckpt", "a place of its own") == [] and links(old) == []
    (old / "ckpt").rename(tmp_path / "moved")
    assert newest(tmp_path / "moved") == 2
    with unbroken.Store(tmp_path / "moved") as store:
        assert whole(store.load()) == 2
        store.save(3, s(3))
    assert newest(tmp_path / "moved") == 3 and not (old / "ckpt").exists()


def test_B13_a_a_runs_folder_is_moved_and_goes_on_and_nothing_in_it_names_its_place(tmp_path: Path) -> None:
    old, new = tmp_path / "a place of its own", tmp_path / "moved"
    train(old, 3)
    end_daemon(old)
    assert mentions(old, "a place of its own") == [] and links(old) == []
    old.rename(new)
    train(new, 5)
    end_daemon(new)
    certificate = unbroken.open(new).certify()
    assert certificate.certified and certificate.steps == 5


def test_B13_b_what_is_newest_is_always_a_real_checkpoint_also_after_a_resume_that_keeps_all(tmp_path: Path) -> None:
    made(tmp_path, 1, 2)
    with unbroken.Store(tmp_path, keep=99) as store:
        assert whole(store.load()) == 2
        for k in (3, 4):
            store.save(k, s(k), wait=True)
            assert newest(tmp_path) == k
    assert links(tmp_path) == []


def test_B13_c_who_asks_for_the_newest_while_it_changes_never_fails_and_never_goes_back(tmp_path: Path) -> None:
    made(tmp_path, 0)
    seen: list[int] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        reader = unbroken.Store(tmp_path)
        try:
            while not done.is_set() or len(seen) < 100:
                step = reader.latest()
                assert step is not None
                seen.append(step)
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with unbroken.Store(tmp_path, keep=1) as store:
        for k in range(1, 101):
            store.save(k, {"k": k})
    done.set()
    asking.join(60.0)
    assert failures == [] and seen == sorted(seen)
    assert len(set(seen)) > 5 and unbroken.Store(tmp_path).latest() == 100


@pytest.mark.parametrize("flags", ["-r", "-rL", "-a"])
def test_B13_d_a_copy_with_links_dropped_or_followed_has_the_same_newest(tmp_path: Path, flags: str) -> None:
    made(tmp_path / "run", 1, 2, 3)
    subprocess.run(["cp", flags, str(tmp_path / "run"), str(tmp_path / "copy")], check=True, timeout=60)
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    for folder in (tmp_path / "copy", tmp_path / "link"):
        assert newest(folder) == newest(tmp_path / "run") == 3
        assert unbroken.open(folder).verify().ok
    with unbroken.Store(tmp_path / "link") as store:
        store.load()
        store.save(4, s(4))
    assert (newest(tmp_path / "copy"), newest(tmp_path / "run")) == (4, 3)
    assert [one.step for one in unbroken.open(tmp_path / "link").prune(keep=1).goes] == [2, 3], "keep is 3 at the last save"


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_B13_e_modes_follow_the_umask(tmp_path: Path, umask: int, file_mode: int, folder_mode: int) -> None:
    before = os.umask(umask)
    try:
        made(tmp_path / "run", 1, 2)
        unbroken.open(tmp_path / "run").prune(keep=1)
    finally:
        os.umask(before)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
    assert modes == {(False, file_mode), (True, folder_mode)}


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run on a mount that takes no writes, or, where mounting is not allowed, in folders that do not."""
    folder = tmp_path / "run"
    made(folder, 1, 2)
    mounted = (
        subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False).returncode == 0
        and subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], capture_output=True, check=False).returncode == 0
    )
    everything = [folder, *folder.rglob("*")]
    if not mounted:
        for path in everything:
            path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)
    else:
        for path in everything:
            path.chmod(0o755)


def test_B13_f_a_read_only_folder_is_read_by_all_that_only_read_and_nothing_is_written(read_only: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    archive = unbroken.open(read_only)
    assert [one.step for one in archive.steps()] == [1, 2] and whole(archive.load()) == 2 and whole(archive.load(1)) == 1
    assert unbroken.Store(read_only).latest() == 2 and whole(unbroken.Store(read_only).load()) == 2
    assert archive.verify().ok and archive.variables()
    assert [one.step for one in archive.prune(keep=1, dry_run=True).goes] == [1]
    for command in ("ls", "prune --dry-run"):
        done = subprocess.run(
            [sys.executable, "-m", "unbroken", *command.split(), str(read_only)], capture_output=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


def test_B13_f_writing_to_a_read_only_mount_is_an_error_with_its_errno(read_only: Path) -> None:
    if os.access(read_only, os.W_OK) or os.statvfs(read_only).f_flag & os.ST_RDONLY == 0:
        pytest.skip("needs a mount that takes no writes: a superuser may write to any folder")
    with pytest.raises(unbroken.SaveFailed) as failed:
        unbroken.Store(read_only).save(3, s(3), wait=True)
    assert isinstance(failed.value, OSError)
    with pytest.raises(OSError, match="Read-only"):
        unbroken.open(read_only).prune(keep=1)
    shutil.copytree(read_only, read_only.parent / "copy")
    assert newest(read_only.parent / "copy") == 2
