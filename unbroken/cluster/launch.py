"""`unbroken run [torchrun's flags] script [args]`: torchrun's command line and meeting, our agent, rule and exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch
from msgspec import Struct, structs
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser, parse_min_max_nnodes

from unbroken.cluster.decide import Failure, Options, exit_code
from unbroken.cluster.devices import Devices, visible
from unbroken.cluster.elastic import ElasticAgent, Surroundings
from unbroken.cluster.forked import ForkServer
from unbroken.cluster.settings import LAUNCH, modules
from unbroken.cluster.signals import ALWAYS, Interrupted, SignalInbox, named
from unbroken.cluster.witness import Witness
from unbroken.core.ports import SystemClock, environment, whole_environment
from unbroken.core.settings import find_file, gather, read_file

LAUNCH_FILE = "UNBROKEN_LAUNCH_FILE"
"""Path of the file in which the workers name their run's folder; by it, being unique, a process is known as one of this launch."""

FAILURES_FILE = "failures.json"
"""What failed, in the folder of the logs, whether or not workers' output was kept there."""

HARMLESS_SIGNAL = "SIGURG"
"""TorchElastic insists on taking over at least one signal; it gets one that nobody sends."""


class Command(Struct, frozen=True, kw_only=True):
    """A parsed command line."""

    config: LaunchConfig
    program: tuple[str, ...]
    options: Options
    end_signals: str
    preload: tuple[str, ...]
    devices: Devices
    grace_s: float
    wants_json: bool
    log_dir: str | None


class Outcome(Struct, frozen=True, kw_only=True):
    """How a launch ended. `exit_code` is the launcher's, `worker_exit_codes` those of the workers that failed last, by global rank.

    `log_dir` is where the workers' output and error files and a list of all failures lie, None when nothing failed. `end_signal`: the
    signal that asked the job to end; `committed`: the newest committed step then, if the daemon said. `evicted`: devices left out.
    """

    exit_code: int
    reason: str
    restarts: int
    seconds: float
    worker_exit_codes: dict[int, int]
    failures: tuple[Failure, ...]
    log_dir: str | None
    directory: str | None
    end_signal: str | None = None
    committed: int | None = None
    evicted: tuple[str, ...] = ()


class UsageError(ValueError):
    """A command line that means nothing; the text says why."""


def parser() -> ArgumentParser:
    """torchrun's own parser with our defaults, and --json."""
    made: ArgumentParser = get_args_parser()
    made.prog = "unbroken run"
    made.description = "Start a training script like torchrun does, and start it again when a worker dies."
    made.add_argument("--json", action="store_true", help="Print how it ended as one JSON object on the last line.")
    made.add_argument(
        "--preload",
        default=None,
        metavar="MODULES",
        help="Modules that a warm server imports once and workers are forked from, separated by commas; empty: start each from nothing.",
    )
    if "PET_MAX_RESTARTS" not in os.environ:
        made.set_defaults(max_restarts=None)
    helps = {
        "max_restarts": "Restarts without a new committed step before giving up (default: 100, and 3 equal errors before any step).",
        "nproc_per_node": "Workers per node: a number, auto, cpu, gpu or xpu. MIN:MAX starts MAX, and goes on with fewer, down to MIN, "
        "when a device fails again and again.",
    }
    for action in made._actions:
        action.help = helps.get(action.dest, action.help)

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{message}; unbroken run --help lists all flags")

    made.error = refuse  # type: ignore[method-assign]
    return made


def parse(argv: Sequence[str], scratch: str) -> Command:
    """A command line to what it means, or UsageError. `scratch` holds logs nobody asked to keep."""
    made = parser()
    args = made.parse_args(list(argv))
    if args.run_path:
        made.error("--run-path is not supported: give the script itself")
    if not (args.module or args.no_python or os.path.exists(args.training_script)):
        made.error(f"no such script: {args.training_script}")
    try:
        settings = gather(LAUNCH, {} if args.preload is None else {"preload": args.preload}, read_file(find_file()))
    except ValueError as error:
        made.error(str(error))
    budget = settings["max_restarts"].value if args.max_restarts is None else args.max_restarts
    given = budget is not None
    args.max_restarts = budget if given else Options().max_restarts
    log_dir = args.log_dir
    args.log_dir = log_dir or os.path.join(scratch, "logs")
    end_signals = args.signals_to_handle
    least, args.nproc_per_node = _split_range(args.nproc_per_node)
    try:
        if parse_min_max_nnodes(args.nnodes)[1] == 1 and not args.rdzv_endpoint and args.master_port is None:
            args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        args.master_port = args.master_port or 29500
        local_world_size = determine_local_world_size(args.nproc_per_node)
        if local_world_size < 1:
            made.error(f"--nproc-per-node: at least 1 process, not {local_world_size}")
        min_workers = local_world_size if least is None else int(least) if least.isdecimal() else 0
        if not 1 <= min_workers <= local_world_size:
            made.error(f"--nproc-per-node: MIN:MAX needs 1 <= MIN <= MAX, not {least}:{args.nproc_per_node}")
        if local_world_size > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        if least is not None and parse_min_max_nnodes(args.nnodes)[1] > 1:
            made.error("--nproc-per-node: MIN:MAX works on one node")
        named(end_signals)
        config, _, _ = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        made.error(str(error))
    devices = _devices(config.max_nodes, local_world_size, is_elastic=min_workers < local_world_size)
    how = ["-m"] if args.module else ["--exec"] if args.no_python else []
    python = [environment("PYTHON_EXEC", sys.executable), "-u", "-m", "unbroken.cluster.worker"]
    return Command(
        config=config,
        program=(*python, *how, args.training_script, *args.training_script_args),
        options=Options(
            max_restarts=args.max_restarts,
            same_start=None if given else Options().same_start,
            devices=len(devices.names),
            min_workers=min_workers,
            max_workers=local_world_size,
        ),
        end_signals=end_signals,
        preload=modules(settings["preload"].value),
        devices=devices,
        grace_s=settings["grace_s"].value,
        wants_json=args.json,
        log_dir=log_dir,
    )


