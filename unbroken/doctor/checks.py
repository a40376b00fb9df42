"""The checks: each a pure function of what was seen on the host, with the remedy in its finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from unbroken.core.limits import PACK_BYTES
from unbroken.doctor.findings import Finding, judged, size

GIB: Final = 1 << 30
ENOUGH_SHM_BYTES = GIB
"""Some loader workers with batches of images; containers have 64 MiB unless told otherwise."""

MIN_OPEN_FILES, GOOD_OPEN_FILES = 256, 1024
GOOD_PROCESSES = 512
SLOW_SYNC_S = 0.1
SLOW_WRITE_BYTES_PER_S = 50 << 20
SLOW_NAME_S = 1.0
SANE_YEARS = range(2025, 2100)
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "virtiofs")
TORCH_FROM, TORCH_BELOW = (2, 9), (3, 0)
MIN_PYTHON = (3, 11)


def python(version: tuple[int, ...], system: str) -> Finding:
    """Interpreter and platform."""
    seen = f"Python {'.'.join(map(str, version))} on {system}"
    if system != "Linux":
        return judged("python", seen, problem="runs need Linux; reading commands may work elsewhere")
    return judged("python", seen, problem="" if version >= MIN_PYTHON else f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer")


def packages(versions: Mapping[str, str | None]) -> Finding:
    """Installed packages, None where one is missing."""
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        extra = "unbroken[torch]" if missing == ["torch"] else "unbroken"
        return judged("packages", seen, problem=f"pip install '{extra}' brings {', '.join(missing)}")
    number = tuple(int(part) for part in (versions.get("torch") or "").split(".")[:2] if part.isdigit())
    fits = len(number) == 2 and TORCH_FROM <= number < TORCH_BELOW
    return judged("packages", seen, warning="" if fits else "tested with torch 2.9 and newer, below 3: install one of these")


def threads(cores: int, quota: float | None, asked: str) -> Finding:
    """Processors that may be used, the container's share of them, and OMP_NUM_THREADS as it is set ("": not)."""
    share = f", of which the container gets {quota:g}" if quota is not None and quota < cores else ""
    seen = f"{cores} cores{share}; OMP_NUM_THREADS {f'is {asked}' if asked else 'is not set'}"
    usable = min(cores, quota or cores)
    if asked and not (asked.isdigit() and int(asked) > 0):
        return judged("threads", seen, problem="set OMP_NUM_THREADS to a whole number of at least 1, or unset it")
    if asked and int(asked) > usable:
        return judged("threads", seen, warning=f"more threads than cores slow each other down: set it to at most {max(1, int(usable))}")
    if usable < 1:
        return judged("threads", seen, warning="less than one core: snapshots and training share it")
    return judged("threads", seen)


def memory(total_bytes: int, available_bytes: int, limit_bytes: int | None) -> Finding:
    """Memory of the host, and the container's limit."""
    limit = f", the container's limit is {size(limit_bytes)}" if limit_bytes is not None else ""
    seen = f"{size(available_bytes)} of {size(total_bytes)} available{limit}; a run needs two snapshots of each rank besides training"
    return judged("memory", seen, warning="" if available_bytes >= GIB else "less than 1 GiB is left: end what else runs here")


def shared_memory(total_bytes: int | None, free_bytes: int) -> Finding:
    """/dev/shm. Snapshots do not use it; loader workers do."""
    if total_bytes is None:
        return judged("/dev/shm", "not there", warning="loader workers need it: mount a tmpfs there, or use num_workers=0")
    seen = f"{size(free_bytes)} of {size(total_bytes)} free; only loader workers use it, snapshots do not"
    remedy = "loader workers die of a bus error when it is full: docker run --shm-size=8g, or num_workers=0"
    return judged("/dev/shm", seen, warning="" if free_bytes >= ENOUGH_SHM_BYTES else remedy)


def memory_files(error: str) -> Finding:
    """Anonymous memory files with seals: where snapshots lie."""
    remedy = "a kernel from 3.17 on, and a container that allows memfd_create: snapshots lie in such files"
    return judged("memory files", error or "can be made, sealed and mapped", problem=remedy if error else "")


