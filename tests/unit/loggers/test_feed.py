"""A sink is fed from committed steps only, gets what it lacks after anything, and its failure is told but never raised."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.synthetic_run import SyntheticRun, interrupted
from tests.rigs.torture_runs import wait_until
from unbroken.core.errors import NoCheckpoint
from unbroken.loggers.choose import Target
from unbroken.loggers.feed import Feed, complete
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo
from unbroken.store.tiers.disk import DiskTier


class Remembering:
    """A sink in memory that fails when it is told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.opened: list[RunInfo] = []
        self.num_closed = 0
        self.fail = ""
        self.may_go = threading.Event()
        self.may_go.set()

    def open(self, run: RunInfo) -> int:
        self.opened.append(run)
        if self.fail == "open":
            raise RuntimeError("no server")
        return self.steps[-1] if self.steps else 0

    def write(self, rows: Sequence[Row]) -> None:
        self.may_go.wait(30)
        for row in rows:
            if self.fail == f"write {row.step}":
                raise RuntimeError("disk full")
            self.steps.append(row.step)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    """Three steps, committed, and two more that are not."""
    one = SyntheticRun(DiskTier(str(tmp_path)))
    one.begin()
    one.train(3)
    one.save()
    one.train(2)
    one.journal.sync()
    return one


@pytest.fixture
def sink() -> Remembering:
    return Remembering()


def feed_of(folder: Path, sink: Remembering, step: int = 0) -> Feed:
    return Feed(Target("own", own=sink), RunInfo("run", str(folder), step))


def end(feed: Feed) -> str:
    feed.finish()
    return feed.join(30)


def test_I8_a_sink_gets_what_is_committed_and_nothing_else(tmp_path: Path, run: SyntheticRun, sink: Remembering) -> None:
    feed = feed_of(tmp_path, sink)
    feed.wake()
    wait_until(lambda: sink.steps == [1, 2, 3], 20, "the committed steps")
    run.save()
    feed.wake()
    wait_until(lambda: sink.steps == [1, 2, 3, 4, 5], 20, "the next ones")
    assert end(feed) == ""
    assert (sink.opened, sink.num_closed) == ([RunInfo("run", str(tmp_path), 3)], 1)


def test_an_end_without_a_wake_completes_what_an_earlier_process_left_open(tmp_path: Path, run: SyntheticRun, sink: Remembering) -> None:
    sink.steps = [1]
    feed = feed_of(tmp_path, sink, step=5)
    assert not feed.is_awake
    assert end(feed) == ""
    assert sink.steps == [1, 2, 3]
    assert sink.opened[0].step == 5, "from memory, beyond what is committed"


@pytest.mark.parametrize(("fail", "so_far"), [("open", []), ("write 2", [1])])
def test_I9_a_sink_that_fails_is_tried_again_at_the_next_commit_and_catches_up(
    tmp_path: Path, run: SyntheticRun, sink: Remembering, fail: str, so_far: list[int]
) -> None:
    sink.fail = fail
    feed = feed_of(tmp_path, sink)
    feed.wake()
    wait_until(lambda: feed.failure, 20, "the failure")
    assert feed.failure.startswith("RuntimeError: ")
    assert (sink.steps, sink.num_closed) == (so_far, 1)
    sink.fail = ""
    run.save()
    feed.wake()
    wait_until(lambda: sink.steps == [1, 2, 3, 4, 5], 20, "what it lacked")
    assert end(feed) == ""
    assert len(sink.opened) == 2


def test_I9_a_sink_that_still_fails_at_the_end_is_named_with_what_it_holds(tmp_path: Path, run: SyntheticRun, sink: Remembering) -> None:
    sink.fail = "open"
    assert end(feed_of(tmp_path, sink)) == "Remembering holds steps up to 0: RuntimeError: no server"


def test_I11_a_sink_that_hangs_is_left_behind(tmp_path: Path, run: SyntheticRun, sink: Remembering) -> None:
    sink.may_go.clear()
    feed = feed_of(tmp_path, sink)
    feed.wake()
    feed.finish()
    assert feed.join(0.2) == "Remembering was not done in time and holds steps up to 0"
    sink.may_go.set()
    assert feed.join(30) == ""


def test_I6_another_runs_rows_do_not_come_into_a_sink(tmp_path: Path, run: SyntheticRun, sink: Remembering) -> None:
    feed = Feed(Target("own", own=sink), RunInfo("another", str(tmp_path), 0))
    assert "the run folder has been replaced by another run's" in end(feed)
    assert sink.opened == []


def test_a_run_that_is_over_gives_any_sink_all_its_steps(tmp_path: Path, sink: Remembering) -> None:
    interrupted(DiskTier(str(tmp_path / "run")))
    assert complete(Target("own", own=sink), str(tmp_path / "run")) == (0, 12)
    assert sink.steps == list(range(1, 13))
    assert complete(Target("own", own=sink), str(tmp_path / "run")) == (12, 12)
    sink.fail = "open"
    with pytest.raises(RuntimeError, match="no server"):
        complete(Target("own", own=sink), str(tmp_path / "run"))
    assert sink.num_closed == 3
    with pytest.raises(NoCheckpoint, match="nowhere: no run here"):
        complete(Target("own", own=sink), str(tmp_path / "nowhere"))
