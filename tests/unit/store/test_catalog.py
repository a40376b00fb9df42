"""The catalog: what may be referenced again, and from which commit."""

from __future__ import annotations

from tests.rigs.store_run import WRITER, StillClock, flipped, start, state
from unbroken.store.catalog import Catalog, condemned_objects
from unbroken.store.log import Log
from unbroken.store.tiers.memory import MemoryTier


def two_that_share() -> MemoryTier:
    tier = MemoryTier()
    trainer = start(tier)
    trainer.save(10)
    trainer.save(20, value=10, logical=state(10))
    return tier


def test_a_chunk_is_known_from_the_newest_commit_that_holds_it() -> None:
    tier = two_that_share()
    index = Catalog(tier).index(Log.open(tier).state)
    assert {known.key for known in index.values()} == {(20, 0)}
    assert all(known.chunk.ref.id == chunk_id for chunk_id, known in index.items())


def test_chunks_in_condemned_short_or_missing_packs_are_not_known() -> None:
    tier = two_that_share()
    log = Log.open(tier)
    (pack,) = tier.list("packs")
    short = MemoryTier(tuple((p, d[:4100] if p == pack else d) for p, d in tier.snapshot()))
    gone = MemoryTier(tuple((p, d) for p, d in tier.snapshot() if p != pack))
    for hurt in (short, gone):
        assert Catalog(hurt).index(log.state) == {}
    trainer = start(tier)
    trainer.repository.condemn(20, 0, [pack], "bad", writer=WRITER, clock=StillClock())
    assert condemned_objects(trainer.repository.log.state) == {pack}
    assert Catalog(tier).index(trainer.repository.log.state) == {}


def test_a_commit_whose_manifest_is_damaged_adds_nothing_and_stops_nothing() -> None:
    tier = two_that_share()
    newest = Log.open(tier).state.commits[-1]
    index = Catalog(flipped(tier, newest.manifests[0].path)).index(Log.open(tier).state)
    assert {known.key for known in index.values()} == {(10, 0)}


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
