"""The choice of a start, as a table."""

from __future__ import annotations

import pytest

from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.messages import SlotSource
from unbroken.core.records import CommitEntry, CondemnEntry, Generation, LogState, ManifestRef
from unbroken.daemon.plan import Key, MemoryCut, Resume, choose, lineage

ROOT = "0" * 64


def generation(number: int, parent: int | None, base_step: int) -> Generation:
    return Generation(number=number, parent=parent, base_step=base_step, nonce="n", world_size=2)


def commit(step: int, generation: int = 0) -> CommitEntry:
    ref = ManifestRef(path=f"manifests/{step}.json", digest=ROOT, size_bytes=1)
    return CommitEntry(
        step=step, generation=generation, manifests=(ref,), state_root=ROOT, size_bytes=1, journal_head=ROOT, journal_lines=1
    )


def cut(step: int, generation: int = 0) -> MemoryCut:
    return MemoryCut(
        generation=generation, step=step, world_size=2, slots=(SlotSource(rank=0, slot=step), SlotSource(rank=1, slot=step + 1))
    )


def state(*generations: Generation, commits: tuple[CommitEntry, ...] = (), condemned: tuple[CondemnEntry, ...] = ()) -> LogState:
    return LogState(generations=generations, commits=commits, condemned=condemned)


ONE = state(generation(0, None, 0), commits=(commit(10), commit(20)))
TWO = state(generation(0, None, 0), generation(1, 0, 12), commits=(commit(10),))


@pytest.mark.parametrize(
    ("memory", "commits", "log", "expected"),
    [
        ([cut(30)], [commit(10), commit(20)], ONE, ("memory", 30, 0)),
        ([cut(20)], [commit(10), commit(20)], ONE, ("memory", 20, 0)),
        ([cut(15)], [commit(10), commit(20)], ONE, ("disk", 20, 0)),
        ([], [commit(10), commit(20)], ONE, ("disk", 20, 0)),
        ([cut(30), cut(25)], [], ONE, ("memory", 30, 0)),
        ([cut(25), cut(30)], [], ONE, ("memory", 30, 0)),
        # Beyond the base of its child, or of a generation that is nobody's ancestor: it never happened.
        ([cut(15, generation=0)], [commit(10)], TWO, ("disk", 10, 0)),
        ([cut(12, generation=0)], [commit(10)], TWO, ("memory", 12, 0)),
        ([cut(13, generation=1)], [commit(10)], TWO, ("memory", 13, 1)),
        ([cut(99, generation=7)], [commit(10)], TWO, ("disk", 10, 0)),
        ([], [], None, ("fresh", 0, 0)),
        ([], [], state(generation(0, None, 0)), ("fresh", 0, 0)),
    ],
)
def test_the_newest_step_wins_and_memory_wins_at_the_same_step(
    memory: list[MemoryCut], commits: list[CommitEntry], log: LogState | None, expected: Key
) -> None:
    choice, reason = choose(memory, commits, "auto", {}, state=log)
    assert choice.key == expected
    assert reason


@pytest.mark.parametrize(
    ("at_most", "expected"),
    [
        (None, ("memory", 30, 0)),
        (30, ("memory", 30, 0)),
        (29, ("disk", 20, 0)),
        (20, ("disk", 20, 0)),
        (19, ("memory", 15, 0)),
        (14, ("disk", 10, 0)),
    ],
)
def test_B38_who_goes_back_gets_nothing_newer_than_asked_for(at_most: int | None, expected: Key) -> None:
    choice, _ = choose([cut(30), cut(15)], [commit(10), commit(20)], "must", {}, state=ONE, at_most=at_most)
    assert choice.key == expected


def test_B38_nothing_old_enough_to_go_back_to_is_said() -> None:
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 9 or an earlier one is left to go back to"):
        choose([cut(30)], [commit(10), commit(20)], "must", {}, state=ONE, at_most=9)


def test_a_bad_source_is_passed_over_and_named() -> None:
    exclude: dict[Key, str] = {("memory", 20, 0): "its index is torn"}
    choice, _ = choose([cut(20)], [commit(10), commit(20)], "auto", exclude, state=ONE)
    assert choice.key == ("disk", 20, 0)
    assert "its index is torn" in choice.notes[0]
    exclude["disk", 20, 0] = "pack x changed"
    choice, _ = choose([cut(20)], [commit(10), commit(20)], "auto", exclude, state=ONE)
    assert choice.key == ("disk", 10, 0)
    assert len(choice.notes) == 2


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_I10_a_run_whose_checkpoints_are_all_bad_is_never_started_afresh(resume: Resume) -> None:
    exclude: dict[Key, str] = {("disk", 10, 0): "pack x changed", ("disk", 20, 0): "manifest y is missing"}
    with pytest.raises(NoCheckpoint) as caught:
        choose([], [commit(10), commit(20)], resume, exclude, state=ONE)
    assert "step 10 of generation 0 (disk): pack x changed" in str(caught.value)
    assert "step 20 of generation 0 (disk): manifest y is missing" in str(caught.value)


def test_I10_condemned_checkpoints_still_forbid_a_fresh_start() -> None:
    gone = CondemnEntry(step=20, generation=0, objects=("packs/x",), reason="digest differs")
    with pytest.raises(NoCheckpoint, match=r"step 20 of generation 0 .*condemned: digest differs"):
        choose([], [], "auto", {}, state=state(generation(0, None, 0), condemned=(gone,)))


def test_I10_must_needs_a_checkpoint_unless_none_was_promised_to_a_restart() -> None:
    with pytest.raises(NoCheckpoint, match="right folder"):
        choose([], [], "must", {}, state=None)
    with pytest.raises(NoCheckpoint, match="right folder"):
        choose([], [], "must", {}, state=state(generation(0, None, 0)))
    with pytest.raises(NoCheckpoint, match="restart 2"):
        choose([], [], "auto", {}, state=None, restart_count=2)
    choice, _ = choose([], [], "auto", {}, state=None, restart_count=2, witnessed=True)
    assert choice.source == "fresh"
    choice, _ = choose([], [], "auto", {}, state=state(generation(0, None, 0)), restart_count=2)
    assert choice.source == "fresh"
    assert "never made a checkpoint" in choice.notes[0]


def test_I10_a_fresh_start_is_always_said() -> None:
    choice, reason = choose([], [], "auto", {}, state=None)
    assert "fresh" in choice.notes[0]
    assert "fresh" in reason


def test_never_refuses_a_folder_with_a_run() -> None:
    assert choose([], [], "never", {}, state=None)[0].source == "fresh"
    with pytest.raises(Refused, match="run exists"):
        choose([], [], "never", {}, state=state(generation(0, None, 0)))


def test_the_lineage_counts_ancestors_up_to_the_lowest_base_on_the_way() -> None:
    log = state(generation(0, None, 0), generation(1, 0, 12), generation(2, 1, 8), generation(3, 0, 4))
    assert lineage(log) == {3: None, 0: 4}
    assert lineage(state(*log.generations[:3])) == {2: None, 1: 8, 0: 8}
    assert lineage(None) == {}
