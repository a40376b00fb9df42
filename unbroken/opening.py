"""Opening a run: what is fixed at its birth, what may not change later, and what a start tells the user."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from unbroken.capture import facts
from unbroken.capture.finite import first_poison
from unbroken.capture.stack import Stack
from unbroken.capture.tree import Item
from unbroken.cluster.exitcode import use_exit_codes
from unbroken.config import RunConfig
from unbroken.core.errors import EnvironmentChanged, LayoutMismatch, NoCheckpoint, Refused, SaveFailed, UnbrokenError, describe
from unbroken.core.limits import NUM_SLOTS
from unbroken.core.messages import Failed, Plan, Rules, Status, StatusReply
from unbroken.core.ports import Clock
from unbroken.core.records import MAIN_LINEAGE
from unbroken.data.loader import Source
from unbroken.doctor.needs import Needs
from unbroken.doctor.room import Room, look_around
from unbroken.importing.live import start_from
from unbroken.importing.spec import StartFrom
from unbroken.order.ledger import SKIPS, check_same
from unbroken.recover.attempts import attempt, tell_launcher
from unbroken.recover.link import Link
from unbroken.recover.once import Once, check_key
from unbroken.recover.replays import require_place
from unbroken.recover.snapshots import expected_bytes
from unbroken.recover.start import Counters, Start, digests, fact_items
from unbroken.recover.together import together
from unbroken.recover.watch import Watching
from unbroken.step.exchange import Exchange, join_world
from unbroken.step.ring import require_equal_shares, require_fixed_buckets
from unbroken.store.repository import Repository
from unbroken.store.tiers.choose import is_object
from unbroken.store.tiers.disk import DiskTier, local_path

GRADES = {
    "equal-world-size": "this loader keeps its own order, which depends on the number of ranks; unbroken.Batches does not",
    "order-only": "the order of samples is kept, random augmentation is not; wrap the data set as unbroken.keyed(dataset)",
}
"""What a grade of the data means to the user."""

REMOVED = "the run folder has been removed or replaced: training goes on unsaved, and nothing is made anew there"

_openings = itertools.count()


@dataclass
class Opening:
    """One start of a run. After `open`, the live objects hold the state of `plan.step` and the generation stands in the log."""

    directory: str
    config: RunConfig
    stack: Stack
    source: Source
    device: torch.device
    clock: Clock
    moments: dict[str, float] = field(default_factory=dict)
    link: Link = field(init=False)
    exchange: Exchange = field(init=False)
    start: Start = field(init=False)
    watching: Watching = field(init=False)
    num_units: int = 0
    run_id: str = ""
    done: Once = field(default_factory=Once)
    room: Room | None = None
    _has_saved: bool = False
    _sheet: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.device)
        self.watching = Watching(self.config.hang_timeout, self.clock)

    def close(self) -> None:
        """Let the daemon and the other ranks go, as far as they were reached."""
        self.watching.stop()
        if hasattr(self, "link"):
            self.link.close()
        self.exchange.abandon()

    def leave(self, error: BaseException) -> None:
        """An error ends this rank: the others learn it, and whoever waits in a collective with us fails at once."""
        self.link.leave(error)
        self.exchange.abandon()

    def open(self) -> tuple[Plan, Counters]:
        """The plan that held, and what was counted so far."""
        join_world(self.device)
        use_exit_codes()
        self.exchange = Exchange(self.device)
        if self.config.reduce == "ring":
            require_fixed_buckets(self.stack.parts.models, self.exchange.world_size)
        # several runs in one process (a notebook) must not meet each other's addresses in the store
        self.exchange.connect(f"start/{attempt()}/{next(_openings)}")
        refuse_own_folder(self.config.copies_to, self.directory)
        together(self.exchange, lambda: self.stack.collect({}, {}, {}))  # what cannot be stored is refused before anything is made
        self.start = Start(
            directory=self.directory,
            tier=DiskTier(self.directory),
            exchange=self.exchange,
            stack=self.stack,
            clock=self.clock,
            resume=self.config.resume,
            options=self._birth_facts(),
            once=self.done,
            lineage=self.config.lineage,
            rules=rules_of(self.config),
        )
        if self.config.lineage != MAIN_LINEAGE:
            together(self.exchange, self._require_place if self.exchange.rank == 0 else lambda: None)
        self.link = self.start.connect()
        self.moments["rendezvous"] = self.clock.monotonic()
        plan = self._load(self.start.plan(self.link))
        self.start.from_copy = False  # from here on this run itself is the newest
        tell_launcher(self.directory, self.config.lineage)
        self.run_id, self._has_saved = plan.run_id, plan.source != "fresh"
        return plan, self.start.counters

    def go_back(self, at_most: int) -> tuple[Plan, Counters]:
        """Start anew in mid-run, from `at_most` or an earlier step; all ranks call it. As `open`, with the process and its groups kept.

        NoCheckpoint when nothing that old is left; SaveFailed when this run is not in its folder any more.
        """
        self.moments["process"] = self.clock.monotonic()
        failures = [failure for failure in self.link.failures if not failure.poisoned]
        self.link.close()
        together(self.exchange, self._require_own_run if self.exchange.rank == 0 else lambda: None)
        self.link = self.start.connect()
        self.link.failures += failures
        self.start.resume, self.start.notes = "must", ()
        self.moments["rendezvous"] = self.clock.monotonic()
        plan = self._load(self.start.plan(self.link, at_most))
        self.stack.notes.clear()  # of options that the script has set since: they are put back
        self.link.poll()
        self.link.forget_poison()  # of the generation that was left
        return plan, self.start.counters

    def _load(self, asked: Plan) -> Plan:
        plan = self.start.load(self.link, asked, self._adopt)
        if self.config.start_from is not None:
            plan = take_over(self.start, plan, self.config.start_from, is_first=self.room is None)
        self._sheet = self._fact_sheet(plan)
        if plan.source != "fresh":
            self.start.compare(self.start.stored, self.facts())
        elif self.config.anomalies.nan != "ignore":
            self._require_finite()
        if self.room is None:
            self.room = self._look_around()
        pieces = together(self.exchange, lambda: [*self.pieces(self.start.counters), *self.facts()])
        self.start.open(self.link, plan, pieces)
        self.watching.start(self.link)
        self.moments["rollback"] = self.clock.monotonic()
        return plan

    def _require_finite(self) -> None:
        """ValueError where the state that a run is born with would be taken for poison later."""
        found = first_poison(self.pieces(self.start.counters))
        if found:
            raise ValueError(
                f"{found} before the first step: mend how it is made, or, if that is meant, make it a buffer (infinities) or give "
                'anomalies=unbroken.Anomalies(nan="ignore")'
            )

    def reattach(self) -> Plan:
        """Start and join a new daemon in mid-run; all ranks call it at one boundary. The live state is kept, nothing is loaded.

        SaveFailed when this run is not in its folder any more: nothing is made anew there. What fails is told when the run closes.
        """
        self.link.close()
        self._has_saved = self._has_saved or self.link.committed is not None
        try:
            together(self.exchange, self._require_own_run if self.exchange.rank == 0 else lambda: None)
            failures, self.link = self.link.failures, self.start.connect()
            self.link.failures += failures
            self.start.resume = "auto"
            plan = self.start.plan(self.link)
            if plan.run_id != self.run_id or (plan.source == "fresh" and self._has_saved):
                raise SaveFailed(REMOVED)
            plan = self.start.continue_from(self.link, plan)
            self.watching.start(self.link)
            return plan
        except (UnbrokenError, OSError) as error:
            self.link.close()
            self.link.failures.append(Failed(step=self.start.counters.step, generation=0, text=describe(error)))
            raise

    def _require_place(self) -> None:
        require_place(self.start.tier, self.directory, self.config.lineage, self.config.replay)

    def _require_own_run(self) -> None:
        """Looked at before a daemon is asked, because that one would take the folder for a new run's."""
        try:
            is_own = Repository.open(self.start.tier).facts.run_id == self.run_id
        except NoCheckpoint:
            is_own = False
        if not is_own:
            raise SaveFailed(REMOVED)

    def pieces(self, counters: Counters) -> list[Item]:
        """Every restored piece as it stands now."""
        where = {"step": counters.step, "consumed_samples": counters.samples, "seed": self.stack.streams.seed}
        return [*self.stack.collect(where, counters.as_dict(), self.source.state()), *self.done.pieces()]

    def once(self, key: str) -> bool:
        """True on rank 0 when the run has not done this yet."""
        check_key(key)
        return self.exchange.rank == 0 and self.done.first(key) and self.config.replay is None  # a step made again was done before

    def facts(self) -> list[Item]:
        """Compared and recorded pieces as they stand now: a switch may be turned in mid-run. Cost: 5 us per module, 20 us besides."""
        self._sheet["/environment"][0]["kernels"] = facts.kernel_settings(self.device)
        self._sheet["/model/structure"] = (self.stack.structure(), *self._sheet["/model/structure"][1:])
        return fact_items(self._sheet)

    def expected_slot_bytes(self, counters: Counters) -> int:
        """Bytes of one memory slot, before there is any."""
        return expected_bytes(self.stack, [*self.pieces(counters), *self.facts()])

    def phase(self) -> str:
        """What the daemon does: "idle" or "draining"."""
        return self.link.ask(Status(), StatusReply)[0].phase

    def changed_parameters(self) -> list[str]:
        """Names of the parameters that are not what the generation was opened with. Cost: a pass over all parameters."""
        before = self.start.opened_with
        items = [i for i in self.pieces(self.start.counters) if i.piece.kind in ("parameter", "frozen")]
        now = digests(items)
        return [p.removeprefix("/model/parameters/") for p in sorted(now) if before.get(p) != now[p]]

    def latest_moments(self) -> dict[str, float]:
        """When each phase of the start ended on the last rank; all ranks call it."""
        told = self.exchange.share(self.moments, dict[str, float])
        return {name: max(moments[name] for moments in told) for name in self.moments}

    def announce(self, plan: Plan, gradient_bytes: int, slot_bytes: int) -> None:
        """Tell the user on rank 0 where the run goes on, what it needs (bytes per rank), and what is not as it was."""
        if self.exchange.rank != 0:
            return
        origin = "a fresh start" if plan.source == "fresh" else f"step {plan.step} from {plan.source}"
        units = f"{self.num_units} units per step on {self.exchange.world_size} ranks, {plan.options['threads']} threads each"
        where = self.directory if self.config.lineage == MAIN_LINEAGE else f"{self.directory}, lineage {self.config.lineage}"
        print(f"unbroken: {where}: {origin}, generation {plan.generation}; {units}")
        memory = f"{NUM_SLOTS} slots of {mebibytes(slot_bytes)} and {mebibytes(gradient_bytes)} for gradients"
        print(f"unbroken: {self.config.interval}; memory per rank: {memory}")
        if self.config.origins:
            print(f"unbroken: {', '.join(self.config.origins)}")
        if self.config.copy_to:
            print(f"unbroken: {told_copies(self.config, slot_bytes)}")
        self._tell_needs(slot_bytes, gradient_bytes)
        if self.source.grade != "exact":
            print(f"unbroken: the claim is limited by the data: {GRADES[self.source.grade]}", file=sys.stderr)
        for note in (*plan.notes, *self.start.notes, *self.stack.notes):
            print(f"unbroken: {note}", file=sys.stderr)
        for difference in self.start.differences:
            warnings.warn(f"not as it was at the checkpoint, the claim is limited: {difference}", EnvironmentChanged, stacklevel=5)

    def _look_around(self) -> Room | None:
        """Before any rank can have asked for slots: the opening of the generation, which comes next, waits for all."""
        if self.exchange.rank != 0:
            return None
        held = self.link.ask(Status(), StatusReply)[0].facts.get("slots_bytes")
        return look_around(self.directory, held if isinstance(held, int) else 0)

    def _tell_needs(self, slot_bytes: int, gradient_bytes: int) -> None:
        """What the host must have for this run, and a warning where it has not: before the failure."""
        if self.room is None:
            return
        config = self.config
        needs = Needs(
            slot_bytes=slot_bytes,
            gradient_bytes=gradient_bytes,
            state_bytes=slot_bytes,
            ranks=self.exchange.world_size,
            keep=config.keep + (config.keep_hours or 0) + (config.keep_best.num if config.keep_best is not None else 0),
        )
        found = self.room.judge(needs)
        print(f"unbroken: needs {'; '.join(one.seen for one in found)}")
        for one in found:
            if one.remedy:
                print(f"unbroken: {one.name}: {one.remedy}", file=sys.stderr)

    def _birth_facts(self) -> dict[str, Any]:
        """What is fixed when the run is born; a run that exists answers with its own."""
        return {
            "units": self.config.units or self.source.default_units(self.exchange.world_size),
            "seed": self.stack.streams.seed,
            "threads": self.config.threads or (1 if self.device.type == "cpu" else torch.get_num_threads()),
            "reduce": self.config.reduce,
            "keep": self.config.keep,
            "data": self.source.facts(),
            "grade": self.source.grade,
        }

    def _adopt(self, plan: Plan) -> None:
        """Take over the birth facts; refuse arguments that contradict them."""
        born, config = plan.options, self.config
        if "units" not in born:
            raise Refused(f"{self.directory} holds checkpoints of a Store, not a run: use another folder")
        mine = {"seed": config.seed, "units": config.units, "threads": config.threads, "reduce": config.reduce}
        wrong = [f"{k}: born with {born.get(k)!r}, now {v!r}" for k, v in mine.items() if v is not None and born.get(k) != v]
        if config.reduce == "ring" and plan.stored_world_size not in (0, self.exchange.world_size):
            wrong.append(f"world size: {plan.stored_world_size} at the checkpoint, now {self.exchange.world_size} (reduce='ring' keeps it)")
        try:
            check_same(born.get("data", {}), self.source.facts())
        except LayoutMismatch as error:
            if not wrong:
                raise
            wrong.append(str(error))
        if wrong:
            text = "this run was born with other facts:\n  " + "\n  ".join(wrong) + "\nGive them as they were, or start another folder"
            raise LayoutMismatch(text, mismatched=tuple(wrong))
        if config.reduce == "ring":
            require_equal_shares(born["units"], self.exchange.world_size)
        self.num_units = born["units"]
        self.stack.streams.seed = born["seed"]
        torch.set_num_threads(born["threads"])

    def _fact_sheet(self, plan: Plan) -> dict[str, Any]:
        environment_facts = {
            "versions": facts.versions(),
            "kernels": facts.kernel_settings(self.device),
            "variables": facts.variables(),
        }
        layout = {n: {"shape": list(p.shape), "placement": "replicated"} for n, p in self.stack.parameters().items()}
        topology = facts.topology(self.exchange.rank, self.exchange.world_size, plan.generation)
        return {
            "/model/structure": (self.stack.structure(), "compared", "logical", "framework"),
            "/environment": (environment_facts, "compared", "rank", "hardware"),
            "/options": (plan.options, "recorded", "logical", "scheduling"),
            **({SKIPS: (self.source.recorded(), "recorded", "logical", "scheduling")} if self.source.recorded() else {}),
            "/hardware": (facts.hardware(self.device), "recorded", "rank", "hardware"),
            "/topology": (topology, "recorded", "rank", "scheduling"),
            "/layout": (layout, "recorded", "logical", "scheduling"),
            "/naming": (self.stack.naming(), "recorded", "logical", "framework"),
            "/anomalies": (self.config.anomalies.as_facts(), "compared", "logical", "scheduling"),
        }


