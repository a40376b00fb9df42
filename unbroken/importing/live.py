"""A foreign checkpoint into the live objects of a fresh run: everything is compared first, one error lists every misfit, then it is put.

Weights go by name. Optimizer state goes by name where the source has names, else by the order of the optimizer's parameters. Step and
data position are not taken: the run counts its own steps from 0, and its data begin at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct

from unbroken.capture.restore import differences, load_into, load_optimizer
from unbroken.capture.stack import Stack
from unbroken.capture.tree import flatten, view
from unbroken.core.errors import LayoutMismatch
from unbroken.importing.files import printable, short_name
from unbroken.importing.foreign import Foreign, open_source
from unbroken.importing.optimizers import Unfit, fitted
from unbroken.importing.parts import Parts, understand
from unbroken.importing.random_states import as_streams
from unbroken.importing.spec import StartFrom
from unbroken.importing.weights import Live, pair

_MAX_LISTED = 40
_LOOSE = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step", "_initial_step"})
"""What a scheduler's state has in some versions of torch and lacks in others."""


class StartReport(Struct, frozen=True, kw_only=True):
    """What became of a source: `taken` and `missing` by part, `left_over` by name, `notes` on how it was matched."""

    source: str
    format: str
    step: int | None
    root: str = ""
    taken: list[str] = []
    missing: list[str] = []
    left_over: list[str] = []
    notes: list[str] = []

    def lines(self) -> list[str]:
        """For people."""
        at = "" if self.step is None else f", step {self.step} there"
        rest = ", ".join(_first(self.left_over))
        told = [
            f"started from {self.source} ({self.format}{at}): {', '.join(self.taken) or 'nothing'}",
            *_first(self.missing),
            *([f"left over in the source: {rest}"] if rest else []),
            *_first(self.notes),
        ]
        return [printable(line) for line in told]

    def facts(self) -> dict[str, Any]:
        """What the run remembers of its origin for ever: the same on every rank."""
        origin = {"source": short_name(self.source), "format": self.format, "step": self.step, "root": self.root}
        return origin | {"taken": list(self.taken)}


