"""How a run starts or starts again: find the daemon, agree on a plan, load, verify, compare, open the generation.

Roll back: every rank reads the plan's step; damaged sources are reported and planned around before anything is touched. After loading,
the live state is walked once more and its root compared, between ranks and with what was saved, so that what trains on is what was
stored (I3, I5).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from unbroken.capture.stack import Pieces, Stack
from unbroken.capture.tree import Item, flatten, rebuild, write_item
from unbroken.codec.digest import digest, state_root
from unbroken.core import os as host
from unbroken.core.errors import CheckFailed, Damaged, NoCheckpoint, Refused
from unbroken.core.limits import ERRAND_TIMEOUT_S
from unbroken.core.messages import Bad, Begin, Hello, Opened, Plan, Rules, Wait
from unbroken.core.ports import Clock, Tier, environment
from unbroken.core.records import MAIN_LINEAGE, Piece
from unbroken.recover.attempts import attempt, must_find, opened_so_far
from unbroken.recover.link import Link
from unbroken.recover.once import Once
from unbroken.recover.sources import Loaded, check_frozen, from_disk, from_memory, require_sound
from unbroken.recover.together import together
from unbroken.step.anomalies import Watch
from unbroken.step.exchange import Exchange

MAX_DIFFERENCES = 64
"""Told at a start, journalled and certified; the rest is counted. All of them must fit into one message."""

RELATIVE = "A relative path means another folder in each working directory (Hydra makes one per start): give an absolute path"
"""What to do where a run is not where it was, or not where the other ranks look."""

MAX_DIFFERENCE_CHARS = 300
MAX_REASON_CHARS = 4000
MAX_OBJECTS = 16
"""Named in one report of damage; what is not named is met again, or found by `verify`."""


class _Found(Struct, frozen=True):
    """What one rank read: the root of the state, or the object that is bad (`path`) and why, and on which ranks if not on all."""

    root: str = ""
    path: str = ""
    reason: str = ""
    where: str = ""


@dataclass
class Counters:
    """What a run has counted, and what its rules about anomalies remember; part of the state root."""

    step: int = 0
    samples: int = 0
    applied: int = 0
    skipped: int = 0
    watch: Watch = field(default_factory=Watch)

    def as_dict(self) -> dict[str, Any]:
        """By name."""
        counted: dict[str, Any] = {"step": self.step, "samples": self.samples, "applied": self.applied, "skipped": self.skipped}
        kept = self.watch.as_dict()
        return counted | {"watch": kept} if kept else counted

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> Counters:
        """From what `as_dict` gave."""
        return cls(**kept | {"watch": Watch.restored(kept.get("watch", {}))})


@dataclass
class Start:
    """One start. `options` are the birth facts of a new run, `origin` where its first state came from, if anywhere."""

    directory: str
    tier: Tier
    exchange: Exchange
    stack: Stack
    clock: Clock
    resume: str
    options: dict[str, Any]
    lineage: str = MAIN_LINEAGE
    rules: Rules = field(default_factory=Rules)
    from_copy: bool = True
    counters: Counters = field(default_factory=Counters)
    differences: tuple[str, ...] = ()
    moments: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loader_state: dict[str, Any] = field(default_factory=dict)
    once: Once = field(default_factory=Once)
    stored: Mapping[str, tuple[Piece, bytes]] = field(default_factory=dict)
    root: str = ""
    origin: dict[str, Any] = field(default_factory=dict)
    opened_with: Mapping[str, str] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)
    _own: bool = False

    def connect(self) -> Link:
        """Reach the daemon of this host; rank 0 starts it. Refused when the ranks are on several hosts."""
        exchange = self.exchange
        told = exchange.share((host.boot_id(), os.path.realpath(self.directory)), tuple[str, str])
        hosts, folders = sorted({boot for boot, _ in told}), sorted({folder for _, folder in told})
        if len(hosts) > 1:
            raise Refused(f"the ranks of this run are on {len(hosts)} hosts; this version runs on one host: use --nnodes=1")
        if len(folders) > 1:
            raise ValueError(f"the ranks name {len(folders)} run folders, {folders[0]} and {folders[1]}: give all the same one. {RELATIVE}")
        hello = Hello(
            role="worker",
            pid=host.current_pid(),
            rank=exchange.rank,
            world_size=exchange.world_size,
            keeper_pid=int(environment("UNBROKEN_KEEPER_PID", "0")) or (host.parent_pid() if environment("TORCHELASTIC_RUN_ID") else 0),
        )
        link: Link | None = None
        if exchange.rank == 0:
            link = together(exchange, lambda: Link.open(self.directory, hello, self.clock, start=True, lineage=self.lineage))
            together(exchange, lambda: None)
        else:
            together(exchange, lambda: None)
            link = together(exchange, lambda: Link.open(self.directory, hello, self.clock, start=False, lineage=self.lineage))
        return link

    def plan(self, link: Link, at_most: int | None = None) -> Plan:
        """Rank 0 asks where to start, at step `at_most` or before; all learn the answer, or its refusal."""
        restarts, elsewhere = must_find(self.directory, attempt(), opened_so_far())
        question = Begin(
            world_size=self.exchange.world_size,
            resume=self.resume,  # type: ignore[arg-type]
            options=self.options,
            restart_count=restarts,
            at_most=at_most,
            from_copy=self.from_copy and bool(self.rules.copy_to),
            rules=self.rules,
        )
        return self._from_rank_0(link, question, elsewhere)

    def load(self, link: Link, plan: Plan, adopt: Callable[[Plan], None]) -> Plan:
        """Load and put back what the plan names, planning anew around damage; the plan that held, whose notes say what was passed over.

        `adopt` checks birth facts first.
        """
        while plan.source != "fresh":
            loaded, found = together(self.exchange, lambda plan=plan: self._read(link, plan))  # type: ignore[misc]
            faults = self._faults(loaded, self.exchange.share(found, _Found))
            if not faults:
                assert loaded is not None
                self._restore(plan, loaded, adopt)
                return plan
            if loaded is not None:
                loaded.close()
            bad = Bad(
                step=plan.step,
                stored_generation=plan.stored_generation,
                objects=tuple(sorted({f.path for f in faults}))[:MAX_OBJECTS],
                reason="; ".join(sorted({f"{f.path}: {f.reason}{f.where}" for f in faults}))[:MAX_REASON_CHARS],
            )
            plan = self._from_rank_0(link, bad)
        adopt(plan)
        return plan

    def open(self, link: Link, plan: Plan, items: list[Item]) -> str:
        """Prove that all ranks hold what was stored, then open the generation; the state root."""
        live = {i.piece.pointer: (i.piece, digest(_bytes(i))) for i in items if _is_checked(i.piece)}
        together(self.exchange, lambda: self._check_loaded(live))
        root = self._agree_on_root(list(live.values()))
        if plan.state_root and plan.state_root != root:
            raise CheckFailed(f"the state loaded at step {plan.step} has root {root[:16]}, stored was {plan.state_root[:16]}")
        self.root = root
        self.opened_with = {pointer: found for pointer, (_, found) in live.items()}
        opened = Opened(generation=plan.generation, step=plan.step, loaded_root=root, differences=self.differences, origin=self.origin)
        together(self.exchange, (lambda: link.ask(opened, Opened)) if self.exchange.rank == 0 else (lambda: None))
        return root

    def continue_from(self, link: Link, plan: Plan) -> Plan:
        """Open a generation on a plan without loading it: the live state descends from it."""
        opened = Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root or self.root, origin=self.origin)
        together(self.exchange, (lambda: link.ask(opened, Opened)) if self.exchange.rank == 0 else (lambda: None))
        return plan

    def compare(self, stored: Pieces, items: list[Item]) -> None:
        """Note the compared facts that are not what they were, the first of them by name; all ranks' differences are joined."""
        live = {i.piece.pointer: i for i in items if i.piece.role == "compared"}
        own = [p for p, (piece, _) in stored.items() if piece.role == "compared"]
        found = []
        for pointer in sorted(set(own) | set(live)):
            before = _value(stored[pointer]) if pointer in stored else None
            now = _value((live[pointer].piece, _bytes(live[pointer]))) if pointer in live else None
            if before != now and before is not _CONTAINER and now is not _CONTAINER:
                found.append(_short(f"{pointer[1:]}: ", before, now))
        joined = sorted({d for part in self.exchange.share(found, list[str]) for d in part})
        more = [f"and {len(joined) - MAX_DIFFERENCES} more"] if len(joined) > MAX_DIFFERENCES else []
        self.differences = (*joined[:MAX_DIFFERENCES], *more)

    def _ask_for_plan(self, link: Link, question: Begin | Bad, elsewhere: str, *, is_asked: bool) -> Plan | Wait:
        try:
            answers: tuple[type[Plan], type[Wait]] = Plan, Wait
            found = link.expect(answers) if is_asked else link.ask(question, answers)
            return found[0]  # type: ignore[return-value]  # mypy joins the two
        except NoCheckpoint as error:
            moved = f"; the attempt before trained in {elsewhere}" if elsewhere else ""
            hint = f"{moved}. {RELATIVE}" if isinstance(question, Begin) and question.restart_count else ""
            named = str(error).removeprefix(f"{self.directory}: ")  # most of what the daemon says names the folder already
            raise NoCheckpoint(f"{self.directory}: {named}{hint}") from None

    def _read(self, link: Link, plan: Plan) -> tuple[Loaded | None, _Found]:
        """What this rank needs, or what is wrong with it. Damage can be planned around; any other error ends the start on all ranks."""
        rank, loaded = self.exchange.rank, None
        try:
            if plan.source == "disk":
                loaded = from_disk(self.tier, plan, rank, self.lineage)
            else:
                loaded = from_memory(link, plan, rank)
                check_frozen(loaded, self.tier, plan, rank, self.lineage)
                if not self.rules.allow_nonfinite:
                    require_sound(loaded, plan, rank)
            return loaded, _Found(root=loaded.root)
        except Damaged as error:
            if loaded is not None:
                loaded.close()
            return None, _Found(path=error.path, reason=error.reason)

    def _faults(self, loaded: Loaded | None, found: list[_Found]) -> list[_Found]:
        """What is bad on some rank; also where each rank read well, but not the same state (only memory can do that)."""
        bad = [rank for rank, f in enumerate(found) if f.path]
        where = f" (on rank {', '.join(map(str, bad))} only)" if len(bad) < len(found) else ""
        faults = [msgspec.structs.replace(found[rank], where=where) for rank in bad]
        if faults or len({f.root for f in found}) == 1:
            return faults
        assert loaded is not None
        wrong = self._differing({p: d for p, d in loaded.digests.items() if loaded.pieces[p][0].scope == "logical"})
        return [_Found(path="memory slots", reason=f"{len(wrong)} pieces are not the same on all ranks, first {wrong[:3]}")]

    def _restore(self, plan: Plan, loaded: Loaded, adopt: Callable[[Plan], None]) -> None:
        def put_back() -> None:
            adopt(plan)
            self.stack.restore(loaded.pieces, own_streams=loaded.own)
            self.counters = Counters.restored(rebuild(loaded.pieces, "/counters"))
            if loaded.own and "/loader" in loaded.pieces:
                self.loader_state = rebuild(loaded.pieces, "/loader")
            self.once.restore(loaded.pieces)
            if not loaded.own:
                self.stack.streams.start_anew(plan.generation, self.exchange.rank)

        together(self.exchange, put_back)
        self._own = loaded.own
        self._digests = {p: value for p, value in loaded.digests.items() if _is_checked(loaded.pieces[p][0])}
        self.stored = {p: (piece, bytes(data)) for p, (piece, data) in loaded.pieces.items() if piece.role == "compared"}
        if plan.stored_world_size > self.exchange.world_size:
            gone = f"{self.exchange.world_size}..{plan.stored_world_size - 1}"
            self.notes += (f"random streams of ranks {gone} of the checkpoint are not continued: there are fewer ranks now",)
        if not all(self.exchange.share(loaded.own, bool)):
            self.notes += (f"ranks beyond the {plan.stored_world_size} of the checkpoint start random streams of their own",)
        loaded.close()

    def _from_rank_0(self, link: Link, question: Begin | Bad, elsewhere: str = "") -> Plan:
        """The daemon's answer to rank 0. While a checkpoint is brought back all meet now and then: no collective may last that long."""
        rank, told = self.exchange.rank, ""
        deadline_s = self.clock.monotonic() + ERRAND_TIMEOUT_S
        while True:
            ask = lambda is_asked=bool(told): self._ask_for_plan(link, question, elsewhere, is_asked=is_asked)  # noqa: E731
            answer = self.exchange.share(together(self.exchange, ask if rank == 0 else lambda: None), Plan | Wait | None)[0]
            if isinstance(answer, Plan):
                return answer
            assert isinstance(answer, Wait)
            if rank == 0 and not told:
                print(f"unbroken: {answer.text}", file=sys.stderr, flush=True)
            told = answer.text
            if self.clock.monotonic() >= deadline_s:
                raise TimeoutError(f"no plan after {ERRAND_TIMEOUT_S:g} s: {told}")

    def _check_loaded(self, live: Mapping[str, tuple[Piece, str]]) -> None:
        """Piece by piece: what lives now is what was stored."""
        wrong = sorted(p for p, known in self._digests.items() if p not in live or live[p][1] != known)
        wrong += sorted(live.keys() - self._digests.keys()) if self._digests and self._own else []
        if wrong:
            raise CheckFailed(
                f"{len(wrong)} pieces are not what was stored, first {wrong[:3]}: an object changed its state while being loaded "
                "(a load_state_dict that casts or re-initialises)"
            )

    def _agree_on_root(self, digests: list[tuple[Piece, str]]) -> str:
        root = state_root(digests)
        if len(set(self.exchange.share(root, str))) > 1:
            wrong = self._differing({p.pointer: d for p, d in digests if p.scope == "logical"})
            raise ValueError(
                f"the ranks do not start from one state; {len(wrong)} pieces differ, first {wrong[:3]}. Seed before the model is built "
                "(torch.manual_seed(...) with the same number on every rank)"
            )
        return root

    def _differing(self, digests: dict[str, str]) -> list[str]:
        """Names of the pieces that are not the same on all ranks; every rank calls it."""
        tables = self.exchange.share(digests, dict[str, str])
        wrong = sorted(p for p in tables[0] if any(t.get(p) != tables[0][p] for t in tables))
        return wrong + sorted({p for t in tables for p in t} - set(tables[0]))


