"""Entry point in the training process: the run, its loop, its steps and its snapshots.

    run = unbroken.Run("runs/gpt", model=model, optimizer=optimizer, data=unbroken.Batches(dataset, global_batch=64))
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()

The flow of a step: `__iter__` yields this rank's units -> `micro.backward` sets each unit's gradient aside -> `step` reduces and
applies, or undoes -> asking for the next batch is the boundary, where a snapshot may be frozen into memory for the daemon to store.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Unpack

import msgspec
import torch
from torch import nn

from unbroken.capture import facts
from unbroken.capture.exchange import Exchange, ExchangeFailed, join_world
from unbroken.capture.loader import Source, Unit, as_source
from unbroken.capture.micro import Batch, Micro
from unbroken.capture.ring import RingUpdate, require_fixed_buckets
from unbroken.capture.stack import Parts, Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.capture.tree import Item
from unbroken.capture.update import Applied, Update, scaled
from unbroken.chaos import arm_from_environment
from unbroken.cluster.preempt import StopRequest
from unbroken.config import Options, RunConfig, resolve
from unbroken.core.errors import LayoutMismatch, Refused, SaveFailed
from unbroken.core.limits import DRAIN_TIMEOUT_S, REPLY_TIMEOUT_S
from unbroken.core.messages import Journal, Plan, Refuse, Status, StatusReply, Verdict
from unbroken.core.ports import Clock, SystemClock, environment, failpoint, position
from unbroken.core.records import EventRecord, Record, StepRecord
from unbroken.order.ledger import check_same, unit_digest
from unbroken.order.units import blocks
from unbroken.recover.link import DaemonLost, Link, SaveWarning
from unbroken.recover.snapshots import Snapshots, Taken, expected_bytes
from unbroken.recover.start import Counters, Start, fact_items
from unbroken.store.tiers.disk import DiskTier


class StepLost(RuntimeError):
    """A collective failed and not every rank is still at the step's beginning: this process must end, the launcher restarts all."""


