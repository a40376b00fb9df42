"""Files written past the page cache hold exactly what was given, on any file system, whatever the pieces' sizes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.core.ports import Buffer
from unbroken.store.tiers import direct
from unbroken.store.tiers.direct import BlockReader, BlockWriter


def in_whole_pages(size: int, at: int = 0) -> memoryview:
    """Random bytes that start `at` bytes after the beginning of a page."""
    view = memoryview(mmap.mmap(-1, at + size + 1))[at : at + size]
    view[:] = os.urandom(size)
    return view


def write(path: Path, parts: Sequence[Buffer]) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        writer = BlockWriter(fd)
        for part in parts:
            writer.add(part)
        return writer.finish()
    finally:
        os.close(fd)


@pytest.fixture(scope="module", params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "disk":
        return tmp_path_factory.mktemp("direct")
    path = Path(f"/dev/shm/unbroken-test-{os.getpid()}")
    path.mkdir(exist_ok=True)
    request.addfinalizer(lambda: [*(p.unlink() for p in path.iterdir()), path.rmdir()])
    return path


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 70_000), st.sampled_from([4096, 8192, 65536])), max_size=12),
    block=st.sampled_from([4096, 16384]),
    refer=st.sampled_from([1, 20_000]),
    at=st.sampled_from([0, 64]),
)
def test_what_is_written_is_what_was_given(folder: Path, sizes: list[int], block: int, refer: int, at: int) -> None:
    parts = [in_whole_pages(size, at) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "BLOCK_BYTES", block)
        patch.setattr(direct, "REFER_BYTES", refer)
        assert write(folder / "file", parts) == sum(sizes)
    assert (folder / "file").read_bytes() == b"".join(parts)


def test_whole_blocks_go_past_the_cache_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    genuine = os.writev

    def watched(fd: int, parts: list[memoryview]) -> int:
        seen.append((sum(map(len, parts)), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return genuine(fd, parts)

    monkeypatch.setattr(direct.os, "writev", watched)
    monkeypatch.setattr(direct, "BLOCK_BYTES", 8192)
    write(tmp_path / "file", [b"x" * 20_000])
    assert seen in ([(8192, True), (8192, True), (3616, False)], [(8192, False), (8192, False), (3616, False)]), (
        "tmpfs has no cache to pass"
    )


def test_large_parts_in_whole_pages_are_written_from_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header, then a part and a gap, then one that lies askew and is copied."""
    seen: list[int] = []
    genuine = os.writev

    def watched(fd: int, parts: list[memoryview]) -> int:
        seen.extend(direct._address(part) for part in parts)
        return genuine(fd, parts)

    monkeypatch.setattr(direct.os, "writev", watched)
    straight, askew = in_whole_pages(direct.REFER_BYTES + 5), in_whole_pages(direct.REFER_BYTES, at=64)
    write(tmp_path / "file", [bytes(4096), straight, bytes(4091), askew])
    assert direct._address(straight) in seen
    assert direct._address(askew) not in seen
    assert (tmp_path / "file").read_bytes() == bytes(4096) + straight + bytes(4091) + askew


@pytest.mark.parametrize("short", [True, False])
def test_a_file_system_that_refuses_or_cuts_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    def awkward(fd: int, parts: list[memoryview]) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and not short:
            raise OSError(errno.EINVAL, "no direct writes here")
        return os.write(fd, parts[0][: 4096 if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 5000])

    monkeypatch.setattr(direct.os, "writev", awkward)
    monkeypatch.setattr(direct, "BLOCK_BYTES", 16384)
    data = os.urandom(50_000)
    write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data


def test_another_error_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, parts: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(direct.os, "writev", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "file", [b"x"])


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize(
    ("offset", "length", "shift"), [(0, 8192, 0), (4096, 5000, 0), (4096, 8192, 1), (1, 9000, 0), (16384, 8192, 0), (30000, 10, 0)]
)
def test_reading_into_memory_gives_what_the_file_holds(folder: Path, is_cached: bool, offset: int, length: int, shift: int) -> None:
    """Aligned or not, at the end of the file and beyond it."""
    content = os.urandom(20000)
    fd = os.open(folder / "read", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    os.fsync(fd)
    if not is_cached:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    view = memoryview(mmap.mmap(-1, 16384))[shift : shift + length]
    reader = BlockReader(fd)
    for _ in range(2):
        expected = content[offset : offset + length]
        assert reader.read_into(offset, view) == len(expected)
        assert view[: len(expected)] == expected
    os.close(fd)


def test_reading_past_the_cache_leaves_it_as_it_was(tmp_path: Path) -> None:
    """What was not in the cache is not put there: a restored state must not push out what the training reads."""
    path = tmp_path / "file"
    content = os.urandom(8 << 20)
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if not can_be_direct(fd):
        pytest.skip("this file system reads through its cache only")
    view = memoryview(mmap.mmap(-1, len(content)))
    assert BlockReader(fd).read_into(0, view) == len(content)
    assert view == content
    os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        os.preadv(fd, [bytearray(4096)], 4 << 20, os.RWF_NOWAIT)
    os.close(fd)


def can_be_direct(fd: int) -> bool:
    try:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(other, [mmap.mmap(-1, 4096)], 0)
    except OSError:
        return False
    os.close(other)
    return True
