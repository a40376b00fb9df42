"""What a start takes from the run's copy: a newer or the only checkpoint brought back before the plan, a damaged one repaired.

Everything is verified while it is read. What is brought back becomes visible with its log entry, and run.json comes last: a start that is
killed in between leaves nothing that the next one would take for a run, and that one repeats it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from unbroken.core.errors import CheckFailed, Damaged, Fenced, NoCheckpoint, Refused, UnbrokenError, describe
from unbroken.core.ports import Tier
from unbroken.core.records import CommitEntry, RunFacts
from unbroken.daemon.folder import RunFolder
from unbroken.store import paths
from unbroken.store.copying import Carrier, candidates, check_histories, facts_at, is_plausible, require_same_run
from unbroken.store.log import Log, visible
from unbroken.store.repair import Repair
from unbroken.store.repository import Repository
from unbroken.store.sealed import read_sealed
from unbroken.store.tiers.choose import tier_at
from unbroken.store.tiers.disk import DiskTier

RETRY_S = 5.0
"""Beyond what the tier's client does by itself: a start does not wait long for a tier that is dead."""


@dataclass
class Found:
    """What was done: `notes` for people, and what is to be said where no checkpoint is found in the folder either."""

    notes: list[str] = field(default_factory=list)
    lacking: str = ""
    written_bytes: int = 0


@dataclass
class _Local:
    facts: RunFacts | None
    log: Log
    newest: CommitEntry | None


def bring_back(folder: RunFolder, url: str) -> Found:
    """Bring the newest good checkpoint of the copy into the folder if the folder has none as new. Takes the lease only if so.

    Refused where the copy is another run's. Where the copy cannot be used a good checkpoint in the folder is enough; NoCheckpoint where
    there is none: a fresh start might lose all.
    """
    local = _look(folder)
    try:
        return _bring(folder, url, local)
    except (OSError, UnbrokenError) as error:
        if local.newest is not None and (isinstance(error, Fenced) or not isinstance(error, Refused)):
            return Found([f"the copy in {url} was not looked at, step {local.newest.step} is here: {describe(error)}"])
        if isinstance(error, Refused):
            raise
        raise NoCheckpoint(
            f"{folder.directory}: no usable checkpoint here, and the copy in {url} cannot be used: {describe(error)}\n"
            "Mend that and start again; a fresh start needs another folder, and another place for its copy"
        ) from error


def mend(folder: RunFolder, url: str, commit: CommitEntry) -> Found:
    """Repair one damaged checkpoint of the folder from the copy; no notes where that cannot be done."""
    work = Repair(DiskTier(folder.directory), tier_at(url, RETRY_S), folder.lineage, folder.writer, folder.clock)
    try:
        is_whole = work.mend(commit)
    except (OSError, UnbrokenError) as error:  # safe: it is passed over and condemned then, and this is said
        return Found(lacking=f"step {commit.step} could not be repaired from {url}: {describe(error)}")
    if not is_whole:
        why = next((f"{fault.path}: {fault.why}" for fault in work.faults.values() if fault.why), "")
        return Found(lacking=f"step {commit.step} could not be repaired from {url}: {why}")
    if not work.faults:
        return Found(lacking=f"step {commit.step}: nothing to repair was found")
    named = ", ".join(sorted(work.faults)[:4]) + (" and more" if len(work.faults) > 4 else "")
    return Found([f"step {commit.step} was damaged and has been repaired from {url}: {named}"], written_bytes=work.written_bytes)


def _look(folder: RunFolder) -> _Local:
    """What lies in the folder. ForeignFolder, NewerFormat as for any start."""
    tier: Tier = DiskTier(folder.directory)
    facts: RunFacts | None = None
    with suppress(Damaged):  # run.json is bad or missing, and its checkpoints are there: it can be brought back, too
        if not Repository.exists(tier):
            return _Local(None, Log(tier, folder.lineage), None)
        facts = read_sealed(tier, paths.RUN, "run", RunFacts)[0]
    log = Log.open(tier, folder.lineage)
    newest = next((c for c in reversed(visible(log.state)) if is_plausible(tier, c)), None) if facts is not None else None
    return _Local(facts, log, newest)


def _bring(folder: RunFolder, url: str, local: _Local) -> Found:
    tier = tier_at(url, RETRY_S)
    facts = facts_at(tier)
    if facts is None:
        return Found(lacking=f"its copy in {url} holds no run either")
    if local.facts is not None:
        require_same_run(facts, local.facts.run_id, url)
    copy = Log.open(tier, folder.lineage)
    check_histories(copy.state, local.log.state, url)
    if local.facts is None and local.log.state.generations and not _share_a_generation(local.log, copy):
        raise Refused(f"{folder.directory} holds remains of another run than {url}: choose an empty folder")
    carrier = Carrier(source=copy, there=local.log, writer=folder.writer, clock=folder.clock, is_back=True)
    newest = local.newest.step if local.newest is not None else -1
    found = Found(lacking=f"nor is there a usable one in its copy in {url}")
    for commit in [commit for commit in candidates(local.log.state, copy.state) if commit.step > newest]:
        folder.take_lease()
        try:
            carrier.carry(commit)
        except (CheckFailed, FileNotFoundError) as error:
            found.notes.append(f"step {commit.step} in {url} was passed over: {error}")
            continue
        carrier.put_facts()
        found.notes.append(f"step {commit.step} from {url}: brought back into the folder, {carrier.sent_bytes} bytes")
        found.notes += carrier.notes
        found.written_bytes = carrier.sent_bytes
        return found
    state = copy.state
    if local.newest is None and (local.facts is None or state.commits or state.condemned or state.pruned or copy.damage):
        tried = "".join(f"\n  {text}" for text in (*found.notes, *copy.damage[:8]))
        raise NoCheckpoint(f"a run lies there, without a checkpoint that could be used{tried}")
    return found


def _share_a_generation(a: Log, b: Log) -> bool:
    return bool({(g.number, g.nonce) for g in a.state.generations} & {(g.number, g.nonce) for g in b.state.generations})
