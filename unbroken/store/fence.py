"""Who may write what: pure rules over the log's state, asked again after every lost slot (I6).

`opened` is the generation that the asking process opened, None for none; `basis` the newest generation it knew when it last looked.
"""

from __future__ import annotations

from typing import NamedTuple

from unbroken.core.errors import Fenced, Transient
from unbroken.core.records import CommitEntry, LogState, Manifest
from unbroken.store.log import Key, branch_of, key_of, newest_number, reach, visible


class Base(NamedTuple):
    """What a new generation continues from."""

    source: str
    step: int
    root: str


def check_writer(state: LogState, manifest: Manifest, opened: int | None) -> None:
    """May this snapshot be committed? Raises Fenced.

    Writers of the newest generation may; and who opened that one may also commit what its ancestors froze up to their child's base, since
    it is their only heir.
    """
    name = f"step {manifest.step} of generation {manifest.generation} is not committed"
    if (manifest.generation, manifest.nonce) not in {(g.number, g.nonce) for g in state.generations}:
        raise Fenced(f"{name}: the log knows no such generation")
    newest = newest_number(state)
    if newest not in (manifest.generation, opened):
        raise Fenced(f"{name}: generation {newest} was opened meanwhile")
    if manifest.step > reach(state).get(manifest.generation, -1):
        raise Fenced(f"{name}: the lineage of generation {newest} left it behind before that step")


def check_borrowed(state: LogState, step: int, borrowed: set[Key]) -> None:
    """Are the commits whose chunks a snapshot reuses still there? Raises Transient."""
    lost = borrowed - {key_of(c) for c in visible(state)}
    if lost:
        raise Transient(f"step {step} reuses chunks of step {min(lost)[0]}, which was withdrawn meanwhile: write it again")


def check_base(state: LogState, base: Base, basis: int, seen: tuple[CommitEntry, ...]) -> None:
    """May a generation be opened on this base, chosen when `seen` was visible? Raises Transient when the choice has to be made again."""
    newest, now = newest_number(state), visible(state)
    if base.source == "branch":
        branch = branch_of(state)
        if branch is not None and not now and (base.step, base.root) == (branch.step, branch.state_root):
            return
        text = "this lineage has been begun meanwhile"
    elif base.source == "disk":
        if (base.step, base.root) in {(c.step, c.state_root) for c in now}:
            return
        text = f"the checkpoint of step {base.step} is no longer visible"
    elif base.source not in ("fresh", "memory"):
        raise ValueError(f"source {base.source!r}: one of 'fresh', 'memory', 'disk', 'branch'")
    elif newest != basis:
        text = f"generation {newest} was opened meanwhile"
    elif base.source == "fresh" and now != seen:
        text = "a checkpoint was committed meanwhile"
    else:
        return
    raise Transient(f"{text}: choose again where to start")


def check_basis(state: LogState, basis: int, what: str) -> None:
    """Raises Fenced when a generation was opened since the asking process looked."""
    newest = newest_number(state)
    if newest != basis:
        raise Fenced(f"generation {newest} was opened meanwhile: {what}, look again")


def check_collector(state: LogState, opened: int | None) -> None:
    """May this process delete? Raises Fenced unless it opened the newest generation."""
    newest = newest_number(state)
    if opened is None or newest != opened:
        mine = "has opened no generation" if opened is None else f"opened generation {opened}"
        raise Fenced(f"only the writer of the newest generation may delete: generation {newest} exists, this process {mine}")
