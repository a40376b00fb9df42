"""The agent that holds a node's workers: TorchElastic's, but it waits on process descriptors, kills at once and decides by rule.

A worker's death is seen when the kernel announces it, the rest of the group is killed with SIGKILL (nothing they hold is needed: memory
slots belong to the daemon) together with whatever the workers had started, and each attempt meets in a store of its own, so that no
address of a dead attempt can be read. Death seen -> next workers started: about 50 ms on one node.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from unbroken.cluster.cause import has_error, is_mistake, root_cause, whole_message
from unbroken.cluster.decide import Failure, Options, Place, decide, describe, workers_without
from unbroken.cluster.devices import Devices
from unbroken.cluster.forked import ForkServer, started_by
from unbroken.cluster.signals import SignalInbox
from unbroken.cluster.strays import end_strays
from unbroken.cluster.witness import Witness
from unbroken.core.os import HANG_EXIT_CODE, hostname, kill_group, peek_exit, pidfd, wait_any
from unbroken.core.ports import Clock, stop_signals

LOOK_INTERVAL_S = 1.0
"""Between looks at things that announce nothing: the launch file, and on several nodes the rendezvous."""

LAST_WORDS_S = 2.0
"""Ranks that make the same mistake end some tenths of a second apart."""

REAP_TIMEOUT_S = 30
"""A killed worker that does not die in this time sits in the kernel (dead disk, wedged device); it is given up with a message."""

STORE_KEY = "unbroken/worker_store_port"
STORE_TIMEOUT = timedelta(seconds=60)
"""Of one request to the workers' store."""

MAX_HISTORY = 1024
"""Failures remembered for the decision; older ones matter to no rule."""


@dataclass
class Attempt:
    """The living group: per local rank its pid, the descriptor that tells of its death, and the exit code once it ended."""

    pids: dict[int, int]
    fds: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return len(self.codes) == len(self.pids)

    @property
    def has_failed(self) -> bool:
        return any(self.codes.values())


@dataclass(frozen=True)
class Surroundings:
    """What the agent is given by the launcher. `say` prints a line for people; `grace_s` is what workers get to end by themselves.

    `mark`: "NAME=value" in the environment of all that this launch starts, the node daemon excepted. `stop_file`: where workers that could
    not hear a signal yet read that one has come. `devices`: those of the workers.
    """

    options: Options
    witness: Witness
    inbox: SignalInbox
    clock: Clock
    say: Callable[[str], None]
    grace_s: float
    num_nodes_max: int
    mark: str
    stop_file: str
    server: ForkServer | None = None
    devices: Devices = field(default_factory=Devices)