def _first(lines: list[str]) -> list[str]:
    return lines[:_MAX_LISTED] + ([f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else [])


@dataclass
class _Plan:
    """What would be put, and what does not fit."""

    report: dict[str, list[str]] = field(default_factory=lambda: {"taken": [], "missing": [], "left_over": [], "notes": []})
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    acts: list[Callable[[], None]] = field(default_factory=list)

    def lacks(self, part: str) -> None:
        self.report["missing"].append(f"{part}: not in the source, starts fresh")


def start_from(stack: Stack, spec: StartFrom, rank: int) -> StartReport:
    """Read the source and put its parts into the live objects of a fresh run; what was taken, what it lacked, what was left over.

    LayoutMismatch names every misfit at once and leaves the live objects as they were; errors of `open_source` besides. Random states are
    this rank's own. Cost: one read of the source.
    """
    foreign = open_source(spec.source, spec.step)
    parts, plan = understand(foreign), _Plan()
    plan.report["left_over"] += parts.left_over
    plan.report["notes"] += parts.notes
    _weights(stack, parts, spec, plan)
    _optimizers(stack, parts, spec, plan)
    _schedulers(stack, parts, spec, plan)
    _scaler(stack, parts, spec, plan)
    _extras(stack, foreign, spec, plan)
    _streams(stack, foreign, spec, rank, plan)
    if plan.missing or plan.unexpected or plan.wrong:
        lines = [f"missing in the source: {name}" for name in plan.missing]
        lines += [f"not in the live model: {name}" for name in plan.unexpected]
        raise LayoutMismatch(
            f"{spec.source} does not fit the live objects, which are untouched; a dict takes parts, or what fits: "
            "start_from={'source': ..., 'take': ['model'], 'strict': False}:\n  " + "\n  ".join(map(printable, lines + plan.wrong)),
            tuple(plan.missing),
            tuple(plan.unexpected),
            tuple(plan.wrong),
        )
    try:
        for act in plan.acts:
            act()
    except Exception as error:  # raised again: an object of the user's has refused what looked as its own state does
        raise LayoutMismatch(
            f"{spec.source}: a live object did not take its state ({type(error).__name__}: {error}); build all of them anew, and "
            "leave that part out with take="
        ) from error
    if parts.progress:
        told = ", ".join(f"{name} {value}" for name, value in parts.progress.items())
        plan.report["notes"].append(
            f"the source stood at {told}; this run counts its own steps from 0, and its data begin at the beginning"
        )
    return StartReport(source=spec.source, format=foreign.format, step=foreign.step, root=foreign.root, **plan.report)


def _weights(stack: Stack, parts: Parts, spec: StartFrom, plan: _Plan) -> None:
    if "model" not in spec.take:
        return
    if not parts.model:
        plan.wrong.append("model: the source holds no weights that are known as such (a dict of names and tensors)")
        return
    live = Live.of(stack)
    found = pair(live, parts.model, cast=spec.cast)
    if spec.strict or not found.pairs:
        plan.missing += found.missing
        plan.unexpected += found.unexpected
        plan.wrong += found.mismatched
        if not found.pairs:
            plan.wrong.append("model: no name in the source is one of the live model's")
    else:
        plan.report["missing"] += [f"weights {name}: not in the source, stay as they were made" for name in found.missing]
        plan.report["left_over"] += found.unexpected
        plan.report["notes"] += [f"not taken: {text}" for text in found.mismatched]
    bad = {text.partition(":")[0] for text in found.mismatched}
    use = {name: source for name, source in found.pairs.items() if name not in bad}
    plan.report["notes"] += [found.stripped] if found.stripped else []
    plan.report["taken"].append(f"weights ({len(use)} tensors)")

    def put() -> None:
        with torch.no_grad():
            for name, source in use.items():
                live.tensors[name].copy_(parts.model[source])

    plan.acts.append(put)


def _optimizers(stack: Stack, parts: Parts, spec: StartFrom, plan: _Plan) -> None:
    live = stack.parts.optimizers
    if "optimizer" not in spec.take:
        plan.report["left_over"] += ["optimizer state (not asked for)"] if parts.optimizers else []
        return
    if not parts.optimizers:
        plan.lacks("optimizer state")
        return
    if live.keys() != parts.optimizers.keys():
        plan.wrong.append(f"optimizers: {_keys(parts.optimizers)} in the source, {_keys(live)} live")
        return
    for key, optimizer in live.items():
        label, notes = f"optimizer {key}".strip(), plan.report["notes"]
        saved, listed = parts.optimizers[key], parts.names.get(key, [])
        try:
            state = fitted(optimizer, stack.names, saved, listed, notes)
        except Unfit as error:
            plan.wrong += [f"{label}: {line}" for line in error.lines]
            continue
        if not _has_names(saved, listed):
            notes.append(f"{label}: matched by the order of its parameters, since the source has no names; shapes agree")
        plan.report["taken"].append(f"{label} state ({len(state['state'])} of {sum(len(g['params']) for g in state['param_groups'])})")
        plan.acts.append(lambda optimizer=optimizer, state=state: load_optimizer(optimizer, state))  # type: ignore[misc]


def _has_names(saved: Mapping[str, Any], listed: list[str]) -> bool:
    groups = saved["param_groups"]
    return bool(listed) or all("param_names" in g or all(isinstance(p, str) and not p.isdecimal() for p in g["params"]) for g in groups)


def _schedulers(stack: Stack, parts: Parts, spec: StartFrom, plan: _Plan) -> None:
    live = stack.parts.schedulers
    if "scheduler" not in spec.take or not live:
        plan.report["left_over"] += ["scheduler state"] if parts.schedulers else []
        return
    if not parts.schedulers:
        plan.lacks("scheduler")
        return
    if live.keys() != parts.schedulers.keys():
        plan.wrong.append(f"schedulers: {_keys(parts.schedulers)} in the source, {_keys(live)} live")
        return
    for key, scheduler in live.items():
        label = f"scheduler {key}".strip()
        now, saved = scheduler.state_dict(), parts.schedulers[key]
        gone, new = sorted(set(saved) - set(now) - _LOOSE), sorted(set(now) - set(saved) - _LOOSE)
        kinds = [name for name in sorted(set(saved) & set(now)) if not _same_kind(now[name], saved[name])]
        if gone or new or kinds:
            why = [f"has {gone}, which the live one has not"] * bool(gone) + [f"lacks {new}"] * bool(new)
            why += [f"has values of another kind for {kinds}"] * bool(kinds)
            plan.wrong.append(f"{label}: another class or version: the source {'; '.join(why)}")
            continue
        plan.report["taken"].append(label)
        state = now | {name: value for name, value in saved.items() if name in now}
        plan.acts.append(lambda scheduler=scheduler, state=state: scheduler.load_state_dict(state))  # type: ignore[misc]


def _same_kind(live: Any, value: Any) -> bool:
    if isinstance(live, int | float) and isinstance(value, int | float):
        return True
    if isinstance(live, list | tuple) and isinstance(value, list | tuple):
        return len(live) == len(value)
    return live is None or value is None or isinstance(value, type(live)) or isinstance(live, type(value))


def _scaler(stack: Stack, parts: Parts, spec: StartFrom, plan: _Plan) -> None:
    scaler = stack.parts.scaler
    if "scaler" not in spec.take or scaler is None:
        plan.report["left_over"] += ["loss scaler"] if parts.scaler is not None else []
        return
    saved, now = parts.scaler, scaler.state_dict()
    if saved is None or not now:
        plan.lacks("loss scaler")
        return
    if set(saved) != set(now) or not all(isinstance(value, int | float) for value in saved.values()):
        plan.wrong.append(f"scaler: {sorted(map(str, saved))} in the source, {sorted(now)} live, of numbers")
        return
    plan.report["taken"].append("loss scaler")
    plan.acts.append(lambda: scaler.load_state_dict(dict(saved)))


def _extras(stack: Stack, foreign: Foreign, spec: StartFrom, plan: _Plan) -> None:
    """Of a run of ours only: what others keep besides has no fixed place."""
    saved = foreign.state.get("extras") if foreign.format == "unbroken" and isinstance(foreign.state, Mapping) else None
    if not stack.parts.extras or "extras" not in spec.take:
        return
    if not isinstance(saved, dict):
        plan.lacks("extras")
        return
    pieces = {item.piece.pointer: (item.piece, view(item)) for item in flatten(saved)}
    found = differences(pieces, stack.parts.extras)
    plan.missing += [f"extras.{name}" for name in found.missing]
    plan.wrong += [f"extras.{name}: in the source, not here" for name in found.unexpected]
    plan.wrong += [f"extras.{text}" for text in found.mismatched]
    plan.report["left_over"] = [name for name in plan.report["left_over"] if name != "extras"]
    plan.report["taken"].append(f"extras ({', '.join(map(str, saved))})")

    def put() -> None:
        load_into(pieces, stack.parts.extras)

    plan.acts.append(put)


def _streams(stack: Stack, foreign: Foreign, spec: StartFrom, rank: int, plan: _Plan) -> None:
    """Outside of units only: inside them random numbers follow from the seed."""
    if "rng" not in spec.take or not foreign.rng:
        return
    if rank not in foreign.rng:
        plan.report["notes"].append("random state: the source has none for every rank of this run")
        return
    try:
        state = as_streams(foreign.rng[rank], stack.streams.device.type)
    except ValueError as error:
        plan.wrong.append(f"random state of rank {rank}: {error}")
        return
    plan.report["taken"].append("random state")
    plan.acts.append(lambda: stack.streams.write(state))


def _keys(parts: Mapping[str, Any]) -> str:
    return "one" if set(parts) == {""} else str(sorted(parts))