def open_files(soft: int | None) -> Finding:
    """ulimit -n; None: no limit."""
    seen = "no limit" if soft is None else f"at most {soft}"
    few = soft is not None and soft < GOOD_OPEN_FILES
    remedy = f"ulimit -n {4 * GOOD_OPEN_FILES} before the start"
    return judged("open files", seen, problem=remedy if soft is not None and soft < MIN_OPEN_FILES else "", warning=remedy if few else "")


def file_size(limit_bytes: int | None) -> Finding:
    """ulimit -f; None: no limit. A pack has up to PACK_BYTES, a journal grows."""
    if limit_bytes is None:
        return judged("file size", "no limit")
    seen, remedy = f"at most {size(limit_bytes)} per file", "ulimit -f unlimited before the start: packs and journals need room"
    return judged("file size", seen, problem=remedy if limit_bytes < 2 * PACK_BYTES else "", warning=remedy)


def address_space(limit_bytes: int | None) -> Finding:
    """ulimit -v; None: no limit."""
    remedy = "ulimit -v unlimited: torch maps far more than it uses"
    return judged(
        "address space", "no limit" if limit_bytes is None else size(limit_bytes), warning=remedy if limit_bytes is not None else ""
    )


def locked_memory(limit_bytes: int | None, fabrics: Sequence[str]) -> Finding:
    """ulimit -l; None: no limit. Only remote direct memory access needs it."""
    seen = ("no limit" if limit_bytes is None else f"at most {size(limit_bytes)}") + (f"; {', '.join(fabrics)}" if fabrics else "")
    remedy = "ulimit -l unlimited: collectives over InfiniBand pin memory"
    return judged("locked memory", seen, warning=remedy if fabrics and limit_bytes is not None else "")


def processes(limit: int | None, container_free: int | None) -> Finding:
    """ulimit -u, and what the container's limit leaves; None: no limit."""
    lowest = min((number for number in (limit, container_free) if number is not None), default=None)
    seen = "no limit" if lowest is None else f"at most {lowest} processes and threads"
    remedy = "raise ulimit -u, or the container's pids limit: each rank and each loader worker has several threads"
    return judged("processes", seen, warning=remedy if lowest is not None and lowest < GOOD_PROCESSES else "")


def core_dumps(soft_bytes: int | None, pattern: str) -> Finding:
    """ulimit -c (None: no limit) and the kernel's core pattern."""
    if soft_bytes == 0:
        return judged("core dumps", "off")
    seen = f"on, {'no limit' if soft_bytes is None else 'up to ' + size(soft_bytes)}, to {pattern or 'core'}"
    return judged(
        "core dumps", seen, warning="a crashed rank writes all its memory before it ends, and is started again later: ulimit -c 0"
    )


def signals(blocked: Sequence[str], ignored: Sequence[str]) -> Finding:
    """Signals that this process was started with blocked or ignored; workers inherit that."""
    needed = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGCHLD")
    wrong = [f"{name} is blocked" for name in needed if name in blocked]
    wrong += [f"{name} is ignored" for name in ("SIGTERM", "SIGCHLD") if name in ignored]
    remedy = "start from a shell that does not block or ignore them: asking a run to stop would have no effect"
    return judged("signals", ", ".join(wrong) or "none blocked", problem=remedy if wrong else "")


def clock(year: int, newest_file_ahead_s: float) -> Finding:
    """Wall clock; seconds by which a file written just now seems to lie in the future (negative: in the past)."""
    seen = f"the year is {year}" + (f", the folder's clock differs by {newest_file_ahead_s:+.0f} s" if abs(newest_file_ahead_s) > 1 else "")
    if year not in SANE_YEARS:
        return judged("clock", seen, warning="set the clock: times in checkpoints and TLS certificates depend on it, training does not")
    return judged("clock", seen, warning="set the clocks of host and file server alike" if abs(newest_file_ahead_s) > 60 else "")


def fork_safety(dropped: Mapping[str, str], error: str) -> Finding:
    """What the warm fork server said of the modules to be imported in it."""
    if error:
        return judged("warm start", error, warning="workers are started without the fork server, seconds later after each failure")
    seen = "; ".join(f"{name} is left out: {why}" for name, why in dropped.items()) or "all preloaded modules can be forked"
    return judged("warm start", seen, warning="leave it out of --preload, or see why it starts threads when imported" if dropped else "")