class ElasticAgent(LocalElasticAgent):
    """Runs the workers of one node until all have ended by themselves or the rule says stop."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, around: Surroundings, log_line_prefix_template: str | None = None) -> None:
        super().__init__(spec, logs_specs, log_line_prefix_template=log_line_prefix_template)
        self.history: list[Failure] = []
        self.end_signal: signal.Signals | None = None
        self.reason = ""
        self.num_restarts = 0
        self.devices = around.devices
        self._around = around
        self._attempt: Attempt | None = None
        self._kill_at_s: float | None = None
        self._generation_before: int | None = None
        self._worker_store: TCPStore | None = None

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start, wait, decide, start again. Every end of every attempt passes through here."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            attempt = self._wait_for_end()
            detected_s = self._around.clock.monotonic()
            self._hear_all(attempt)
            causes = {rank: code for rank, code in attempt.codes.items() if code != 0}
            self._kill_and_reap()
            if attempt.has_ended and not causes:
                return self._succeeded(group)
            if causes:
                self.end_signal = self.end_signal or next(iter(self._around.inbox.take()), None)
                self._remember(group, attempt, causes, detected_s)
                decision, self.reason = decide(detected_s, self.history, self._around.options)
                if decision == "stop":
                    return self._failed(group, attempt, causes)
                if decision == "evict":
                    self._evict(group)
            else:
                self.reason = "nodes joined or left"
            self._around.say(self.reason)
            self._start_again(group, self.history[-1] if causes else None, detected_s)

    def _start_again(self, group: WorkerGroup, failure: Failure | None, detected_s: float) -> None:
        self._end_strays()
        self._remaining_restarts -= 1
        self.num_restarts += 1
        self._close_attempt()
        group.state = WorkerState.STOPPED
        self._initialize_workers(group)
        respawn_s = self._around.clock.monotonic()
        codes = dict(failure.codes) if failure is not None else {}
        facts: dict[str, Any] = {
            "attempt": self.num_restarts,
            "rank": failure.rank if failure is not None else -1,
            "exit_codes": {str(rank): code for rank, code in codes.items()},
            "signals": {str(rank): describe(code) for rank, code in codes.items() if code < 0},
        }
        if failure is not None and failure.evicted:
            facts |= {"evicted": str(failure.place), "workers": group.spec.local_world_size}
        self._around.witness.note("recovery", {"detect": detected_s, "respawn": respawn_s}, facts)
        self._around.say(f"workers started again {(respawn_s - detected_s) * 1000:.0f} ms after the failure was seen")

    def _evict(self, group: WorkerGroup) -> None:
        """Go on without the device of the last failure: on a spare, or with fewer workers. Any number of ranks ends in the same bits."""
        failure = self.history[-1]
        assert failure.place is not None, "a failure without a place cannot evict it"
        group.spec.local_world_size = workers_without(self.history, self._around.options)
        self.history[-1] = structs.replace(failure, evicted=True)
        self.devices = self.devices.without(failure.place.device)
        os.environ.update(self.devices.environment())
        group.workers = self._assign_worker_ranks(group.store, group.group_rank, group.group_world_size, group.spec)
        self._around.say(f"{failure.place} is left out, {group.spec.local_world_size} workers go on")

    def _end_strays(self) -> None:
        """Nothing of this attempt may touch a port, the run folder or a device when the next one does."""
        server = self._around.server
        spared = [server.pid, *server.standby] if server is not None and server.pid is not None else []
        for pid in end_strays(self._around.mark, spared, self._around.clock):
            self._around.say(f"process {pid} of the attempt that failed cannot be killed: it sits in the kernel")

    def _succeeded(self, group: WorkerGroup) -> RunResult:
        group.state = WorkerState.SUCCEEDED
        if self._around.num_nodes_max > 1:
            self._exit_barrier()  # type: ignore[no-untyped-call]
        self.reason = "all workers ended by themselves"
        return RunResult(state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in group.workers})

    def _failed(self, group: WorkerGroup, attempt: Attempt, causes: dict[int, int]) -> RunResult:
        group.state = WorkerState.FAILED
        self._end_strays()
        failures = {}
        for local, code in causes.items():
            failure = ProcessFailure(local_rank=local, pid=attempt.pids[local], exitcode=code, error_file="")
            failures[group.workers[local].global_rank] = failure
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _wait_for_end(self) -> Attempt:
        """Until all workers ended, or one failed (when asked to end: all, within the grace), or the set of nodes changed."""
        attempt = self._attempt
        assert attempt is not None, "waiting for workers that were not started"
        while True:
            for local, pid in attempt.pids.items():
                if local not in attempt.codes and (code := peek_exit(pid)) is not None:
                    attempt.codes[local] = code
            if attempt.has_failed and self.end_signal is None:
                self._recognise_stop(attempt)
            if attempt.has_ended or (attempt.has_failed and self.end_signal is None):
                return attempt
            self._obey_signals(attempt)
            if self._around.num_nodes_max > 1 and self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
                return attempt
            self._around.witness.look()
            living = [fd for local, fd in attempt.fds.items() if local not in attempt.codes]
            if not wait_any([*living, self._around.inbox.fd], self._patience_s()) and self._around.server is not None:
                self._around.server.stand_by(len(attempt.pids))  # now that this attempt has started and nothing is urgent

    def _patience_s(self) -> float:
        if self._kill_at_s is None:
            return LOOK_INTERVAL_S
        return min(LOOK_INTERVAL_S, max(0.001, self._kill_at_s - self._around.clock.monotonic()))

    def _obey_signals(self, attempt: Attempt) -> None:
        """Pass the first signal on and start the grace; a second interrupt from the keyboard, or the end of the grace, kills."""
        now_s = self._around.clock.monotonic()
        for sig in self._around.inbox.take():
            if self.end_signal is None:
                self._begin_end(attempt, sig)
            elif sig == signal.SIGINT:
                self._kill_at_s = now_s
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + LOOK_INTERVAL_S
            for pid in attempt.pids.values():
                kill_group(pid)

    def _begin_end(self, attempt: Attempt, sig: signal.Signals) -> None:
        self.end_signal, self._kill_at_s = sig, self._around.clock.monotonic() + self._around.grace_s
        self._around.say(f"{sig.name}: workers finish their step and commit (at most {self._around.grace_s:g} s)")
        with contextlib.suppress(OSError), open(self._around.stop_file, "w", encoding="utf-8") as file:
            file.write(sig.name)
        self._pass_on(attempt, sig)

    def _recognise_stop(self, attempt: Attempt) -> None:
        """A worker that ended by a signal which asks it to stop, before it had anything to finish: that was meant for the job."""
        failed = {code for code in attempt.codes.values() if code != 0}
        asked = [sig for sig in stop_signals() if failed & {-sig, 128 + sig}]
        if asked and not any(code < 0 and -code not in asked for code in failed):
            self._begin_end(attempt, asked[0])

    def _pass_on(self, attempt: Attempt, sig: signal.Signals) -> None:
        """To the workers alone, not to their children. SIGUSR1 stays itself, every other wish to end becomes SIGTERM."""
        for local, pid in attempt.pids.items():
            if local not in attempt.codes:
                os.kill(pid, signal.SIGUSR1 if sig == signal.SIGUSR1 else signal.SIGTERM)

    def _hear_all(self, attempt: Attempt) -> None:
        """Before any run was opened, after a mistake on one rank: the others get a moment to end with theirs before they are killed."""
        deadline_s = self._around.clock.monotonic() + LAST_WORDS_S
        while attempt.has_failed and not attempt.has_ended and self._only_mistakes(attempt.codes):
            left_s = deadline_s - self._around.clock.monotonic()
            if left_s <= 0:
                return
            wait_any([fd for local, fd in attempt.fds.items() if local not in attempt.codes], left_s)
            for local, pid in attempt.pids.items():
                if local not in attempt.codes and (code := peek_exit(pid)) is not None:
                    attempt.codes[local] = code

    def _only_mistakes(self, codes: Mapping[int, int]) -> bool:
        """Did all of these fail by an exception that comes again, and has no attempt of this launch opened a run?"""
        files = self._pcontext.error_files if self._pcontext is not None else {}
        known = self._around.witness.directory is None and self._around.num_nodes_max == 1
        return known and all(code > 0 and is_mistake(files.get(local, "")) for local, code in codes.items())

    def _remember(self, group: WorkerGroup, attempt: Attempt, causes: dict[int, int], detected_s: float) -> None:
        """Add a failure to the history, with the step it happened at if this attempt opened a generation of its own.

        A worker that had reported its error but was still on its way out when we killed it counts as failed: often it is the cause.
        """
        progress = self._around.witness.progress()
        opened = progress.generation is not None and progress.generation != self._generation_before
        self._generation_before = progress.generation
        error_files = self._pcontext.error_files if self._pcontext is not None else {}
        late = {local: 1 for local, path in error_files.items() if local not in attempt.codes and has_error(path)}
        failed = {group.workers[local].global_rank: (code, error_files.get(local, "")) for local, code in (causes | late).items()}
        rank, error = root_cause(failed)
        code, error_file = failed[rank]
        is_programs, message = code > 0 and is_mistake(error_file), whole_message(code, error_file)
        if opened and progress.hang:
            rank, error = max(progress.hanging, 0), f"{describe(HANG_EXIT_CODE)}: {progress.hang}"
            is_programs, message = False, error
        local = next((local for local, worker in enumerate(group.workers) if worker.global_rank == rank), None)
        device = None if local is None else self.devices.of(local)
        failure = Failure(
            at_s=detected_s,
            codes=tuple(sorted((r, code) for r, (code, _) in failed.items())),
            rank=rank,
            error=error,
            step=progress.applied + 1 if opened and progress.applied is not None else None,
            committed=progress.committed,
            asked_to_end=self.end_signal is not None,
            is_mistake=len(failed) == len(attempt.pids) and self._only_mistakes(causes | late),
            place=None if device is None or is_programs else Place(hostname(), device),
            message=message,
        )
        older = [old for old in self.history[: 1 - MAX_HISTORY] if old.evicted]
        self.history = [*older, *self.history[1 - MAX_HISTORY :], failure]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with started_by(self._around.server, self._around.inbox.interrupting) as why:
            pids: dict[int, int] = super()._start_workers(worker_group)
        for line in why:
            self._around.say(line)
        self._around.inbox.install()
        self._attempt = Attempt(pids=pids, fds={local: pidfd(pid) for local, pid in pids.items()})
        return pids

    def _meet(self, worker_group: WorkerGroup) -> None:
        """A signal ends the waiting for other nodes: no worker lives that could be asked to finish."""
        with self._around.inbox.interrupting():
            if self._around.num_nodes_max > 1:
                self._around.say(f"waiting for other nodes, at most {self._around.num_nodes_max} in all")
            super()._rendezvous(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes (a node alone does so once: TorchElastic takes up to 0.3 s), then give the attempt a store of its own.

        The store lives in the first node's agent, which holds its port from the moment it has one: nobody else can take it.
        """
        group: Any = worker_group
        alone = self._around.num_nodes_max == 1
        if group.store is None or not alone:
            self._meet(worker_group)
        if not group.spec.rdzv_handler.use_agent_store:
            return
        if alone:
            group.master_addr = "127.0.0.1"
        if group.group_rank == 0:
            self._worker_store = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
            group.store.set(STORE_KEY, str(self._worker_store.port))
        group.master_port = int(group.store.get(STORE_KEY))

    def _kill_and_reap(self) -> None:
        """End the attempt's processes and all they started. Groups are killed before their leaders are reaped: a pid is ours until then."""
        attempt = self._attempt
        if attempt is not None:
            for pid in attempt.pids.values():
                kill_group(pid)
            self._wait_until_dead(attempt)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, REAP_TIMEOUT_S)

    def _wait_until_dead(self, attempt: Attempt) -> None:
        living = set(attempt.fds.values())
        deadline_s = self._around.clock.monotonic() + REAP_TIMEOUT_S
        while living and (left_s := deadline_s - self._around.clock.monotonic()) > 0:
            living.difference_update(wait_any(sorted(living), left_s))

    def _close_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            for fd in attempt.fds.values():
                os.close(fd)
        self._pcontext = None
        self._worker_store = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = REAP_TIMEOUT_S) -> None:
        """The last thing of every run, also after an error of our own."""
        if self._attempt is not None:
            self._kill_and_reap()
        super()._shutdown(signal.SIGKILL, timeout)
        self._close_attempt()
