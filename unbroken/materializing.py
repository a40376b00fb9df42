"""Entry point for a step made again: a checkpoint that is no longer stored, or never was, computed from the one before it, and proven.

Training is deterministic, so a checkpoint between two that are stored is a matter of computing time. It is made in a lineage of its own,
by the user's own script under the launcher, up to exactly that step: the run's lineage is read and never touched.

Order: what is recorded of the steps is read and found whole; the lineage is begun on the nearest checkpoint at or before the step; the
script runs, each step held against the record before anything is kept (`replaying.py`); at the end both journals are compared once more.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from unbroken.archive import reading
from unbroken.archive.branching import check_name, make_branch
from unbroken.cluster import check, start
from unbroken.core.errors import Damaged, NoCheckpoint, Refused
from unbroken.core.ports import SystemClock, SystemNonces
from unbroken.core.records import MAIN_LINEAGE, CommitEntry
from unbroken.core.replay import REPLAY, Parted, Replay
from unbroken.proof.replaying import Proof, prove, recorded
from unbroken.store.lineages import is_begun
from unbroken.store.log import Log, branch_of, reach, replay_of
from unbroken.store.paths import check_lineage
from unbroken.store.repository import Repository, naming
from unbroken.store.tiers.disk import DiskTier, local_path

if TYPE_CHECKING:
    from unbroken.cluster.launch import Outcome

MAX_REPORT_BYTES = 1 << 20


class Materialized(Struct, frozen=True, kw_only=True):
    """What came of it. The checkpoint is that of `step` in `lineage`, made from `base`.

    `outcome`: "stored" the run itself has it, nothing was done; "made" and proven by `proof`; "there" it had been made before, and is
    proven anew; "parted" it is not what was recorded, at `parted`; "unfinished" the script ended before, for `reason`.
    `differences` are facts of the environment that were not the same. `exit_code` is the command's.
    """

    outcome: Literal["stored", "made", "there", "parted", "unfinished"]
    lineage: str
    step: int
    base: int
    root: str = ""
    exit_code: int = 0
    proof: Proof | None = None
    parted: Parted | None = None
    differences: list[str] = []
    reason: str = ""


def materialize(
    directory: str | os.PathLike[str],
    step: int,
    script: Sequence[str],
    say: Callable[[str], None],
    *,
    lineage: str = MAIN_LINEAGE,
    name: str | None = None,
    num_ranks: int | None = None,
) -> Materialized:
    """Make the checkpoint of `step` of `lineage` again, in lineage `name` (default: "replay-STEP"), and prove it.

    script: the training script of that run and its arguments, as `unbroken run` takes them. num_ranks: default as many as the base had.
    A call that was killed goes on at the next one. Takes over the process's signals while the script runs.

    NoCheckpoint where no base is stored, or the step lies beyond what the run has certified; Damaged where the record of the steps is not
    whole; Refused where there is nothing to compare with, or the name is another lineage's.
    """
    tier = DiskTier(local_path(directory))
    with naming(tier.root):
        source = Repository.open(tier, check_lineage(lineage))
        _require_steps(source, tier.root)
        name = name or (f"replay-{step}" if lineage == MAIN_LINEAGE else f"{lineage}.replay-{step}")
        check_name(name)
        stored = next((commit for commit in source.visible() if commit.step == step), None)
        if stored is not None:
            return Materialized(outcome="stored", lineage=lineage, step=step, base=step, root=stored.state_root)
        base = _begun(source, name, step)
        there = None if base is None else _commit(tier, name, step)
        if base is not None and there is not None:
            return _judged(source, Repository.open(tier, name), base[0], there, "there")
        if not script:
            raise ValueError("give the training script of the run after --, such as -- train.py")
        check(script)
        if base is None:
            base = _begin(source, tier, name, step)
        else:
            _require_record(source, base[0], step)
    say(f"step {step} of {lineage} is computed again from step {base[0]}, as lineage {name}")
    world_size = next((g.world_size for g in source.log.state.generations if g.number == base[1]), 1)
    outcome, report = _run(
        Replay(directory=tier.root, source=lineage, lineage=name, step=step, report=""), script, num_ranks or world_size, say
    )
    if report is not None:
        told = [f"now, {text}" for text in report.differences]
        return Materialized(
            outcome="parted", lineage=name, step=step, base=base[0], exit_code=1, parted=report, differences=told, reason=str(report)
        )
    made = _commit(tier, name, step)
    if made is None:
        reason, code = _why(outcome, step)
        return Materialized(outcome="unfinished", lineage=name, step=step, base=base[0], exit_code=code, reason=reason)
    source.refresh()
    return _judged(source, Repository.open(tier, name), base[0], made, "made")


def _require_steps(source: Repository, root: str) -> None:
    if "units" not in source.facts.options:
        raise Refused(f"{root} holds checkpoints of a Store: nothing says how they were computed, so none can be made again")


def _begun(source: Repository, name: str, step: int) -> tuple[int, int] | None:
    """(step, generation) of the base of a lineage that was begun for this before; None where there is none. Refused for another's."""
    state = Log.open(source.tier, name).state
    branch = branch_of(state)
    if not is_begun(state):
        return None
    if branch is None or branch.parent != source.lineage or replay_of(state) != step:
        raise Refused(f"lineage {name!r} is there and is not step {step} of {source.lineage} made again: choose another name with --as")
    if reach(source.log.state).get(branch.generation, -1) < branch.step:
        raise Refused(f"lineage {name!r} was begun from a part of {source.lineage} that was given up since: choose another name with --as")
    return branch.step, branch.generation


