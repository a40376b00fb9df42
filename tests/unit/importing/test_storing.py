"""`unbroken import`: a foreign checkpoint as a folder of ours, whole or not at all; ls, show, verify and Store work on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from tests.rigs.foreign_files import lightning_file, trainer_folder, training
from tests.rigs.hostile import Strike
from unbroken.core.errors import NoCheckpoint, Refused
from unbroken.core.ports import arm


def command(*args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "unbroken", *map(str, args)]
    done = subprocess.run(line, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_B19_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state: dict[Any, Any] = {"model": training()[0].state_dict(), "ms": {25: 1, 50: 2}, 1.5: "y", True: "x", "t": (1, 2), "none": None}
    torch.save(state | {"by": b"\x00\xff", "big": 2**70, "el": [], "step": 12}, tmp_path / "a.pt")
    made = unbroken.import_checkpoint(tmp_path / "a.pt", tmp_path / "out")
    assert (made.format, made.step, made.num_tensors, made.not_stored) == ("torch", 12, 4, [])
    assert made.taken == ["weights (4 tensors)", "step 12"] and "ms" in made.left_over
    back = unbroken.Store(tmp_path / "out").load(12)
    assert {key: value for key, value in back.items() if key != "model"} == {
        "ms": {25: 1, 50: 2}, 1.5: "y", True: "x", "t": (1, 2), "none": None, "by": b"\x00\xff", "big": 2**70, "el": [], "step": 12,
    }  # fmt: skip
    assert all(torch.equal(value, state["model"][name]) for name, value in back["model"].items())
    archive = unbroken.open(tmp_path / "out")
    assert archive.verify().ok and archive.facts.options["imported"]["format"] == "torch"
    assert archive.steps()[0].root == made.root
    again = unbroken.import_checkpoint(f"{tmp_path}/out@12", tmp_path / "again")
    assert again.root == made.root, "a second cycle changes nothing"


def test_the_commands_work_on_what_was_imported(tmp_path: Path) -> None:
    trainer_folder(tmp_path / "hf" / "checkpoint-2")
    trainer_folder(tmp_path / "hf" / "checkpoint-4", 4)
    told = json.loads(command("import", tmp_path / "hf", tmp_path / "out", "--step", "2", "--json").stdout)
    assert (told["format"], told["step"], told["left_over"]) == ("huggingface", 2, [])
    assert told["taken"] == ["weights (4 tensors)", "optimizer state", "scheduler", "step 2"]
    text = command("import", lightning_file(tmp_path / "a.ckpt"), tmp_path / "l").stdout
    assert "lightning: " in text and "stored, but not understood: loops, callbacks" in text
    archive = unbroken.open(tmp_path / "l")
    assert [one.step for one in archive.steps()] == [2] and archive.verify().ok
    assert "/state_dict/model.0.weight" in {one["name"] for one in archive.variables()}


def test_what_cannot_be_stored_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    folder: Any = 1
    for _ in range(80):
        folder = {"d": folder}
    torch.save({"w": torch.ones(2), "deep": folder}, tmp_path / "b.pt")
    made = unbroken.import_checkpoint(tmp_path / "b.pt", tmp_path / "out")
    assert len(made.not_stored) == 1 and made.not_stored[0].startswith("state['deep']['d']")
    assert unbroken.Store(tmp_path / "out").load()["w"].tolist() == [1, 1]


def test_after_an_error_nothing_is_there(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Strike(tmp_path / "marker")}, tmp_path / "bad.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(Refused):
        unbroken.import_checkpoint(tmp_path / "bad.pt", tmp_path / "out")

    def strike() -> None:
        raise OSError(28, "no space left on device")

    arm("import.written", strike)
    try:
        with pytest.raises(OSError, match="no space"):
            unbroken.import_checkpoint(tmp_path / "good.pt", tmp_path / "out")
    finally:
        arm("import.written", None)
    assert sorted(os.listdir(tmp_path)) == before
    (tmp_path / "out").mkdir()
    unbroken.import_checkpoint(tmp_path / "good.pt", tmp_path / "out", step=7)
    assert unbroken.Store(tmp_path / "out").latest() == 7


def test_folders_that_are_taken_or_cannot_be_made(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("full", "a.pt", "link"):
        with pytest.raises(Refused, match="is there already, and nothing is overwritten"):
            unbroken.import_checkpoint(tmp_path / "a.pt", tmp_path / name)
    with pytest.raises(ValueError, match="does not exist: make it first"):
        unbroken.import_checkpoint(tmp_path / "a.pt", tmp_path / "no" / "out")
    with pytest.raises(NoCheckpoint):
        unbroken.import_checkpoint(tmp_path / "gone.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_file_of_the_folder_holds_a_path_of_this_machine(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    unbroken.import_checkpoint(tmp_path / "a.pt", tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
