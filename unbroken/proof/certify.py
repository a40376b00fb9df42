"""The certificate: what can be proven about a run from its folder alone, and against a reference.

Grade "sequence" needs no reference: every stored byte verifies, the journals' chains are whole, each step was applied exactly once in
the surviving lineage, on the samples of its units, and every generation continued from the very state that had been saved. Grade "exact"
adds: every loss and every state root has the bits of the reference, and every superseded attempt those of its replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from msgspec import Struct

from unbroken.core.errors import Damaged
from unbroken.core.ports import Tier
from unbroken.core.records import BranchEntry, Change, CommitEntry, CondemnEntry, LogState
from unbroken.proof.history import MAX_PROBLEMS, History, read_history
from unbroken.proof.samples import expected_units, stored_skips
from unbroken.store.repository import Repository

Grade = Literal["exact", "sequence", "none"]

_NO_LOSS = 0x7FF8 << 48
"""Bits of the NaN that stands for a loss which the script did not tell."""

MAX_SKIPPED = 1000
"""Skipped steps that are named; the rest is counted."""

MAX_NAMES = 5
"""Differing pieces that are named in one problem."""


class Condemned(Struct, frozen=True, kw_only=True):
    """A checkpoint that was found damaged and given up: reported, and no reason to fail."""

    step: int
    generation: int
    objects: list[str]
    reason: str


class Branched(Struct, frozen=True, kw_only=True):
    """Where a lineage was branched off, and every value that was changed there on purpose."""

    lineage: str
    parent: str
    step: int
    generation: int
    changes: list[Change]


class Skipped(Struct, frozen=True, kw_only=True):
    """A step that was committed without having been applied, because of its numbers: its samples were used up and are in no update."""

    step: int
    reason: str


class Certificate(Struct, frozen=True, kw_only=True):
    """What is proven. `problems` name the object each; `differences` are recorded facts that limit the claim.

    `num_skipped` counts steps that were not applied, overflows of a loss scale among them; `skipped` names the first of the others,
    `num_rollbacks` how often the run went back because of them. `branches` are the branch points that `lineage` descends from, the oldest
    first.

    `world_sizes` has one entry per generation; `steps_lost_total` counts steps that were applied and had to be done again; a field is
    None where it was not, or could not be, checked.
    """

    certified: bool
    grade: Grade
    steps: int
    generations: int
    world_sizes: list[int]
    steps_lost_total: int
    losses_equal: bool | None
    state_root_equal: bool | None
    samples_exactly_once: bool | None
    superseded_equal: bool | None
    fell_back: bool
    condemned: list[Condemned]
    differences: list[str]
    problems: list[str]
    num_checkpoints: int
    final_step: int
    final_root: str
    lineage: str = "main"
    branches: list[Branched] = []
    num_skipped: int = 0
    num_rollbacks: int = 0
    skipped: list[Skipped] = []


def certify(tier: Tier, lineage: str = "main", *, against: Tier | None = None, against_lineage: str = "main") -> Certificate:
    """Check the run in `tier`, and compare it with the one in `against` if given. Reads every stored byte; needs ~10 MB per 10^6 steps.

    NoCheckpoint, ForeignFolder or NewerFormat if there is nothing to check; whatever is wrong inside a run becomes a problem.
    """
    repository = Repository.open(tier, lineage)
    history, problems = _examine(repository)
    sequence = not problems
    superseded_equal = _superseded_equal(history)
    losses_equal = root_equal = None
    if against is not None:
        losses_equal, root_equal, found = _compare(history, repository, Repository.open(against, against_lineage))
        problems += found
        if superseded_equal is False:
            problems.append("a superseded attempt has other loss bits than its replay: the computation is not deterministic")
    certified, skipped = not problems, history.skipped()
    exact = certified and against is not None
    return Certificate(
        certified=certified,
        grade="exact" if exact else "sequence" if sequence else "none",
        steps=len(history.losses()),
        generations=len(history.attempts),
        world_sizes=[attempt.generation.world_size for attempt in history.attempts],
        steps_lost_total=_steps_lost(history),
        losses_equal=losses_equal,
        state_root_equal=root_equal,
        samples_exactly_once=history.samples_as_ordered,
        superseded_equal=superseded_equal,
        fell_back=_fell_back(repository.log.state),
        num_skipped=len(skipped),
        num_rollbacks=history.num_rollbacks,
        skipped=[Skipped(step=step, reason=reason) for step, reason in skipped.items() if reason][:MAX_SKIPPED],
        condemned=[_condemned(entry) for entry in repository.log.state.condemned],
        differences=_differences(history, repository.facts.options),
        problems=problems[:MAX_PROBLEMS],
        num_checkpoints=len(repository.visible()),
        final_step=history.final_step,
        final_root=history.final.state_root if history.final else "",
        lineage=lineage,
        branches=[_branched(one.lineage, one.branch) for one in history.chain() if one.branch is not None],
    )


def _examine(repository: Repository) -> tuple[History, list[str]]:
    """Everything that needs no reference: the stored bytes, then the story they tell."""
    report = repository.verify()
    history = read_history(repository, expected_units(repository.facts.options, stored_skips(repository)))
    stored = [f"{path}: {reason}" for path, reason in report.bad]
    told = [problem for problem in history.problems if problem not in stored]
    if history.final is None:
        told.append("no checkpoint is visible: nothing is proven")
    return history, stored + told


def _compare(history: History, repository: Repository, reference: Repository) -> tuple[bool | None, bool, list[str]]:
    """(losses equal, state roots equal, problems) against a reference run that must itself hold."""
    other, problems = _examine(reference)
    problems = [f"reference: {problem}" for problem in problems]
    losses_equal = _losses_equal(history.losses(), other.losses(), problems)
    elsewhere = sorted(step for step in history.skipped().keys() ^ other.skipped().keys() if step <= history.final_step)
    if elsewhere:
        problems.append(f"step {elsewhere[0]}: skipped in one of both runs and applied in the other ({len(elsewhere)} such steps)")
    mine, theirs = history.roots(), other.roots()
    unequal = sorted(step for step in mine.keys() & theirs.keys() if mine[step] != theirs[step])
    if unequal:
        where = _differing_pieces(repository, reference, unequal)
        problems.append(f"step {unequal[0]}: the state root differs from the reference's ({len(unequal)} such steps){where}")
    comparable = history.final_step in theirs and history.final_step > 0
    if not comparable:
        problems.append(f"reference: has no state root at step {history.final_step}: bring both runs to the same step")
    return losses_equal, comparable and not unequal, problems


def _differing_pieces(repository: Repository, reference: Repository, steps: Sequence[int]) -> str:
    """Which pieces differ at the first of `steps` that both runs still hold, in words; "" if there is none."""
    mine, theirs = ({commit.step: commit for commit in run.visible()} for run in (repository, reference))
    step = next((step for step in steps if step in mine and step in theirs), None)
    if step is None:
        return ""
    try:
        ours, others = _digests(repository, mine[step]), _digests(reference, theirs[step])
    except Damaged:
        return ""
    names = sorted(name for name in ours.keys() | others.keys() if ours.get(name) != others.get(name))
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"; at step {step} it is in {', '.join(names[:MAX_NAMES])}{more}"


def _digests(repository: Repository, commit: CommitEntry) -> dict[str, str]:
    pieces = [stored for manifest in repository.manifests(commit) for stored in manifest.pieces]
    return {stored.piece.pointer: stored.digest for stored in pieces if stored.rank is None and stored.piece.role == "restored"}


def _losses_equal(mine: array[int], theirs: array[int], problems: list[str]) -> bool | None:
    """None where no loss was ever told (a plain loop under reduce="ring")."""
    if mine and all(bits == _NO_LOSS for bits in mine):
        return None
    if len(theirs) < len(mine):
        problems.append(f"reference: holds {len(theirs)} steps, this run {len(mine)}: bring both runs to the same step")
        return False
    if mine == theirs[: len(mine)]:
        return True
    different = [i for i, bits in enumerate(mine) if bits != theirs[i]]
    problems.append(f"step {different[0] + 1}: the loss's bits differ from the reference's ({len(different)} such steps)")
    return False


def _steps_lost(history: History) -> int:
    """Steps that were computed again: superseded ones, without those that the next generation took over from the trainers' memory."""
    lost = 0
    for attempt, following in pairwise(history.attempts):
        taken_over = range(following.base + 1, following.base + 1 + following.num_continued)
        lost += sum(step not in taken_over for step, _ in attempt.superseded())
    return lost


