"""Files of format 2, with differences, as they were first written: they must stay readable."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.golden_run import moving
from tests.rigs.store_run import load
from unbroken.codec.planes import DIFFERENCE, IDENTITY, PLANES, XOR
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

RUN = Path(__file__).parent / "v2" / "run"


def test_the_golden_run_reads_and_verifies() -> None:
    repository = Repository.open(DiskTier(str(RUN)))
    assert [(c.step, c.generation, c.kind) for c in repository.visible()] == [(2, 0, "incremental"), (3, 1, "incremental")]
    for commit, step in zip(repository.visible(), (2, 4), strict=True):
        pieces = load(repository, commit)
        assert all(pieces[part.piece.pointer] == bytes(part.data) for part in moving(step))
    report = repository.verify()
    assert (report.ok, report.bad) == (True, [])


def test_it_holds_chunks_as_they_are_in_planes_and_as_differences() -> None:
    repository = Repository.open(DiskTier(str(RUN)))
    codecs = {chunk.codec for c in repository.visible() for manifest in repository.manifests(c) for chunk in manifest.chunks}
    assert codecs == {IDENTITY, PLANES, DIFFERENCE, XOR}
