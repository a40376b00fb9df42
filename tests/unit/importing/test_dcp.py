"""DCP folders: read as torch reads them, sharded tensors put together; hostile or torn ones refused, nothing unpickled."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.rigs.hostile import PICKLES, Strike
from unbroken.core.errors import Damaged, NoCheckpoint, Refused, UnbrokenError
from unbroken.importing.dcp import read_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    others = {"step": 3, "name": "x", "list": [1, {"a": torch.ones(2)}, torch.zeros(1)], "plain": [1, 2.5], "half": torch.ones(2).half()}
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), **others}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "c"
    dcp.save(state(), checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "c"))


def change(folder: Path, act: Callable[[Metadata], Any]) -> None:
    """Metadata that the test's own files make, changed."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    act(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_it_is_read_as_it_was_saved(saved: Path) -> None:
    back, expected = read_dcp(str(saved)), state()
    assert {n: v.tolist() for n, v in back["model"].items()} == {n: v.tolist() for n, v in expected["model"].items()}
    assert back["optim"]["param_groups"] == expected["optim"]["param_groups"]
    assert torch.equal(back["optim"]["state"]["0"]["exp_avg"], expected["optim"]["state"][0]["exp_avg"])
    assert (back["step"], back["name"], back["plain"], back["half"].dtype) == (3, "x", [1, 2.5], torch.float16)
    assert back["list"][0] == 1 and back["list"][1]["a"].tolist() == [1, 1] and back["list"][2].tolist() == [0]


def sharded(folder: Path, pieces: list[tuple[list[int], torch.Tensor]], size: list[int]) -> None:
    """A tensor in chunks, as several ranks write it, each in a file of its own."""
    import io

    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    places, chunks = {}, []
    for i, (offset, part) in enumerate(pieces):
        out = io.BytesIO()
        torch.save(part, out)
        (folder / f"__{i}_0.distcp").write_bytes(out.getvalue())
        places[MetadataIndex("w", offset, i)] = _StorageInfo(f"__{i}_0.distcp", 0, len(out.getvalue()))
        chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
    kinds = {"w": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(kinds, {"w": ("w",)}, places)))


def test_chunks_become_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(30.0).view(5, 6)
    pieces = [([0, 0], whole[:3, :2].clone()), ([0, 2], whole[:3, 2:].clone()), ([3, 0], whole[3:].clone())]
    sharded(tmp_path / "c", pieces, [5, 6])
    assert torch.equal(read_dcp(str(tmp_path / "c"))["w"], whole)


@pytest.mark.parametrize(
    ("offsets", "size", "words"),
    [
        ([[0], [2]], [4], "two chunks of 'w' overlap|not as large"),
        ([[0], [3]], [6], "two chunks of 'w' overlap|nowhere, or not inside"),
        ([[0], [1]], [6], "overlap"),
        ([[0], [3]], [7], "not as large as it is"),
        ([[0], [3]], [1 << 40], "not as large as it is"),
        ([[0], [4]], [6], "not inside of it"),
        ([[0], [0]], [6], "overlap"),
    ],
)
def test_B04_chunks_that_do_not_tile_their_tensor_are_refused(
    tmp_path: Path, offsets: list[list[int]], size: list[int], words: str
) -> None:
    sharded(tmp_path / "c", [(offset, torch.ones(3)) for offset in offsets], size)
    if offsets == [[0], [3]] and size == [6]:
        assert read_dcp(str(tmp_path / "c"))["w"].tolist() == [1] * 6
        return
    with pytest.raises(Damaged, match=words):
        read_dcp(str(tmp_path / "c"))


@pytest.mark.parametrize("kind", PICKLES)
def test_B39_hostile_metadata_are_refused_and_not_run(folder: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    (folder / ".metadata").write_bytes(PICKLES[kind](marker))
    with pytest.raises(UnbrokenError, match=r"\.metadata: "):
        read_dcp(str(folder))
    assert not marker.exists()


def test_B39_a_payload_inside_true_metadata_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    change(folder, lambda metadata: setattr(metadata, "planner_data", {"x": Strike(marker)}))
    with pytest.raises(Refused, match=r"(?s)needs posix\.system.*dcp_to_torch_save"):
        read_dcp(str(folder))
    assert not marker.exists()


def test_B39_a_payload_in_an_item_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    dcp.save({"a": Strike(marker), "w": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    with pytest.raises(Refused, match=r"distcp \(at byte \d+\).*posix\.system"):
        read_dcp(str(tmp_path / "c"))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a/../../x", "", "x\0y", "..", "link.distcp"])
def test_B39_files_outside_the_folder_are_not_read(folder: Path, name: str) -> None:
    (folder.parent / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "link.distcp").symlink_to(folder.parent / "outside.distcp")

    def act(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    change(folder, act)
    with pytest.raises(Refused, match="outside of"):
        read_dcp(str(folder))


def test_B39_items_that_share_their_bytes_or_lie_about_them(folder: Path) -> None:
    def longer(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).length = 1 << 50

    def shared(metadata: Metadata) -> None:
        longest = max(metadata.storage_data.values(), key=lambda info: info.length)
        for info in metadata.storage_data.values():
            info.offset, info.length = longest.offset, longest.length

    raw = (folder / ".metadata").read_bytes()
    for act in (longer, shared):
        (folder / ".metadata").write_bytes(raw)
        change(folder, act)
        with pytest.raises(Damaged, match=r"is cut short|not what the metadata say|far more than it holds"):
            read_dcp(str(folder))


def test_B04_torn_folders_are_errors_by_name(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    raw, metadata = path.read_bytes(), (folder / ".metadata").read_bytes()
    for at in range(0, len(raw), len(raw) // 20):
        path.write_bytes(raw[:at])
        with pytest.raises(Damaged, match=r"__0_0\.distcp"):
            read_dcp(str(folder))
    path.unlink()
    with pytest.raises(NoCheckpoint, match=r"__0_0\.distcp"):
        read_dcp(str(folder))
    path.write_bytes(raw)
    for at in range(0, len(metadata), len(metadata) // 20):
        (folder / ".metadata").write_bytes(metadata[:at])
        with pytest.raises(Damaged, match=r"\.metadata"):
            read_dcp(str(folder))


def test_B04_a_flipped_bit_in_the_items_is_an_error_or_changes_nothing(folder: Path) -> None:
    path, expected, num_refused = folder / "__0_0.distcp", state(), 0
    raw = path.read_bytes()
    for at in range(5, len(raw), len(raw) // 40):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 2]) + raw[at + 1 :])
        try:
            back = read_dcp(str(folder))
        except UnbrokenError:
            num_refused += 1
            continue
        assert all(torch.equal(back["model"][name], value) for name, value in expected["model"].items())
    assert num_refused > 10
