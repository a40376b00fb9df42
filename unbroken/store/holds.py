"""Holds: what writes that are not committed yet own and borrow, so that a collection of the same process leaves it alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from unbroken.core.records import CommitEntry
from unbroken.store.log import Key


@dataclass
class Hold:
    """One write: `own` objects are new, `borrowed` commits hold chunks that it reuses and must still be visible at its commit."""

    step: int
    generation: int
    borrowed: set[Key] = field(default_factory=set)
    own: set[str] = field(default_factory=set)


class Holds:
    """Writes under way and written manifests that wait for their commit; `doomed` are objects that no commit will ever name."""

    def __init__(self) -> None:
        self.doomed: set[str] = set()
        self._under_way: list[Hold] = []
        self._written: dict[str, Hold] = {}

    def begin(self, hold: Hold) -> None:
        """A write starts; until it ends it may borrow from every commit in `hold.borrowed`."""
        self._under_way.append(hold)

    def end(self, hold: Hold, manifest: str | None) -> None:
        """The write ended; with a manifest it waits for its commit, without one it failed and its objects are rubbish."""
        self._under_way.remove(hold)
        if manifest is None:
            self.doomed |= hold.own
        else:
            self._written[manifest] = hold

    @contextmanager
    def keeping(self, key: Key) -> Iterator[None]:
        """Within the block this commit, if it is there, is not withdrawn: somebody copies it."""
        hold = Hold(*key, borrowed={key})
        self.begin(hold)
        try:
            yield
        finally:
            self.end(hold, None)

    def of(self, manifest: str) -> Hold | None:
        """The hold behind a manifest that this process wrote and did not commit yet."""
        return self._written.get(manifest)

    def committed(self, commit: CommitEntry) -> None:
        """The commit's manifests are reachable now; older writes that it passed over never will be."""
        for ref in commit.manifests:
            self._written.pop(ref.path, None)
        stale = [p for p, hold in self._written.items() if hold.generation <= commit.generation and hold.step <= commit.step]
        self.give_up(stale)

    def give_up(self, manifests: Iterable[str]) -> None:
        """These manifests will not be committed."""
        for path in manifests:
            hold = self._written.pop(path, None)
            if hold is not None:
                self.doomed |= hold.own

    def let_go(self) -> None:
        """Another process commits, or gives up, what was written here."""
        self._written.clear()
        self.doomed.clear()

    def borrowed(self) -> set[Key]:
        """Commits that must stay."""
        return {key for hold in self._all() for key in hold.borrowed}

    def own(self) -> set[str]:
        """Objects that must stay though no commit names them."""
        return {path for hold in self._all() for path in hold.own}

    def _all(self) -> list[Hold]:
        return [*self._under_way, *self._written.values()]
