"""A loader that does not give what it should is found by its samples: the certificate speaks of what was computed, not of what was due."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import unbroken
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import DATA_SEED, samples, train
from unbroken.proof.certify import Certificate

BENDS = ("none", "repeat", "swap", "drop")
SCRIPT = "from tests.e2e.test_lying_loader import main\nmain()\n"
STEPS, LIED_AT, GLOBAL_BATCH, UNITS = 5, 3, 8, 4


class LyingSampler(unbroken.Sampler):
    """Repeats, swaps or drops one id of this rank's share during step 3, and goes on as if nothing had happened."""

    bend = "none"
    share = GLOBAL_BATCH
    """Samples of this rank per step."""

    def __iter__(self) -> Iterator[int]:
        ids = super().__iter__()
        place = (LIED_AT - 1) * self.share
        for number, sample in enumerate(ids):
            if number != place or self.bend == "none":
                yield sample
            elif self.bend == "repeat":
                yield from (sample, sample)
                next(ids)
            elif self.bend == "swap":
                yield next(ids)
                yield sample


def lying_run(directory: Path, bend: str, how: str, share: int = GLOBAL_BATCH) -> None:
    """Train with a loader of this kind that lies in this way; the same kind of loader may not lie as well."""
    dataset = samples()
    sampler = LyingSampler(dataset, global_batch=GLOBAL_BATCH, seed=DATA_SEED)
    sampler.bend, sampler.share = bend, share
    if how == "DataLoader":
        data: object = DataLoader(unbroken.keyed(dataset), batch_size=GLOBAL_BATCH // UNITS, sampler=sampler)
    else:
        data = unbroken.Batches(dataset, global_batch=GLOBAL_BATCH, seed=DATA_SEED)
        data._sampler = sampler
    train(directory, STEPS, data=data, units=UNITS)


def main() -> None:
    """One rank of a job that trains once with each lie, all of them told by rank 1."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = len(torch.arange(UNITS).tensor_split(world_size)[rank]) * GLOBAL_BATCH // UNITS
    for bend in BENDS:
        lying_run(Path(sys.argv[1]) / bend, bend if rank == 1 else "none", "DataLoader", share)


def judge(directory: Path, bend: str, units: list[int]) -> None:
    """An honest run is certified; a lie is not, and the step and the units in which it was told are named."""
    certificate: Certificate = unbroken.open(directory).certify()
    if bend == "none":
        assert (certificate.certified, certificate.samples_exactly_once) == (True, True), certificate.problems
        return
    assert (certificate.certified, certificate.samples_exactly_once, certificate.grade) == (False, False, "none")
    told = [text for text in certificate.problems if "did not compute the samples of its units" in text]
    assert told == certificate.problems
    first = f"runs/main/journal/00000000.jsonl line [0-9]+: step {LIED_AT} "
    assert re.match(first, told[0]) and told[0].endswith(f"{units}"), told
    assert len(told) == (1 if bend != "drop" else STEPS - LIED_AT + 1), "what a dropped sample shifts stays shifted"
    assert unbroken.open(directory).verify().ok, "nothing stored was changed: only the ledger can tell"


@pytest.mark.parametrize("how", ["Batches", "DataLoader"])
@pytest.mark.parametrize("bend", BENDS)
def test_I8_a_loader_that_lies_once_is_found(tmp_path: Path, how: str, bend: str) -> None:
    lying_run(tmp_path / "run", bend, how)
    judge(tmp_path / "run", bend, [0, 1, 2, 3] if bend == "drop" else [0])


def test_I8_a_loader_that_lies_on_one_of_three_ranks_is_found(tmp_path: Path) -> None:
    script = tmp_path / "lie.py"
    script.write_text(SCRIPT)
    run_ranks([str(script), str(tmp_path)], 3, {"PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    for bend in BENDS:
        judge(tmp_path / bend, bend, [2])