class Run:
    """A training run that continues where it was, whoever is killed. The same script under python, torchrun and `unbroken run`.

    directory: folder of the run, created if missing. model, optimizer, scheduler: one, a list or a dict of them; you wrap, move and
    compile them, Run never does. data: `Batches`, or a DataLoader. extras: anything else with state (EMA, generators, dicts).
    lose_at_most: how much work a failure may cost, "30s" or "100 steps". resume: "auto" starts fresh only where nothing is, "must"
    never does, "never" refuses a folder that holds a run. options: see `unbroken.config.Options`.

    Raises NoCheckpoint (exit 3), Refused and its kinds (exit 4), ValueError and TypeError with the remedy in the text.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: Any,
        optimizer: Any,
        data: Any,
        scheduler: Any = None,
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        lose_at_most: str = "60s",
        resume: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        self._clock: Clock = SystemClock()
        self._moments = {"process": self._clock.monotonic()}
        self._config: RunConfig = resolve(lose_at_most, resume, options)
        self._directory = os.path.abspath(os.fspath(directory))
        self.model = model
        parts = Parts(
            models=keyed_parts(model, "model"),
            optimizers=keyed_parts(optimizer, "optimizer"),
            schedulers=keyed_parts(scheduler, "scheduler"),
            scaler=scaler,
            extras=dict(extras or {}),
        )
        self._device = _device_of(parts.models)
        _refuse_sync_batch_norm(parts.models)
        _refuse_metric_schedulers(parts.schedulers)
        self._source: Source = as_source(data, units=self._config.units)
        self._seed = self._config.seed if self._config.seed is not None else int(self._source.facts().get("seed") or 0)
        self._stop = StopRequest()
        self._streams = Streams(self._seed, self._device)
        self._stack = Stack(parts, self._streams)
        self._scaler = scaler
        self._closed = False
        self._exchange = Exchange(self._device)
        self._link_or_none: Link | None = None
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    # -- life ---------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        _tell_launcher(self._directory)
        if join_world(self._device):
            self._exchange = Exchange(self._device)
        if self._config.reduce == "ring":
            require_fixed_buckets(self._stack.parts.models, self._exchange.world_size)
        self._exchange.connect(f"start/{environment('TORCHELASTIC_RESTART_COUNT', '0')}")
        start = Start(
            directory=self._directory,
            tier=DiskTier(self._directory),
            exchange=self._exchange,
            stack=self._stack,
            clock=self._clock,
            resume=self._config.resume,
            options=self._birth_facts(),
        )
        self._link_or_none = start.connect()
        self._stop.install()
        self._moments["rendezvous"] = self._clock.monotonic()
        self._plan = start.load(self._link, start.plan(self._link), self._adopt)
        self._counters: Counters = start.counters
        self._facts: list[Item] = fact_items(self._fact_sheet())
        if self._plan.source != "fresh":
            start.compare(start.stored, self._facts)
        start.open(self._link, self._plan, self._collect())
        self._moments["rollback"] = self._clock.monotonic()
        self._ready_to_train(start)
        self._report_start(start)

    def _ready_to_train(self, start: Start) -> None:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        self._block = blocks(self._num_units, world_size)[rank]
        ring = self._config.reduce == "ring"
        self._update = (RingUpdate if ring else Update)(self._stack, self._num_units, self._exchange)
        self._snapshots = Snapshots(self._link, self._clock, rank, world_size, self._plan.generation)
        self._snapshots.reserve(expected_bytes(self._stack, self._collect()))
        self._source.bind(units=self._num_units, block=self._block, rank=rank, world_size=world_size)
        if start.loader_state:
            self._source.load_state(start.loader_state, self._counters.step)
        else:
            self._source.seek(self._counters.step + 1)
        self._units_ahead = self._source.units()
        self._ahead: Unit | None = None
        self._attempt = 0
        self._last_save_s = self._clock.monotonic()
        self._step_s = 0.0
        self._snapshot_due = self._config.interval.due(self._counters.step + 1, 0.0, 0.0)
        self._outcome: bool | None = None
        self._inside = False
        self._boundary_open = self._counters.step == 0 and self._plan.source == "fresh"
        self._saved_step = self._plan.step if self._plan.source != "fresh" else -1
        self._unconfirmed = self._plan.step if self._plan.source == "memory" else None
        self.loss = float("nan")
        arm_from_environment(rank, self._plan.generation, lambda: self._link.ask(Status(), StatusReply)[0].phase)
        position[:] = [self._counters.step + 1, self._plan.generation]
        self._streams_at_start: dict[str, Any] | None = self._streams.read()
        self._moments["align"] = self._clock.monotonic()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Commit the last boundary, wait until it is durable, let the daemon go. Warns where an automatic save had failed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._streams.leave()
        try:
            if self._inside:
                self._update.undo()
            if self._counters.step != self._saved_step:
                self._snapshot(milestone=False, wait_s=DRAIN_TIMEOUT_S)
            self._flush()
        finally:
            self._snapshots.close()
            self._let_go()

    def _let_go(self) -> None:
        """Give back what a failed start or an ended run holds."""
        self._source.close()
        if self._link_or_none is not None:
            self._link_or_none.close()
        self._exchange.abandon()
        self._stop.remove()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:
            self.close()

    def _flush(self) -> None:
        """Wait for the newest snapshot; a failure is a warning, because the run itself has ended well."""
        try:
            if self._unconfirmed is not None and self._link.lost is None:
                self._link.wait_for_step(self._unconfirmed, DRAIN_TIMEOUT_S)
        except SaveFailed as error:
            warnings.warn(f"{error}; older checkpoints are untouched", SaveWarning, stacklevel=3)
        if self._link.superseded and self._exchange.rank == 0:
            count = len(self._link.superseded)
            print(f"unbroken: {count} snapshots stayed in memory only: writing takes longer than the interval", file=sys.stderr)
        if self._link.failures and self._exchange.rank == 0:
            steps = ", ".join(str(f.step) for f in self._link.failures)
            print(f"unbroken: checkpoints that were not saved: steps {steps} (first: {self._link.failures[0].text})", file=sys.stderr)

    # -- the loop -----------------------------------------------------------------------------------------------------------

    @property
    def _link(self) -> Link:
        assert self._link_or_none is not None, "the run has not been opened"
        return self._link_or_none

    @property
    def completed(self) -> int:
        """Steps applied so far, those before this start included."""
        return self._counters.step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batch of the next step until the data or `total_steps` end; asking for the next one is the step's boundary."""
        if self._closed:
            raise RuntimeError("this run is closed; make a new Run to go on")
        if self._streams_at_start is not None:
            # whatever the script drew or seeded since Run() was made (warm-up, sanity check) must not move the run
            self._streams.write(self._streams_at_start)
            self._streams_at_start = None
        self._boundary()
        while not self._at_end():
            if self._outcome is not False:
                self._update.begin()
            self._outcome = None
            if len(self._block) and (first := self._peek()) is None:
                break
            self._inside = True
            yield Batch(self._counters.step + 1, self._micros)
            if self._outcome is None:
                raise RuntimeError("the loop asked for the next batch without run.step(); call it once per batch")
            if self._outcome:
                self._boundary()
        self.close()

    def _peek(self) -> Unit | None:
        """Have the step's first unit at hand; None when the data have ended. After the boundary, whose data position it must not move."""
        if self._ahead is None:
            self._ahead = next(self._units_ahead, None)
        return self._ahead

    def _at_end(self) -> bool:
        ends = [n for n in (self._config.total_steps, self._source.num_steps()) if n is not None]
        return bool(ends) and self._counters.step >= min(ends)

    def _micros(self) -> Iterator[Micro]:
        step = self._counters.step + 1
        for number in self._block:
            unit = self._peek()
            self._ahead = None
            if unit is None:
                raise RuntimeError(f"the data ended inside step {step}, before unit {number}: give whole steps, or unbroken.Batches")
            assert (unit.step, unit.unit) == (step, number), f"loader gave {unit.step, unit.unit}, due was {step, number}"
            digest = unit_digest(unit.ids)
            if unit.weight == 0:
                self._update.finish_unit(number, digest, 0, None)
                continue
            self._update.start_unit()
            self._streams.enter(step, number)
            position[0] = step
            failpoint("step.forward")
            micro = Micro(step, number, unit.ids, unit.weight, unit.data, self._backward)
            yield micro
            self._streams.leave()
            if not micro.done and self._config.reduce == "ring":
                self._update.finish_unit(number, digest, unit.weight, None)
            elif not micro.done:
                raise RuntimeError(f"unit {number} of step {step} ended without micro.backward(loss)")

    def _backward(self, micro: Micro, loss: torch.Tensor) -> None:
        failpoint("step.backward")
        scaled(self._scaler, loss).backward()  # type: ignore[no-untyped-call]
        self._update.finish_unit(micro.unit, unit_digest(micro.ids), micro.weight, loss)

    def step(self, *, clip_grad_norm: float | None = None) -> bool:
        """Reduce the units' gradients and apply the update on all ranks, or on none.

        clip_grad_norm: largest 2-norm of the reduced gradient over all parameters. True: applied (or, after a loss-scale overflow,
        committed as skipped). False: a collective failed, everything is as at the step's beginning, the same units come again.
        Cost: two collectives of the gradient's size in all; see `capture.update`.
        """
        self._streams.leave()
        if self._outcome is not None:
            raise RuntimeError("run.step() was called twice for one batch")
        if len(self._update.collected) != len(self._block):
            raise RuntimeError(f"run.step() after {len(self._update.collected)} of {len(self._block)} units: iterate over the whole batch")
        began = self._clock.monotonic()
        failpoint("step.reduce")
        try:
            reduced = self._update.reduce(stop=self._stop.requested, snapshot_next=self._due_next())
        except ExchangeFailed as error:
            self._outcome = False
            self._refuse(error)
            return False
        applied = self._update.apply(reduced, clip_grad_norm)
        self._outcome = True
        self._inside = False
        self._boundary_open = True
        self._snapshot_next = reduced.facts[0].snapshot_next
        self._stop_agreed = any(rank.stop for rank in reduced.facts)
        self._count(applied)
        self._step_s = max(self._clock.monotonic() - began, self._step_s)
        failpoint("step.applied")
        return True

    def _count(self, applied: Applied) -> None:
        counters = self._counters
        counters.step += 1
        counters.samples += applied.num_samples
        counters.applied += applied.status == "applied"
        counters.skipped += applied.status == "skipped"
        self.loss = applied.loss
        now = self._clock.monotonic()
        record = StepRecord(
            step=counters.step,
            attempt=self._attempt,
            units=applied.units,
            num_samples=applied.num_samples,
            loss=applied.loss_bits,
            clock=((self._plan.generation, counters.step, self._exchange.world_size),),
            status=applied.status,
            time_s=now,
        )
        self._attempt = 0
        self._journal(record, *self._caught_up(now))

    def _refuse(self, error: ExchangeFailed) -> None:
        """A retry in place needs every member's word that it has applied nothing: a failed collective proves nothing about others."""
        step = self._counters.step + 1
        self._exchange.abandon()
        refuse = Refuse(
            generation=self._plan.generation, step=step, attempt=self._attempt, rank=self._exchange.rank, reason=str(error)[:1000]
        )
        try:
            verdict, _ = self._link.ask(refuse, Verdict, REPLY_TIMEOUT_S)
        except (DaemonLost, TimeoutError) as lost:
            raise StepLost(f"step {step} was refused ({error}) and the daemon gave no verdict ({lost})") from error
        if not verdict.retry:
            raise StepLost(f"step {step} cannot be tried again in place: {verdict.reason} ({error})") from error
        self._attempt = verdict.attempt
        self._update.undo()
        self._exchange.connect(f"{self._plan.generation}/{step}/{verdict.attempt}")
        self._source.seek(step)
        self._units_ahead, self._ahead = self._source.units(), None

    # -- boundaries and snapshots -------------------------------------------------------------------------------------------

    def save(self, *, milestone: bool = False, wait: bool = False) -> None:
        """Take a snapshot at the boundary of the step just applied; every rank must call it. A milestone is never pruned.

        wait: return only when it is durable; raises SaveFailed with the cause if it is not.
        """
        if self._inside:
            raise RuntimeError("run.save() belongs after run.step() or outside the loop: inside a step there is no whole state to save")
        if self._counters.step != self._saved_step or milestone:
            self._snapshot(milestone=milestone, wait_s=DRAIN_TIMEOUT_S)
        if wait:
            self._link.wait_for_step(self._counters.step, DRAIN_TIMEOUT_S)

    def _boundary(self) -> None:
        self._link.poll()
        if not self._boundary_open:
            return
        self._boundary_open = False
        first = self._counters.step == 0
        stop = not first and self._stop_agreed
        last = self._at_end()
        if first or stop or last or self._snapshot_due:
            self._snapshot(milestone=False, wait_s=DRAIN_TIMEOUT_S if stop or last else 1.0)
        if not first:
            self._snapshot_due = self._snapshot_next
        if stop:
            self._journal(EventRecord(name="stopped", step=self._counters.step, facts={"signal": self._stop.name}))
            self.close()
            sys.exit(0)

    def _snapshot(self, *, milestone: bool, wait_s: float) -> None:
        if self._saved_step == self._counters.step and not milestone:
            return
        taken = self._snapshots.take(self._collect(), self._counters.step, milestone=milestone, wait_s=wait_s)
        if taken is None:
            self._journal(EventRecord(name="snapshot_skipped", step=self._counters.step))
            return
        self._saved_step = self._unconfirmed = taken.step
        self._last_save_s = self._clock.monotonic()
        self._journal(_captured(taken))

    def _due_next(self) -> bool:
        if self._exchange.rank != 0 or not self._snapshots.has_room():
            return False
        return self._config.interval.due(self._counters.step + 2, self._clock.monotonic() - self._last_save_s, self._step_s)

    def _collect(self) -> list[Item]:
        where = {"step": self._counters.step, "consumed_samples": self._counters.samples, "seed": self._seed}
        return [*self._stack.collect(where, self._counters.as_dict(), self._source.state()), *self._facts]

    def _journal(self, *records: Record) -> None:
        if self._exchange.rank != 0 or not records or self._link.lost is not None:
            return
        try:
            self._link.send(Journal(generation=self._plan.generation, records=records))
        except DaemonLost as error:
            warnings.warn(f"{error}; training goes on, but nothing is saved any more", SaveWarning, stacklevel=3)

    # -- facts --------------------------------------------------------------------------------------------------------------

    def _birth_facts(self) -> dict[str, Any]:
        """What is fixed when the run is born; a run that exists answers with its own."""
        world_size = self._exchange.world_size
        return {
            "units": self._config.units or self._source.default_units(world_size),
            "seed": self._seed,
            "threads": self._config.threads or (1 if self._device.type == "cpu" else torch.get_num_threads()),
            "reduce": self._config.reduce,
            "keep": self._config.keep,
            "data": self._source.facts(),
            "grade": self._source.grade,
        }

    def _adopt(self, plan: Plan) -> None:
        """Take over the birth facts; refuse arguments that contradict them."""
        born = plan.options
        mine = {"seed": self._config.seed, "units": self._config.units, "threads": self._config.threads}
        wrong = [f"{k}: born with {born.get(k)!r}, now {v!r}" for k, v in mine.items() if v is not None and born.get(k) != v]
        ring = self._config.reduce == "ring"
        if ring and plan.stored_world_size not in (0, self._exchange.world_size):
            wrong.append(f"world size: {plan.stored_world_size} at the checkpoint, now {self._exchange.world_size} (reduce='ring' keeps it)")
        wrong += [f"reduce: born with {born['reduce']!r}, now {self._config.reduce!r}"] if born["reduce"] != self._config.reduce else []
        if wrong:
            text = "this run was born with other facts:\n  " + "\n  ".join(wrong) + "\nGive them as they were, or start another folder"
            raise LayoutMismatch(text, mismatched=tuple(wrong))
        check_same(born.get("data", {}), self._source.facts())
        self._num_units: int = born["units"]
        self._seed = self._streams.seed = born["seed"]
        torch.set_num_threads(born["threads"])

    def _fact_sheet(self) -> dict[str, Any]:
        environment_facts = {
            "versions": facts.versions(),
            "kernels": facts.kernel_settings(self._device),
            "variables": facts.variables(),
        }
        layout = {n: {"shape": list(p.shape), "placement": "replicated"} for n, p in self._stack.parameters().items()}
        topology = facts.topology(self._exchange.rank, self._exchange.world_size, self._plan.generation)
        return {
            "/model/structure": (self._stack.structure(), "compared", "logical", "framework"),
            "/options": (self._plan.options, "recorded", "logical", "scheduling"),
            "/environment": (environment_facts, "compared", "rank", "hardware"),
            "/hardware": (facts.hardware(self._device), "recorded", "rank", "hardware"),
            "/topology": (topology, "recorded", "rank", "scheduling"),
            "/layout": (layout, "recorded", "logical", "scheduling"),
        }

    def _report_start(self, start: Start) -> None:
        latest = {k: max(m[k] for m in self._exchange.share(self._moments, dict[str, float])) for k in self._moments}
        self._journal(EventRecord(name="start", step=self._plan.step, at=latest, facts={"source": self._plan.source}))
        if self._exchange.rank != 0:
            return
        units = f"{self._num_units} units per step on {self._exchange.world_size} ranks, {self._plan.options['threads']} threads each"
        buffers = self._update.reduction.buffers_bytes
        origin = "a fresh start" if self._plan.source == "fresh" else f"step {self._plan.step} from {self._plan.source}"
        print(f"unbroken: {self._directory}: {origin}, generation {self._plan.generation}; {units}; {buffers >> 20} MiB of gradients")
        for note in (*self._plan.notes, *start.notes):
            print(f"unbroken: {note}", file=sys.stderr)
        for difference in start.differences:
            warnings.warn(f"not as it was at the checkpoint, the claim is limited: {difference}", EnvironmentChanged, stacklevel=4)

    def _caught_up(self, now: float) -> list[EventRecord]:
        """After a failure: when the lost work was done again. `lost` is the step that was in flight."""
        lost = self._plan.last_step + 1
        step = self._counters.step
        if self._plan.generation == 0 or step > lost:
            return []
        if step == lost - 1:
            self._moments["compensate"] = now
        if step != lost:
            return []
        at = {"compensate": self._moments.get("compensate", self._moments["align"]), "first_step": now}
        return [EventRecord(name="caught_up", step=step, at=at, facts={"lost_step": lost})]


