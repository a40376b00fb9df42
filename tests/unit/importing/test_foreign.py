"""Which format a source is: told by its content. Folders of a Trainer, Lightning files, our own folders; what is none of these."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unbroken
from tests.rigs.foreign_files import lightning_file, trainer_folder, training
from tests.rigs.hostile import Strike
from unbroken.core.errors import Damaged, NoCheckpoint, Refused
from unbroken.importing.foreign import open_source
from unbroken.importing.parts import understand


def test_a_trainers_checkpoint_and_its_output_folder(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        trainer_folder(tmp_path / f"checkpoint-{step}", step)
    for source, asked, expected in (
        (tmp_path, None, 10),
        (tmp_path, 4, 4),
        (tmp_path / "checkpoint-2", None, 2),
        (tmp_path / "checkpoint-2", 2, 2),
    ):
        found = open_source(source, asked)
        parts = understand(found)
        assert (found.format, found.step, set(found.rng)) == ("huggingface", expected, {0})
        assert len(parts.model) == 4 and list(parts.optimizers) == [""] == list(parts.schedulers) and not parts.left_over
    with pytest.raises(NoCheckpoint, match="no checkpoint-3; there are 2, 4, 10"):
        open_source(tmp_path, 3)
    with pytest.raises(NoCheckpoint, match="holds step 2 only, not step 3"):
        open_source(tmp_path / "checkpoint-2", 3)


def test_B39_nothing_outside_of_a_trainers_folder_is_read_and_nothing_run(tmp_path: Path) -> None:
    whole = trainer_folder(tmp_path / "whole")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"):
        folder = Path(shutil.copytree(whole, tmp_path / f"{name}-bad"))
        torch.save({"state": Strike(tmp_path / "marker")}, folder / name)
        with pytest.raises(Refused, match=rf"(?s){name}.*posix\.system.*weights_only=False"):
            open_source(folder)
        assert not (tmp_path / "marker").exists()
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        folder = Path(shutil.copytree(whole, tmp_path / f"{name}-link"))
        (folder / name).unlink()
        (folder / name).symlink_to(whole / name)
        with pytest.raises(Refused, match=f"{name}: is a link to .*, outside of the folder"):
            open_source(folder)
    for text in ("[]", "", '{"global_step": "x"}'):
        folder = Path(shutil.copytree(whole, tmp_path / f"t{len(text)}"))
        (folder / "trainer_state.json").write_text(text)
        if text.startswith("{"):
            assert open_source(folder).step is None
        else:
            with pytest.raises(Damaged, match="trainer_state"):
                open_source(folder)


def test_a_link_to_a_source_is_followed(tmp_path: Path) -> None:
    trainer_folder(tmp_path / "real" / "checkpoint-2")
    (tmp_path / "latest").symlink_to(tmp_path / "real" / "checkpoint-2")
    assert open_source(tmp_path / "latest").step == 2


def test_a_lightning_file(tmp_path: Path) -> None:
    found = open_source(lightning_file(tmp_path / "a.ckpt"))
    parts = understand(found)
    assert (found.format, found.step, parts.progress) == ("lightning", 2, {"step": 2, "epoch": 1})
    assert list(parts.optimizers) == [""] == list(parts.schedulers) and parts.left_over == ["loops", "callbacks"]


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    lightning_file(tmp_path / "a.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "b.ckpt")
    assert open_source(tmp_path / "a.safetensors").format == "lightning"
    assert open_source(tmp_path / "b.ckpt").format == "safetensors"


def test_folders_of_ours(tmp_path: Path) -> None:
    with unbroken.Store(tmp_path / "s") as store:
        for step in (1, 2, 3):
            store.save(step, {"model": {"w": torch.full((2,), float(step))}, "ms": {25: 1}, "none": None})
    for source, step, expected in ((f"{tmp_path}/s", None, 3), (f"{tmp_path}/s@2", None, 2), (f"{tmp_path}/s", 1, 1)):
        found = open_source(source, step)
        assert (found.format, found.step) == ("unbroken", expected) and found.state["model"]["w"].tolist() == [expected] * 2
        assert found.state["ms"] == {25: 1} and found.state["none"] is None and len(found.root) == 64
    with pytest.raises(NoCheckpoint, match="there are 1, 2, 3"):
        open_source(f"{tmp_path}/s@7")
    with pytest.raises(ValueError, match="names step 2, and step 3 is asked for"):
        open_source(f"{tmp_path}/s@2", 3)
    pack = next((tmp_path / "s").glob("packs/*/*.pack"))
    raw = bytearray(pack.read_bytes())
    raw[4100] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(Damaged):
        for step in (1, 2, 3):
            open_source(f"{tmp_path}/s", step)


def test_what_is_no_checkpoint_is_refused_with_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder").mkdir()
    for name in ("text.pt", "empty.pt", "folder"):
        with pytest.raises(Refused, match=f"{name}: is of no known format; there are: a file of torch.save"):
            open_source(tmp_path / name)
    with pytest.raises(NoCheckpoint, match="nothing is there"):
        open_source(tmp_path / "gone")
    (tmp_path / "folder" / "__0_0.distcp").touch()
    with pytest.raises(Damaged, match=r"no \.metadata: that save was never finished"):
        open_source(tmp_path / "folder")
    (tmp_path / "o" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(Refused, match="checkpoint-5: is of no known format, or was never finished"):
        open_source(tmp_path / "o")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="no regular file"):
        open_source(tmp_path / "pipe")


def test_B18_parts_under_the_names_that_people_use(tmp_path: Path) -> None:
    model, optimizer, scheduler = training()
    weights, state = model.state_dict(), optimizer.state_dict()
    for given, num, rest in (
        (weights, 4, []),
        ({"model_state_dict": weights, "optimizer_state_dict": state, "epoch": 3, "args": {"a": 1}}, 4, ["args"]),
        ({"app": {"model": weights, "optim": state}}, 4, []),
        ({"model": {"g": weights, "d": weights}, "optimizer": {"g": state, "d": state}}, 8, []),
        ({"state_dict": weights, "optimizer": state, "lr_scheduler": scheduler.state_dict(), "best": 0.5}, 4, ["best"]),
        ({"model": "a name", "state_dict": weights, "optimizer": None, "scheduler": {}}, 4, ["model"]),
        ([1, 2], 0, ["the whole state, which is a list"]),
    ):
        torch.save(given, tmp_path / "a.pt")
        parts = understand(open_source(tmp_path / "a.pt"))
        assert (len(parts.model), parts.left_over) == (num, rest), given if isinstance(given, list) else list(given)
