"""Where a start continues from: pure choice among memory cuts and visible commits, with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.messages import SlotSource
from unbroken.core.records import CommitEntry, Generation, LogState

Source = Literal["fresh", "memory", "disk"]
Resume = Literal["auto", "must", "never"]
Key = tuple[Source, int, int]
"""(source, step, generation) of a candidate."""


class MemoryCut(Struct, frozen=True, kw_only=True):
    """READY slots of all ranks of one generation at one step (I5): `slots` in rank order, one per rank."""

    generation: int
    step: int
    world_size: int
    slots: tuple[SlotSource, ...]
    milestone: bool = False

    @property
    def key(self) -> Key:
        return "memory", self.step, self.generation


class Choice(Struct, frozen=True, kw_only=True):
    """What to load: nothing, a memory cut, or a commit. `notes` must be shown to a person."""

    source: Source
    step: int = 0
    generation: int = 0
    cut: MemoryCut | None = None
    commit: CommitEntry | None = None
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return self.source, self.step, self.generation


def choose(
    memory: Sequence[MemoryCut],
    commits: Sequence[CommitEntry],
    resume: Resume,
    exclude: Mapping[Key, str],
    *,
    state: LogState | None = None,
    restart_count: int = 0,
    witnessed: bool = False,
    at_most: int | None = None,
) -> tuple[Choice, str]:
    """The newest step that can be had, memory before disk at the same step, and why.

    `commits` are the visible ones, ascending; `state` is the whole log, None if there is no run; `exclude` says what was found bad just
    now, and how. `witnessed`: whoever asks has seen the earlier tries of this start, and that none of them opened a generation.
    `at_most`: the newest step that will do.
    Raises NoCheckpoint where a checkpoint must be and none is (I10), Refused for `resume="never"` where a run is.
    """
    if resume == "never":
        if state is not None:
            raise Refused('resume="never", but a run exists here: choose another folder, or resume="auto"')
        return Choice(source="fresh"), 'resume="never" and nothing is here'
    passed: dict[Key, str] = dict(exclude) | dict(_condemned(state))
    best: Choice | None = None
    newest = float("inf") if at_most is None else at_most
    for cut in (cut for cut in memory if cut.step <= newest):
        reason = passed.get(cut.key) or _off_lineage(cut, state)
        if reason:
            passed[cut.key] = reason
        elif best is None or cut.step > best.step:
            best = Choice(source="memory", step=cut.step, generation=cut.generation, cut=cut)
    for commit in commits:
        if commit.step > newest or ("disk", commit.step, commit.generation) in exclude:
            continue
        if best is None or commit.step > best.step:
            best = _from_disk(commit)
    if best is not None:
        why = f"step {best.step} of generation {best.generation} is the newest to be had, from {best.source}"
        notes = tuple(f"passed over: {text}" for text in _listing({k: v for k, v in passed.items() if k[1] >= best.step}))
        return Choice(source=best.source, step=best.step, generation=best.generation, cut=best.cut, commit=best.commit, notes=notes), why
    if at_most is not None:
        raise NoCheckpoint(f"no checkpoint of step {at_most} or an earlier one is left to go back to")
    return _nothing_usable(resume, state, passed, restart_count, witnessed)


def _nothing_usable(
    resume: Resume, state: LogState | None, passed: Mapping[Key, str], restart_count: int, witnessed: bool
) -> tuple[Choice, str]:
    promised = state is not None and bool(state.commits or state.condemned or state.pruned)
    if promised:
        tried = "\n".join(f"  {text}" for text in _listing(passed)) or "  (none is left in the log)"
        raise NoCheckpoint(f"this run has made checkpoints, but none is usable:\n{tried}\nA fresh start needs another folder.")
    if resume == "must":
        raise NoCheckpoint('resume="must", but no checkpoint was ever made here: is this the right folder, and is it mounted?')
    if state is None:
        if restart_count > 0 and not witnessed:
            raise NoCheckpoint(
                f"this is restart {restart_count} of a job, but no run is here: is this the right folder, and is it mounted?"
            )
        note = "no run here: starting fresh at step 0"
    else:
        note = "the run here never made a checkpoint: starting fresh at step 0"
    return Choice(source="fresh", notes=(note, *(f"passed over: {text}" for text in _listing(passed)))), note


def _from_disk(commit: CommitEntry) -> Choice:
    return Choice(source="disk", step=commit.step, generation=commit.generation, commit=commit)


def lineage(state: LogState | None) -> dict[int, int | None]:
    """Generations that the newest one stands on, itself included, each with the last step of it that counts (None: all)."""
    if state is None or not state.generations:
        return {}
    table: dict[int, Generation] = {g.number: g for g in state.generations}
    newest = max(table)
    limits: dict[int, int | None] = {newest: None}
    current, limit = table[newest], None
    while current.parent is not None and current.parent in table and current.parent not in limits:
        limit = current.base_step if limit is None else min(limit, current.base_step)
        current = table[current.parent]
        limits[current.number] = limit
    return limits


def _off_lineage(cut: MemoryCut, state: LogState | None) -> str:
    limits = lineage(state)
    if cut.generation not in limits:
        return "its generation is not one that this run stands on"
    limit = limits[cut.generation]
    if limit is not None and cut.step > limit:
        return f"a later generation went on from step {limit}"
    return ""


def _condemned(state: LogState | None) -> Iterator[tuple[Key, str]]:
    for entry in state.condemned if state is not None else ():
        yield ("disk", entry.step, entry.generation), f"condemned: {entry.reason}"


def _listing(passed: Mapping[Key, str]) -> list[str]:
    return [f"step {step} of generation {generation} ({source}): {reason}" for (source, step, generation), reason in sorted(passed.items())]
