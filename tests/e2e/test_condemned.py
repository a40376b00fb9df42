"""A damaged newest checkpoint costs the steps since an older good one and nothing else; what was bad is never stood on again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs import tiny_run
from tests.rigs.tiny_run import commits, damage_newest, end_daemon, files_of, packs_of, train
from unbroken.core.errors import Damaged
from unbroken.core.records import CommitEntry, CondemnEntry, Manifest
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

OPTIONS: dict[str, Any] = {"keep": 10, "width": 5000}
"""All checkpoints are kept, and each step changes pieces that are large enough for chunks of their own."""


def repository(directory: Path) -> Repository:
    return Repository.open(DiskTier(str(directory)))


def manifest_of(directory: Path, step: int) -> Manifest:
    """The manifest of the visible checkpoint of this step."""
    found = repository(directory)
    (commit,) = [commit for commit in found.visible() if commit.step == step]
    (manifest,) = found.manifests(commit)
    return manifest


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, CommitEntry, str]:
    """A run that has come to step 4 and ended, memory included; afterwards a byte of step 4's own pack was changed."""
    directory = tmp_path / "run"
    train(directory, 4, **OPTIONS)
    end_daemon(directory)
    commit, pack = damage_newest(directory)
    assert commit.step == 4
    return directory, commit, pack