def loopback(addresses: Sequence[str], error: str) -> Finding:
    """Where `localhost` leads, and whether a port can be opened there: ranks meet on it."""
    if error:
        return judged("loopback", error, problem="the loopback interface must be up (ip link set lo up) and allow connections")
    right = any(address.startswith("127.") or address == "::1" for address in addresses)
    remedy = "add `127.0.0.1 localhost` to /etc/hosts: ranks of a host meet there"
    return judged("loopback", f"localhost is {', '.join(addresses) or 'unknown'}", problem="" if right else remedy)


def host_name(name: str, addresses: Sequence[str], seconds: float) -> Finding:
    """Whether the host's own name can be resolved, and how fast: torch asks for it."""
    seen = f"{name} is {', '.join(addresses) or 'unknown'} ({seconds * 1000:.0f} ms)"
    remedy = f"add `127.0.0.1 {name}` to /etc/hosts: an unknown or slowly found name delays each start"
    return judged("host name", seen, warning=remedy if not addresses or seconds > SLOW_NAME_S else "")


def runtime_folder(path: str, error: str) -> Finding:
    """Where sockets and logs of daemons lie."""
    return judged("runtime folder", error or path, problem="set XDG_RUNTIME_DIR to a writable folder of yours" if error else "")


def file_system(kind: str) -> Finding:
    """The type of the folder's file system."""
    if any(kind.startswith(name) for name in NETWORK_FILE_SYSTEMS):
        return judged(
            "file system", kind, warning="local file systems are tested, network ones are not: what fsync and link promise must hold"
        )
    if kind in ("tmpfs", "ramfs"):
        return judged("file system", kind, warning="it is memory: nothing of it outlives a reboot, and it takes memory from training")
    if kind == "overlay":
        return judged("file system", kind, warning="a container's own layer goes with the container: mount a volume")
    return judged("file system", kind or "unknown")


def disk_room(free_bytes: int, total_bytes: int, free_names: int | None) -> Finding:
    """Free bytes, and free inodes where the file system counts them."""
    seen = f"{size(free_bytes)} of {size(total_bytes)} free"
    if free_names is not None and free_names < 1000:
        return judged("disk room", f"{seen}, {free_names} more files", problem="free inodes: each step's journal and pack is a file")
    full = free_bytes < GIB
    return judged(
        "disk room", seen, problem="free space first" if free_bytes < 16 << 20 else "", warning="less than 1 GiB is left" if full else ""
    )


def disk_promises(link_error: str, sync_s: float, direct: bool) -> Finding:
    """What the store relies on: link() as put-if-absent, fsync; O_DIRECT saves processor time where it works."""
    seen = f"link {link_error or 'works'}, fsync takes {sync_s * 1000:.1f} ms, O_DIRECT {'works' if direct else 'does not'}"
    if link_error:
        return judged("disk promises", seen, problem="another file system: checkpoints become visible by link()")
    slow = "each checkpoint waits for several of these: a faster or less busy disk"
    return judged("disk promises", seen, warning=slow if sync_s > SLOW_SYNC_S else "")


def bandwidth(bytes_per_s: float, state_bytes: int | None) -> Finding:
    """Measured writing, and what that means for a checkpoint of this size."""
    one = f"; a checkpoint of {size(state_bytes)} takes {state_bytes / bytes_per_s:.1f} s" if state_bytes and bytes_per_s > 0 else ""
    remedy = "snapshots that come faster than they are written stay in memory only: a faster disk, or a longer lose_at_most"
    seen = f"{size(bytes_per_s)}/s written and synced{one}"
    return judged("write bandwidth", seen, warning=remedy if bytes_per_s < SLOW_WRITE_BYTES_PER_S else "")


def folder(kind: str, error: str) -> Finding:
    """What is at the path; `error` why it cannot be used."""
    return judged("run folder", error or kind, problem="choose another folder, or mend this one" if error else "")


def writable(path: str, error: str) -> Finding:
    """The folder cannot be written."""
    return judged(
        "disk promises", f"{path} cannot be written: {error}", problem="mount it writable, change its owner, or choose another folder"
    )