def _is_checked(piece: Piece) -> bool:
    """Is it put back before the generation opens? A foreign loader is moved to its place only when the loop begins."""
    return piece.role == "restored" and not (piece.pointer + "/").startswith("/loader/")


_CONTAINER = object()


def _short(name: str, before: Any, now: Any) -> str:
    """Both values in full where they fit, else the beginning of each."""
    name = name[: MAX_DIFFERENCE_CHARS // 2]
    room = (MAX_DIFFERENCE_CHARS - len(name) - len(" -> ")) // 2
    return name + " -> ".join(text if len(text) <= room else text[: room - 1] + "…" for text in (f"{before}", f"{now}"))


def _bytes(item: Item) -> bytes:
    buffer = bytearray(item.nbytes)
    write_item(item, memoryview(buffer))
    return bytes(buffer)


def _value(stored: tuple[Piece, Any]) -> Any:
    piece, data = stored
    if piece.kind == "container" or piece.dtype in ("py:dict", "py:list", "py:tuple"):
        return _CONTAINER
    return rebuild({piece.pointer: (piece, data)}, piece.pointer)


def digests(items: Iterable[Item]) -> dict[str, str]:
    """Digest by pointer of live pieces."""
    return {item.piece.pointer: digest(_bytes(item)) for item in items}


def fact_items(facts: Mapping[str, Any]) -> list[Item]:
    """Pieces for `{pointer: (value, role, scope, layer)}`: captured once, at the start."""
    items: list[Item] = []
    for pointer, (value, role, scope, layer) in facts.items():
        items += flatten(value, pointer, role=role, scope=scope, layer=layer, kind=pointer.strip("/").split("/")[0], captured="start")
    return items
