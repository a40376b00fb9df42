"""What happens in a run, told live: read from its folder, its fault log and its output, by somebody who only watches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from unbroken.chaos.inject import Struck, read_strikes
from unbroken.demo.story import POWER, PowerLoss, moment, read_accounts, recoveries
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

Kind = Literal["act", "note", "save", "strike", "start", "good", "bad", "progress"]

STEP_LINE = re.compile(rb"^step (\d+) loss (\S+)$", re.MULTILINE)
"""How the training script says on its output where it is."""

LONG_NAME = re.compile(r"(?:packs/[0-9a-f]{2}/)?\b([0-9a-f]{8})[0-9a-f]{8,}")


class Told(Struct, frozen=True):
    """One line. "act" opens a chapter, "progress" (where training stands) is worth showing only until the next line comes."""

    kind: Kind
    text: str


Tell = Callable[[Told], Any]


def strike_words(struck: Struck) -> str:
    """A strike for people."""
    if struck.at == POWER:
        return f"power lost in step {struck.step}: launcher, ranks and daemon killed together, what was in memory is gone"
    if struck.action == "preempt":
        return f"SIGTERM for the launcher in step {struck.step}, as a scheduler sends it"
    return f"SIGKILL: rank {struck.rank} in {moment(struck.at)} of step {struck.step}"


class Narrator:
    """Tells what is new in a run since the last look: strikes, starts, checkpoints, damage found, recoveries. One per run folder."""

    def __init__(self, directory: Path, fault_log: Path, output: Path, tell: Tell) -> None:
        self.power: PowerLoss | None = None
        self._directory = directory
        self._fault_log = str(fault_log)
        self._output = output
        self._tell = tell
        self._output_bytes = 0
        self._num_entries = 0
        self._told: set[tuple[str, int, int]] = set()

    def look(self) -> None:
        """Tell what is new. Costs a listing of the log folder when nothing is."""
        for told in (*self._strikes(), *self._log(), *self._progress()):
            self.tell(told.kind, told.text)

    def tell(self, kind: Kind, text: str) -> None:
        """Tell this, too: what only the caller knows. Names of packs and digests are cut to what people can compare."""
        self._tell(Told(kind, LONG_NAME.sub(r"\1…", text)))

    def _strikes(self) -> Iterator[Told]:
        for i, struck in enumerate(read_strikes(self._fault_log)):
            if struck.action != "stop" and self._is_new("strike", i):  # a halt is the driver's own preparation
                yield Told("strike", strike_words(struck))

    def _log(self) -> Iterator[Told]:
        num_entries = len(list(self._directory.glob("runs/main/log/*.json")))
        if num_entries == self._num_entries:
            return
        self._num_entries = num_entries
        repository = Repository.open(DiskTier(str(self._directory)))
        state = repository.log.state
        for entry in state.condemned:
            if self._is_new("condemned", entry.generation, entry.step):
                yield Told("bad", f"checkpoint of step {entry.step} is damaged and given up: {entry.reason}")
        accounts = read_accounts(repository)
        for number, account in accounts.items():
            if account.source != "unknown" and self._is_new("generation", number):
                origin = "a fresh start" if account.source == "fresh" else f"goes on after step {account.base_step}, from {account.source}"
                yield Told("start", f"generation {number}, {account.world_size} ranks: {origin}")
        for commit in state.commits:
            if self._is_new("commit", commit.generation, commit.step):
                yield Told("save", f"checkpoint of step {commit.step} on disk, state root {commit.state_root}")
        for recovery in recoveries(read_strikes(self._fault_log), accounts, self.power):
            if self._is_new("recovery", recovery.step, recovery.rank):
                yield Told("good", f"step {recovery.step} is done, {recovery.total_s:.1f} s after the strike")

    def _progress(self) -> Iterator[Told]:
        try:
            with open(self._output, "rb") as file:
                file.seek(self._output_bytes)
                fresh = file.read()
        except FileNotFoundError:
            return
        whole = fresh.rfind(b"\n") + 1
        self._output_bytes += whole
        steps = STEP_LINE.findall(fresh[:whole])
        if steps:
            step, loss = (word.decode() for word in steps[-1])
            yield Told("progress", f"step {step}, loss {loss}")

    def _is_new(self, kind: str, first: int, second: int = 0) -> bool:
        new = (kind, first, second) not in self._told
        self._told.add((kind, first, second))
        return new
