"""B39: files that somebody else has written. Nothing is unpickled, nothing outside the folder is touched, old files are read.

Each for a Store and for a Run; the Run's folder is read by `unbroken.open`, and started from.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.forged import forge
from tests.rigs.states import s, whole
from tests.rigs.store_run import start, steps
from tests.rigs.tiny_run import end_daemon, train
from unbroken.core.errors import CheckpointWarning, Damaged, NewerFormat, NoCheckpoint, UnbrokenError
from unbroken.core.ports import SystemNonces
from unbroken.core.records import ChunkRef, Extent, Manifest, ManifestRef
from unbroken.store.repository import Repository
from unbroken.store.sealed import FORMAT, unseal
from unbroken.store.tiers.disk import DiskTier

MIB = 1 << 20
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Store's folder with S(1), S(2), and a Run's with the steps 1, 2 (and 0)."""
    root = tmp_path_factory.mktemp("untrusted")
    with unbroken.Store(root / "store") as store:
        for k in (1, 2):
            store.save(k, s(k), wait=True)
    train(root / "run", 2)
    end_daemon(root / "run")
    return {"store": root / "store", "run": root / "run"}


@pytest.fixture(params=["store", "run"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(folders[request.param], tmp_path / request.param)
    return tmp_path / request.param


def read_all(folder: Path) -> list[str]:
    """Every way to read a folder; what each said."""
    said = []
    acts: list[Callable[[], Any]] = [lambda: unbroken.open(folder).load(), lambda: unbroken.open(folder).verify()]
    if folder.name == "store":
        acts += [lambda: unbroken.Store(folder).latest(), lambda: unbroken.Store(folder).load()]
    else:
        acts += [lambda: unbroken.open(folder).certify(), lambda: train(folder, 3)]
    for act in acts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                said.append(str(act()))
            except UnbrokenError as error:
                said.append(f"{type(error).__name__}: {error}")
        said += [str(w.message) for w in caught]
    if folder.name == "run":
        end_daemon(folder)
    return said


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_the_bomb_goes_off_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", ["run.json", "manifest", "pack", "log", "journal"])
def test_B39_a_a_pickle_in_the_place_of_any_file_is_never_run(folder: Path, tmp_path: Path, kind: str) -> None:
    patterns = {"manifest": "manifests/*", "pack": "packs/*/*", "log": "runs/main/log/*", "journal": "runs/main/journal/*"}
    files = sorted(folder.glob(patterns.get(kind, kind)))
    assert files
    for protocol, file in zip([0, 2, 4, 5] * len(files), files, strict=False):
        file.write_bytes(pickle.dumps(Bomb(tmp_path / "marker"), protocol))
    said = read_all(folder)
    assert not (tmp_path / "marker").exists()
    assert any("Damaged" in text or "NoCheckpoint" in text or "bad" in text for text in said), said


@pytest.mark.parametrize("kind", ["manifest", "pack"])
def test_B39_a_a_pickle_in_the_place_of_the_newest_falls_back_and_says_so(folder: Path, tmp_path: Path, kind: str) -> None:
    newest = Repository.open(DiskTier(str(folder))).visible()[-1]
    (manifest,) = Repository.open(DiskTier(str(folder))).manifests(newest)
    before = Repository.open(DiskTier(str(folder))).visible()[-2]
    (older,) = Repository.open(DiskTier(str(folder))).manifests(before)
    own = {chunk.pack for chunk in manifest.chunks} - {chunk.pack for chunk in older.chunks}
    for path in [newest.manifests[0].path] if kind == "manifest" else own:
        (folder / path).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    with pytest.warns(CheckpointWarning, match=f"loaded step 1 .*passed over: step {newest.step}: "):
        unbroken.open(folder).load()
    assert not (tmp_path / "marker").exists()


def test_B39_b_random_states_are_stored_with_the_defaults_and_go_on(tmp_path: Path) -> None:
    """As plain arrays of words, whichever NumPy wrote them."""

    def generators() -> dict[str, Any]:
        return {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "mersenne": np.random.RandomState(1),
            "torch": torch.Generator().manual_seed(1),
            "legacy": np.random.RandomState(2).get_state(),
            "words": random.Random(2).getstate(),
            "global": torch.get_rng_state(),
        }

    def draws(of: dict[str, Any]) -> list[float]:
        return [
            of["python"].random(),
            float(of["numpy"].random()),
            float(of["mersenne"].random_sample()),
            float(torch.rand(1, generator=of["torch"])),
        ]

    state = generators()
    draws(state)
    with unbroken.Store(tmp_path) as store:
        store.save(1, state)
    wanted = draws(state)
    back = unbroken.Store(tmp_path).load()
    assert draws(back) == wanted
    assert back["words"] == state["words"]
    assert np.array_equal(back["legacy"][1], state["legacy"][1])
    other = np.random.RandomState()
    other.set_state(back["legacy"])
    assert other.random_sample() == np.random.RandomState(2).random_sample()
    assert torch.equal(back["global"], state["global"])
    into = generators()
    unbroken.Store(tmp_path).load(into=into)
    assert draws(into) == wanted
    kinds = {one["dtype"] for one in unbroken.open(tmp_path).variables()}
    assert all(not kind.startswith("py:bytes") for kind in kinds), "nothing opaque"


def test_B39_b_a_runs_random_states_survive_a_start_with_the_defaults(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["run"], tmp_path / "run")
    train(tmp_path / "run", 4)
    train(tmp_path / "whole", 4)
    found = unbroken.open(tmp_path / "run").diff(tmp_path / "whole")
    assert found.equal, found.differences


OUTSIDE = ["../../x", "/x", "packs/../../x.pack", "packs/aa/../../../x", "manifests/../x.json"]


@pytest.mark.parametrize("name", [*OUTSIDE, "absolute"])
@pytest.mark.parametrize("where", ["pack", "manifest"])
def test_B39_c_a_name_that_leads_outside_is_refused_for_load_and_for_delete(folder: Path, tmp_path: Path, name: str, where: str) -> None:
    outside = tmp_path / "x"
    outside.write_bytes(b"mine")
    (tmp_path / "x.pack").write_bytes(b"mine")
    (folder / "x.json").write_bytes(b"mine")
    name = str(outside) if name == "absolute" else name

    def change(manifest: Manifest) -> Manifest:
        chunks = tuple(msgspec.structs.replace(chunk, pack=name) for chunk in manifest.chunks)
        return msgspec.structs.replace(manifest, chunks=chunks) if where == "pack" else manifest

    def ref(old: ManifestRef) -> ManifestRef:
        return msgspec.structs.replace(old, path=name) if where == "manifest" else old

    step = forge(folder, change, ref)
    with pytest.raises(Damaged, match="is not the name of a"):
        unbroken.open(folder).load(step)
    report = unbroken.open(folder).verify()
    assert any("is not the name of a" in reason for _, reason in report.bad), report
    if folder.name == "store":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with unbroken.Store(folder, keep=1) as store:
                store.load()
                for k in (3, 4, 5):  # a grace later the bad one is withdrawn and removed
                    store.save(k, s(k), wait=True)
            assert whole(unbroken.Store(folder).load()) == 5
    else:
        train(folder, 5, keep=1)
        end_daemon(folder)
    assert [path.read_bytes() for path in (outside, tmp_path / "x.pack", folder / "x.json")] == [b"mine"] * 3


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change fields of a sealed file's envelope, and leave the checksum as it is."""
    envelope = msgspec.json.decode(path.read_bytes())
    change(envelope)
    path.write_bytes(msgspec.json.encode(envelope))


FIRST = {"run": "run.json", "log": "runs/main/log/00000000.json"}


@pytest.mark.parametrize("kind", ["run", "log", "journal", "pack", "manifest"])
def test_B39_d_a_newer_format_is_named_with_both_versions(folder: Path, kind: str) -> None:
    if kind == "journal":
        (file,) = folder.glob("runs/main/journal/*")
        raw = file.read_bytes()
        file.write_bytes(raw.replace(b'"format":1,"min_reader":1', b'"format":99,"min_reader":99', 1))
    elif kind == "pack":
        for file in folder.glob("packs/*/*"):
            raw = file.read_bytes()
            file.write_bytes(raw[:16] + (99).to_bytes(4, "little") * 2 + raw[24:])
    else:
        for file in [folder / FIRST[kind]] if kind in FIRST else list(folder.glob("manifests/*")):
            rewritten(file, lambda envelope: envelope.update(format=99, min_reader=99))
    if kind == "manifest":  # the commit names the file's digest: another file is damage before it is a newer one
        with pytest.raises(UnbrokenError):
            unbroken.open(folder).load()
        return
    with pytest.raises(NewerFormat, match=rf"written by a newer version \(format 99, this reads <= {FORMAT}\): upgrade unbroken"):
        unbroken.open(folder).verify()


@pytest.mark.parametrize("missing", ["format", "min_reader", "magic", "checksum"])
def test_B39_d_a_missing_version_is_a_clear_error(folder: Path, missing: str) -> None:
    rewritten(folder / "run.json", lambda envelope: envelope.pop(missing))
    with pytest.raises(Damaged, match=f"run.json: not a sealed file.*{missing}"):
        unbroken.open(folder)


@pytest.mark.parametrize("version", ["v1", "v1b"])
def test_B39_d_files_of_the_first_release_are_read_with_equal_values(tmp_path: Path, version: str) -> None:
    shutil.copytree(GOLDEN / version / "run", tmp_path / "run")
    state = unbroken.open(tmp_path / "run").load(2, keys=["/model/w"])["/model/w"]
    assert state.numpy().tobytes() == np.full(50, 2.0, np.float32).tobytes()
    assert steps(DiskTier(str(tmp_path / "run"))) == [2, 3]
    trainer = start(DiskTier(str(tmp_path / "run")), nonces=SystemNonces())
    trainer.save(4)
    assert unbroken.open(tmp_path / "run").verify().ok


def test_B39_d_an_unknown_field_is_passed_over(folder: Path) -> None:
    """In an envelope; in a body too, where the checksum is made anew."""
    rewritten(folder / "run.json", lambda envelope: envelope.update(flavour="new"))
    assert unbroken.open(folder).steps()[-1].step == 2
    raw = (folder / "run.json").read_bytes()
    from unbroken.core.records import RunFacts

    facts = unseal("run", raw, RunFacts, "run.json")
    assert facts.run_id == unbroken.open(folder).facts.run_id


def huge(manifest: Manifest) -> Manifest:
    """Every tensor claims 2**40 elements."""
    pieces = tuple(
        msgspec.structs.replace(stored, piece=msgspec.structs.replace(stored.piece, shape=(1 << 40,))) if stored.piece.shape else stored
        for stored in manifest.pieces
    )
    return msgspec.structs.replace(manifest, pieces=pieces)


def repeated(manifest: Manifest) -> Manifest:
    """A piece of a GiB, made of one small chunk named again and again."""
    stored = next(stored for stored in manifest.pieces if stored.piece.shape)
    times = (1 << 30) // manifest.chunks[0].raw_bytes
    extents = (Extent(0, 0, manifest.chunks[0].raw_bytes),) * times
    size = times * manifest.chunks[0].raw_bytes
    piece = msgspec.structs.replace(stored.piece, shape=(size,), dtype="uint8")
    big = msgspec.structs.replace(stored, piece=piece, extents=extents, size_bytes=size)
    return msgspec.structs.replace(manifest, pieces=tuple(big if one is stored else one for one in manifest.pieces))


def large_chunk(manifest: Manifest) -> Manifest:
    """A chunk that claims 2**40 bytes."""
    first: ChunkRef = msgspec.structs.replace(manifest.chunks[0], stored_bytes=1 << 40, raw_bytes=1 << 40)
    return msgspec.structs.replace(manifest, chunks=(first, *manifest.chunks[1:]))


@pytest.mark.parametrize("change", [huge, repeated, large_chunk])
def test_B39_e_a_size_that_lies_is_an_error_before_memory_is_set_aside(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    step = forge(folder, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Damaged):
        unbroken.open(folder).load(step)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    if folder.name == "run":
        losses = train(folder, 3)
        assert len(losses) == 2, "step 2 was passed over and done again"
        end_daemon(folder)
        (condemned,) = unbroken.open(folder).verify().condemned
        assert condemned[0] == step
    else:
        with pytest.warns(CheckpointWarning, match="passed over: step 2"):
            assert whole(unbroken.Store(folder).load()) == 1


def test_B39_e_a_file_that_is_too_large_to_be_ours_is_not_read(folder: Path) -> None:
    entry = folder / "runs/main/log/00000001.json"
    with open(entry, "r+b") as file:
        file.truncate(300 * MIB)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((NoCheckpoint, Damaged)):
        unbroken.open(folder).load(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 320 * 1024
