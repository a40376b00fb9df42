"""torch.distributed.checkpoint on a folder of ours, with real ranks: any mesh to any mesh, deaths and damage between and in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.dcp_ranks import Jobs
from unbroken.core.records import Manifest
from unbroken.store import paths
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    found = Jobs()
    yield found
    found.close()


def commits(folder: Path) -> list[tuple[int, list[Manifest]]]:
    repository = Repository.open(DiskTier(str(folder)))
    return [(commit.step, repository.manifests(commit)) for commit in repository.visible()]


def stored_files(folder: Path) -> set[str]:
    return {path for path in DiskTier(str(folder)).list("") if paths.manifest_name(path) or paths.pack_origin(path)}


def needed_files(folder: Path) -> set[str]:
    repository = Repository.open(DiskTier(str(folder)))
    refs = {ref.path for commit in repository.visible() for ref in commit.manifests}
    return refs | {chunk.pack for _, manifests in commits(folder) for manifest in manifests for chunk in manifest.chunks}


def flip(folder: Path, path: str, offset: int) -> None:
    raw = bytearray((folder / path).read_bytes())
    raw[offset] ^= 1
    (folder / path).write_bytes(raw)


def shard_of(folder: Path, step: int, name: str, node: int) -> tuple[str, int]:
    """A pack and a place in it that one node has written of a tensor."""
    manifest = next(m for s, manifests in commits(folder) if s == step for m in manifests if m.node == node)
    stored = next(s for s in manifest.pieces if s.piece.pointer.startswith(f"/state/model.{name}/"))
    chunk = manifest.chunks[stored.extents[0].chunk]
    return chunk.pack, chunk.offset + stored.extents[0].offset


def loaded(jobs: Jobs, folder: Path, num_ranks: int, **env: str) -> Any:
    """What all ranks found, which must be the same but for warnings, which the first one gives."""
    first, *others = jobs.run("load", folder, num_ranks, **env)
    assert first["is_right"] and all(one["is_right"] and one["step"] == first["step"] for one in others)
    return first


def test_every_mesh_reads_what_every_other_one_has_saved_bit_by_bit(jobs: Jobs, tmp_path: Path) -> None:
    assert [found["wrong"] for found in jobs.run("reshard", tmp_path, 4)] == [[]] * 4
    for folder in tmp_path.iterdir():
        report = Repository.open(DiskTier(str(folder))).verify()
        assert (report.ok, report.bad, report.num_checkpoints) == (True, [], 1)


def test_a_rank_of_any_mesh_reads_little_more_than_its_share(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.run("shares", tmp_path, 4)
    assert len(found[0]) == 7
    assert all(0.99 < share <= 1.2 for of_rank in found for share in of_rank.values()), found


SLOW = [pytest.param(where, marks=pytest.mark.slow) for where in ("1:store.write.after_packs", "0:sharing.share_written")]


@pytest.mark.parametrize("where", ["1:sharing.share_written", "0:saving.before_commit", *SLOW])
def test_B01_I1_a_rank_that_dies_in_a_save_leaves_nothing_visible(jobs: Jobs, tmp_path: Path, where: str) -> None:
    assert None in jobs.run("save", tmp_path, 2, UNBROKEN_TEST_DIE=f"{where}:20")
    assert [step for step, _ in commits(tmp_path)] == [10]
    before = loaded(jobs, tmp_path, 1)
    assert before["step"] == 10
    assert "step 20: its log entry is missing: the save was cut off" in before["warnings"][0]
    assert jobs.run("save", tmp_path, 2) == [{}, {}]
    assert [step for step, _ in commits(tmp_path)] == [30, 40]
    assert stored_files(tmp_path) == needed_files(tmp_path), "leftovers are collected"


def test_B04_I3_damage_that_one_rank_alone_sees_makes_all_of_them_take_an_older_one(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run("save", tmp_path, 2) == [{}, {}]
    flip(tmp_path, *shard_of(tmp_path, 30, "large", 1))
    found = loaded(jobs, tmp_path, 2)
    assert found["step"] == 20
    assert len(found["warnings"]) == 1 and "passed over: step 30: packs/" in found["warnings"][0]
    explicit = jobs.run("load", tmp_path, 2, UNBROKEN_TEST_STEP="30")
    assert all("does not match its digest" in one["error"] for one in explicit)
    assert all("there are 20, 30" in one["error"] for one in jobs.run("load", tmp_path, 2, UNBROKEN_TEST_STEP="15"))
    for step in (20, 30):
        flip(tmp_path, *shard_of(tmp_path, step, "large", 0))
    nothing = jobs.run("load", tmp_path, 2)
    assert all("no usable checkpoint" in one["error"] and one["step"] is None and one["is_right"] for one in nothing), nothing


def test_an_older_checkpoint_of_another_mesh_is_taken_where_the_newest_is_damaged(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run("save", tmp_path, 2) == [{}, {}]
    assert None in jobs.run("save", tmp_path, 3, UNBROKEN_TEST_DIE="2:sharing.share_written:50")
    assert [(step, len(manifests)) for step, manifests in commits(tmp_path)] == [(30, 3), (40, 4)]
    flip(tmp_path, *shard_of(tmp_path, 40, "wide", 2))
    found = loaded(jobs, tmp_path, 3)
    assert found["step"] == 30 and "step 40: packs/" in found["warnings"][0]


def test_B01_lost_files_of_the_newest_are_passed_over_on_another_number_of_ranks(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run("save", tmp_path, 3) == [{}] * 3
    newest = Repository.open(DiskTier(str(tmp_path))).visible()[-1]
    (tmp_path / newest.manifests[1].path).unlink()
    found = loaded(jobs, tmp_path, 2)
    assert found["step"] == 20 and newest.manifests[1].path in found["warnings"][0]


def test_what_one_rank_cannot_store_fails_the_save_on_all_and_names_it(jobs: Jobs, tmp_path: Path) -> None:
    found = jobs.run("fail", tmp_path, 2)
    assert all("TypeError: only here.x[0]: cannot store a value of type object" in one["error"] for one in found), found
    assert not any(one["was_committed"] for one in found)
    assert [step for step, _ in commits(tmp_path)] == [20]
    assert stored_files(tmp_path) == needed_files(tmp_path)


def test_a_file_of_a_sharded_checkpoint_is_refused_by_older_versions(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run("save", tmp_path, 1) == [{}]
    formats = {path.name: json.loads(path.read_text())["min_reader"] for path in tmp_path.glob("manifests/*.json")}
    assert set(formats.values()) == {3}
    log = sorted(tmp_path.glob("runs/main/log/*.json"))
    assert [json.loads(path.read_text())["min_reader"] for path in log] == [
        3 if b'"kind":"sharded"' in path.read_bytes() else 1 for path in log
    ]
