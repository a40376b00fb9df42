"""A trainer's line to its daemon: answers, news in between, refusals by their class, and an end that is seen (I9, I11)."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator

import pytest

from tests.rigs.daemon_end import DaemonEnd, heard_on, line
from unbroken.core import errors
from unbroken.core.errors import SaveWarning, StepLost
from unbroken.core.messages import Bye, Committed, Error, Failed, Hello, Message, Refuse, Slots, Status, StatusReply, Verdict, Welcome
from unbroken.core.os import memory_file
from unbroken.core.ports import SystemClock
from unbroken.recover.link import DaemonLost, Link, raise_error
from unbroken.shm.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Link, Channel]]:
    link, peer = line()
    yield link, peer
    link.close()
    peer.close()


def committed(step: int) -> Committed:
    return Committed(step=step, generation=0, state_root="00", seconds=0.1)


def failed(step: int, text: str = "no space", superseded: bool = False) -> Failed:
    return Failed(step=step, generation=0, text=text, superseded=superseded)


# -- questions and news --------------------------------------------------------------------------------------------------------


def test_an_answer_is_found_behind_the_news_which_are_kept(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    fd = memory_file("test", 4096)
    for message in (committed(3), failed(4, superseded=True), StatusReply(phase="idle", facts={})):
        peer.send(message)
    peer.send(Slots(sizes=(4096,)), [fd])
    answer, fds = link.ask(Status(), Slots)
    assert (answer, len(fds)) == (Slots(sizes=(4096,)), 1)
    assert heard_on(peer) == [Status()]
    assert (link.committed, link.superseded, link.failures) == (committed(3), [failed(4, superseded=True)], [])
    for one in (fd, *fds):
        os.close(one)


def test_I11_an_answer_that_does_not_come_is_a_timeout_whatever_else_arrives(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.send(committed(1))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        link.expect(Verdict, 0.05)
    assert time.monotonic() - began < 5
    assert link.lost is None, "slow is not gone"


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("Fenced", errors.Fenced),
        ("NoCheckpoint", errors.NoCheckpoint),
        ("NewerFormat", errors.NewerFormat),
        ("LayoutMismatch", errors.LayoutMismatch),
        ("SaveFailed", errors.SaveFailed),
        ("ValueError", ValueError),
        ("TypeError", ValueError),
    ],
)
def test_a_refusal_is_raised_as_the_class_that_it_names(ends: tuple[Link, Channel], kind: str, raised: type[Exception]) -> None:
    link, peer = ends
    peer.send(Error(kind=kind, text="process 7 has it", code=4))
    with pytest.raises(raised, match=r"^process 7 has it$") as caught:
        link.ask(Status(), StatusReply)
    assert type(caught.value) is raised


def test_damage_keeps_the_object_and_the_reason() -> None:
    with pytest.raises(errors.Damaged) as caught:
        raise_error(Error(kind="Damaged", text="packs/ab/x.pack: chunk 3: wrong digest", code=1))
    assert (caught.value.path, caught.value.reason) == ("packs/ab/x.pack", "chunk 3: wrong digest")


@pytest.mark.parametrize("kind", ["OSError", "KeyError", "__name__", "annotations", ""])
def test_a_refusal_of_any_other_kind_keeps_its_name_and_exit_code(kind: str) -> None:
    with pytest.raises(errors.UnbrokenError, match=f"^{kind}: broken$") as caught:
        raise_error(Error(kind=kind, text="broken", code=5))
    assert type(caught.value) is errors.UnbrokenError and caught.value.exit_code == 5
    assert errors.UnbrokenError.exit_code == 1, "the class keeps its own"


def test_I9_a_daemon_that_is_gone_is_known_from_then_on(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.send(committed(2))
    peer.close()
    link.poll()
    assert link.committed == committed(2), "its last words count"
    assert link.lost is not None and "gone" in link.lost
    for act in (lambda: link.send(Status()), lambda: link.ask(Status(), StatusReply), lambda: link.expect(Verdict)):
        with pytest.raises(DaemonLost, match="gone"):
            act()
    link.poll()
    link.close()


def test_I9_I11_a_daemon_that_has_stopped_reading_is_as_good_as_gone(ends: tuple[Link, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket fills up; training must not end by that, nor wait at every step."""
    link, _ = ends
    genuine = link._channel.send
    monkeypatch.setattr(link._channel, "send", lambda message, fds=(): genuine(message, fds, timeout_s=0.05))
    with pytest.raises(DaemonLost, match=r"does not read|timed out"):
        for step in range(100_000):
            link.send(failed(step, "x" * 1000))
    assert link.lost is not None


# -- fates of snapshots --------------------------------------------------------------------------------------------------------


