"""Arms of bench/recovery.py for engines that are no part of this project: torchft, and the in-process restart of NVRx.

    pip install --no-deps torchft==0.2.0 nvidia-resiliency-ext==0.4.1
    pip install -c constraints.txt opentelemetry-sdk opentelemetry-exporter-otlp-proto-http packaging psutil nvidia-ml-py

Without --no-deps they may bring another torch. An arm whose package cannot be imported is skipped. Neither engine puts a new process
in the place of a dead one. Under torchft the replica group's own torchrun does it, as in torchft/torchx.py, or a third group is there
from the start, computing gradients that count as zero (FIXED_WITH_SPARES). Under NVRx a third process waits in reserve
(MaxActiveWorldSize), and nothing ends its siblings when one dies, as under `srun --kill-on-bad-exit=0`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TORCHFT_NAMES, NVRX_NAMES = ("torchft", "torchft"), ("nvidia_resiliency_ext.inprocess", "nvidia-resiliency-ext")
PACKAGES = {"torchft": TORCHFT_NAMES, "torchft_spare": TORCHFT_NAMES, "nvrx": NVRX_NAMES}  # module, distribution

# the lighthouse finds a death by missing heartbeats alone, so the survivor stands for about its timeout; the defaults are 5000 and 100 ms
TORCHFT_HEARTBEAT_TIMEOUT_MS, TORCHFT_HEARTBEAT_INTERVAL_MS = 200, 50
# join_timeout_ms (default 60000): at 2000, one of 7 deaths with a spare group cost exactly that much more, as if one of the two survivors
# had asked for the next quorum and the other had not
TORCHFT_LIGHTHOUSE = {
    "min_replicas": 1,
    "heartbeat_timeout_ms": TORCHFT_HEARTBEAT_TIMEOUT_MS,
    "join_timeout_ms": 500,
    "quorum_tick_ms": 10,
}
# of each group; the manager takes its store from the agent, so the store is shared here, unlike in the other arm with torchrun
TORCHFT_RUN = ["--nnodes=1", "--nproc_per_node=1", "--max_restarts=10", "--monitor-interval", "0.1"]

# defaults: 1 s each; the monitor process of a rank sees its death within its interval, so heartbeats (left as they are) play no part
NVRX_S = {"monitor_thread_interval": 0.05, "monitor_process_interval": 0.05, "progress_watchdog_interval": 0.05, "last_call_wait": 0.0}

# Manager.allreduce, not torchft's DDP: that one raises an AssertionError when a peer dies inside an all-reduce, and the survivor dies too
TORCHFT = """
rank, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])  # one process each
assert rank == 1 or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", "the survivor died too"
import torch
from datetime import timedelta
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader
from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text
torch.set_num_threads(1)
torch.manual_seed(0)
model = ByteGPT()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = ByteWindows(library_text())
sampler = DistributedSampler(data, replica_rank=rank, num_replica_groups=groups, group_rank=0, num_replicas=1)
loader = iter(DataLoader(data, batch_size=4, sampler=sampler))

def save():
    return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

def load(state):
    model.load_state_dict(state["model"])
    adamw.load_state_dict(state["optimizer"])

if (folder / "killed").exists():
    (folder / "respawned").write_text(repr(time.monotonic()))
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load, state_dict=save, min_replica_size=groups - 1,
    world_size_mode=WorldSizeMode.DYNAMIC if groups == 2 else WorldSizeMode.FIXED_WITH_SPARES,
    replica_id=f"group_{rank}", hostname="127.0.0.1", heartbeat_interval=timedelta(milliseconds=INTERVAL_MS),
)
optimizer = Optimizer(manager, adamw)
(folder / f"ready-{rank}").touch()
while not all((folder / f"ready-{other}").exists() for other in range(groups)):  # else the first to come would train alone
    time.sleep(0.01)
while True:  # until the bench has what it waits for
    optimizer.zero_grad()
    strike(manager.current_step() + 1)
    x, y = next(loader)
    model(x, y).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    vector_to_parameters(flat, gradients)
    before = manager.current_step()
    optimizer.step()
    now = time.monotonic()
    if rank == 0 and manager.current_step() > max(before, HIT - 1):
        if not (folder / "survivor").exists():
            (folder / "survivor").write_text(repr(now))
        if manager.num_participants() == 2 and not (folder / "back").exists():
            (folder / "back.new").write_text(repr(now))
            (folder / "back.new").rename(folder / "back")