def _split_range(workers: str) -> tuple[str | None, str]:
    """MIN (None where it was not given) and MAX of --nproc-per-node."""
    least, colon, most = workers.partition(":")
    return (least, most) if colon else (None, workers)


def _devices(max_nodes: int, num_workers: int, *, is_elastic: bool) -> Devices:
    """The workers' devices. torch is only asked for accelerators where it matters: it may have to load a driver."""
    if max_nodes > 1:
        return Devices()
    return visible(whole_environment(), num_workers, torch.cuda.device_count() if is_elastic else 0)


def launch(argv: Sequence[str], say: Callable[[str], None]) -> tuple[Outcome, bool]:
    """Run a command line to its end; what came of it, and whether JSON was asked for. Takes over the process's signals."""
    scratch = tempfile.mkdtemp(prefix="unbroken-run-")
    keep = False
    try:
        command = parse(argv, scratch)
        outcome = _run(command, os.path.join(scratch, "launch.jsonl"), say)
        failed = outcome.exit_code != 0 and bool(outcome.failures)
        if failed:
            _write_failures(outcome, os.path.join(command.log_dir or os.path.join(scratch, "logs"), command.config.run_id), say)
        keep = command.log_dir is None and failed
        log_dir = command.log_dir or (os.path.join(scratch, "logs") if keep else None)
        return structs.replace(outcome, log_dir=log_dir), command.wants_json
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Command, launch_file: str, say: Callable[[str], None]) -> Outcome:
    clock = SystemClock()
    started_s = clock.monotonic()
    config = command.config
    end_signals = named(command.end_signals) | set(ALWAYS)
    _set_environment(launch_file, end_signals)
    witness = Witness(launch_file)
    inbox = SignalInbox(end_signals)
    server = ForkServer(command.preload) if command.preload else None
    around = Surroundings(
        options=command.options,
        witness=witness,
        inbox=inbox,
        clock=clock,
        say=say,
        grace_s=command.grace_s,
        num_nodes_max=config.max_nodes,
        mark=f"{LAUNCH_FILE}={launch_file}",
        stop_file=os.environ["UNBROKEN_STOP_FILE"],
        server=server,
        devices=command.devices,
    )
    inbox.install()
    if server is not None:
        server.open()
    spec = _worker_spec(config, command.program)
    assert config.logs_specs is not None, "torchrun's config always has them"
    agent = ElasticAgent(spec, config.logs_specs, around, config.log_line_prefix_template)
    result: RunResult | None = None
    interrupted: Interrupted | None = None
    try:
        result = agent.run()
    except Interrupted as error:
        interrupted = error
    finally:
        if server is not None:
            server.close()
        spec.rdzv_handler.shutdown()
        directory = witness.directory
        committed = witness.committed() if agent.end_signal is not None or interrupted is not None else None
        witness.close()
    failed = result is not None and result.is_failed()
    if interrupted is not None:
        agent.end_signal = interrupted.signal
        while_what = "waiting for other nodes" if config.max_nodes > 1 else "no worker ran yet"
        code, reason = 128 + interrupted.signal, f"{interrupted.signal.name} came while {while_what}"
    else:
        code = exit_code(agent.history, agent.end_signal, command.options) if failed else 0
        reason = agent.reason or "another node closed the meeting"
        if agent.end_signal is not None and not failed:
            reason = f"{agent.end_signal.name}: {reason}"
    return Outcome(
        exit_code=code,
        reason=reason if committed is None else f"{reason}; committed step {committed}",
        restarts=agent.num_restarts,
        seconds=round(clock.monotonic() - started_s, 3),
        worker_exit_codes=dict(agent.history[-1].codes) if failed else {},
        failures=tuple(agent.history),
        log_dir=None,
        directory=directory,
        end_signal=agent.end_signal.name if agent.end_signal is not None else None,
        committed=committed,
        evicted=tuple(str(failure.place) for failure in agent.history if failure.evicted),
    )


def _set_environment(launch_file: str, end_signals: set[signal.Signals]) -> None:
    """What workers inherit from us. An end of the terminal's, and its keys, reach workers through us alone."""
    more = sorted(sig.name for sig in end_signals - {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
    os.environ["UNBROKEN_STOP_SIGNALS"] = ",".join(more)
    os.environ["UNBROKEN_LAUNCHER_PID"] = os.environ["UNBROKEN_KEEPER_PID"] = str(os.getpid())
    os.environ[LAUNCH_FILE] = launch_file
    os.environ["UNBROKEN_STOP_FILE"] = launch_file + ".stop"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = HARMLESS_SIGNAL
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)  # each attempt has a store of its own; rank 0 must not make another


def _worker_spec(config: LaunchConfig, program: tuple[str, ...]) -> WorkerSpec:
    """As torchrun makes it."""
    is_static = config.rdzv_backend == "static"
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    host, _, port = config.rdzv_endpoint.strip().rpartition(":") if is_static else ("", "", "")
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program[0],
        args=program[1:],
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=max(config.monitor_interval, 1e-4),
        master_addr=host or None,
        master_port=int(port) if port else None,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _write_failures(outcome: Outcome, folder: str, say: Callable[[str], None]) -> None:
    """Leave all failures beside the logs of this launch. A full disk must not hide them: they are printed as well."""
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, FAILURES_FILE), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(outcome.failures)))
    except OSError as error:
        say(f"could not write {FAILURES_FILE}: {error}")