def test_I9_each_failed_save_is_one_warning_and_an_overtaken_one_is_none(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    for message in (failed(3), failed(4, superseded=True), failed(5, "broken disk")):
        peer.send(message)
    with pytest.warns(SaveWarning) as caught:
        link.poll()
        link.poll()
    assert [str(w.message) for w in caught] == [
        "checkpoint of step 3 not saved, training goes on: no space",
        "checkpoint of step 5 not saved, training goes on: broken disk",
    ]
    assert ([f.step for f in link.failures], [f.step for f in link.superseded]) == ([3, 5], [4])


@pytest.mark.parametrize("step", [7, 6])
def test_waiting_ends_with_the_news_of_this_step_or_a_later_one(step: int) -> None:
    daemon = DaemonEnd(lambda m: [StatusReply(phase="draining", facts={"last_committed": 5}), committed(7)] if m == Status() else ())
    daemon.link.wait_for_step(step, 10.0)
    daemon.close()


@pytest.mark.parametrize(("known", "returns"), [(7, True), (8, True), (6, False), (None, False), ("7", False)])
def test_a_step_stored_before_we_came_needs_no_news(known: object, returns: bool) -> None:
    daemon = DaemonEnd(lambda m: [StatusReply(phase="idle", facts={"last_committed": known})] if m == Status() else ())
    if returns:
        daemon.link.wait_for_step(7, 0.2)
    else:
        with pytest.raises(errors.SaveFailed, match="step 7 was not durable after 0 s"):
            daemon.link.wait_for_step(7, 0.2)
    daemon.close()


IDLE = StatusReply(phase="idle", facts={})


@pytest.mark.parametrize(
    ("news", "words"),
    [
        ([failed(7, "no space")], "step 7 was not saved: no space"),
        ([failed(7, superseded=True)], "step 7 was overtaken by a newer one"),
        ([committed(6), failed(6), failed(8)], "step 7 was not durable after 0 s"),
        ([], "step 7 was not durable after 0 s"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.filterwarnings("ignore::unbroken.SaveWarning")
def test_I9_a_step_that_will_not_be_durable_raises_the_cause(news: list[Message], words: str, early: bool) -> None:
    """Whether the news came before the question or behind it."""
    daemon = DaemonEnd(lambda m: [*(news if early else []), IDLE, *([] if early else news)] if m == Status() else ())
    with pytest.raises(errors.SaveFailed, match=words):
        daemon.link.wait_for_step(7, 0.3)
    daemon.close()


def test_I9_a_daemon_that_dies_while_its_commit_is_awaited_is_the_cause(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.send(IDLE)
    peer.close()
    with pytest.raises(errors.SaveFailed, match=r"step 7 was not saved: the node daemon has gone"):
        link.wait_for_step(7, 10.0)
    with pytest.raises(errors.SaveFailed, match="the node daemon has gone"):
        link.wait_for_step(8, 10.0)


def test_I11_a_daemon_that_says_nothing_is_waited_for_as_long_as_was_said(ends: tuple[Link, Channel]) -> None:
    began = time.monotonic()
    with pytest.raises(errors.SaveFailed, match="not durable after 0 s"):
        ends[0].wait_for_step(7, 0.1)
    assert time.monotonic() - began < 5


def test_I9_the_end_of_a_run_says_what_was_not_saved_and_raises_nothing(
    ends: tuple[Link, Channel], capsys: pytest.CaptureFixture[str]
) -> None:
    link, peer = ends
    for message in (failed(3), failed(4, superseded=True), failed(9, "broken disk")):
        peer.send(message)
    with pytest.warns(SaveWarning) as caught:
        link.settle((9, False), 0.1, aloud=True)
    assert str(caught[-1].message) == "the checkpoint of step 9 was not saved: broken disk; older checkpoints are untouched"
    assert len(caught) == 3
    said = capsys.readouterr().err
    assert "1 of the snapshots were never on disk" in said
    assert "checkpoints that were not saved: steps 3, 9 (first: no space)" in said


def test_a_run_that_ends_well_or_on_another_rank_is_quiet(ends: tuple[Link, Channel], capsys: pytest.CaptureFixture[str]) -> None:
    link, peer = ends
    peer.send(failed(4, superseded=True))
    peer.send(committed(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        link.settle((9, False), 0.1, aloud=False)
        link.settle(None, 0.1, aloud=False)
    assert capsys.readouterr().err == ""


# -- retry and goodbye ---------------------------------------------------------------------------------------------------------

REFUSE = Refuse(generation=1, step=4, attempt=0, rank=0, reason="connection closed")


def test_I8_a_verdict_to_try_again_says_which_attempt_is_next(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.send(Verdict(retry=True, attempt=3, reason=""))
    assert link.retry(REFUSE, RuntimeError("x")) == 3
    assert heard_on(peer) == [REFUSE]


def test_I8_a_verdict_to_leave_ends_the_process_with_both_reasons(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.send(Verdict(retry=False, attempt=0, reason="rank 2 has applied it"))
    cause = RuntimeError("connection closed")
    with pytest.raises(StepLost, match=r"step 4 cannot be tried again in place: rank 2 has applied it \(connection closed\)") as caught:
        link.retry(REFUSE, cause)
    assert caught.value.__cause__ is cause


def test_I8_without_a_daemon_there_is_no_verdict_and_no_retry(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    peer.close()
    with pytest.raises(StepLost, match=r"step 4 was refused \(x\) and the daemon gave no verdict \(.*gone"):
        link.retry(REFUSE, RuntimeError("x"))


def test_a_link_says_goodbye_and_may_do_so_twice(ends: tuple[Link, Channel]) -> None:
    link, peer = ends
    link.close()
    assert heard_on(peer) == [Bye()]
    link.close()


def test_a_daemon_that_ends_before_it_answers_makes_way_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is started again just when the daemon of the one before has decided to end."""
    from unbroken.recover import link as module

    class Answers:
        def __init__(self, answer: object) -> None:
            self.answer, self.is_closed = answer, False

        def send(self, *_: object) -> None:
            pass

        def receive(self, _: float) -> tuple[object, list[int]]:
            if self.answer is None:
                raise ConnectionError("the other end of the channel is gone")
            return self.answer, []

        def close(self) -> None:
            self.is_closed = True

    made = [Answers(None), Answers(None), Answers(Welcome(pid=1, directory="/run"))]
    waiting = iter(made)
    monkeypatch.setattr(module, "connect", lambda *_: next(waiting))
    hello = Hello(role="worker", pid=1, rank=0, world_size=1)
    assert Link.open("/run", hello, SystemClock(), start=True)._channel is made[2]
    assert [one.is_closed for one in made] == [True, True, False]
    waiting = iter([Answers(None)])
    with pytest.raises(DaemonLost):
        Link.open("/run", hello, SystemClock(), start=False)
