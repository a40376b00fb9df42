"""A trainer's line to its node daemon: questions with one answer each, and news that arrive unasked."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from typing import TypeVar

from unbroken.core import errors
from unbroken.core.errors import CheckpointWarning, SaveWarning, StepLost
from unbroken.core.limits import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S
from unbroken.core.messages import (
    Bye,
    Committed,
    DamageFound,
    Error,
    Failed,
    Hello,
    Leaving,
    Message,
    Refuse,
    Status,
    StatusReply,
    Verdict,
    Welcome,
)
from unbroken.core.ports import Clock
from unbroken.core.records import MAIN_LINEAGE
from unbroken.shm.channel import Channel, connect

MAX_STEPS_NAMED = 64
"""Of the checkpoints that were not saved; the rest is counted."""

M = TypeVar("M")


ENDING_S = 0.05
"""A daemon that does not answer any more ends within milliseconds."""


class DaemonLost(errors.UnbrokenError):
    """The node daemon has gone; training can go on, but nothing is saved until it is back."""


def raise_error(error: Error) -> None:
    """Raise the daemon's refusal as the class that it names."""
    kind = getattr(errors, error.kind, None)
    if kind is errors.Damaged:
        path, _, reason = error.text.partition(": ")
        raise errors.Damaged(path, reason)
    if isinstance(kind, type) and issubclass(kind, errors.UnbrokenError):
        raise kind(error.text)
    if error.kind in ("ValueError", "TypeError"):
        raise ValueError(error.text)
    failed = errors.UnbrokenError(f"{error.kind}: {error.text}")
    failed.exit_code = error.code
    raise failed