def test_I3_the_older_good_one_is_used_with_one_warning(
    damaged: tuple[Path, CommitEntry, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _, pack = damaged
    with pytest.raises(Damaged, match=pack):
        unbroken.open(directory).load(step=4)
    capsys.readouterr()
    losses = train(directory, 6, **OPTIONS)
    spoken = capsys.readouterr()
    assert "step 3 from disk, generation 1" in spoken.out
    warnings = [line for line in spoken.err.splitlines() if pack in line]
    assert len(warnings) == 1, spoken.err
    assert "step 4" in warnings[0] and "does not match its digest" in warnings[0]
    whole = train(tmp_path / "whole", 6, **OPTIONS)
    assert losses == whole[3:], "steps 4, 5 and 6 were computed (again) to the same bits"
    certificate = unbroken.open(directory).certify(tmp_path / "whole")
    assert (certificate.grade, certificate.fell_back, certificate.steps_lost_total) == ("exact", True, 1), certificate.problems
    assert [(one.step, one.generation, one.objects) for one in certificate.condemned] == [(4, 0, [pack])]
    capsys.readouterr()
    end_daemon(directory)
    train(directory, 7, **OPTIONS)
    assert pack not in capsys.readouterr().err, "what is behind the run is not told at every start"


def test_I2_I3_what_was_condemned_is_written_anew_and_its_pack_goes(damaged: tuple[Path, CommitEntry, str]) -> None:
    directory, bad, pack = damaged
    old = manifest_of(directory, 4)
    train(directory, 4, **OPTIONS)
    entries = [entry for entry in repository(directory).log.state.condemned if isinstance(entry, CondemnEntry)]
    assert [(entry.step, entry.generation, entry.objects) for entry in entries] == [(4, 0, (pack,))]
    assert "does not match its digest" in entries[0].reason
    new = manifest_of(directory, 4)
    assert (new.generation, new.state_root) == (1, old.state_root), "the same step, the same bits"
    was_in_bad = {chunk.id for chunk in old.chunks if chunk.pack == pack}
    again = [chunk for chunk in new.chunks if chunk.id in was_in_bad]
    assert len(again) >= 3, "the replay has chunks in common with the condemned pack, so that reusing them was a temptation"
    written = [chunk.pack for chunk in new.chunks if chunk.pack not in packs_of(directory, commits(directory)[-2])]
    assert set(written) == {chunk.pack for chunk in again}, "they lie in the pack that the new commit brought"
    for commit in commits(directory):
        assert pack not in packs_of(directory, commit), f"step {commit.step} stands on the condemned pack"
    report = unbroken.open(directory).verify()
    assert report.ok and [one[:2] for one in report.condemned] == [(4, 0)], report.bad
    assert bad.manifests[0].path not in files_of(directory)


def test_I2_the_condemned_pack_goes_and_nothing_reachable_with_it(damaged: tuple[Path, CommitEntry, str]) -> None:
    """Nothing is removed before something newer is there; afterwards just what nobody needs."""
    directory, bad, pack = damaged
    before = files_of(directory)
    train(directory, 3, **OPTIONS)
    assert files_of(directory).keys() >= before.keys(), "a start alone removes nothing"
    assert [commit.step for commit in commits(directory)] == [0, 1, 2, 3], "but what it condemned does not count any more"
    train(directory, 5, **OPTIONS)
    gone = before.keys() - files_of(directory).keys()
    assert gone == {pack, bad.manifests[0].path}
    for name in before.keys() - gone - {"writer.json", "metrics.jsonl", "runs/main/journal/00000000.jsonl"}:
        assert (directory / name).read_bytes() == before[name], f"{name} was changed"
    assert [commit.step for commit in commits(directory)] == [0, 1, 2, 3, 4, 5]
    for commit in commits(directory):
        assert unbroken.open(directory).load(commit.step)["counters"]["step"] == commit.step
    assert unbroken.open(directory).verify().ok


def test_I3_two_bad_ones_in_a_row_are_both_passed_over(damaged: tuple[Path, CommitEntry, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _, pack = damaged
    third = commits(directory)[-2].manifests[0].path
    tiny_run.flip(directory / third, 500)
    capsys.readouterr()
    train(directory, 5, **OPTIONS)
    spoken = capsys.readouterr()
    assert "step 2 from disk, generation 1" in spoken.out
    assert [sum(path in line for line in spoken.err.splitlines()) for path in (pack, third)] == [1, 1], spoken.err
    certificate = unbroken.open(directory).certify()
    assert certificate.certified and certificate.fell_back and certificate.steps_lost_total == 2
    assert sorted(one.step for one in certificate.condemned) == [3, 4]


def alternate(directory: Path, steps: int) -> None:
    """Train with an extra that has one value after even steps and another after odd ones, each stored once and referred to again."""
    sign = torch.ones(20_000)
    run = tiny_run.open_run(directory, total_steps=steps, extras={"sign": sign})
    for batch in run:
        for micro in batch:
            micro.backward(tiny_run.loss_of(run.model, micro))
        run.step()
        sign.neg_()
        run.save(wait=True)
    end_daemon(directory)


def test_I2_I3_a_condemned_pack_is_not_stood_on_even_if_older_checkpoints_do(tmp_path: Path) -> None:
    """The first pack holds what never changes and what is there after even steps; the latter is damaged, the former good.

    Step 3 needs only the good part and is gone back to. Step 4 then finds both parts in checkpoints that still count.
    """
    directory = tmp_path / "run"
    alternate(directory, 4)
    fourth = commits(directory)[-1]
    pack, offset = tiny_run.place_of(directory, fourth, "/extras/sign")
    assert tiny_run.place_of(directory, fourth, "/model/parameters/frozen")[0] == pack
    assert [pack in packs_of(directory, commit) for commit in commits(directory)] == [True, True, True]
    tiny_run.flip(directory / pack, offset)
    alternate(directory, 4)
    third, again = commits(directory)[-2:]
    assert (third.step, third.generation, again.step, again.generation) == (3, 0, 4, 1)
    assert pack in packs_of(directory, third)
    assert pack not in packs_of(directory, again), "a new checkpoint stands on the condemned pack"
    assert again.state_root == fourth.state_root
    assert unbroken.open(directory).load(4)["extras"]["sign"].eq(1).all()
    assert unbroken.open(directory).verify().bad[0][0] == pack, "step 2 still counts and needs the damaged part"
    alternate(directory, 6)
    assert not (directory / pack).exists()
    assert unbroken.open(directory).verify().ok
    assert [unbroken.open(directory).load(step)["counters"]["step"] for step in (4, 5, 6)] == [4, 5, 6]


def test_I3_a_shared_pack_that_is_bad_takes_all_that_need_it(tmp_path: Path) -> None:
    """The first pack holds what never changes: every checkpoint needs it, and none may be used."""
    directory = tmp_path / "run"
    train(directory, 3)
    end_daemon(directory)
    newest = commits(directory)[-1]
    pack, offset = tiny_run.place_of(directory, newest, "/model/parameters/frozen")
    assert all(pack in packs_of(directory, commit) for commit in commits(directory))
    tiny_run.flip(directory / pack, offset)
    with pytest.raises(unbroken.NoCheckpoint) as caught:
        train(directory, 5)
    assert all(f"step {step} " in str(caught.value) for step in (1, 2, 3)), str(caught.value)
    assert str(caught.value).count(pack) >= 3
