"""The story: train, kill, damage, come back on other ranks, and prove that nothing of it can be seen in the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from unbroken.chaos.inject import read_strikes
from unbroken.core.errors import GaveUp, NoCheckpoint
from unbroken.demo.charts import Scene
from unbroken.demo.job import Job
from unbroken.demo.narrator import Tell, Told
from unbroken.demo.plan import INTERVAL_STEPS, Plan, plan_faults
from unbroken.demo.report import Pages, render
from unbroken.demo.story import PHASES, PowerLoss, Recovery, Spread, curves, moment, read_accounts, recoveries, spread
from unbroken.proof.certify import Certificate, certify
from unbroken.proof.history import read_history
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


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


def run_demo(directory: str, seed: int, ranks: int, tell: Tell) -> DemoResult:
    """Run the whole demo into `directory` (empty or missing) and write report.html there. About a minute and a half on two cores.

    ValueError for a folder with files in it or a number of ranks other than 2, 3 or 4; GaveUp if a job fails. The proof itself failing
    is no error: `certified` is False then and `problems` says why.
    """
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{directory} is a file: choose a new folder for the demo")
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{directory} is not empty: choose a new folder for the demo")
    plan = plan_faults(seed, ranks)
    root.mkdir(parents=True, exist_ok=True)
    tell(Told("note", f"A small GPT reads the sources of Python's library, twice from seed {seed}: undisturbed, then under faults."))
    _reference(root / "reference", plan, tell)
    power = _interrupted(root / "interrupted", plan, tell)
    return _prove(root, plan, power, tell)


def _job(directory: Path, plan: Plan, tell: Tell) -> Job:
    return Job(directory, steps=plan.total_steps, seed=plan.seed, interval=f"{INTERVAL_STEPS} steps", tell=tell)


def _reference(directory: Path, plan: Plan, tell: Tell) -> None:
    tell(Told("act", f"1. The reference: {plan.total_steps} steps on {plan.ranks} ranks, and nothing goes wrong"))
    with _job(directory, plan, lambda told: tell(told) if told.kind == "progress" else None) as job:
        job.start(plan.ranks)
        job.finish()
    tell(Told("good", f"done: {_newest(directory)}"))


def _interrupted(directory: Path, plan: Plan, tell: Tell) -> PowerLoss:
    moments = ", ".join(moment(fault.at) for fault in plan.kills)
    with _job(directory, plan, tell) as job:
        tell(Told("act", f"2. The same run under faults: a rank is killed in {moments}; the launcher starts the ranks again"))
        job.start(plan.ranks, plan.faults)
        stop = job.wait_for_stop()
        tell(Told("act", "3. The newest checkpoint rots on disk, then the power fails; the job is started again"))
        power = job.fail_power(stop, lambda folder: damage_newest(folder, plan.seed))
        job.start(plan.ranks, plan.faults)
        job.finish()
        if not any(struck.action == "preempt" for struck in read_strikes(str(job.fault_log))):
            raise GaveUp(f"the job in {directory} was to be ended by SIGTERM in step {plan.preemption.step}, but it ended by itself")
        tell(Told("good", f"the step was finished and saved, exit code 0: {_newest(directory)}"))
        tell(Told("act", f"4. The job is started again on {plan.ranks_after} ranks, to the end"))
        job.start(plan.ranks_after)
        job.finish()
    tell(Told("good", f"done: {_newest(directory)}"))
    return power


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
    return f"byte {position} of {chunk.pack}, part of the checkpoint of step {visible[-1].step}, changed from {byte} to {byte ^ 1}"


def _newest(directory: Path) -> str:
    newest = Repository.open(DiskTier(str(directory))).visible()[-1:]
    return f"step {newest[0].step}, state root {newest[0].state_root[:8]}…" if newest else "no checkpoint"


def _prove(root: Path, plan: Plan, power: PowerLoss, tell: Tell) -> DemoResult:
    tell(Told("act", "5. The certificate, recomputed from the stored bytes"))
    interrupted, reference = DiskTier(str(root / "interrupted")), DiskTier(str(root / "reference"))
    certificate = certify(interrupted, against=reference)
    repository = Repository.open(interrupted)
    history = read_history(repository, None)
    accounts = read_accounts(repository)
    strikes = read_strikes(str(root / "interrupted-faults.jsonl"))
    found = recoveries(strikes, accounts, power)
    capture_s, stall_s = (spread(accounts, "captured", fact) for fact in ("capture_s", "stall_s"))
    scene = Scene(
        total_steps=plan.total_steps,
        reference=curves(read_history(Repository.open(reference), None)),
        attempts=curves(history),
        strikes=strikes,
        checkpoints=[(a.generation.number, step) for a in history.attempts for step in a.roots],
        condemned=[(entry.generation, entry.step) for entry in certificate.condemned],
    )
    pages = Pages(seed=plan.seed, scene=scene, recoveries=found, capture_s=capture_s, stall_s=stall_s, certificate=certificate)
    report = root / "report.html"
    report.write_text(render(pages), encoding="utf-8")
    for told in certificate_lines(certificate, found):
        tell(told)
    tell(Told("note", f"the whole story: {report}"))
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
        capture_s=capture_s,
        stall_s=stall_s,
        recovery_s=found,
        problems=certificate.problems,
    )


def certificate_lines(certificate: Certificate, found: Sequence[Recovery]) -> list[Told]:
    """The recoveries and the certificate for people."""
    lines = [Told("note", line) for line in _seconds(found)]
    lines.append(Told("note", f"ranks per generation: {certificate.world_sizes}; {certificate.steps_lost_total} steps done again"))
    claims = (
        (f"every loss has the reference's bits ({certificate.steps} steps)", certificate.losses_equal),
        (f"wherever both saved, the whole state has one hash ({certificate.final_root[:8]}… at the end)", certificate.state_root_equal),
        ("every sample was used exactly once", certificate.samples_exactly_once),
        ("every step done again had the same bits the first time", certificate.superseded_equal),
        ("a damaged checkpoint was noticed, an older one used", certificate.fell_back),
    )
    answers = {True: "yes", False: "NO", None: "not checked"}
    lines += [Told("good" if held else "bad", f"{answers[held]:3}  {text}") for text, held in claims]
    lines += [Told("note", f"limit of the claim: {text}") for text in certificate.differences]
    lines += [Told("bad", f"problem: {text}") for text in certificate.problems]
    certified = certificate.certified
    verdict = "certified: both runs ended in the same bits" if certified else "NOT certified"
    lines.append(Told("good" if certified else "bad", f"{verdict} (grade {certificate.grade})"))
    return lines


def _seconds(found: Sequence[Recovery]) -> list[str]:
    """The recoveries as a table: from each strike until the step that was struck is done, phase by phase."""
    heads = [name.replace("_", " ") for name in (*PHASES, "total")]
    rows = [f"{'recovery (seconds)':20}" + "".join(f"{head:>{len(head) + 2}}" for head in heads) + "  state from"]
    for r in found:
        seconds = [*(s for _, s in r.phases()), r.total_s]
        cells = "".join(f"{s:{len(head) + 2}.2f}" for s, head in zip(seconds, heads, strict=True))
        rows.append(f"{f'{moment(r.at)}, step {r.step}':20}{cells}  {r.source}")
    return rows
