"""A source of state, whatever wrote it, and who it is: recognised by content, never by its name alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from unbroken.core.errors import Damaged, NoCheckpoint, Refused
from unbroken.importing import own, safetensors_files
from unbroken.importing.dcp import METADATA, read_dcp
from unbroken.importing.files import member, read_json, size_of
from unbroken.importing.torch_file import is_torch_file, read_torch_file

ACCEPTED = (
    "a file of torch.save, a Lightning .ckpt, a safetensors file or folder, a folder of torch.distributed.checkpoint, "
    "a Hugging Face Trainer checkpoint-N, or a folder of unbroken (DIR, DIR@STEP)"
)

_TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
_RNG = re.compile(r"rng_state(?:_(\d{1,6}))?\.pth")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What a source holds. `state` is as it was saved, tensors on the CPU; `step` what it says of itself; `rng` random states by rank."""

    path: str
    format: str
    state: Any
    step: int | None = None
    root: str = ""
    notes: tuple[str, ...] = ()
    rng: dict[int, Any] = field(default_factory=dict)


def open_source(source: str | os.PathLike[str], step: int | None = None) -> Foreign:
    """Read a whole checkpoint of any known format. `step`: which one, where the source holds several.

    Refused for what would have to be executed, or is not known; Damaged for what is torn; NoCheckpoint where nothing is, or not of that
    step; MissingExtra. Nothing in the source is executed, and nothing outside of it read. Memory: torch and safetensors files are
    mapped, others are read whole.
    """
    path = os.path.abspath(os.fspath(source).removeprefix("file://"))
    found = own.read_own(path, step)
    if found is not None:
        state, at, root, notes = found
        return Foreign(path=path, format="unbroken", state=state, step=at, root=root, notes=tuple(notes))
    if not os.path.lexists(path):
        raise NoCheckpoint(f"{path}: nothing is there")
    read: Callable[[str], Foreign] = _from_folder if os.path.isdir(path) else _from_file
    if read is _from_folder and not _is_known(path):
        path = _trainer_checkpoint(path, step)
    opened = read(path)
    if step is not None and opened.step is not None and opened.step != step:
        raise NoCheckpoint(f"{path}: holds step {opened.step} only, not step {step}")
    return opened


def _from_file(path: str) -> Foreign:
    size_of(path)
    if safetensors_files.is_safetensors(path):
        return Foreign(path=path, format="safetensors", state={"model": safetensors_files.read_safetensors(path)})
    if not is_torch_file(path):
        raise Refused(f"{path}: is of no known format; there are: {ACCEPTED}")
    state = read_torch_file(path)
    is_lightning = isinstance(state, dict) and "pytorch-lightning_version" in state and "state_dict" in state
    return Foreign(path=path, format="lightning" if is_lightning else "torch", state=state, step=step_of(state))


def _is_known(folder: str) -> bool:
    names = os.listdir(folder)
    return METADATA in names or _TRAINER_STATE in names or any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _from_folder(folder: str) -> Foreign:
    names = os.listdir(folder)
    if METADATA in names:
        state = read_dcp(folder)
        return Foreign(path=folder, format="dcp", state=state, step=step_of(state))
    if _TRAINER_STATE in names:
        return _from_trainer(folder, names)
    if any(name.endswith(".distcp") for name in names):
        raise Damaged(folder, f"holds files of torch.distributed.checkpoint, but no {METADATA}: that save was never finished")
    weights = safetensors_files.weights_of(folder)
    if weights is None:
        raise Refused(f"{folder}: is of no known format; there are: {ACCEPTED}")
    return Foreign(path=folder, format="safetensors", state={"model": weights})


def _trainer_checkpoint(folder: str, step: int | None) -> str:
    """The checkpoint-N that is meant, where the folder is a Trainer's output; else the folder itself."""
    found = {int(match[1]): name for name in os.listdir(folder) if (match := _CHECKPOINT.fullmatch(name))}
    if not found:
        return folder
    if step is not None and step not in found:
        raise NoCheckpoint(f"{folder}: there is no checkpoint-{step}; there are {', '.join(map(str, sorted(found)))}")
    name = found[max(found) if step is None else step]
    place = member(folder, name, named_by=folder)
    if not _is_known(place):
        raise Refused(f"{place}: is of no known format, or was never finished; there are: {ACCEPTED}")
    return place


def _from_trainer(folder: str, names: list[str]) -> Foreign:
    """A Hugging Face Trainer's folder: weights, and a file each for optimizer, scheduler, scaler and random states."""
    trainer = read_json(member(folder, _TRAINER_STATE, named_by=folder))
    if not isinstance(trainer, dict):
        raise Damaged(os.path.join(folder, _TRAINER_STATE), "is no JSON object")
    weights: Any = safetensors_files.weights_of(folder)
    if weights is None and "pytorch_model.bin" in names:
        weights = read_torch_file(member(folder, "pytorch_model.bin", named_by=folder))
    state: dict[str, Any] = {} if weights is None else {"model": weights}
    for part in ("optimizer", "scheduler", "scaler"):
        if f"{part}.pt" in names:
            state[part] = read_torch_file(member(folder, f"{part}.pt", named_by=folder))
    rng = {}
    for name in names:
        if match := _RNG.fullmatch(name):
            rng[int(match[1] or 0)] = read_torch_file(member(folder, name, named_by=folder))
    step = trainer.get("global_step")
    state["trainer_state"] = trainer
    if rng:
        state["rng_state"] = rng
    notes = () if weights is not None else (f"{folder}: holds no weights (model.safetensors or pytorch_model.bin)",)
    return Foreign(
        path=folder, format="huggingface", state=state, step=step if type(step) is int and step >= 0 else None, notes=notes, rng=rng
    )


def step_of(state: Any) -> int | None:
    """The step that a state tells of itself."""
    for name in ("global_step", "step", "iteration", "iter", "iter_num"):
        value = state.get(name) if isinstance(state, dict) else None
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point() and not value.is_complex():
            value = int(value)
        if type(value) is int and 0 <= value < 10**12:
            return value
    return None
