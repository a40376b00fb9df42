"""A run over a mixture with skipped samples: resumed at other world sizes, certified from its folder alone, refused when changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

import unbroken
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import commits, flip, open_run, place_of, samples, train
from tests.rigs.torture_runs import ROOT
from unbroken.order.ledger import SKIPS
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

STEPS = 12


def mixture(**changes: Any) -> unbroken.Batches:
    """A third of each step from a small data set, which is read through every three steps."""
    datasets = {"code": Subset(samples(), range(10)), "web": Subset(samples(), range(10, 64))}
    given: dict[str, Any] = {"weights": {"web": 2, "code": 1}, "skip": {"web": [1, range(40, 44)]}, "global_batch": 8, "seed": 1} | changes
    return unbroken.Batches(datasets, **given)


def main() -> None:
    """One rank: train to a step."""
    train(Path(sys.argv[1]), int(sys.argv[2]), data=mixture(), units=4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1..5 on three ranks, the rest on one."""
    folder = tmp_path_factory.mktemp("mixture")
    script = folder / "mixture.py"
    script.write_text("from tests.e2e.test_mixtures import main\nmain()\n")
    run_ranks([str(script), str(folder / "run"), "5"], 3, {"PYTHONPATH": str(ROOT)})
    train(folder / "run", STEPS, data=mixture(), units=4)
    return folder / "run"


def test_I7_I13_a_mixture_goes_on_exactly_at_another_world_size(finished: Path, tmp_path: Path) -> None:
    train(tmp_path / "whole", STEPS, data=mixture(), units=4)
    certificate = unbroken.open(finished).certify(tmp_path / "whole")
    assert (certificate.grade, certificate.world_sizes) == ("exact", [3, 1]), certificate.problems


def test_I8_each_sample_of_a_mixture_is_proven_from_the_folder_alone(finished: Path) -> None:
    certificate = unbroken.open(finished).certify()
    assert (certificate.grade, certificate.samples_exactly_once, certificate.differences) == ("sequence", True, []), certificate.problems
    repository = Repository.open(DiskTier(str(finished)))
    assert repository.facts.options["data"]["datasets"]["web"]["skip"]["num"] == 5
    assert "[1, 40" not in (finished / "run.json").read_text()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"weights": {"web": 3, "code": 1}}, "datasets.web.share: the run was born with 2, now it is 3"),
        ({"skip": {"web": [1, range(40, 45)]}}, "datasets.web.skip.num: the run was born with 5, now it is 6"),
        ({"skip": {"web": [2, range(40, 44)]}}, "datasets.web.skip.digest"),
        ({"skip": None}, "datasets.web.skip.digest"),
    ],
)
def test_B31_other_weights_or_skips_are_refused_with_both_values(finished: Path, change: dict[str, Any], name: str) -> None:
    with pytest.raises(unbroken.LayoutMismatch, match="give the data its old settings, or start a new run") as caught:
        open_run(finished, data=mixture(**change), units=4)
    assert name in str(caught.value) and caught.value.exit_code == 4


class Lying(unbroken.Sampler):
    """Gives a sample that is to be skipped."""

    def __iter__(self) -> Any:
        for number, sample in enumerate(super().__iter__()):
            yield 11 if number == 20 else sample


def test_I8_a_skipped_sample_that_was_trained_on_is_found(tmp_path: Path) -> None:
    data = mixture()
    data._sampler = Lying._over(data._sampler._whole)
    train(tmp_path / "run", 4, data=data, units=4)
    certificate = unbroken.open(tmp_path / "run").certify()
    assert certificate.samples_exactly_once is False
    assert any("step 3 did not compute the samples of its units [2]" in problem for problem in certificate.problems)


def test_I3_a_changed_list_of_skipped_samples_is_damage(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, data=mixture(), units=4)
    newest = commits(tmp_path / "run")[-1]
    manifest = Repository.open(DiskTier(str(tmp_path / "run"))).manifests(newest)[0]
    pointer = next(stored.piece.pointer for stored in manifest.pieces if stored.piece.pointer.startswith(f"{SKIPS}/"))
    pack, offset = place_of(tmp_path / "run", newest, pointer)
    flip(tmp_path / "run" / pack, offset)
    certificate = unbroken.open(tmp_path / "run").certify()
    assert not certificate.certified and any(pack in problem for problem in certificate.problems)
    assert certificate.samples_exactly_once is None, "what cannot be read has not been checked"


def test_a_million_skipped_samples_go_through_a_run(tmp_path: Path) -> None:
    class Vast:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> Any:
            return samples()[index % 64]

    path = tmp_path / "skip.txt"
    path.write_text("\n".join(f"{i}:{i + 1000}" for i in range(0, 10**9, 10**6)))
    data = unbroken.Batches(Vast(), global_batch=8, seed=1, skip=os.fspath(path))
    train(tmp_path / "run", 2, data=data)
    certificate = unbroken.open(tmp_path / "run").certify()
    assert (certificate.grade, certificate.samples_exactly_once) == ("sequence", True), certificate.problems
