"""Sharded manifests: shards that lie about themselves, or that are not one tensor together, are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.rigs.store_run import WRITER, StillClock, start
from unbroken.core.errors import Damaged
from unbroken.core.records import Manifest, ManifestRef, Piece
from unbroken.store.layout import FINE, Grain, Layout, Part
from unbroken.store.manifests import check_cut, check_manifest
from unbroken.store.tiers.memory import MemoryTier


def shard(offset: int, length: int, *, name: str = "/state/w", total: int = 6, **changes: Any) -> Part:
    piece = Piece(pointer=f"{name}/{offset}", dtype="uint8", shape=(length,), global_shape=(total,), offsets=(offset,))
    return Part(msgspec.structs.replace(piece, **changes), memoryview(bytes(range(offset, offset + length))))


def shares(*parts_of: list[Part]) -> tuple[Any, list[tuple[Manifest, ManifestRef]]]:
    """One manifest for each list of parts, of one cut."""
    trainer = start(MemoryTier(), world_size=len(parts_of))
    generation = trainer.generation
    found = [
        trainer.repository.write(
            step=10, generation=generation.number, nonce=generation.nonce, node=i, world_size=len(parts_of),
            logical=parts, per_rank={i: ()}, partial=True,
        )
        for i, parts in enumerate(parts_of)
    ]  # fmt: skip
    return trainer, found


def cut(*parts_of: list[Part]) -> str:
    return check_cut([manifest for manifest, _ in shares(*parts_of)[1]])


def test_shards_of_all_nodes_make_one_state_whoever_wrote_them() -> None:
    assert cut([shard(0, 4)], [shard(4, 2)]) == cut([shard(4, 2)], [shard(0, 4)]) == cut([], [shard(0, 4), shard(4, 2)])
    assert cut([shard(0, 4)], [shard(4, 2)]) != cut([shard(0, 3)], [shard(3, 3)])


@pytest.mark.parametrize(
    ("parts_of", "reason"),
    [
        (([shard(0, 4)], []), "'/state/w': shards of it are missing: 4 of 6"),
        (([shard(0, 4)], [shard(3, 2)]), "overlap"),
        (([shard(0, 4)], [shard(0, 4)]), "is there twice"),
        (([shard(0, 4)], [shard(4, 2, total=7)]), "of different tensors"),
        (([shard(0, 4)], [shard(4, 2, dtype="int8")]), "of different tensors"),
    ],
)
def test_shards_that_are_not_one_tensor_are_no_cut(parts_of: tuple[list[Part], ...], reason: str) -> None:
    with pytest.raises(Damaged, match=reason):
        cut(*parts_of)


def test_a_part_beside_a_whole_state_is_no_cut() -> None:
    _, ((one, _), (other, _)) = shares([shard(0, 6)], [])
    with pytest.raises(Damaged, match="one has all of the state, the other a part"):
        check_cut([one, msgspec.structs.replace(other, partial=msgspec.UNSET)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"offsets": (5,)}, "leads outside"),
        ({"offsets": (1,), "global_shape": (9,)}, "has the name of another one"),
        ({"offsets": (0, 0)}, "different lengths"),
        ({"global_shape": (1 << 63,)}, "of a shape that none can have"),
        ({"global_shape": msgspec.UNSET}, "different lengths"),
        ({"pointer": "/../../0"}, "roots do not follow"),
        ({"pointer": "0"}, "has the name of another one"),
    ],
)
def test_a_shard_that_lies_about_itself_is_refused(changes: dict[str, Any], reason: str) -> None:
    _, ((manifest, _),) = shares([shard(0, 6)])
    stored = manifest.pieces[0]
    lying = msgspec.structs.replace(
        manifest, pieces=(msgspec.structs.replace(stored, piece=msgspec.structs.replace(stored.piece, **changes)),)
    )
    with pytest.raises(Damaged, match=reason):
        check_manifest(lying, "m")


def test_I1_a_commit_of_shards_is_sharded_and_verifies() -> None:
    trainer, written = shares([shard(0, 4)], [shard(4, 2)])
    commit = trainer.repository.commit(
        manifests=written, milestone=False, journal_head=trainer.journal.head, journal_lines=trainer.journal.num_lines, writer=WRITER,
        clock=StillClock(),
    )  # fmt: skip
    assert commit.kind == "sharded" and commit.state_root not in {manifest.state_root for manifest, _ in written}
    assert [len(manifest.pieces) for manifest in trainer.repository.manifests(commit)] == [1, 1]


def test_large_shards_are_cut_fine_and_have_the_digest_of_their_bytes() -> None:
    data = bytes(i % 251 for i in range(3 << 20))
    piece = Piece(pointer="/w", dtype="uint8", shape=(len(data),))
    found = {}
    for name, grain in (("coarse", Grain()), ("fine", FINE)):
        layout = Layout([Part(piece, memoryview(data))], {}, grain=grain)
        chunks = list(layout)
        found[name] = (layout.pieces[0].digest, len(chunks), max(len(chunk.data) for chunk in chunks))
    assert found["coarse"][0] == found["fine"][0]
    assert found["coarse"][1:] == (1, 3 << 20)
    assert found["fine"][1:] == (24, 128 << 10)
