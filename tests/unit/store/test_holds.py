"""Holds: what is written and not committed stays, what will never be committed goes."""

from __future__ import annotations

from unbroken.core.records import CommitEntry, ManifestRef
from unbroken.store.holds import Hold, Holds


def commit(step: int, generation: int, *manifests: str) -> CommitEntry:
    refs = tuple(ManifestRef(path=path, digest="0" * 64, size_bytes=1) for path in manifests)
    return CommitEntry(
        step=step, generation=generation, manifests=refs, state_root="0" * 64, size_bytes=1, journal_head="", journal_lines=0
    )


def written(holds: Holds, step: int, generation: int, manifest: str) -> None:
    hold = Hold(step, generation, borrowed={(step - 1, 0)}, own={manifest, f"pack of {manifest}"})
    holds.begin(hold)
    holds.end(hold, manifest)


def test_a_write_holds_from_its_begin_until_its_commit() -> None:
    holds = Holds()
    hold = Hold(10, 0, borrowed={(5, 0)}, own={"p"})
    holds.begin(hold)
    assert (holds.borrowed(), holds.own()) == ({(5, 0)}, {"p"})
    holds.end(hold, "m")
    assert (holds.borrowed(), holds.own(), holds.of("m")) == ({(5, 0)}, {"p"}, hold)
    holds.committed(commit(10, 0, "m"))
    assert (holds.borrowed(), holds.own(), holds.of("m"), holds.doomed) == (set(), set(), None, set())


def test_a_write_that_failed_is_doomed_at_once() -> None:
    holds = Holds()
    hold = Hold(10, 0, own={"p"})
    holds.begin(hold)
    holds.end(hold, None)
    assert (holds.own(), holds.doomed) == (set(), {"p"})


def test_a_commit_dooms_older_writes_that_it_passed_over_and_no_later_ones() -> None:
    holds = Holds()
    for step, generation in ((10, 0), (20, 0), (30, 0), (15, 1)):
        written(holds, step, generation, f"{step}-{generation}")
    holds.committed(commit(20, 0, "20-0"))
    assert holds.doomed == {"10-0", "pack of 10-0"}
    assert holds.of("30-0") is not None
    assert holds.of("15-1") is not None
