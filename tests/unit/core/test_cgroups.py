"""Limits of containers, read from folders like those that kernels show."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.core.cgroups import Limits, limits
from unbroken.core.os import available_memory_bytes, host_memory_bytes

MIB = 1 << 20


def tree(root: Path, membership: str, files: dict[str, str]) -> Limits:
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "membership").write_text(membership)
    return limits(str(root / "fs"), str(root / "membership"))


def test_no_limit_anywhere(tmp_path: Path) -> None:
    assert tree(tmp_path, "", {}) == Limits()
    assert tree(tmp_path, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n", "cpu.max": "max 100000\n"}) == Limits()
    v1 = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "5\n", "cpu/cpu.cfs_quota_us": "-1\n"}
    assert tree(tmp_path, "4:memory:/\n1:cpu,cpuacct:/\n", v1) == Limits()


def test_version_2_in_a_container(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "0::/\n",
        {
            "memory.max": f"{100 * MIB}\n", "memory.current": f"{60 * MIB}\n", "memory.stat": f"anon 7\ninactive_file {20 * MIB}\n",
            "cpu.max": "150000 100000\n", "pids.max": "100\n", "pids.current": "90\n",
        },
    )  # fmt: skip
    assert found == Limits(memory_bytes=100 * MIB, memory_free_bytes=60 * MIB, processors=1.5, processes_free=10)


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    """A scheduler's job inside a slice: the job's own group has no limit, the one above it has, which others use as well."""
    found = tree(
        tmp_path,
        "0::/slice/job/step\n",
        {
            "slice/job/step/memory.max": "max\n", "slice/job/step/memory.current": "1\n",
            "slice/job/memory.max": f"{64 * MIB}\n", "slice/job/memory.current": f"{1 * MIB}\n",
            "slice/memory.max": f"{100 * MIB}\n", "slice/memory.current": f"{90 * MIB}\n",
        },
    )  # fmt: skip
    assert (found.memory_bytes, found.memory_free_bytes) == (64 * MIB, 10 * MIB)


def test_version_1_with_controllers_of_their_own(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "9:name=systemd:/\n8:pids:/docker/x\n4:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{32 * MIB}\n", "memory/memory.usage_in_bytes": f"{40 * MIB}\n",
            "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {4 * MIB}\n",
            "cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n", "pids/pids.max": "max\n", "pids/pids.current": "9\n",
        },
    )  # fmt: skip
    assert found == Limits(memory_bytes=32 * MIB, memory_free_bytes=0, processors=0.5)


@pytest.mark.parametrize("text", ["", "x", "-", "\n\n", "9" * 400, "0::\n::::\n4:memory\n", "4:memory:/../../etc\n"])
def test_what_makes_no_sense_is_no_limit(tmp_path: Path, text: str) -> None:
    names = ("memory.max", "memory.current", "cpu.max", "pids.max", "pids.current", "memory.stat")
    assert tree(tmp_path, text, dict.fromkeys(names, text)) == Limits()


def test_what_is_available_here_is_no_more_than_the_host_has() -> None:
    total, available = host_memory_bytes()
    assert 0 < available_memory_bytes() <= available + (256 << 20) <= total + (256 << 20)
