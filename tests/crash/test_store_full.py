"""A disk that is full or forbids writing: the save fails with its errno, the older checkpoint is untouched, the next save works (I9)."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.store_child import in_child
from tests.rigs.store_run import load, start, whole_value
from unbroken.core.errors import StoreError
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

NUM_FLOATS = 100_000


def steps(tier: DiskTier) -> list[int]:
    repository = Repository.open(tier)
    assert [whole_value(load(repository, c)) for c in repository.visible()] == [c.step for c in repository.visible()]
    return [c.step for c in repository.visible()]


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and "journal" not in p.parts}


def limited_saves(root: Path, limit: int, say: Callable[[str], None]) -> None:
    """Two saves under a limit on file sizes, then one without it."""
    tier = DiskTier(str(root))
    trainer = start(tier, num_floats=NUM_FLOATS)
    trainer.save(10)
    trainer.collect(1)
    before = tree(root)
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            trainer.save(20)
            say("saved 20")
        except StoreError as e:
            assert isinstance(e.__cause__, OSError)
            say(f"errno {e.__cause__.errno}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert before.items() <= tree(root).items()
        say(f"visible {steps(tier)}")
    trainer.save(30)
    trainer.collect(1)
    say(f"visible {steps(tier)}")
    say(f"ok {Repository.open(tier).verify().ok}")
    say(f"objects {len(tier.list('packs'))} {len(tier.list('manifests'))}")


@pytest.mark.parametrize("limit", [0, 1, 100, 1000, 4096, NUM_FLOATS * 2, NUM_FLOATS * 4 + 5000])
def test_B03_I9_a_save_that_cannot_write_is_an_error_with_its_errno_and_harms_nothing(tmp_path: Path, limit: int) -> None:
    said, status = in_child(lambda say: limited_saves(tmp_path / "run", limit, say))
    assert status == 0, said
    assert said == [
        *[f"errno {errno.EFBIG}", "visible [10]"] * 2,
        "visible [30]",
        "ok True",
        "objects 1 1",
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of tmpfs; needs the right to mount."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("may not mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_B03_I9_a_full_disk_is_an_error_and_training_goes_on_when_there_is_room_again(small_disk: Path) -> None:
    tier = DiskTier(str(small_disk / "run"))
    trainer = start(tier, num_floats=50_000)
    trainer.save(10)
    (small_disk / "ballast").write_bytes(bytes(800_000))
    for _ in range(2):
        with pytest.raises(StoreError) as failed:
            trainer.save(20)
        assert isinstance(failed.value.__cause__, OSError)
        assert failed.value.__cause__.errno == errno.ENOSPC
        assert steps(tier) == [10]
    os.remove(small_disk / "ballast")
    trainer.save(30)
    trainer.collect(1)
    assert steps(tier) == [30]
    assert Repository.open(tier).verify().ok
