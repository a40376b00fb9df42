"""A Store that keeps differences: smaller, exact, whole in time, and as safe as one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unbroken
from tests.rigs.states import s, struck
from unbroken.core.errors import CheckpointWarning, SaveFailed


def moved(step: int) -> dict[str, torch.Tensor]:
    """A state that moves a little from step to step, and a part of it that does not."""
    generator = torch.Generator().manual_seed(3)
    still = torch.randn(60_000, generator=generator)
    return {"moves": torch.randn(60_000, generator=generator) * (1 + 1e-4 * step), "still": still}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("packs/*/*"))


def test_I13_differences_are_exact_and_take_less(tmp_path: Path) -> None:
    for name, full_every in (("whole", None), ("differences", "10 steps")):
        with unbroken.Store(tmp_path / name, keep=99, full_every=full_every) as store:
            for step in range(14):
                store.save(step, moved(step), milestone=step == 5)
    archive = unbroken.open(str(tmp_path / "differences"))
    whole = [step.step for step in archive.steps() if step.kind == "full"]
    assert whole == [0, 5, 10], "the first, the milestone, and one in ten"
    for step in range(14):
        assert all(torch.equal(value, moved(step)[name]) for name, value in archive.load(step).items())
    assert size(tmp_path / "differences") < 0.85 * size(tmp_path / "whole")
    assert archive.verify().ok


def test_I2_what_a_kept_difference_stands_on_is_kept(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=1, full_every="1000 steps") as store:
        for step in range(12):
            store.save(step, moved(step), wait=True)
    archive = unbroken.open(str(tmp_path))
    assert [step.step for step in archive.steps()] == [11]
    assert all(torch.equal(value, moved(11)[name]) for name, value in archive.load().items())


def test_B04_a_damaged_base_makes_what_stands_on_it_unusable_and_that_is_said(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path, keep=99, full_every="2 steps") as store:
        for step in range(4):
            store.save(step, moved(step), wait=True)
            if step == 2:
                packs = set(tmp_path.glob("packs/*/*"))
        newest = next(iter(set(tmp_path.glob("packs/*/*")) - packs))
    bases = sorted(packs - {newest}, key=lambda path: path.stat().st_mtime_ns)
    raw = bytearray(bases[-1].read_bytes())
    raw[5000] ^= 1
    bases[-1].write_bytes(raw)
    with unbroken.Store(tmp_path, keep=99, full_every="2 steps") as store, pytest.warns(CheckpointWarning, match="passed over: step 3"):
        assert all(torch.equal(value, moved(1)[name]) for name, value in store.load().items())


def test_I9_a_failed_save_leaves_the_next_one_whole(tmp_path: Path) -> None:
    def no_space() -> None:
        raise OSError(28, "No space left on device")

    with unbroken.Store(tmp_path, keep=99, full_every="100 steps") as store:
        store.save(0, moved(0), wait=True)
        with struck(no_space), pytest.raises(SaveFailed):
            store.save(1, moved(1), wait=True)
        store.save(2, moved(2), wait=True)
    assert all(torch.equal(value, moved(2)[name]) for name, value in unbroken.open(str(tmp_path)).load().items())


@pytest.mark.parametrize("wrong", ["often", "0 steps", "-1 h", "5", ""])
def test_a_full_every_that_says_nothing_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"full_every='{wrong}'"):
        unbroken.Store(tmp_path, full_every=wrong)
    assert not any(tmp_path.iterdir())


def test_small_states_are_whole(tmp_path: Path) -> None:
    """What lies in shared chunks is stored by itself."""
    with unbroken.Store(tmp_path, keep=9, full_every="100 steps") as store:
        for k in range(3):
            store.save(k, s(k), wait=True)
    assert {step.kind for step in unbroken.open(str(tmp_path)).steps()} == {"full"}
