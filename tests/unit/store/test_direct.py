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
from unbroken.store.tiers.direct import BlockWriter


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
