"""Crashes of the node daemon while it drains snapshots of two ranks into a run's folder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.rigs.crash_ends import ended, scratch, strike_at
from tests.rigs.crash_life import Say
from tests.rigs.crash_oracle import Loss
from tests.rigs.fake_trainer import pieces_of
from unbroken.core.messages import Begin, Opened, Rules, SlotSource
from unbroken.core.os import memory_file
from unbroken.core.ports import SystemClock, SystemNonces, arm
from unbroken.core.records import SlotIndex
from unbroken.daemon.drain import Cargo, drain
from unbroken.daemon.folder import LiveJournal, RunFolder
from unbroken.daemon.plan import MemoryCut
from unbroken.shm.slots import Slot, slot_bytes
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

FAILPOINTS = ("drain.begin", "drain.written", "drain.before_commit", "drain.committed", "drain.collected")
NUM_STEPS = 6
KEEP = 2


def state_of(step: int) -> dict[str, bytes]:
    """One piece that changes little, one that does not, one small."""
    return {"/w": bytes(range(256)) * 400 + b"%06d" % step, "/frozen": bytes(99_999), "/step": b"%d" % step}


def point(name: str, nth: str) -> None:
    """The daemon is killed at its nth pass of a failpoint; the next one starts, goes on and leaves nothing behind."""
    with scratch() as folder:
        run = folder / "run"

        def act(say: Say) -> None:
            arm(name, strike_at(int(nth)))
            _drain(run, NUM_STEPS, say)

        said = ended(act)
        done = [int(line.split()[1]) for line in said if line.startswith("end")]
        begun = [int(line.split()[1]) for line in said if line.startswith("begin")]
        if len(begun) == NUM_STEPS and len(done) == NUM_STEPS:
            raise Loss(f"{name} was not passed {nth} times")
        _check(run, [step for step in done if step in begun[-KEEP:]], {*done, *begun})
        ended(lambda say: _drain(run, 2, say))
        _check(run, [], set(range(99)))
        _require_tidy(run)


def points(count: int, chance: random.Random) -> Iterator[str]:
    """Every failpoint at every pass."""
    every = [f"daemon/{name}/{nth}" for name in FAILPOINTS for nth in range(1, NUM_STEPS + 1)]
    chance.shuffle(every)
    yield from sorted(every, key=lambda word: every.index(word) // len(FAILPOINTS))[:count]


def _drain(run: Path, num_steps: int, say: Say) -> None:
    folder = RunFolder(str(run), SystemClock(), SystemNonces())
    rules = Rules(full_steps=3)
    plan = folder.begin(Begin(world_size=2, resume="auto", options={"keep": KEEP}, rules=rules), [], witnessed=False, last_applied=None)
    live = folder.opened(Opened(generation=plan.generation, step=plan.step, loaded_root=plan.state_root))
    for step in range(plan.step + 1, plan.step + 1 + num_steps):
        cargo = _cargo(folder, live, step, plan.generation)
        say(f"begin {step}")
        drain(cargo, folder)
        say(f"end {step}")
    folder.close()


def _cargo(folder: RunFolder, live: LiveJournal, step: int, generation: int) -> Cargo:
    slots = []
    for rank in range(2):
        placed, data = pieces_of(state_of(step), {"/rng": b"%d %d" % (rank, step)})
        index = SlotIndex(generation=generation, step=step, rank=rank, world_size=2, milestone=False, pieces=placed)
        slot = Slot(memory_file("crash", slot_bytes(index)), slot_bytes(index))
        view = slot.begin(index)
        view[:] = data
        view.release()
        slot.finish()
        slots.append(slot)
    sources = tuple(SlotSource(rank=rank, slot=0) for rank in range(2))
    return Cargo(MemoryCut(generation=generation, step=step, world_size=2, slots=sources), folder.repository, tuple(slots), live)


def _check(run: Path, sure: list[int], may: set[int]) -> None:
    if not run.exists() or not DiskTier(str(run)).list(""):
        if sure:
            raise Loss(f"steps {sure} were acknowledged, and nothing is there")
        return
    repository = Repository.open(DiskTier(str(run)))
    seen = [commit.step for commit in repository.visible()]
    if set(sure) - set(seen) or set(seen) - may:
        raise Loss(f"visible are {seen}; acknowledged were {sure}, begun {sorted(may)}")
    for commit in repository.visible():
        for manifest in repository.manifests(commit):
            for stored, data in repository.read_pieces(manifest, manifest.pieces):
                wanted = b"%d %d" % (stored.rank, commit.step) if stored.rank is not None else state_of(commit.step)[stored.piece.pointer]
                if bytes(data) != wanted:
                    raise Loss(f"{stored.piece.pointer} of step {commit.step} has other bytes than were saved")
    report = repository.verify()
    if not report.ok:
        raise Loss(f"verify: {report.bad}")


def _require_tidy(run: Path) -> None:
    tier = DiskTier(str(run))
    repository = Repository.open(tier)
    needed = {ref.path for commit in repository.visible() for ref in commit.manifests}
    if left := set(tier.list("manifests")) - needed:
        raise Loss(f"left over: {sorted(left)}")
