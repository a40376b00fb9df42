"""Every way in which the crash campaign ends a writer on a disk. A point is one word: the same word is the same crash.

    failpoint/HISTORY/SEED/NAME/NTH        SIGKILL when the writer passes a failpoint for the nth time
    moment/HISTORY/SEED/K/K2               SIGKILL at the Kth call of a function, then of the next process at its K2th (0: it ends well)
    timer/HISTORY/SEED/US                  SIGKILL so many microseconds after the first word
    power/HISTORY/SEED/AT/LOSS             the power fails after AT events on the file system; LOSS draws what is left
    again/HISTORY/SEED/AT/LOSS/MILLE/LOSS  likewise; then a life goes on from what is left, and after so much of it the power fails again
    error/HISTORY/SEED/CALL/ERROR/NTH/N    system calls fail, from the nth on, N of them; SHORT: they do half; HALF: half, then ENOSPC
    daemon/NAME/NTH                        SIGKILL at a failpoint of the daemon's drain
    s3..., s3kill...                       see crash_object

A point runs in a process of its own, which raises Loss, or any other error, when something is wrong.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from tests.rigs import crash_daemon, powerloss
from tests.rigs.crash_ends import ended, killed_at_call, scratch, strike_at
from tests.rigs.crash_faults import CALLS, MUTANTS, SHORT, Fault
from tests.rigs.crash_life import HISTORIES, Book, Life, Op, Say, go_on, ops_of, seed_of
from tests.rigs.crash_oracle import Loss, judge
from unbroken.core.errors import UnbrokenError
from unbroken.core.ports import arm
from unbroken.store.tiers.disk import DiskTier

ON_DISK = (
    "store.create.part",
    "store.create.before_fsync",
    "store.create.before_link",
    "store.create.after_link",
    "store.write.after_packs",
    "store.write.after_manifest",
    "store.journal.before_append",
    "store.append.before_fsync",
    "store.log.before_create",
    "store.log.after_create",
    "store.collect.after_prune",
    "store.collect.after_manifests",
    "store.delete",
    "branch.pinned",
    "branch.before_commit",
)
IN_BUCKET = (
    "store.create.before_put",
    "store.create.after_put",
    "store.append.before_put",
    "store.write.after_packs",
    "store.write.after_manifest",
    "store.journal.before_append",
    "store.log.before_create",
    "store.log.after_create",
    "store.collect.after_prune",
    "store.collect.after_manifests",
    "store.delete",
)
FAILPOINTS = frozenset((*ON_DISK, *IN_BUCKET, *crash_daemon.FAILPOINTS))
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS")}


@cache
def passes(history: str, seed: int) -> dict[str, int]:
    """How often a whole life passes each failpoint, and ("call") how many functions it calls."""

    def act(say: Say) -> None:
        counts: Counter[str] = Counter()
        for name in ON_DISK:
            arm(name, lambda name=name: counts.update([name]))  # type: ignore[misc]
        with scratch() as folder, killed_at_call(0) as done:
            Life(DiskTier(str(folder / "run")), history, seed, 0, lambda line: None).run(ops_of(history, seed))
        for name, count in [*counts.items(), ("call", done[0])]:
            say(f"{name} {count}")

    return {line.split()[0]: int(line.split()[1]) for line in ended(act)}


def live(folder: Path, history: str, seed: int, number: int, prepare: Callable[[], Any], say: Say | None = None) -> list[str]:
    """One life in a child. `prepare` is called there first, and may give a context for it. A later life begins with a start."""

    def act(tell: Say) -> None:
        with prepare() or nullcontext():
            life = Life(DiskTier(str(folder)), history, seed, number, say or tell)
            life.run([Op("restart")] * bool(number) + ops_of(history, seed + 1000 * number))

    return ended(act)


def _judge_disk(folder: Path, lines: list[str]) -> None:
    judge(lambda: DiskTier(str(folder)), Book().read(lines))


def failpoint(history: str, seed: str, name: str, nth: str, mutant: str = "") -> None:
    def prepare() -> None:
        if mutant:
            MUTANTS[mutant]()
        arm(name, strike_at(int(nth)))

    with scratch() as folder:
        _judge_disk(folder / "run", live(folder / "run", history, int(seed), 0, prepare))


def moment(history: str, seed: str, first: str, second: str) -> None:
    with scratch() as folder:
        lines = live(folder / "run", history, int(seed), 0, lambda: killed_at_call(int(first)))
        lines += live(folder / "run", history, int(seed), 1, lambda: killed_at_call(int(second)))
        _judge_disk(folder / "run", lines)


def timer(history: str, seed: str, micros: str) -> None:
    with scratch() as folder:

        def act(say: Say) -> None:
            say("ready")
            Life(DiskTier(str(folder / "run")), history, int(seed), 0, say).run(ops_of(history, int(seed)))

        _judge_disk(folder / "run", ended(act, int(micros) / 1e6))


@cache
def trace(history: str, seed: int, mutant: str = "") -> powerloss.Recording:
    """Two lives on a file system that can lose power: the first is killed somewhere, the second ends well."""
    killed_at = random.Random(f"trace {history} {seed}").randrange(1, passes(history, seed)["call"])

    def prepare(number: int) -> Any:
        if mutant:
            MUTANTS[mutant]()
        return killed_at_call(killed_at) if number == 0 else None

    with scratch() as folder, powerloss.recorded(folder / "mount") as recording:
        for number in range(2):
            live(
                folder / "mount" / "run", history, seed, number,
                lambda number=number: prepare(number), lambda line: powerloss.say_on(folder / "mount", line),
            )  # fmt: skip
    return recording


def power(history: str, seed: str, at: str, loss: str, mutant: str = "") -> None:
    drive = trace(history, int(seed), mutant).drive(int(at))
    with scratch() as folder:
        powerloss.lay_out(drive.after_loss(random.Random(seed_of(history, seed, at, loss))), folder)
        _judge_disk(folder / "run", drive.said)


def again(history: str, seed: str, at: str, loss: str, mille: str, second_loss: str) -> None:
    drive = trace(history, int(seed)).drive(int(at))
    with scratch() as folder:
        powerloss.lay_out(drive.after_loss(random.Random(seed_of(history, seed, at, loss))), folder / "first")
        with powerloss.recorded(folder / "mount", folder / "first") as recording:
            live(folder / "mount" / "run", history, int(seed), 2, lambda: None, lambda line: powerloss.say_on(folder / "mount", line))
        began = recording.events.index(("say", powerloss.LOADED, None, None))
        later = recording.drive(began + 1 + (len(recording.events) - began - 1) * int(mille) // 1000)
        powerloss.lay_out(later.after_loss(random.Random(seed_of(history, seed, mille, second_loss))), folder / "second")
        _judge_disk(folder / "second" / "run", drive.said + later.said)


def _ops_for(history: str, seed: int, call: str) -> list[Op]:
    """Nothing that damages; at a start what cannot be read is rightly condemned, so reads fail in between only."""
    fitting = ("save", "milestone", "collect") if call == "pread" else ("save", "milestone", "collect", "restart", "branch")
    return [op for op in ops_of(history, seed) if op.kind.rpartition(" ")[2] in fitting]


@cache
def calls(history: str, seed: int, call: str) -> int:
    """How often a life without faults makes a system call."""

    def act(say: Say) -> None:
        with scratch() as folder, Fault(folder, call, 0, 0, 0) as fault:
            Life(DiskTier(str(folder / "run")), history, seed, 0, lambda line: None).run(_ops_for(history, seed, call))
        say(str(fault.seen))

    return int(ended(act)[-1])


def error(history: str, seed: str, call: str, kind: str, nth: str, count: str) -> None:
    with scratch() as folder:
        lines: list[str] = []
        life = Life(DiskTier(str(folder / "run")), history, int(seed), 0, lines.append)
        number = 0 if kind == "SHORT" else ERRORS["ENOSPC" if kind == "HALF" else kind]
        struck = 0
        with Fault(folder, call, number, int(nth), int(count), short_first=kind == "HALF") as fault:
            for op, failed in go_on(life, _ops_for(history, int(seed), call)):
                if failed is not None:
                    require_reported(op, failed, number, has_struck=fault.struck > struck)
                struck = fault.struck
        _judge_disk(folder / "run", lines)


def require_reported(op: Op, failed: BaseException, number: int, *, has_struck: bool) -> None:
    """An op fails only because of a fault, and a save says what the disk said (I9)."""
    if not has_struck:
        raise Loss(f"{op.kind} failed though nothing was wrong any more: {failed!r}") from failed
    numbers, at = set(), failed
    while at is not None:
        numbers |= {at.errno} if isinstance(at, OSError) else set()
        at = at.__cause__
    if not isinstance(failed, (UnbrokenError, OSError)) or (number and number not in numbers):
        raise Loss(f"{op.kind} failed with {failed!r}, which does not tell what the disk said ({number})") from failed


RUN: dict[str, Callable[..., None]] = {
    "failpoint": failpoint,
    "moment": moment,
    "timer": timer,
    "power": power,
    "again": again,
    "error": error,
    "daemon": crash_daemon.point,
}


def run_point(name: str) -> None:
    """One point, in this process and its children. Raises what is wrong."""
    kind, *words = name.split("/")
    RUN[kind](*words)


def points(kind: str, count: int, seed: int) -> list[str]:
    """So many points of a kind, drawn from the seed; fewer where there are no more."""
    chance = random.Random(f"{kind} {seed}")
    return list(dict.fromkeys(_POINTS[kind](count, chance)))[:count]


def _failpoints(count: int, chance: random.Random) -> Iterator[str]:
    """All names before any twice."""
    for _ in range(1 + 2 * count // len(ON_DISK)):
        for name in ON_DISK:
            for _ in range(20):
                history, seed = chance.choice(HISTORIES), chance.randrange(8)
                if total := passes(history, seed).get(name):
                    yield f"failpoint/{history}/{seed}/{name}/{chance.randint(1, total)}"
                    break


def _moments(count: int, chance: random.Random) -> Iterator[str]:
    for _ in range(count):
        history, seed = chance.choice(HISTORIES), chance.randrange(8)
        total = passes(history, seed)["call"]
        yield f"moment/{history}/{seed}/{chance.randint(1, total)}/{chance.choice((0, chance.randint(1, total)))}"


def _timers(count: int, chance: random.Random) -> Iterator[str]:
    for _ in range(count):
        yield f"timer/{chance.choice(HISTORIES)}/{chance.randrange(8)}/{chance.randint(100, 120_000)}"


def _powers(count: int, chance: random.Random) -> Iterator[str]:
    for number in range(count):
        history, seed = HISTORIES[number % len(HISTORIES)], number // len(HISTORIES) // 100
        events = trace(history, seed).events
        writes = [at for at, event in enumerate(events, 1) if event[0] == "write"]  # the moments at which most is unsure
        at = chance.choice(writes) if writes and chance.random() < 0.4 else chance.randint(1, len(events))
        yield f"power/{history}/{seed}/{at}/{chance.randrange(1 << 30)}"


def _agains(count: int, chance: random.Random) -> Iterator[str]:
    for name in _powers(count, chance):
        yield f"again/{name.partition('/')[2]}/{chance.randint(0, 1000)}/{chance.randrange(1 << 30)}"


def _errors(count: int, chance: random.Random) -> Iterator[str]:
    for number in range(count):
        call, history, seed = CALLS[number % len(CALLS)], chance.choice(HISTORIES), chance.randrange(8)
        kinds = [*ERRORS, *(("SHORT", "HALF") if call in SHORT else ())]
        total = calls(history, seed, call)
        if total:
            yield f"error/{history}/{seed}/{call}/{chance.choice(kinds)}/{chance.randint(1, total)}/{chance.choice((1, 1, 2, 5, 40))}"


_POINTS: dict[str, Callable[[int, random.Random], Iterator[str]]] = {
    "failpoint": _failpoints,
    "moment": _moments,
    "timer": _timers,
    "power": _powers,
    "again": _agains,
    "error": _errors,
    "daemon": crash_daemon.points,
}
