"""Reads committed checkpoints again now and then, so that damage is known while there are older ones, or other copies, to turn to.

A thread of low priority reads what the visible checkpoints need, from the disk and not from its cache, at BYTES_PER_S at most. Nothing is
withdrawn here: a start finds the same damage, condemns it and goes on from before. Passes begin with every start of a daemon, and in an
order of their own: so the end of a large folder is reached, too, by jobs that never live for a whole pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, StoreError, UnbrokenError, describe
from unbroken.core.os import yield_to_others
from unbroken.core.ports import Clock, Nonces
from unbroken.core.records import CommitEntry, EventRecord
from unbroken.store import paths
from unbroken.store.log import key_of
from unbroken.store.packs import audit_pack
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.limit import LimitTier

BYTES_PER_S = 32 << 20
"""100 GB take 50 minutes; a disk gives twenty times as much, and a core hashes two hundred times as much."""

FIRST_S = 60.0
"""So long after a start, which has enough to read, the first pass begins; sooner where passes are more frequent."""

MAX_FINDINGS = 64
"""That wait to be told, and that are remembered so as not to be told again at every pass."""


@dataclass(frozen=True)
class Finding:
    """Something damaged, and the checkpoints that need it."""

    path: str
    reason: str
    steps: tuple[int, ...]

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.steps[:8])) + (" ..." if len(self.steps) > 8 else "")
        return f"{self.path}: {self.reason}; needed by the checkpoints of steps {steps}"

    def event(self, at_step: int) -> EventRecord:
        """The same for the journal."""
        return EventRecord(name="damaged", step=at_step, facts={"path": self.path, "reason": self.reason, "steps": list(self.steps[:64])})


class Scrub:
    """`begin` with every start, `take` from the event loop, `stop` at the end; `wake` is called in the thread when there is something."""

    def __init__(self, clock: Clock, nonces: Nonces, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._nonces = nonces
        self._wake = wake
        self._found: deque[Finding] = deque(maxlen=MAX_FINDINGS)
        self._known: deque[str] = deque(maxlen=MAX_FINDINGS)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_passes = 0

    def begin(self, repository: Repository, root: str, every_s: float | None) -> None:
        """Look after this run from now on, every so many seconds; None: not at all."""
        self.stop()
        if every_s is not None:
            self._ending = ending = threading.Event()
            self._thread = threading.Thread(
                target=self._work, args=(repository, DiskTier(root), every_s, ending), name="scrub", daemon=True
            )
            self._thread.start()

    def take(self) -> list[Finding]:
        """What was found since the last call."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def stop(self) -> None:
        """No more reading. The thread ends behind the chunk that it is at; nobody waits for it, as it writes nothing."""
        self._ending.set()

    def _work(self, repository: Repository, tier: DiskTier, every_s: float, ending: threading.Event) -> None:
        yield_to_others()
        pause_s = min(FIRST_S, every_s)
        while not ending.wait(pause_s):
            try:
                self._read_all(repository, tier, ending)
            except (OSError, UnbrokenError) as error:  # safe: it is said, and the next pass tries again
                print(f"stored checkpoints could not be read through: {describe(error)}", flush=True)
            self.num_passes += 1
            pause_s = every_s

    def _read_all(self, repository: Repository, tier: DiskTier, ending: threading.Event) -> None:
        limited, order = LimitTier(tier, BYTES_PER_S, clock=self._clock), self._nonces.nonce()
        needed: dict[str, list[CommitEntry]] = {}
        for commit in repository.visible():
            try:
                packs = {chunk.pack for manifest in repository.manifests(commit) for chunk in manifest.chunks}
            except Damaged as damaged:
                self._judge(repository, damaged, [commit])
                continue
            for pack in packs:
                needed.setdefault(pack, []).append(commit)
        for pack in sorted(needed, key=lambda path: text_digest(order, path)):
            if ending.is_set():
                return
            with contextlib.suppress(OSError, StoreError):  # safe: then what is read may come from the cache
                tier.forget(pack)
            try:
                audit_pack(limited, pack)
            except Damaged as damaged:
                self._judge(repository, damaged, needed[pack])
            with contextlib.suppress(OSError, StoreError):
                tier.forget(pack)

    def _judge(self, repository: Repository, damaged: Damaged, commits: list[CommitEntry]) -> None:
        """Damage counts while the run is there and a checkpoint that needs the object still is one: it may have been removed meanwhile."""
        there = {key_of(commit) for commit in repository.visible()}
        steps = tuple(commit.step for commit in commits if key_of(commit) in there)
        if steps and damaged.path not in self._known and repository.is_there() and paths.is_ours(damaged.path):
            self._known.append(damaged.path)
            self._found.append(Finding(damaged.path, damaged.reason, steps))
            self._wake()
