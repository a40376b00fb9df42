"""A job under `unbroken run` that dwells in a chosen stage, the signals that strike it there, and what is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

import unbroken
from tests.rigs.launched import Launched, launched, wait_until
from unbroken.core.records import EventRecord, JournalLine

AT = 3
"""The step in which a stage inside the loop dwells."""

SCRIPT = """
STAGE, DWELL_S, TOTAL = os.environ["STAGE"], float(os.environ["DWELL_S"]), int(os.environ["TOTAL"])
def dwell(stage):
    if STAGE == stage and not os.path.exists(os.path.join(FOLDER, "struck")):
        mark("at", stage=stage)
        end = time.monotonic() + DWELL_S
        while time.monotonic() < end:
            time.sleep(0.005)
if os.environ["OWN_HANDLER"] == "before":
    signal.signal(signal.SIGTERM, lambda number, frame: mark("heard"))
dwell("import")
import torch, unbroken
class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if not hasattr(self, "pid"):
            self.pid = os.getpid()
            mark("loads", loader=self.pid)
        self.num = getattr(self, "num", 0) + 1
        if self.num == 6:
            dwell("data")
        return torch.arange(4.0) + index
class Slow(dict):
    def state_dict(self):
        dwell("construct" if not hasattr(self, "opened") else "save" if run.completed >= 3 else "")
        return dict(self)
    def load_state_dict(self, state):
        self.update(state)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
extra = Slow()
run = unbroken.Run(
    os.path.join(FOLDER, "run"), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4), extras={"slow": extra},
    data=unbroken.Batches(Points(), global_batch=8, seed=7, num_workers=int(os.environ["LOADERS"])),
    lose_at_most=os.environ["LOSE"], total_steps=TOTAL, units=4,
)
extra.opened = True
if os.environ["OWN_HANDLER"] == "after":
    signal.signal(signal.SIGTERM, lambda number, frame: mark("heard"))
mark("opened", step=run.completed)
dwell("warm-up")
for batch in run:
    mark("began", step=batch.step)
    for micro in batch:
        micro.backward((model(micro.x) ** 2).mean())
    if batch.step == TOTAL:
        dwell("last")
    time.sleep(0.02)
    run.step()
    mark("applied", step=batch.step)
    if batch.step == 3:
        with run.eval():
            dwell("evaluation")
mark("after")
"""


@dataclass(frozen=True)
class Strike:
    """Who gets which signal in which stage. `stage` "": `after_s` after the first step. `own_handler`: set before or after Run."""

    stage: str
    to: str
    loaders: int = 0
    sig: str = "SIGTERM"
    twice: bool = False
    own_handler: str = ""
    dwell_s: float = 0.4
    after_s: float = 0.0
    lose: str = "1000 steps"
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.stage or f"{self.after_s:.2f}s", self.to, str(self.loaders), self.sig, self.own_handler and f"own-{self.own_handler}"]
        return "-".join(filter(None, [*words, "twice" if self.twice else "", "long" if self.dwell_s > 5 else ""]))


def environment(strike: Strike, total: int) -> dict[str, str]:
    given = {"STAGE": strike.stage, "DWELL_S": strike.dwell_s, "TOTAL": total, "LOADERS": strike.loaders}
    return {name: str(value) for name, value in given.items()} | {
        "OWN_HANDLER": strike.own_handler, "LOSE": strike.lose, "OMP_NUM_THREADS": "1"
    }  # fmt: skip


@dataclass
class Struck:
    """What came of it: the launcher's exit code, seconds from the signal to its end, processes that lived on, and what is committed."""

    job: Launched
    code: int
    seconds: float
    survivors: list[str]
    run: Path

    @property
    def committed(self) -> int:
        """The newest checkpoint's step, 0 where there is none."""
        try:
            return max((found.step for found in unbroken.open(str(self.run)).steps()), default=0)
        except unbroken.NoCheckpoint:
            return 0

    @property
    def applied(self) -> int:
        """The last step that every rank has applied."""
        last = [max((m["step"] for m in self.job.marks("applied") if m["rank"] == rank), default=0) for rank in (0, 1)]
        return min(last)


def strike_job(folder: Path, strike: Strike, total: int = 400) -> Struck:
    """Start, wait for the stage, strike, wait for the end."""
    with launched(folder, SCRIPT, "--nproc-per-node", "2", *strike.flags, env=environment(strike, total)) as job:
        job.wait_for_marks("at" if strike.stage else "applied", 2 if strike.stage else 1)
        time.sleep(strike.after_s)
        processes = psutil.Process(job.process.pid).children(recursive=True)
        (folder / "struck").touch()
        targets = find_targets(job, strike.to, processes)
        began_s = time.monotonic()
        for _ in range(1 + strike.twice):
            for pid in targets:
                send(pid, signal.Signals[strike.sig])
            time.sleep(0.01 if strike.twice else 0.0)
        code = job.wait(60)
        seconds = time.monotonic() - began_s
        survivors = [str(one) for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return Struck(job, code, seconds, survivors, folder / "run")


def find_targets(job: Launched, to: str, processes: list[psutil.Process]) -> list[int]:
    """Process numbers, those of groups negative. "all": what a scheduler finds in the job, the node daemon and fork server included."""
    workers = [mark["pid"] for mark in job.marks()]
    if to == "all":
        found = daemons(job.folder / "run")
        assert found or not job.marks("opened"), "a run has a daemon"
        return [*(one.pid for one in processes), *found, job.process.pid]
    return {"launcher": [job.process.pid], "one": [workers[-1]], "groups": [-pid for pid in workers]}[to]


def daemons(run: Path) -> list[int]:
    """The run's node daemon, if there is one."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "unbroken.agent" in words and str(run) in words:
            found.append(one.pid)
    return found


def send(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid < 0:
            os.killpg(-pid, sig)
        else:
            os.kill(pid, sig)


def finish(struck: Struck, strike: Strike, total: int) -> list[dict[str, Any]]:
    """Start the job again with the same script and let it end; the marks of that launch."""
    folder = struck.job.folder
    num_before = {name: len(struck.job.marks(name)) for name in ("opened", "applied")}
    with launched(folder, SCRIPT, "--nproc-per-node", "2", env=environment(strike, total)) as job:
        assert job.wait(120) == 0, job.stderr
        return [mark for name, num in num_before.items() for mark in job.marks(name)[num:]]


def events(run: Path, name: str) -> list[EventRecord]:
    """The events of this name in all journals, oldest generation first."""
    found = []
    for path in sorted(run.glob("runs/main/journal/*.jsonl")):
        for line in path.read_bytes().splitlines()[1:]:
            record = msgspec.json.decode(line, type=JournalLine).record
            if isinstance(record, EventRecord) and record.name == name:
                found.append(record)
    return found


def wait_for_no_daemon(run: Path) -> None:
    """The daemon ends by itself once nobody needs it."""
    wait_until(lambda: not daemons(run), "end of the daemon", 20)
