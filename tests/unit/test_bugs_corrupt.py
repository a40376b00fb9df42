"""B04: whatever is done to whatever file, what is loaded is what was saved, or there is an error that names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.rigs.store_run import Trainer, load, newest_good, part, start
from unbroken.core.errors import Damaged, NoCheckpoint, UnbrokenError
from unbroken.core.records import CommitEntry
from unbroken.store.deltas import Encoding
from unbroken.store.repository import Part, Repository
from unbroken.store.tiers.disk import DiskTier

NUM_PLACES = 64


def tensors(step: int, num: int) -> list[Part]:
    """Three tensors of float32 that move from step to step, and two scalars."""
    rng = np.random.default_rng(7)
    found = []
    for name in "abc":
        values = rng.standard_normal(num, np.float32) + np.float32(1e-3 * step)
        found.append(part(f"/model/{name}", values.tobytes()))
    return [
        *found,
        part("/step", step.to_bytes(8, "little"), dtype="py:int"),
        part("/rate", np.float64(0.1 / step).tobytes(), dtype="py:float"),
    ]


@pytest.fixture(scope="module", params=["as they are", "differences"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10, 20 and 30 of a run; the files of 20 and 30 are harmed."""
    path = tmp_path_factory.mktemp("corrupt") / "run"
    encoding = Encoding() if request.param == "differences" else None
    trainer: Trainer = start(DiskTier(str(path)), encoding=encoding)
    for step in (10, 20, 30):
        commit = trainer.save(step, logical=tensors(step, 256 if encoding is None else 20_000))
    assert commit.kind == ("full" if encoding is None else "incremental")
    return path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def commit_of(repository: Repository, step: int) -> CommitEntry | None:
    return next((commit for commit in repository.visible() if commit.step == step), None)


def check(folder: Path, right: dict[int, dict[str, bytes]], harmed: str) -> None:
    """Every step by its number, and the newest: whole, or an error. An older one is right only where the newest says why it is not."""
    try:
        repository = Repository.open(DiskTier(str(folder)))
    except UnbrokenError as error:
        assert "run.json" in harmed, f"{harmed}: {error}"
        return
    wrong = []
    for step, expected in right.items():
        commit = commit_of(repository, step)
        try:
            if commit is not None:
                assert load(repository, commit) == expected, f"{harmed}: step {step} is silently another"
            else:
                assert repository.log.damage, f"{harmed}: step {step} has gone without a word"
        except Damaged as error:
            assert (folder / error.path).name in str(error), f"{harmed}: {error}"
            wrong.append(step)
    try:
        newest, pieces, passed_over = newest_good(repository)
    except NoCheckpoint as error:
        assert set(wrong) | {s for s in right if commit_of(repository, s) is None} == set(right), f"{harmed}: {error}"
        return
    assert pieces == right[newest.step], harmed
    assert [commit.step for commit, _ in passed_over] == [s for s in reversed(wrong) if s > newest.step], harmed


@pytest.fixture
def right(folder: Path) -> dict[int, dict[str, bytes]]:
    repository = Repository.open(DiskTier(str(folder)))
    return {commit.step: load(repository, commit) for commit in repository.visible()}


def harm(folder: Path, right: dict[int, dict[str, bytes]], path: Path, how: str, changed: Iterator[bytes]) -> None:
    original = path.read_bytes()
    try:
        for raw in changed:
            path.write_bytes(raw)
            check(folder, right, f"{path.relative_to(folder)} {how}")
    finally:
        path.write_bytes(original)


def flips(raw: bytes) -> Iterator[bytes]:
    for n in range(NUM_PLACES):
        at = n * len(raw) // NUM_PLACES
        yield raw[:at] + bytes([raw[at] ^ (1 << n % 8)]) + raw[at + 1 :]


def cuts(raw: bytes) -> Iterator[bytes]:
    for n in range(NUM_PLACES):
        yield raw[: n * len(raw) // NUM_PLACES]


@pytest.mark.parametrize(
    ("how", "make"),
    [("with one bit flipped", flips), ("cut", cuts), ("with a byte more", lambda raw: iter([raw + b"\0", raw + b"\n", raw + raw[-1:]]))],
    ids=["flip", "cut", "append"],
)
def test_B04_I3_no_harm_to_a_file_is_silent(
    folder: Path, right: dict[int, dict[str, bytes]], how: str, make: Callable[[bytes], Iterator[bytes]]
) -> None:
    assert sorted(right) == [10, 20, 30]
    for path in files(folder):
        harm(folder, right, path, how, make(path.read_bytes()))
    check(folder, right, "nothing")


@pytest.mark.parametrize("what", ["packs", "manifests", "runs/main/log"])
def test_B04_I3_a_file_in_the_place_of_another_is_not_taken_for_it(
    folder: Path, right: dict[int, dict[str, bytes]], what: str, tmp_path: Path
) -> None:
    """Swapped, replaced by the one of another step, and two names for one."""
    found = files(folder / what)
    assert len(found) >= 3
    for a in found:
        for b in found:
            if a == b:
                continue
            for is_swapped in (True, False):
                copy = tmp_path / "copy"
                shutil.copytree(folder, copy)
                (copy / a.relative_to(folder)).write_bytes(b.read_bytes())
                if is_swapped:
                    (copy / b.relative_to(folder)).write_bytes(a.read_bytes())
                check(copy, right, f"{a.name} {'swapped with' if is_swapped else 'replaced by'} {b.name}")
                shutil.rmtree(copy)
