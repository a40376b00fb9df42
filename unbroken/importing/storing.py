"""A foreign checkpoint as a new folder of a Store: its state as it was saved, types of values and keys kept, in one checkpoint."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct

from unbroken.archive.saving import Saving
from unbroken.capture import tensors
from unbroken.capture.tree import flatten, view
from unbroken.core.errors import Refused
from unbroken.core.os import sync_directory
from unbroken.core.ports import Clock, Nonces, failpoint
from unbroken.importing.files import short_name
from unbroken.importing.foreign import open_source
from unbroken.importing.parts import Parts, understand
from unbroken.store.repository import Part
from unbroken.store.tiers.disk import DiskTier

_MAX_DEPTH = 60


class Imported(Struct, frozen=True, kw_only=True):
    """What was written: one checkpoint of `step` in the folder `path`.

    `taken` names the parts that `Run(start_from=)` would know, `left_over` what is stored, but not understood, `not_stored` what could not
    be kept.
    """

    path: str
    source: str
    format: str
    step: int
    root: str
    num_tensors: int
    size_bytes: int
    taken: list[str]
    left_over: list[str]
    not_stored: list[str]
    notes: list[str]


def import_into(source: str, directory: str, step: int | None, *, clock: Clock, nonces: Nonces) -> Imported:
    """Read a foreign checkpoint and write it to `directory`, which is made: there whole, or not at all.

    step: which one, where the source holds several; else the number that the checkpoint gets where the source tells none (0 if not given).
    Refused where `directory` is anything but an empty folder, ValueError where its parent is missing; errors of `open_source` besides.
    """
    directory = _new_folder(directory)
    foreign = open_source(source, step)
    parts, not_stored = understand(foreign), list[str]()
    state = _storable(foreign.state, "state", not_stored, 0)
    if state is _NOTHING:
        raise Refused(f"{foreign.path}: holds nothing that can be stored: {'; '.join(not_stored[:3])}")
    items = flatten(state)
    at = foreign.step if foreign.step is not None else step or 0
    folder, name = os.path.split(directory)
    temporary = os.path.join(folder, f".{name[:100]}.tmp-{nonces.nonce()}")
    origin = {"source": short_name(foreign.path), "format": foreign.format, "step": foreign.step, "root": foreign.root}
    try:
        saving = Saving.open(DiskTier(temporary), clock, nonces, facts={"imported": origin})
        try:
            saving.save(at, [Part(item.piece, view(item)) for item in items], milestone=True, base=None, loaded_root="")
            last = saving.last
        finally:
            saving.release()
        assert last is not None
        failpoint("import.written")
        _publish(temporary, directory)
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(temporary)
    sync_directory(folder)
    return Imported(
        path=directory,
        source=foreign.path,
        format=foreign.format,
        step=at,
        root=last.state_root,
        num_tensors=sum(isinstance(item.data, torch.Tensor) for item in items),
        size_bytes=sum(item.nbytes for item in items),
        taken=_taken(parts),
        left_over=parts.left_over,
        not_stored=not_stored,
        notes=parts.notes,
    )


def _new_folder(directory: str) -> str:
    directory = os.path.abspath(directory)
    if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.path.islink(directory) and not os.listdir(directory)):
        raise Refused(f"{directory}: is there already, and nothing is overwritten: choose a new folder")
    if not os.path.isdir(os.path.dirname(directory)):
        raise ValueError(f"{directory}: its folder {os.path.dirname(directory)} does not exist: make it first")
    return directory


def _publish(temporary: str, directory: str) -> None:
    try:
        os.rename(temporary, directory)  # fails where something is, but for an empty folder, of which nothing is lost
    except OSError as error:
        if os.path.lexists(directory):
            raise Refused(f"{directory}: has been made meanwhile, and nothing is overwritten: choose a new folder") from error
        raise


_NOTHING = object()


def _storable(value: Any, path: str, gone: list[str], depth: int) -> Any:
    """The state without what no Store keeps, named in `gone`; dicts lose that entry, a list is kept whole or not at all."""
    if isinstance(value, torch.Tensor):
        reason = tensors.refusal(value)
        return value if reason is None else _without(path, reason, gone)
    if depth > _MAX_DEPTH:
        return _without(path, f"more than {_MAX_DEPTH} deep", gone)
    if isinstance(value, dict):
        kept = {key: found for key, one in value.items() if (found := _storable(one, f"{path}[{key!r}]", gone, depth + 1)) is not _NOTHING}
        if len(kept) == len(value) and all(kept[key] is value[key] for key in value):
            return value
        out = type(value)()
        out.update(kept)
        return out
    if type(value) in (list, tuple):
        found = [_storable(one, f"{path}[{i}]", gone, depth + 1) for i, one in enumerate(value)]
        return _NOTHING if any(one is _NOTHING for one in found) else type(value)(found)
    try:
        flatten(value)
    except TypeError as error:
        return _without(path, str(error), gone)
    return value


def _without(path: str, reason: str, gone: list[str]) -> Any:
    gone.append(f"{path}: {reason}")
    return _NOTHING


def _taken(parts: Parts) -> list[str]:
    found = [f"weights ({len(parts.model)} tensors)"] if parts.model else []
    found += [f"optimizer {key} state".replace("  ", " ") for key in parts.optimizers]
    found += [f"scheduler {key}".strip() for key in parts.schedulers]
    found += ["loss scaler"] if parts.scaler is not None else []
    return found + [f"{name} {value}" for name, value in parts.progress.items()]
