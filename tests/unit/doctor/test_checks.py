"""Each check on what good, doubtful and bad hosts show. A remedy stands exactly where something has to be done."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from unbroken.doctor import checks
from unbroken.doctor.findings import Finding
from unbroken.doctor.needs import Needs, judge_disk, judge_memory

MIB, GIB = 1 << 20, 1 << 30
WHOLE = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}

CASES: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("python", ((3, 11, 7), "Linux"), "ok", "Python 3.11.7"),
    ("python", ((3, 10, 1), "Linux"), "problem", "use Python 3.11 or newer"),
    ("python", ((3, 12, 0), "Darwin"), "problem", "runs need Linux"),
    ("packages", (WHOLE,), "ok", "torch 2.13.0+cpu"),
    ("packages", (WHOLE | {"torch": None},), "problem", "pip install 'unbroken[torch]'"),
    ("packages", (WHOLE | {"numpy": None},), "problem", "pip install 'unbroken' brings numpy"),
    ("packages", (WHOLE | {"torch": "2.4.1"},), "warning", "torch 2.9 and newer"),
    ("packages", (WHOLE | {"torch": "3.0.0"},), "warning", "below 3"),
    ("packages", (WHOLE | {"torch": "2.10.0a0+git"},), "ok", "2.10.0a0"),
    ("packages", (WHOLE | {"torch": "nonsense"},), "warning", "nonsense"),
    ("threads", (8, None, ""), "ok", "8 cores; OMP_NUM_THREADS is not set"),
    ("threads", (8, None, "8"), "ok", "OMP_NUM_THREADS is 8"),
    ("threads", (8, None, "9"), "warning", "at most 8"),
    ("threads", (8, 2.5, "4"), "warning", "of which the container gets 2.5"),
    ("threads", (8, 16.0, "8"), "ok", "8 cores;"),
    ("threads", (8, 0.5, ""), "warning", "less than one core"),
    ("threads", (8, None, "0"), "problem", "at least 1"),
    ("threads", (8, None, "all"), "problem", "whole number"),
    ("memory", (64 * GIB, 60 * GIB, None), "ok", "60.0 GiB of 64.0 GiB"),
    ("memory", (64 * GIB, GIB - 1, 2 * GIB), "warning", "the container's limit is 2.0 GiB"),
    ("shared_memory", (8 * GIB, GIB), "ok", "snapshots do not"),
    ("shared_memory", (64 * MIB, 64 * MIB), "warning", "--shm-size"),
    ("shared_memory", (8 * GIB, 3), "warning", "3 B of 8.0 GiB free"),
    ("shared_memory", (None, 0), "warning", "not there"),
    ("memory_files", ("",), "ok", "sealed"),
    ("memory_files", ("OSError: no",), "problem", "memfd_create"),
    ("open_files", (None,), "ok", "no limit"),
    ("open_files", (1024,), "ok", "at most 1024"),
    ("open_files", (1023,), "warning", "ulimit -n"),
    ("open_files", (255,), "problem", "ulimit -n"),
    ("file_size", (None,), "ok", "no limit"),
    ("file_size", (10 * GIB,), "warning", "ulimit -f"),
    ("file_size", (511 * MIB,), "problem", "ulimit -f"),
    ("address_space", (None,), "ok", "no limit"),
    ("address_space", (8 * GIB,), "warning", "ulimit -v"),
    ("locked_memory", (8 * MIB, ()), "ok", "at most 8.0 MiB"),
    ("locked_memory", (8 * MIB, ("mlx5_0",)), "warning", "ulimit -l"),
    ("locked_memory", (None, ("mlx5_0",)), "ok", "mlx5_0"),
    ("processes", (None, None), "ok", "no limit"),
    ("processes", (9999, 100), "warning", "at most 100"),
    ("processes", (100, None), "warning", "pids limit"),
    ("core_dumps", (0, "core"), "ok", "off"),
    ("core_dumps", (None, "|/usr/bin/crash"), "warning", "to |/usr/bin/crash"),
    ("core_dumps", (MIB, ""), "warning", "ulimit -c 0"),
    ("signals", ([], []), "ok", "none blocked"),
    ("signals", (["SIGUSR2"], ["SIGPIPE", "SIGHUP", "SIGINT"]), "ok", "none"),
    ("signals", (["SIGTERM"], []), "problem", "SIGTERM is blocked"),
    ("signals", ([], ["SIGCHLD"]), "problem", "SIGCHLD is ignored"),
    ("clock", (2026, 0.2), "ok", "2026"),
    ("clock", (1970, 0.0), "warning", "set the clock"),
    ("clock", (2026, -300.0), "warning", "-300 s"),
    ("fork_safety", ({}, ""), "ok", "can be forked"),
    ("fork_safety", ({"x": "started 3 threads"}, ""), "warning", "x is left out: started 3 threads"),
    ("fork_safety", ({}, "it ended"), "warning", "without the fork server"),
    ("loopback", (["127.0.0.1", "::1"], ""), "ok", "127.0.0.1"),
    ("loopback", (["10.0.0.1"], ""), "problem", "/etc/hosts"),
    ("loopback", ([], ""), "problem", "unknown"),
    ("loopback", (["127.0.0.1"], "OSError: refused"), "problem", "lo up"),
    ("host_name", ("a", ["10.0.0.1"], 0.01), "ok", "a is 10.0.0.1 (10 ms)"),
    ("host_name", ("a", [], 0.01), "warning", "127.0.0.1 a"),
    ("host_name", ("a", ["10.0.0.1"], 5.0), "warning", "delays each start"),
    ("runtime_folder", ("/run/x", ""), "ok", "/run/x"),
    ("runtime_folder", ("", "Refused: is a link"), "problem", "XDG_RUNTIME_DIR"),
    ("file_system", ("ext4",), "ok", "ext4"),
    ("file_system", ("nfs4",), "warning", "local file systems"),
    ("file_system", ("fuse.s3fs",), "warning", "local file systems"),
    ("file_system", ("tmpfs",), "warning", "reboot"),
    ("file_system", ("overlay",), "warning", "mount a volume"),
    ("file_system", ("",), "ok", "unknown"),
    ("disk_room", (10 * GIB, 20 * GIB, None), "ok", "10.0 GiB of 20.0 GiB"),
    ("disk_room", (GIB - 1, 20 * GIB, 5000), "warning", "less than 1 GiB"),
    ("disk_room", (MIB, 20 * GIB, None), "problem", "free space"),
    ("disk_room", (10 * GIB, 20 * GIB, 999), "problem", "inodes"),
    ("disk_promises", ("", 0.001, True), "ok", "O_DIRECT works"),
    ("disk_promises", ("", 0.001, False), "ok", "O_DIRECT does not"),
    ("disk_promises", ("", 0.5, True), "warning", "500.0 ms"),
    ("disk_promises", ("does not work (EPERM)", 0.001, True), "problem", "by link()"),
    ("bandwidth", (100.0 * MIB, 200 * MIB), "ok", "takes 2.0 s"),
    ("bandwidth", (100.0 * MIB, None), "ok", "100.0 MiB/s"),
    ("bandwidth", (10.0 * MIB, None), "warning", "faster disk"),
    ("folder", ("a run", ""), "ok", "a run"),
    ("folder", ("", "not a folder"), "problem", "not a folder"),
    ("writable", ("/x", "read-only"), "problem", "mount it writable"),
]


@pytest.mark.parametrize(("name", "arguments", "status", "words"), CASES)
def test_a_check_judges_what_was_seen(name: str, arguments: tuple[Any, ...], status: str, words: str) -> None:
    found = getattr(checks, name)(*arguments)
    assert isinstance(found, Finding)
    assert found.status == status
    assert words in f"{found.seen} | {found.remedy}"
    assert bool(found.remedy) == (status != "ok")


def test_every_check_is_judged_in_each_way_that_it_can_end() -> None:
    names = {name for name, function in inspect.getmembers(checks, inspect.isfunction) if function.__module__ == checks.__name__}
    judged = {(name, status) for name, _, status, _ in CASES}
    assert {name for name, _ in judged} == names
    assert names - {"writable"} == {name for name, status in judged if status == "ok"}
    assert names - {"python"} <= {name for name, status in judged if status in ("warning", "problem")}


NEEDS = Needs(slot_bytes=10 * MIB, gradient_bytes=5 * MIB, state_bytes=8 * MIB, ranks=4, keep=3)


def test_a_run_needs_two_slots_and_gradients_per_rank_and_one_checkpoint_more_than_it_keeps() -> None:
    assert (NEEDS.slots_bytes, NEEDS.memory_bytes, NEEDS.disk_bytes) == (80 * MIB, 100 * MIB, 32 * MIB)


@pytest.mark.parametrize(
    ("available", "held", "status"), [(100, 0, "ok"), (99, 0, "warning"), (20, 80, "ok"), (19, 80, "warning"), (0, 0, "warning")]
)
def test_memory_fits_or_not(available: int, held: int, status: str) -> None:
    found = judge_memory(NEEDS, available * MIB, held * MIB)
    assert found.status == status
    assert found.seen.startswith("100.0 MiB of memory for 4 ranks, ")


@pytest.mark.parametrize(
    ("free", "stored", "status"), [(32, 0, "ok"), (31, 0, "warning"), (8, 24, "ok"), (7, 24, "warning"), (0, 1000, "ok")]
)
def test_the_disk_fits_or_not(free: int, stored: int, status: str) -> None:
    found = judge_disk(NEEDS, free * MIB, stored * MIB)
    assert found.status == status
    assert found.seen.startswith("up to 32.0 MiB on disk for 4 checkpoints")
