"""The catalog: what may be referenced again, and from which commit."""

from __future__ import annotations

import struct
from functools import cache

import pytest

from tests.rigs.store_run import WRITER, CountedNonces, StillClock, flipped, part, start, state
from unbroken.core.errors import Transient
from unbroken.core.records import CommitEntry, LogState, Manifest, ManifestRef
from unbroken.store.catalog import Catalog, condemned_objects
from unbroken.store.journal import first_chain
from unbroken.store.log import Key, Log
from unbroken.store.repository import Repository
from unbroken.store.tiers.memory import MemoryTier


def two_that_share() -> MemoryTier:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20, value=10, logical=state(10))
    return tier


def known(tier: MemoryTier, state: LogState, elsewhere: tuple[str, ...] = ()) -> set[Key]:
    """From which commits the chunks of `two_that_share` may be used."""
    commits = Log.open(two_that_share_once()).state.commits
    ids = {chunk.ref.id for commit in commits for chunk in Catalog(two_that_share_once()).chunks(commit)}
    index = Catalog(tier).index(state, lambda: elsewhere)
    found = [(chunk_id, index.get(chunk_id)) for chunk_id in ids]
    assert all(one is None or one.chunk.ref.id == chunk_id for chunk_id, one in found)
    return {one.key for _, one in found if one is not None}


@cache
def two_that_share_once() -> MemoryTier:
    return two_that_share()


def test_a_chunk_is_known_from_the_newest_commit_that_holds_it() -> None:
    tier = two_that_share()
    assert known(tier, Log.open(tier).state) == {(20, 0)}


def test_chunks_in_condemned_short_or_missing_packs_are_not_known() -> None:
    tier = two_that_share()
    log = Log.open(tier)
    (pack,) = tier.list("packs")
    short = MemoryTier(tuple((p, d[:4100] if p == pack else d) for p, d in tier.snapshot()))
    gone = MemoryTier(tuple((p, d) for p, d in tier.snapshot() if p != pack))
    for hurt in (short, gone):
        assert known(hurt, log.state) == set()
    trainer = start(tier)
    trainer.repository.condemn(20, 0, [pack], "bad", writer=WRITER, clock=StillClock())
    assert condemned_objects(trainer.repository.log.state) == {pack}
    assert known(tier, trainer.repository.log.state) == set()


def test_a_commit_whose_manifest_is_damaged_adds_nothing_and_stops_nothing() -> None:
    tier = two_that_share()
    newest = Log.open(tier).state.commits[-1]
    assert known(flipped(tier, newest.manifests[0].path), Log.open(tier).state) == {(10, 0)}


def test_manifests_are_read_once_and_forgotten_on_demand() -> None:
    class Counting(MemoryTier):
        reads = 0

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            self.reads += 1
            return super().read(path, offset, length)

    tier = Counting(two_that_share().snapshot())
    first, second = Log.open(tier).state.commits
    catalog = Catalog(tier)
    tier.reads = 0
    for _ in range(3):
        catalog.chunks(first)
        catalog.packs(second)
    assert tier.reads == 2
    catalog.forget_others({(10, 0)})
    catalog.chunks(first)
    assert tier.reads == 2
    catalog.chunks(second)
    assert tier.reads == 3


class Asked(MemoryTier):
    """Counts what it is asked, by call."""

    def __init__(self, tier: MemoryTier) -> None:
        super().__init__(tier.snapshot())
        self.asked: list[str] = []

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.asked.append(f"read {path}")
        return super().read(path, offset, length)

    def size(self, path: str) -> int:
        self.asked.append(f"size {path}")
        return super().size(path)

    def folders(self, prefix: str) -> list[str]:
        self.asked.append(f"folders {prefix}")
        return super().folders(prefix)


def node_write(repository: Repository, step: int, node: int, value: int) -> tuple[Manifest, ManifestRef]:
    """A share of one node of 20, each of which has one rank."""
    generation = repository.log.state.generations[-1]
    own = {node: [part("/w", b"%d" % node + struct.pack("<q", value) * 20_000, scope="rank")]}
    return repository.write(
        step=step, generation=generation.number, nonce=generation.nonce, node=node, world_size=20, logical=state(1), per_rank=own
    )


def commit_all(repository: Repository, written: list[tuple[Manifest, ManifestRef]]) -> CommitEntry:
    generation = repository.log.state.generations[-1]
    head = first_chain(generation.number, generation.nonce)
    return repository.commit(manifests=written, milestone=False, journal_head=head, journal_lines=0, writer=WRITER, clock=StillClock())


def test_of_many_nodes_none_asks_for_what_the_others_wrote() -> None:
    """At most 4 requests per node and snapshot where everything has changed: 2 puts, the new log entry and the one after it."""
    tier = Asked(MemoryTier())
    first = start(tier, world_size=20).repository
    nodes = [first, *(Repository.open(tier, nonces=CountedNonces(f"node {node}")) for node in range(1, 20))]
    for step in (1, 2, 3):
        tier.asked.clear()
        for node in range(1, 20):
            nodes[node].refresh()
        written = [node_write(nodes[node], step, node, value=step if step < 3 else 2) for node in range(20)]
        asked = list(tier.asked)
        tier.asked.clear()
        commit = commit_all(first, written)
        assert len(tier.asked) <= 1, "the committer looks at a listing"
        if step == 2:
            changed = [one for one in asked if not one.startswith("read runs/main/log")]
            assert len([one for one in asked if one.startswith("read runs/main/log")]) == 2 * 19
            assert len(changed) == 2 * 20, "what all share is unchanged: its pack, and whether another lineage condemns it"
    manifests = first.manifests(commit)
    assert [m.node for m in manifests] == list(range(20))
    shared = {chunk.pack for m in written for chunk in m[0].chunks} & {chunk.pack for m in manifests for chunk in m.chunks}
    assert shared, "what has not changed is not written again"
    assert first.verify().ok


def test_what_another_lineage_condemns_is_not_known() -> None:
    tier = two_that_share()
    (pack,) = tier.list("packs")
    assert known(tier, Log.open(tier).state, elsewhere=(pack,)) == set()


def test_an_object_of_another_process_that_is_gone_stops_a_commit_of_many() -> None:
    tier = MemoryTier()
    first = start(tier, world_size=20).repository
    written = [node_write(Repository.open(tier, nonces=CountedNonces(f"n {node}")), 1, node, 1) for node in range(20)]
    tier.delete(written[7][0].chunks[0].pack)
    with pytest.raises(Transient, match="which is gone"):
        commit_all(first, written)
    assert first.visible() == ()
