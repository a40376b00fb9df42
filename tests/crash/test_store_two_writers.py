"""Two jobs on one folder: the lease refuses the second; without it the log still lets only one of them be seen."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from tests.rigs.store_child import in_child
from tests.rigs.store_run import load, newest_good, start, state
from unbroken.core.errors import Damaged, Fenced, NoCheckpoint, Transient
from unbroken.core.os import boot_id, hostname
from unbroken.core.ports import SystemNonces
from unbroken.core.records import Writer
from unbroken.store.lease import WriterLease
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


def job(root: str, value: int, use_lease: bool, say: Callable[[str], None]) -> None:
    """Save 50 steps of a state of which every element is `value`."""
    try:
        lease = None
        if use_lease:
            lease = WriterLease.acquire(root, Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now"))
        trainer = start(DiskTier(root), nonces=SystemNonces())
        for step in range(1, 51):
            trainer.save(step, logical=state(value))
            trainer.collect(3)
        say("done")
        del lease
    except (Fenced, Transient, NoCheckpoint) as e:
        say(f"{type(e).__name__} {e}")


def two_jobs(root: Path, use_lease: bool) -> tuple[list[str], set[int]]:
    """What the two jobs said, and every value that a third party saw while they ran; a load is one value or an error."""
    said: list[str] = []
    seen: set[int] = set()
    threads = [threading.Thread(target=lambda v=v: said.extend(in_child(lambda say: job(str(root), v, use_lease, say))[0])) for v in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        look(root, seen)
    look(root, seen)
    return said, seen


def look(root: Path, seen: set[int]) -> None:
    try:
        repository = Repository.open(DiskTier(str(root)))
        commit = repository.visible()[-1]
    except (NoCheckpoint, IndexError):
        return
    try:
        pieces = load(repository, commit)
    except Damaged:
        repository.refresh()
        assert commit not in repository.visible(), "a visible checkpoint could not be read"
        return
    seen.add(one_value(pieces))


def one_value(pieces: dict[str, bytes]) -> int:
    k = int.from_bytes(pieces["/step"], "little")
    assert dict(pieces) == {part.piece.pointer: bytes(part.data) for part in state(k)}, "two states were mixed"
    return k


def test_B12_a_the_second_job_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    said, seen = two_jobs(tmp_path / "run", use_lease=True)
    assert sorted(line.split()[0] for line in said) in (["Fenced", "done"], ["done", "done"])
    for line in said:
        assert line == "done" or f"on {hostname()} (since now)" in line or "just taking" in line
    assert seen <= {1, 2}
    assert seen
    assert Repository.open(DiskTier(str(tmp_path / "run"))).verify().ok


def test_B12_a_I6_without_a_lease_every_load_is_still_one_jobs_state(tmp_path: Path) -> None:
    root = tmp_path / "run"
    said, seen = two_jobs(root, use_lease=False)
    assert len(said) == 2
    assert "done" in said
    assert seen <= {1, 2}
    repository = Repository.open(DiskTier(str(root)))
    commit, pieces, passed_over = newest_good(repository)
    assert (commit.step, passed_over) == (50, [])
    assert one_value(pieces) in (1, 2)
    report = repository.verify()
    assert report.ok, report.bad