""".replace("INTERVAL_MS", str(TORCHFT_HEARTBEAT_INTERVAL_MS))

# as NVRx's advanced example: model and optimizer are built once, what depends on the process group in every restart
NVRX = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from datetime import timedelta
from nvidia_resiliency_ext import inprocess
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from unbroken.demo.model import ByteGPT
from unbroken.demo.text import ByteWindows, library_text
torch.set_num_threads(1)
torch.manual_seed(0)
plain = ByteGPT()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
data = ByteWindows(library_text())
latest = folder / "latest"

def train(base_store, call: inprocess.CallWrapper | None = None):
    active, members = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(str(call.iteration), base_store)
    dist.init_process_group("gloo", store=store, rank=active, world_size=members, timeout=timedelta(seconds=10))
    model = DistributedDataParallel(plain)
    loader = iter(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
    step = 0
    if latest.exists():
        step = int(latest.read_text())
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    while step < STEPS:
        strike(step + 1)
        x, y = next(loader)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if active == 0 and call.iteration > 0 and members == 2 and not (folder / "back").exists():
            (folder / "back").write_text(repr(time.monotonic()))
        if step % EVERY == 0:
            with call.atomic():
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
                dist.barrier()
                if active == 0:
                    latest.write_text(str(step))

host, port, world_size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
base_store = dist.TCPStore(host, port, world_size=world_size, is_master=rank == 0, multi_tenant=True, wait_for_workers=True)
settings = {name: timedelta(seconds=value) for name, value in SETTINGS.items()}
inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["WRAPPER_PORT"])},
    rank_assignment=inprocess.Compose(inprocess.rank_assignment.MaxActiveWorldSize(2), inprocess.rank_assignment.ShiftRanks()),
    **settings,
)(train)(base_store)
""".replace("SETTINGS", repr(NVRX_S))


def missing(arm: str) -> str | None:
    """Why an arm cannot run here, or None."""
    statement = f"import {PACKAGES[arm][0]}"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=False)
    return None if done.returncode == 0 else f"{statement}: {(done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]}"


def settings(arm: str) -> dict[str, Any]:
    """What an arm ran with, for the document."""
    version = importlib.metadata.version(PACKAGES[arm][1])
    if arm in ("torchft", "torchft_spare"):
        wide = arm == "torchft_spare"
        return {
            "version": version, "lighthouse": TORCHFT_LIGHTHOUSE, "heartbeat_interval_ms": TORCHFT_HEARTBEAT_INTERVAL_MS,
            "torchrun_of_each_group": " ".join(TORCHFT_RUN), "quorum": "asynchronous", "state": "from the peer's memory, none saved",
            "reduce": "Manager.allreduce of one flat gradient", "survivor_s": "the survivor's next committed step",
            "groups": "2 active, 1 spare that computes as well" if wide else "2", "respawn_s": "the new process has built its model",
            "total_s": "the first committed step of two members again",
        }  # fmt: skip
    return {
        "version": version, "wrapper_s": NVRX_S, "processes": "2 active, 1 in reserve", "state": "DCP, every 5 steps",
        "total_s": "the first step of both active ranks, one of them the former reserve",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def started(folder: Path, commands: dict[str, tuple[list[str], dict[str, str]]]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes by name, their output in the folder; all are gone at the end."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (command, env) in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT)
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def failure(folder: Path, text: str) -> RuntimeError:
    tails = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(folder.glob("*.log")))
    return RuntimeError(f"{text}\n{tails}")


def wait_for(path: Path, processes: dict[str, subprocess.Popen[bytes]], limit_s: float = 90.0) -> None:
    """Until a file is there; all processes must stay."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        ended = [name for name, process in processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise failure(path.parent, f"no {path.name}; ended: {ended}")
        time.sleep(0.05)


def seconds(folder: Path, **names: str) -> dict[str, float]:
    """Times since the kill, read from files of the folder."""
    killed_s = float((folder / "killed").read_text())
    return {key: float((folder / name).read_text()) - killed_s for key, name in names.items()}


def torchft(folder: Path, groups: int = 2) -> dict[str, float]:
    """A lighthouse and replica groups of one process each, each under a torchrun of its own; a third group is a spare."""
    lighthouse, env = free_port(), {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "NUM_REPLICA_GROUPS": str(groups)}
    flags = [item for name, value in TORCHFT_LIGHTHOUSE.items() for item in (f"--{name}", str(value))]
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    commands = {"lighthouse": ([program, "--bind", f"127.0.0.1:{lighthouse}", *flags], env)}
    for group in range(groups):
        command = [sys.executable, "-m", "torch.distributed.run", f"--master_port={free_port()}", *TORCHFT_RUN]
        own = {"REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}"}
        commands[f"group-{group}"] = ([*command, str(folder / "train.py"), str(folder)], env | own)
    with started(folder, commands) as processes:
        wait_for(folder / "back", processes)
    names = {"survivor_s": "survivor", "respawn_s": "respawned", "total_s": "back"}
    return seconds(folder, **{key: name for key, name in names.items() if groups == 2 or key != "respawn_s"})


def nvrx(folder: Path) -> dict[str, float]:
    """Three processes that nobody restarts: two train, one waits."""
    env = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "error",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WRAPPER_PORT": str(free_port()),
    }
    command = [sys.executable, str(folder / "train.py"), str(folder)]
    commands = {f"rank-{rank}": (command, env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}) for rank in range(3)}
    with started(folder, commands) as processes:
        for name in ("rank-0", "rank-2"):
            try:
                code = processes[name].wait(120)
            except subprocess.TimeoutExpired as error:
                raise failure(folder, f"{name} does not end") from error
            if code != 0 or not (folder / "back").exists():
                raise failure(folder, f"{name} ended with {code}")
    return seconds(folder, total_s="back")


ARMS: dict[str, tuple[str, Callable[[Path], dict[str, float]]]] = {
    "torchft": (TORCHFT, torchft),
    "torchft_spare": (TORCHFT, functools.partial(torchft, groups=3)),
    "nvrx": (NVRX, nvrx),
}
