"""The disk tier beyond the common contract: durability order, temporaries, modes, links, what errors become."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child, suicide
from unbroken.core.errors import Permanent, StoreError, Transient
from unbroken.core.ports import arm
from unbroken.store.tiers.disk import DiskTier, local_path


@pytest.fixture
def armed() -> Iterator[Callable[[str, Callable[[], None]], None]]:
    names = []

    def put(name: str, strike: Callable[[], None]) -> None:
        names.append(name)
        arm(name, strike)

    yield put
    for name in names:
        arm(name, None)


def failing(number: int) -> Callable[[], None]:
    def strike() -> None:
        raise OSError(number, os.strerror(number))

    return strike


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_I1_bytes_are_durable_before_the_name_and_the_name_before_the_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        order.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}').rsplit('/', 1)[-1][:5]}")
        real_fsync(fd)

    def link(*args: object, **kwargs: object) -> None:
        order.append("link")
        real_link(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    DiskTier(str(tmp_path / "root")).create("packs/object", [b"x"])
    assert order == [f"fsync {tmp_path.name[:5]}", "fsync root", "fsync .obje", "link", "fsync packs"]


def test_B01_d_a_killed_create_leaves_a_temporary_that_is_never_seen_and_is_swept(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))

    def die_before_link(say: Callable[[str], None]) -> None:
        arm("store.create.before_link", suicide)
        tier.create("packs/a", [b"x" * 100])

    _, status = in_child(die_before_link)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left,) = files(tmp_path)
    assert left.startswith("packs/.a.") and ".tmp-" in left
    assert tier.list("") == []
    with pytest.raises(Permanent):
        tier.read(left)
    assert tier.sweep() == [left]
    assert files(tmp_path) == []


def test_a_living_writers_and_another_hosts_temporaries_are_left_alone(tmp_path: Path, armed: Callable[..., None]) -> None:
    tier = DiskTier(str(tmp_path))
    swept: list[list[str]] = []
    armed("store.create.before_link", lambda: swept.append(tier.sweep()))
    other = tmp_path / ".b.999999999-00000000-00000000.tmp-abcdef"
    other.write_bytes(b"x")
    tier.create("a", [b"x"])
    assert swept == [[]]
    assert files(tmp_path) == [other.name, "a"]


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_modes_follow_the_umask(tmp_path: Path, mask: int, file_mode: int, folder_mode: int) -> None:
    before = os.umask(mask)
    try:
        tier = DiskTier(str(tmp_path / "root"))
        tier.create("a/b", [b"x"])
        tier.append("a/c", b"x")
    finally:
        os.umask(before)
    for name in ("root/a/b", "root/a/c"):
        assert (tmp_path / name).stat().st_mode & 0o777 == file_mode
    assert (tmp_path / "root/a").stat().st_mode & 0o777 == folder_mode


def test_a_link_inside_the_store_that_leads_outside_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "packs").symlink_to(outside)
    (root / "one").symlink_to(outside / "secret")
    tier = DiskTier(str(root))
    for act in (lambda: tier.read("packs/secret"), lambda: tier.read("one"), lambda: tier.delete("packs/secret")):
        with pytest.raises(Permanent, match="leads outside"):
            act()
    with pytest.raises(Permanent, match="leads outside"):
        tier.create("packs/new", [b"x"])
    assert tier.list("") == []
    assert files(outside) == ["secret"]


def test_the_root_itself_may_be_a_link_and_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    tier = DiskTier("link")
    monkeypatch.chdir("/")
    tier.create("a/b", [b"x"])
    assert tier.read("a/b") == b"x"
    assert files(tmp_path / "real") == ["a/b"]


@pytest.mark.parametrize("place", ["store.create.part", "store.create.before_fsync", "store.create.before_link", "store.create.after_link"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, Permanent), (errno.EDQUOT, Permanent), (errno.EROFS, Permanent), (errno.EACCES, Permanent), (errno.ESTALE, Transient)],
)
def test_I9_a_failed_create_keeps_the_errno_and_leaves_no_temporary(
    tmp_path: Path, armed: Callable[..., None], place: str, number: int, kind: type[StoreError]
) -> None:
    tier = DiskTier(str(tmp_path))
    armed(place, failing(number))
    with pytest.raises(kind, match="packs/a") as failed:
        tier.create("packs/a", [b"x"])
    assert isinstance(failed.value.__cause__, OSError)
    assert failed.value.__cause__.errno == number
    assert files(tmp_path) == (["packs/a"] if place.endswith("after_link") else [])


def test_I9_a_failed_append_is_cut_back(tmp_path: Path, armed: Callable[..., None]) -> None:
    tier = DiskTier(str(tmp_path))
    tier.append("j", b"one\n")
    armed("store.append.before_fsync", failing(errno.ENOSPC))
    with pytest.raises(Permanent):
        tier.append("j", b"two\n")
    assert tier.read("j") == b"one\n"


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    tier = DiskTier(str(tmp_path))
    for path in ("fifo", "folder"):
        with pytest.raises(Permanent, match="not a regular file"):
            tier.read(path)
    with pytest.raises(FileExistsError):
        tier.create("folder", [b"x"])
    assert tier.list("") == []


def test_B12_c_a_folder_that_another_writer_makes_first_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def mkdir(path: str, *args: int) -> None:
        real(path, *args)
        raise FileExistsError(errno.EEXIST, "made by another", path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    tier = DiskTier(str(tmp_path / "root"))
    tier.create("a/b/c", [b"x"])
    assert tier.list("") == ["a/b/c"]


def test_a_link_that_succeeded_but_was_called_a_failure_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str, **kwargs: bool) -> None:
        real(source, target, **kwargs)
        raise FileExistsError(errno.EEXIST, "asked twice", target)

    monkeypatch.setattr(os, "link", link)
    tier = DiskTier(str(tmp_path))
    assert tier.create("a", [b"x"]) == 1
    assert files(tmp_path) == ["a"]


def test_missing_folders_above_the_root_are_made(tmp_path: Path) -> None:
    DiskTier(str(tmp_path / "a" / "b" / "run")).create("x", [b"1"])
    assert files(tmp_path) == ["a/b/run/x"]


def test_an_empty_append_that_fails_takes_back_nothing_that_the_writer_added(tmp_path: Path, armed: Callable[..., None]) -> None:
    tier = DiskTier(str(tmp_path))
    tier.append("j", b"a\n")

    def strike() -> None:
        with open(tmp_path / "j", "ab") as file:  # the journal's own writer, in another thread
            file.write(b"b\n")
        raise OSError(errno.EIO, "no")

    armed("store.append.before_fsync", strike)
    with pytest.raises(Permanent):
        tier.append("j", b"")
    assert tier.read("j") == b"a\nb\n"


@pytest.mark.parametrize("url", [os.fsdecode(b"run\xff"), "file:///tmp/run%FF"])
def test_a_folder_whose_name_is_not_utf8_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="not UTF-8: rename it, or choose another path") as caught:
        local_path(url)
    assert type(caught.value) is ValueError
    str(caught.value).encode()


def test_a_relative_name_in_a_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.path.join(os.fsencode(tmp_path), b"\xff")
    os.mkdir(there)
    monkeypatch.chdir(os.fsdecode(there))
    with pytest.raises(ValueError, match="rename it"):
        local_path("run")


def test_other_alphabets_are_names_like_any_other() -> None:
    assert local_path("/tmp/Läufe") == local_path("file:///tmp/L%C3%A4ufe") == "/tmp/Läufe"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    too_long = str(tmp_path / ("x" * 300))
    with pytest.raises(Permanent, match=f"^{too_long}: "):
        DiskTier(too_long).list("")