class EnvironmentChanged(UserWarning):
    """A compared fact (version, thread count, kernel setting, structure) is not what it was when the checkpoint was written."""


def _captured(taken: Taken) -> EventRecord:
    numbers = {"capture_s": taken.capture_s, "stall_s": taken.stall_s, "size_bytes": taken.size_bytes}
    return EventRecord(name="captured", step=taken.step, facts=numbers)


def _device_of(models: Mapping[str, nn.Module]) -> torch.device:
    for model in models.values():
        for parameter in model.parameters():
            return parameter.device
    raise ValueError("model has no parameters: pass the module whose parameters the optimizer holds")


def _refuse_sync_batch_norm(models: Mapping[str, nn.Module]) -> None:
    for model in models.values():
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise Refused(
                    f"{name or 'the model'} is SyncBatchNorm, whose result depends on which ranks compute a step; "
                    "use BatchNorm, whose buffers Run averages over units, or GroupNorm"
                )


def _refuse_metric_schedulers(schedulers: Mapping[str, Any]) -> None:
    for scheduler in schedulers.values():
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric at each step, which only your loop knows: pass it as extras={'plateau': scheduler} "
                "and call its step(metric) yourself after run.step(); its state is saved with the run"
            )


def _tell_launcher(directory: str) -> None:
    """The launcher learns where the run lives, so that it can keep the daemon through restarts."""
    path = environment("UNBROKEN_LAUNCH_FILE")
    if path and environment("LOCAL_RANK", "0") == "0":
        with open(path, "ab") as file:
            file.write(msgspec.json.encode({"directory": directory}) + b"\n")