def _begin(source: Repository, tier: DiskTier, name: str, step: int) -> tuple[int, int]:
    """Begin the lineage on the nearest whole checkpoint before the step; (step, generation) of that."""
    commits = source.visible()
    if not commits or step > commits[-1].step:
        newest = f"beyond step {commits[-1].step}, the newest checkpoint" if commits else "and no checkpoint is stored"
        raise NoCheckpoint(f"step {step} cannot be made again: it lies {newest}, so nothing has certified it")
    problems = []
    for base in reversed([commit for commit in commits if commit.step < step]):
        try:
            reading.checked_manifests(source, base)
        except Damaged as damaged:
            problems.append(str(damaged))
            continue
        _require_record(source, base.step, step)
        made = make_branch(source, tier, base.step, name, {}, clock=SystemClock(), nonces=SystemNonces(), replay=step)
        return made.step, made.generation
    first, passed = commits[0].step, "".join(f"\n  passed over: {text}" for text in problems)
    branch = branch_of(source.log.state)
    hint = f"; before step {branch.step} it is lineage {branch.parent}" if branch is not None and step < branch.step else ""
    raise NoCheckpoint(f"step {step} cannot be made again: no checkpoint before it is stored, the oldest is of step {first}{hint}{passed}")


def _require_record(source: Repository, base: int, step: int) -> None:
    """Damaged where the record is not whole, Refused where it says nothing: looked at before hours are spent on computing."""
    known = recorded(source, base, step)
    if not known.has_losses and step not in known.roots:
        raise Refused(f"step {step}: no loss was told and no state root is recorded, so that nothing could be proven")


def _commit(tier: DiskTier, name: str, step: int) -> CommitEntry | None:
    return next((commit for commit in Repository.open(tier, name).visible() if commit.step == step), None)


def _judged(source: Repository, replay: Repository, base: int, commit: CommitEntry, outcome: Literal["made", "there"]) -> Materialized:
    proof = prove(source, replay, base, commit)
    return Materialized(
        outcome=outcome if proof.parted is None else "parted",
        lineage=replay.lineage,
        step=commit.step,
        base=base,
        root=commit.state_root,
        exit_code=0 if proof.parted is None else 1,
        proof=proof,
        parted=proof.parted,
        differences=proof.differences,
        reason="" if proof.parted is None else str(proof.parted),
    )


def _run(replay: Replay, script: Sequence[str], num_ranks: int, say: Callable[[str], None]) -> tuple[Outcome, Parted | None]:
    """Launch the script; how it ended, and where it parted from the record if it did."""
    folder = tempfile.mkdtemp(prefix="unbroken-replay-")
    path = os.path.join(folder, "parted.json")
    try:
        with _told(msgspec.structs.replace(replay, report=path)):
            outcome, _ = start(["--nproc-per-node", str(num_ranks), *script], say)
        report = None
        with suppress(FileNotFoundError), open(path, "rb") as file:
            report = msgspec.json.decode(file.read(MAX_REPORT_BYTES), type=Parted)
        return outcome, report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _told(replay: Replay) -> Iterator[None]:
    """The processes started meanwhile make the step again."""
    os.environ[REPLAY] = msgspec.json.encode(replay).decode()
    try:
        yield
    finally:
        del os.environ[REPLAY]


def _why(outcome: Outcome, step: int) -> tuple[str, int]:
    """Why the step was not reached, and the exit code for that."""
    if outcome.exit_code:
        message = f"\n{outcome.failures[-1].message}" if outcome.failures and outcome.failures[-1].message else ""
        where = f" (logs: {outcome.log_dir})" if outcome.log_dir else ""
        return f"{outcome.reason}{where}{message}", outcome.exit_code
    if outcome.end_signal:
        return f"asked to stop by {outcome.end_signal}: the same command goes on", 128 + signal.Signals[outcome.end_signal]
    return f"the script ended before step {step} was committed; it must be that of the run, and get as far as the run did", 1