def _superseded_equal(history: History) -> bool | None:
    """Each superseded attempt against the surviving one of the same step; None if nothing was done twice.

    Up to the first step that one of them applied and the other skipped, because an anomaly was seen only later: from there on the
    attempt computed with other weights, which is why it was given up.
    """
    surviving, skipped = history.losses(), history.skipped()
    pairs: list[tuple[int, int]] = []
    for attempt in history.attempts:
        for step, loss in attempt.superseded():
            if step > len(surviving) or (step in attempt.skipped) != (step in skipped):
                break
            pairs.append((loss, surviving[step - 1]))
    return all(loss == replay for loss, replay in pairs) if pairs else None


def _fell_back(state: LogState) -> bool:
    """True if a damaged checkpoint was given up and a later generation went on from before it."""
    return any(g.number > c.generation and g.base_step < c.step for c in state.condemned for g in state.generations)


def _branched(lineage: str, branch: BranchEntry) -> Branched:
    return Branched(lineage=lineage, parent=branch.parent, step=branch.step, generation=branch.generation, changes=list(branch.changes))


def _condemned(entry: CondemnEntry) -> Condemned:
    return Condemned(step=entry.step, generation=entry.generation, objects=list(entry.objects), reason=entry.reason)


def _differences(history: History, options: Mapping[str, Any]) -> list[str]:
    found = [
        f"generation {attempt.generation.number}: {text}"
        for attempt in history.attempts
        if attempt.begin is not None
        for text in attempt.begin.differences
    ]
    if history.samples_as_ordered is None:
        found.append("the order of samples is not ours to recompute: that each was used exactly once is not part of the claim")
    if options.get("grade") == "order-only":
        found.append("the order of samples is kept, but their augmentation is not keyed: equal bits are not claimed for it")
    origin = options.get("started_from")
    if isinstance(origin, Mapping):
        at = f", step {origin['step']} there" if origin.get("step") is not None else ""
        found.append(f"born from {origin.get('source')} ({origin.get('format')}{at}): what was before is not part of the claim")
    if options.get("reduce") == "ring":
        found.append("reduce='ring': the sum depends on the number of ranks, so equal bits are claimed at equal world size only")
    return found
