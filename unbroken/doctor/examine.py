"""`unbroken doctor`: everything that is checked, in the order in which it is told."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence

from msgspec import Struct

from unbroken.core.cgroups import limits
from unbroken.core.errors import UnbrokenError
from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.os import available_memory_bytes, host_memory_bytes, hostname
from unbroken.core.ports import Clock, environment
from unbroken.doctor import checks, look
from unbroken.doctor.findings import Finding
from unbroken.doctor.needs import Needs
from unbroken.doctor.room import existing, look_around, space
from unbroken.shm.channel import runtime_directory
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


class Report(Struct, frozen=True, kw_only=True):
    """`ok`: no problem was found; warnings do not count."""

    ok: bool
    directory: str | None
    findings: tuple[Finding, ...]


def examine(directory: str | None, preload: Sequence[str], clock: Clock) -> Report:
    """Check this host and, if given, a run folder's place. Takes as long as importing the `preload` modules and writing 64 MiB."""
    findings = [*_software(preload), *_machine(), *_limits(), *_meeting(clock)]
    if directory is not None:
        findings += _place(os.path.abspath(directory), clock)
    return Report(ok=all(one.status != "problem" for one in findings), directory=directory, findings=tuple(findings))


def _software(preload: Sequence[str]) -> list[Finding]:
    found = look.versions()
    findings = [checks.python(sys.version_info[:3], platform.system()), checks.packages(found)]
    if found["torch"] is not None and preload:
        findings.append(checks.fork_safety(*look.try_fork_server(list(preload))))
    return findings


def _machine() -> list[Finding]:
    container = limits()
    total_bytes, _ = host_memory_bytes()
    return [
        checks.threads(len(os.sched_getaffinity(0)), container.processors, environment("OMP_NUM_THREADS")),
        checks.memory(total_bytes, available_memory_bytes(), container.memory_bytes),
        checks.memory_files(look.try_memory_file()),
        checks.shared_memory(*look.shared_memory()),
    ]


def _limits() -> list[Finding]:
    return [
        checks.open_files(look.limit(resource.RLIMIT_NOFILE)),
        checks.file_size(look.limit(resource.RLIMIT_FSIZE)),
        checks.address_space(look.limit(resource.RLIMIT_AS)),
        checks.locked_memory(look.limit(resource.RLIMIT_MEMLOCK), look.fabrics()),
        checks.processes(look.limit(resource.RLIMIT_NPROC), limits().processes_free),
        checks.core_dumps(look.limit(resource.RLIMIT_CORE), look.core_pattern()),
        checks.signals(*look.signal_sets()),
    ]


def _meeting(clock: Clock) -> list[Finding]:
    began_s = clock.monotonic()
    own = look.addresses(hostname())
    seconds = clock.monotonic() - began_s
    try:
        place, error = runtime_directory(), ""
    except (OSError, UnbrokenError) as refused:
        place, error = "", str(refused)
    return [
        checks.loopback(look.addresses("localhost"), look.try_loopback()),
        checks.host_name(hostname(), own, seconds),
        checks.runtime_folder(place, error),
    ]


def _place(directory: str, clock: Clock) -> list[Finding]:
    """The run folder, or where it would be made."""
    finding, needs = _what_is_there(directory)
    there = existing(directory)
    free_bytes, all_bytes, names = space(there)
    findings = [finding, checks.file_system(look.file_system(there)), checks.disk_room(free_bytes, all_bytes, names)]
    try:
        trial = look.try_writing(there, clock, free_bytes)
    except OSError as error:
        return [*findings, checks.writable(there, str(error))]
    findings += [
        checks.disk_promises(trial.link_error, trial.sync_s, trial.direct),
        checks.bandwidth(trial.bytes_per_s, needs.state_bytes if needs is not None else None),
        checks.clock(int(clock.utc()[:4]), trial.ahead_s),
    ]
    if needs is not None:
        findings += look_around(directory, held_bytes=0).judge(needs)
    return findings


def _what_is_there(directory: str) -> tuple[Finding, Needs | None]:
    """What lies at the path, and what a run that lies there needs to go on with as many ranks as it had."""
    if not os.path.lexists(directory):
        return checks.folder("not there yet: a run would make it", ""), None
    if not os.path.isdir(directory):
        return checks.folder("", "not a folder"), None
    try:
        tier = DiskTier(directory)
        if not Repository.exists(tier):
            return checks.folder("holds no run yet", ""), None
        found = Repository.open(tier)
        commits = found.visible()
    except UnbrokenError as error:
        return checks.folder("", f"{type(error).__name__}: {error}"), None
    if not commits:
        return checks.folder("a run without a checkpoint", ""), None
    newest, keep = commits[-1], found.facts.options.get("keep")
    needs = Needs(
        slot_bytes=newest.size_bytes,
        gradient_bytes=0,
        state_bytes=newest.size_bytes,
        ranks=max(found.log.state.generations, key=lambda g: g.number).world_size,
        keep=keep if isinstance(keep, int) else KEEP_NEWEST,
    )
    return checks.folder(f"a run with {len(commits)} checkpoints, the newest of step {newest.step}", ""), needs