class Link:
    """One connection. Not thread-safe: the training thread owns it."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self.committed: Committed | None = None
        self.failures: list[Failed] = []
        self.superseded: list[Failed] = []
        self.poison, self.poisoned_step = "", 0
        self._newest: dict[bool, int] = {}
        self._refusal = ""
        self.lost: str | None = None

    @classmethod
    def open(cls, directory: str, hello: Hello, clock: Clock, *, start: bool, lineage: str = MAIN_LINEAGE) -> Link:
        """Connect to the daemon of this lineage of the folder, starting it where `start`; raises what the daemon says against it.

        One that was just ending, and has gone before it could answer, makes way for the next one.
        """
        deadline_s = clock.monotonic() + CONNECT_TIMEOUT_S
        while True:
            link = cls(connect(directory, start, lineage), clock)
            try:
                link.ask(hello, Welcome)
                return link
            except DaemonLost:
                link.close()
                if not start or clock.monotonic() >= deadline_s:
                    raise
            clock.sleep(ENDING_S)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send without waiting for an answer. DaemonLost when nobody is there, or nobody has read for REPLY_TIMEOUT_S."""
        try:
            self._channel.send(message, fds)
        except (ConnectionError, TimeoutError) as error:
            self.lost = f"the node daemon has gone: {error}"
            raise DaemonLost(self.lost) from error

    def ask(self, message: Message, answer: type[M] | tuple[type[M], ...], timeout_s: float = REPLY_TIMEOUT_S) -> tuple[M, list[int]]:
        """Send, then wait for an answer of this type; news that come before it are kept. Descriptors come with it."""
        self.send(message)
        return self.expect(answer, timeout_s)

    def expect(self, answer: type[M] | tuple[type[M], ...], timeout_s: float = REPLY_TIMEOUT_S) -> tuple[M, list[int]]:
        """Wait for a message of this type, or of one of these. Raises what an `Error` names, DaemonLost, TimeoutError."""
        end = self._clock.monotonic() + timeout_s
        while True:
            message, fds = self._receive(max(0.0, end - self._clock.monotonic()))
            if isinstance(message, answer):
                return message, fds
            if isinstance(message, Error):
                raise_error(message)
            self._note(message)

    def retry(self, refuse: Refuse, why: Exception) -> int:
        """Ask whether a refused step may be tried again in place: the number of the next attempt, else StepLost."""
        try:
            verdict, _ = self.ask(refuse, Verdict)
        except (DaemonLost, TimeoutError) as lost:
            raise StepLost(f"step {refuse.step} was refused ({why}) and the daemon gave no verdict ({lost})") from why
        if not verdict.retry:
            raise StepLost(f"step {refuse.step} cannot be tried again in place: {verdict.reason} ({why})") from why
        return verdict.attempt

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends, as far as somebody listens."""
        with contextlib.suppress(OSError, errors.UnbrokenError):
            self.send(Leaving(text=errors.describe(error)))

    def forget_poison(self) -> None:
        """What was told of poisoned snapshots concerns this run no more."""
        self.poison, self.poisoned_step = "", 0
        self.failures = [failure for failure in self.failures if not failure.poisoned]

    def poll(self) -> None:
        """Take in what has arrived, without waiting. A failed save becomes one warning."""
        while self.lost is None:
            try:
                message, _ = self._receive(0.0)
            except (TimeoutError, DaemonLost):
                return
            self._note(message)

    def wait_for_step(self, step: int, timeout_s: float, *, milestone: bool = False) -> None:
        """Wait until the checkpoint of `step` is visible and durable, as a milestone if so asked. SaveFailed with the cause otherwise."""
        end = self._clock.monotonic() + timeout_s
        self.poll()
        if self.lost is None and self._stored_before(step, milestone, timeout_s):
            return
        while True:
            self.poll()
            if self._newest.get(milestone, -1) >= step:
                return
            for failure in self.failures:
                if (failure.step, failure.milestone) == (step, milestone):
                    raise errors.SaveFailed(f"the checkpoint of step {step} was not saved: {failure.text}")
            if any((overtaken.step, overtaken.milestone) == (step, milestone) for overtaken in self.superseded):
                raise errors.SaveFailed(f"the checkpoint of step {step} was overtaken by a newer one before it was durable")
            refused = self.lost or self._refusal
            if refused:
                raise errors.SaveFailed(f"the checkpoint of step {step} was not saved: {refused}")
            left = end - self._clock.monotonic()
            if left <= 0:
                raise errors.SaveFailed(f"the checkpoint of step {step} was not durable after {timeout_s:.0f} s")
            try:
                message, _ = self._receive(min(left, 1.0))
            except (TimeoutError, DaemonLost):
                continue
            self._note(message)

    def knows_milestone(self, step: int) -> bool:
        """Has it been told what became of the milestone of this step? Cost: 1 us."""
        told = (failed.step for failed in (*self.failures, *self.superseded) if failed.milestone)
        return self._newest.get(True, -1) >= step or step in told

    def _stored_before(self, step: int, milestone: bool, timeout_s: float) -> bool:
        """Was it committed before we came, so that no news of it will arrive?"""
        fact = "last_milestone" if milestone else "last_committed"
        try:
            committed = self.ask(Status(), StatusReply, min(timeout_s, REPLY_TIMEOUT_S))[0].facts.get(fact)
        except (DaemonLost, TimeoutError):
            return False
        return isinstance(committed, int) and committed >= step

    def settle(self, last: tuple[int, bool] | None, timeout_s: float, *, aloud: bool) -> None:
        """At the end of a run: wait for its last snapshot, (step, milestone), then say what was not saved.

        Warnings only: the run itself has ended well.
        """
        try:
            if last is not None and self.lost is None:
                self.wait_for_step(last[0], timeout_s, milestone=last[1])
        except errors.SaveFailed as error:
            warnings.warn(f"{error}; older checkpoints are untouched", SaveWarning, stacklevel=4)
        if self.superseded and aloud:
            print(
                f"unbroken: {len(self.superseded)} of the snapshots were never on disk, because a newer one came before they were written: "
                "a larger lose_at_most makes fewer",
                file=sys.stderr,
            )
        if self.failures and aloud:
            steps = ", ".join(str(f.step) for f in self.failures[:MAX_STEPS_NAMED])
            more = f" and {len(self.failures) - MAX_STEPS_NAMED} more" if len(self.failures) > MAX_STEPS_NAMED else ""
            print(f"unbroken: checkpoints that were not saved: steps {steps}{more} (first: {self.failures[0].text})", file=sys.stderr)

    def close(self) -> None:
        """Say goodbye; harmless when the daemon has gone."""
        with contextlib.suppress(OSError):  # nobody may be there to be told
            self._channel.send(Bye(), ())
        self._channel.close()
        self.lost = self.lost or "the connection to the node daemon is closed"

    def _receive(self, timeout_s: float) -> tuple[Message, list[int]]:
        try:
            message, fds = self._channel.receive(timeout_s)
        except ConnectionError as error:
            self.lost = f"the node daemon has gone: {error}"
            raise DaemonLost(self.lost) from error
        return message, list(fds)

    def _note(self, message: Message) -> None:
        if isinstance(message, Committed):
            self.committed = message
            self._newest[False] = message.step
            if message.milestone:
                self._newest[True] = message.step
        elif isinstance(message, Failed) and message.superseded:
            self.superseded.append(message)
        elif isinstance(message, Failed):
            self.failures.append(message)
            if message.poisoned:  # the run goes back, and says so
                if not self.poison or message.step < self.poisoned_step:
                    self.poison, self.poisoned_step = message.text, message.step
                return
            warnings.warn(f"checkpoint of step {message.step} not saved, training goes on: {message.text}", SaveWarning, stacklevel=4)
        elif isinstance(message, DamageFound):
            text = f"a stored checkpoint is damaged, training goes on, and the next start passes it over: {message.text}"
            warnings.warn(text, CheckpointWarning, stacklevel=4)
        elif isinstance(message, Error):  # nobody waits for it: a snapshot or a journal record was refused
            self._refusal = f"{message.kind}: {message.text}"
            warnings.warn(f"the node daemon refused what this rank sent, training goes on: {self._refusal}", SaveWarning, stacklevel=4)
