"""`unbroken run [torchrun's flags] script [args]`: torchrun's command line and meeting, our agent, rule and exit codes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

from msgspec import Struct, structs
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser, parse_min_max_nnodes

from unbroken.cluster.decide import Failure, Options, exit_code
from unbroken.cluster.elastic import ElasticAgent, Surroundings
from unbroken.cluster.forked import ForkServer
from unbroken.cluster.settings import LAUNCH, modules
from unbroken.cluster.signals import ALWAYS, Interrupted, SignalInbox, named
from unbroken.cluster.witness import Witness
from unbroken.core.ports import SystemClock, environment
from unbroken.core.settings import find_file, gather, read_file

HARMLESS_SIGNAL = "SIGURG"
"""TorchElastic insists on taking over at least one signal; it gets one that nobody sends."""


class Command(Struct, frozen=True, kw_only=True):
    """A parsed command line."""

    config: LaunchConfig
    program: tuple[str, ...]
    options: Options
    end_signals: str
    preload: tuple[str, ...]
    grace_s: float
    wants_json: bool
    log_dir: str | None


class Outcome(Struct, frozen=True, kw_only=True):
    """How a launch ended. `exit_code` is the launcher's, `worker_exit_codes` those of the workers that failed last, by global rank.

    `log_dir` is where the workers' output and error files lie, None when nothing was kept.
    """

    exit_code: int
    reason: str
    restarts: int
    seconds: float
    worker_exit_codes: dict[int, int]
    failures: tuple[Failure, ...]
    log_dir: str | None
    directory: str | None


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
    for action in made._actions:
        if action.dest == "max_restarts":
            action.help = "Restarts without a new committed step before giving up (default: 100, and 3 equal errors before any step)."
    return made


def parse(argv: Sequence[str], scratch: str) -> Command:
    """A command line to what it means. Ends the process with exit code 2 on a usage error. `scratch` holds logs nobody asked to keep."""
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
    try:
        if parse_min_max_nnodes(args.nnodes)[1] == 1 and not args.rdzv_endpoint and args.master_port is None:
            args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        args.master_port = args.master_port or 29500
        local_world_size = determine_local_world_size(args.nproc_per_node)
        if local_world_size < 1:
            made.error(f"--nproc-per-node: at least 1 process, not {local_world_size}")
        if local_world_size > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        named(end_signals)
        config, _, _ = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        made.error(str(error))
    how = ["-m"] if args.module else ["--exec"] if args.no_python else []
    python = [environment("PYTHON_EXEC", sys.executable), "-u", "-m", "unbroken.cluster.worker"]
    return Command(
        config=config,
        program=(*python, *how, args.training_script, *args.training_script_args),
        options=Options(max_restarts=args.max_restarts, same_start=None if given else Options().same_start),
        end_signals=end_signals,
        preload=modules(settings["preload"].value),
        grace_s=settings["grace_s"].value,
        wants_json=args.json,
        log_dir=log_dir,
    )


def launch(argv: Sequence[str], say: Callable[[str], None]) -> tuple[Outcome, bool]:
    """Run a command line to its end; what came of it, and whether JSON was asked for. Takes over the process's signals."""
    scratch = tempfile.mkdtemp(prefix="unbroken-run-")
    keep = False
    try:
        command = parse(argv, scratch)
        outcome = _run(command, os.path.join(scratch, "launch.jsonl"), say)
        keep = command.log_dir is None and outcome.exit_code != 0 and _holds_files(scratch)
        log_dir = command.log_dir or (os.path.join(scratch, "logs") if keep else None)
        return structs.replace(outcome, log_dir=log_dir), command.wants_json
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Command, launch_file: str, say: Callable[[str], None]) -> Outcome:
    clock = SystemClock()
    started_s = clock.monotonic()
    config = command.config
    _set_environment(launch_file)
    witness = Witness(launch_file)
    inbox = SignalInbox(named(command.end_signals) | set(ALWAYS))
    server = ForkServer(command.preload) if command.preload else None
    around = Surroundings(
        options=command.options,
        witness=witness,
        inbox=inbox,
        clock=clock,
        say=say,
        grace_s=command.grace_s,
        num_nodes_max=config.max_nodes,
        server=server,
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
        witness.close()
    if interrupted is not None:
        return _without_workers(interrupted, round(clock.monotonic() - started_s, 3))
    failed = result is not None and result.is_failed()
    return Outcome(
        exit_code=exit_code(agent.history, agent.end_signal, command.options) if failed else 0,
        reason=agent.reason or "another node closed the meeting",
        restarts=agent.num_restarts,
        seconds=round(clock.monotonic() - started_s, 3),
        worker_exit_codes=dict(agent.history[-1].codes) if failed else {},
        failures=tuple(agent.history),
        log_dir=None,
        directory=directory,
    )


def _without_workers(interrupted: Interrupted, seconds: float) -> Outcome:
    """Told to end before the nodes had met."""
    return Outcome(
        exit_code=128 + interrupted.signal,
        reason=f"{interrupted.signal.name} came while waiting for other nodes",
        restarts=0,
        seconds=seconds,
        worker_exit_codes={},
        failures=(),
        log_dir=None,
        directory=None,
    )


def _set_environment(launch_file: str) -> None:
    """What workers inherit from us."""
    os.environ["UNBROKEN_LAUNCHER_PID"] = os.environ["UNBROKEN_KEEPER_PID"] = str(os.getpid())
    os.environ["UNBROKEN_LAUNCH_FILE"] = launch_file
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


def _holds_files(folder: str) -> bool:
    """True when the logs hold anything to look at."""
    return any(files for _, _, files in os.walk(os.path.join(folder, "logs")))
