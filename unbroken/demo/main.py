"""The story: train, kill, damage, come back on other ranks, and prove that nothing of it can be seen in the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from unbroken.chaos.inject import Struck, read_strikes
from unbroken.core.errors import NoCheckpoint
from unbroken.core.ports import SystemClock
from unbroken.core.records import EventRecord
from unbroken.demo.job import Job, Say
from unbroken.demo.plan import INTERVAL_STEPS, Plan, plan_faults
from unbroken.demo.report import Pages, render
from unbroken.demo.story import Recovery, Spread, curves, moment, read_events, recoveries, spread
from unbroken.recover.certify import Certificate, certify
from unbroken.recover.history import read_history
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

INTERVAL = f"{INTERVAL_STEPS} steps"


class DemoResult(Struct, frozen=True, kw_only=True):
    """What the demo showed. Times in seconds; `kills` counts killing strikes, `report` is the path of report.html."""

    certified: bool
    grade: str
    kills: int
    steps_lost_total: int
    world_sizes: list[int]
    losses_equal: bool | None
    state_root_equal: bool | None
    samples_exactly_once: bool | None
    fell_back: bool
    report: str
    capture_s: Spread
    stall_s: Spread
    recovery_s: list[Recovery]
    problems: list[str]


def run_demo(directory: str, seed: int, ranks: int, echo: Callable[[str], Any] = print) -> DemoResult:
    """Run the whole demo into `directory` (empty or missing) and write report.html there. About two minutes on two cores.

    ValueError for a folder with files in it or a number of ranks other than 2, 3 or 4; GaveUp if a job fails. The proof itself failing
    is no error: `certified` is False then and `problems` says why.
    """
    root = Path(directory)
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{directory} is not empty: choose a new folder for the demo")
    plan = plan_faults(seed, ranks)
    root.mkdir(parents=True, exist_ok=True)
    _reference(root / "reference", plan, echo)
    power = _interrupted(root / "interrupted", plan, echo)
    return _prove(root, plan, power, echo)


def _job(directory: Path, plan: Plan, ranks: int, say: Say) -> Job:
    return Job(directory, ranks=ranks, steps=plan.total_steps, seed=plan.seed, interval=INTERVAL, say=say)


def _reference(directory: Path, plan: Plan, echo: Say) -> None:
    echo(f"1. Reference: {plan.total_steps} steps on {plan.ranks} ranks, uninterrupted")
    job = _job(directory, plan, plan.ranks, lambda line: None)
    job.start()
    job.finish()
    echo(f"  done: {_newest(directory)}")


class PowerLoss(Struct, frozen=True, kw_only=True):
    """The strike, how many processes it took, and when the job was started again."""

    struck: Struck
    num_killed: int
    restarted_s: float


def _interrupted(directory: Path, plan: Plan, echo: Say) -> PowerLoss:
    moments = ", ".join(moment(fault.at) for fault in plan.kills)
    echo(f"2. The same run under faults: a rank is killed in {moments}; the launcher starts the workers again")
    job = _job(directory, plan, plan.ranks, echo)
    job.start(plan.faults)
    stop = job.wait_for_stop()
    echo("3. A byte of the newest checkpoint rots on disk, then the power fails")
    struck, num_killed = job.fail_power(stop, lambda folder: damage_newest(folder, plan.seed))
    echo(f"4. The job is started again, now on {plan.ranks_after} ranks")
    again = _job(directory, plan, plan.ranks_after, echo)
    restarted_s = SystemClock().monotonic()
    again.start()
    again.finish()
    echo(f"  done: {_newest(directory)}")
    return PowerLoss(struck=struck, num_killed=num_killed, restarted_s=restarted_s)


def damage_newest(directory: Path, seed: int) -> str:
    """Change one byte of a chunk that only the newest checkpoint uses; what was done, in words."""
    repository = Repository.open(DiskTier(str(directory)))
    visible = repository.visible()
    if len(visible) < 2:
        raise NoCheckpoint(f"{directory} has {len(visible)} checkpoints, the demo needs an older one to fall back to")
    older = {chunk.id for commit in visible[:-1] for manifest in repository.manifests(commit) for chunk in manifest.chunks}
    own = [chunk for manifest in repository.manifests(visible[-1]) for chunk in manifest.chunks if chunk.id not in older]
    chunk = own[seed % len(own)]
    position = chunk.offset + seed % chunk.stored_bytes
    with open(directory / chunk.pack, "r+b") as f:
        f.seek(position)
        (byte,) = f.read(1)
        f.seek(position)
        f.write(bytes([byte ^ 1]))
    return f"  byte {position} of {chunk.pack}, part of the checkpoint of step {visible[-1].step}, changed from {byte} to {byte ^ 1}"


def _newest(directory: Path) -> str:
    newest = Repository.open(DiskTier(str(directory))).visible()[-1:]
    return f"step {newest[0].step}, state root {newest[0].state_root[:16]}" if newest else "no checkpoint"


def _prove(root: Path, plan: Plan, power: PowerLoss, echo: Say) -> DemoResult:
    echo("5. Certificate, recomputed from the stored bytes")
    interrupted, reference = DiskTier(str(root / "interrupted")), DiskTier(str(root / "reference"))
    certificate = certify(interrupted, against=reference)
    repository = Repository.open(interrupted)
    history = read_history(repository, None)
    attempts = curves(history)
    events = read_events(repository)
    strikes = read_strikes(str(root / "interrupted-faults.jsonl"))
    found = recoveries(
        strikes, _with_restart(events, power), {curve.generation: curve for curve in attempts}, {power.struck.time_s: power.num_killed}
    )
    pages = Pages(
        seed=plan.seed,
        total_steps=plan.total_steps,
        reference=curves(read_history(Repository.open(reference), None)),
        attempts=attempts,
        strikes=strikes,
        recoveries=found,
        checkpoints=[(a.generation.number, step) for a in history.attempts for step in a.roots],
        condemned=[(entry.generation, entry.step) for entry in certificate.condemned],
        certificate=certificate,
    )
    report = root / "report.html"
    report.write_text(render(pages), encoding="utf-8")
    for line in certificate_lines(certificate, found):
        echo(line)
    echo(f"report: {report}")
    return DemoResult(
        certified=certificate.certified,
        grade=certificate.grade,
        kills=sum(1 for struck in strikes if struck.action == "kill"),
        steps_lost_total=certificate.steps_lost_total,
        world_sizes=certificate.world_sizes,
        losses_equal=certificate.losses_equal,
        state_root_equal=certificate.state_root_equal,
        samples_exactly_once=certificate.samples_exactly_once,
        fell_back=certificate.fell_back,
        report=str(report),
        capture_s=spread(events, "captured", "capture_s"),
        stall_s=spread(events, "captured", "stall_s"),
        recovery_s=found,
        problems=certificate.problems,
    )


def _with_restart(events: dict[int, list[EventRecord]], power: PowerLoss) -> dict[int, list[EventRecord]]:
    """The events, with the moment somebody noticed that the power is back: no launcher was alive to note it."""
    noticed = EventRecord(name="recovery", step=power.struck.step, at={"detect": power.restarted_s})
    following = power.struck.generation + 1
    return events | {following: [noticed, *events.get(following, [])]}


def certificate_lines(certificate: Certificate, found: Sequence[Recovery]) -> list[str]:
    """The certificate and the recoveries for people."""
    words = {True: "yes", False: "NO", None: "not checked"}
    lines = [
        f"  certified: {words[certificate.certified]}, grade {certificate.grade}",
        f"  every loss has the reference's bits: {words[certificate.losses_equal]} ({certificate.steps} steps)",
        f"  every state root is the reference's: {words[certificate.state_root_equal]} ({certificate.final_root[:16]} at the end)",
        f"  every sample exactly once: {words[certificate.samples_exactly_once]}",
        f"  every superseded attempt equals its replay: {words[certificate.superseded_equal]} ({certificate.steps_lost_total} steps lost)",
        f"  came back from an older checkpoint: {words[certificate.fell_back]}",
        f"  ranks per generation: {certificate.world_sizes}",
    ]
    lines += [f"  limit: {text}" for text in certificate.differences]
    lines += [f"  PROBLEM: {text}" for text in certificate.problems]
    for r in found:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r.phases())
        lines.append(f"  recovery from {moment(r.at)} at step {r.step}: {r.total_s:.2f} s from {r.source} ({phases})")
    return lines
