"""Files written past the page cache hold exactly what was given, on any file system, whatever the pieces' sizes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.store.tiers import direct
from unbroken.store.tiers.direct import BlockWriter


def write(path: Path, parts: list[bytes]) -> int:
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
)
def test_what_is_written_is_what_was_given(folder: Path, sizes: list[int], block: int) -> None:
    parts = [os.urandom(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "BLOCK_BYTES", block)
        assert write(folder / "file", parts) == sum(sizes)
    assert (folder / "file").read_bytes() == b"".join(parts)


def test_whole_blocks_go_past_the_cache_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    genuine = os.write

    def watched(fd: int, data: memoryview) -> int:
        seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return genuine(fd, data)

    monkeypatch.setattr(direct.os, "write", watched)
    monkeypatch.setattr(direct, "BLOCK_BYTES", 8192)
    write(tmp_path / "file", [b"x" * 20_000])
    assert seen in ([(8192, True), (8192, True), (3616, False)], [(8192, False), (8192, False), (3616, False)]), (
        "tmpfs has no cache to pass"
    )


@pytest.mark.parametrize("short", [True, False])
def test_a_file_system_that_refuses_or_cuts_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    genuine = os.write

    def awkward(fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and not short:
            raise OSError(errno.EINVAL, "no direct writes here")
        return genuine(fd, data[:5000]) if short and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else genuine(fd, data[:4096])

    monkeypatch.setattr(direct.os, "write", awkward)
    monkeypatch.setattr(direct, "BLOCK_BYTES", 16384)
    data = os.urandom(50_000)
    write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data


def test_another_error_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(direct.os, "write", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "file", [b"x"])