def take_over(start: Start, plan: Plan, spec: StartFrom, *, is_first: bool) -> Plan:
    """A fresh run begins with the state of its source; one that is there goes on, and that is said. What is then known of the birth."""
    if plan.source != "fresh":
        ignored = f"start_from={spec.source} is not used: this run is there already and goes on from its own step {plan.step}"
        start.notes += (ignored,) if is_first else ()
        return plan
    report = together(start.exchange, lambda: start_from(start.stack, spec, start.exchange.rank))
    start.origin = report.facts()
    start.notes += tuple(report.lines())
    return msgspec.structs.replace(plan, options=plan.options | {"started_from": start.origin})


def rules_of(config: RunConfig) -> Rules:
    """What the daemon is told of how to keep this run."""
    full, every = config.full_every, config.copy_every
    return Rules(
        allow_nonfinite=config.anomalies.nan == "ignore",
        keep=config.rules,
        full_steps=None if full is None else full.steps,
        full_s=None if full is None else full.seconds,
        scrub_s=config.scrub_every,
        copy_to=config.copies_to or "",
        copy_steps=None if every is None else every.steps,
        copy_s=None if every is None else every.seconds,
        copy_keep=config.copy_keep,
    )


def refuse_own_folder(copy_to: str | None, directory: str) -> None:
    """ValueError for a copy in the run's own folder, which would be none."""
    if copy_to and not is_object(copy_to):
        place, own = os.path.realpath(local_path(copy_to)), os.path.realpath(directory)
        if place == own or place.startswith(own + os.sep) or own.startswith(place + os.sep):
            raise ValueError(f"copy_to={copy_to!r} and the run folder {directory} are not two places: give another folder or disk")


