"""Export: a checkpoint as files that other tools read, in one new place. It is there whole or not at all; nothing is overwritten."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Literal, get_args

from msgspec import Struct

from unbroken.archive import reading
from unbroken.core.errors import Refused
from unbroken.core.os import sync_directory
from unbroken.core.ports import Nonces, failpoint
from unbroken.core.records import CommitEntry, StoredPiece
from unbroken.store.repository import Repository

Format = Literal["safetensors", "torch"]


class Export(Struct, frozen=True, kw_only=True):
    """What was written: `path` is the new folder or file, `files` what is in it. `notes` limit what a loader may expect."""

    path: str
    files: list[str]
    step: int
    generation: int
    root: str
    notes: list[str]


def export(repository: Repository, root: str, step: int | None, target: str, format: str, *, nonces: Nonces) -> Export:
    """Write the state of `step`, or of the newest good checkpoint, to `target`: a new folder (safetensors) or a new file (torch).

    Refused when `target` is there or lies inside the run's folder; ValueError for another format or a missing parent folder; NoCheckpoint,
    Damaged as in load; MissingExtra. Memory: the whole state. After any error nothing is there.
    """
    if format not in get_args(Format):
        raise ValueError(f"format={format!r}: give 'safetensors' or 'torch'")
    target = _checked_target(target, root)
    from unbroken.capture import portable

    def wanted(stored: StoredPiece) -> bool:
        return reading.logical(stored) or stored.piece.pointer in portable.NAMES

    def use(commit: CommitEntry) -> reading.Pieces:
        return reading.read_commit(repository, commit, wanted)

    found = reading.newest_good(repository, use) if step is None else reading.exactly(repository, step, use)
    parts, notes = portable.state_dicts(found.value)
    notes += [f"passed over: {bad}" for bad in found.passed_over]
    commit = found.commit
    source = {"step": commit.step, "generation": commit.generation, "lineage": repository.lineage, "root": commit.state_root}
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:100]}.tmp-{nonces.nonce()}")
    try:
        if format == "torch":
            portable.write_torch(parts, temporary)
            files = [name]
        else:
            os.mkdir(temporary)
            files = portable.write_safetensors(parts, temporary, source | {"notes": notes})
            sync_directory(temporary)
        failpoint("export.written")
        _publish(temporary, target)
    finally:
        _remove(temporary)
    sync_directory(folder)
    return Export(path=target, files=files, step=commit.step, generation=commit.generation, root=commit.state_root, notes=notes)


def _checked_target(target: str, root: str) -> str:
    target = os.path.abspath(target)
    folder = os.path.dirname(target)
    if os.path.lexists(target):
        raise Refused(f"{target}: is there already, and nothing is overwritten: choose a new name")
    if not os.path.isdir(folder):
        raise ValueError(f"{target}: its folder {folder} does not exist: make it first")
    inside = os.path.realpath(folder) + os.sep
    if inside.startswith(os.path.realpath(root).rstrip(os.sep) + os.sep):
        raise Refused(f"{target}: lies inside the run's folder: choose a place outside of it")
    return target


def _publish(temporary: str, target: str) -> None:
    """Give it its name unless that is taken by now."""
    try:
        if os.path.isdir(temporary):
            os.rename(temporary, target)  # fails where something is, but for an empty folder, of which nothing is lost
        else:
            os.link(temporary, target)
    except OSError as error:
        if os.path.lexists(target):
            raise Refused(f"{target}: has been made meanwhile, and nothing is overwritten: choose a new name") from error
        raise


def _remove(temporary: str) -> None:
    with suppress(FileNotFoundError):
        if os.path.isdir(temporary):
            shutil.rmtree(temporary)
        else:
            os.unlink(temporary)
