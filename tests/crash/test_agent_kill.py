"""The daemon is killed at random moments while snapshots come in; what it had called committed is there afterwards, whole."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.fake_trainer import FakeJob, daemon_pid, hang_up, kill, open_run, run_folder
from unbroken.core import messages as m

NUM_KILLS = 8


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with run_folder(tmp_path, monkeypatch) as folder:
        yield folder


def train_until(job: FakeJob, end_s: float) -> int:
    """Train and take snapshots without waiting for them; the newest step that was reported as committed."""
    committed = -1
    while time.monotonic() < end_s:
        job.train(1)
        for rank in job.ranks:
            rank.ready(job.step)
        for rank in job.ranks:
            assert rank.channel is not None
            while rank.channel.wait(0.0):
                message, _ = rank.channel.receive(0.0)
                assert not isinstance(message, m.Error)
                committed = max(committed, message.step if isinstance(message, m.Committed) else -1)
        time.sleep(0.002)
    return committed


@pytest.mark.timeout(180)
def test_I1_I9_what_was_called_committed_survives_a_kill_at_any_moment(directory: str) -> None:
    rng = random.Random(11)
    promised = -1
    for _ in range(NUM_KILLS):
        job = FakeJob(directory, 2)
        plan = job.start()
        assert plan.step >= promised
        assert plan.source == "disk" or promised == -1
        promised = max(promised, train_until(job, time.monotonic() + rng.uniform(0.05, 0.5)))
        kill(daemon_pid(directory))
        hang_up()
    assert promised > 0
    report = open_run(directory).verify()
    assert report.ok, report.bad


@pytest.mark.timeout(180)
def test_I4_I5_a_cut_is_in_memory_after_the_trainers_end_at_any_moment(directory: str) -> None:
    rng = random.Random(12)
    newest = -1
    for _ in range(NUM_KILLS):
        job = FakeJob(directory, 2)
        plan = job.start()
        assert plan.step >= newest
        assert plan.source == "memory" or newest == -1
        train_until(job, time.monotonic() + rng.uniform(0.02, 0.2))
        newest = min(max((slot.step for slot in rank.slots if slot.is_ready), default=-1) for rank in job.ranks)
        interrupted = rng.choice(job.ranks)
        slot = next((slot for slot in interrupted.slots if not slot.is_ready and not slot.held), None)
        if slot is not None:
            slot.begin(interrupted.index(job.step + 1)).release()
        hang_up()
    assert newest > 0