def told_copies(config: RunConfig, slot_bytes: int) -> str:
    """Where copies go, how often, and what they take there at most."""
    if config.copies_to is None:
        return f"lineage {config.lineage} is not copied to {config.copy_to}: branches are not yet"
    often = "every checkpoint, as far as it keeps up" if config.copy_every is None else str(config.copy_every).replace("snapshot", "copy")
    each, total = mebibytes(slot_bytes), mebibytes(slot_bytes * (config.copy_keep + 1))
    return f"copies in {config.copy_to}: {often}; at most {each} per checkpoint, {config.copy_keep} kept besides milestones: up to {total}"


def mebibytes(size: int) -> str:
    """Bytes for people."""
    return f"{size / (1 << 20):.1f} MiB"


def device_of(models: Mapping[str, nn.Module]) -> torch.device:
    """Where the parameters are; TypeError for what is no module, ValueError when there are none."""
    for model in models.values():
        if not isinstance(model, nn.Module):
            raise TypeError(f"model= got {model!r:.100}: pass a torch.nn.Module (compiling a compiled model gives a plain function)")
        for parameter in model.parameters():
            return parameter.device
    raise ValueError("model has no parameters: pass the module whose parameters the optimizer holds")


def refuse_sync_batch_norm(models: Mapping[str, nn.Module]) -> None:
    """Refused, because such a model cannot be exact over world sizes."""
    for model in models.values():
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise Refused(
                    f"{name or 'the model'} is SyncBatchNorm, whose result depends on which ranks compute a step; "
                    "use BatchNorm, whose buffers Run averages over units, or GroupNorm"
                )


def refuse_metric_schedulers(schedulers: Mapping[str, Any]) -> None:
    """TypeError for a scheduler that only the user's loop can step."""
    for scheduler in schedulers.values():
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau needs a metric at each step, which only your loop knows: pass it as extras={'plateau': scheduler} "
                "and call its step(metric) yourself after run.step(); its state is saved with the run"
            )
