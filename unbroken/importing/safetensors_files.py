"""safetensors: one file, or several with `model.safetensors.index.json`. JSON and the tensors' bytes: there is nothing to execute."""

from __future__ import annotations

import os
import struct
from typing import Any

import torch

from unbroken.core.errors import Damaged, MissingExtra, Refused
from unbroken.importing.files import member, read_json, size_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def is_safetensors(path: str) -> bool:
    """Does it begin like one: the length of a header, then its brace?"""
    with open(path, "rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] <= _MAX_HEADER_BYTES


def read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """The tensors of one file by name, mapped. Damaged where the header lies about sizes, places or the file's length; MissingExtra.

    The format has no checksums: other bytes of the right length are other values.
    """
    size = size_of(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtra("safetensors", "safetensors") from error
    with open(path, "rb") as file:
        head = file.read(8)
    if len(head) < 8 or struct.unpack("<Q", head)[0] > min(size - 8, _MAX_HEADER_BYTES):
        raise Damaged(path, f"is no safetensors file, or cut short: its header is longer than its {size} bytes")
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
    except (SafetensorError, ValueError, RuntimeError, OverflowError, KeyError, TypeError) as error:
        raise Damaged(path, f"is no sound safetensors file ({str(error)[:200]})") from error


def read_shards(folder: str, index: str = INDEX) -> dict[str, torch.Tensor]:
    """The tensors of all files that an index names. Refused for names outside the folder, Damaged where index and files disagree."""
    place = member(folder, index, named_by=folder)
    content = read_json(place)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table:
        raise Damaged(place, "has no weight_map")
    files = {str(name): member(folder, name, named_by=place) for name in dict.fromkeys(map(_text, table.values()))}
    out: dict[str, torch.Tensor] = {}
    for name, path in files.items():
        found = read_safetensors(path)
        listed = {weight for weight, file in table.items() if file == name}
        if listed != found.keys():
            wrong = sorted(listed ^ found.keys())
            raise Damaged(path, f"holds other tensors than {index} says: {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}")
        out |= found
    return out


def weights_of(folder: str) -> dict[str, torch.Tensor] | None:
    """The weights of a folder, from shards or one file; None where there are none. Refused where two files could be meant."""
    if os.path.lexists(os.path.join(folder, INDEX)):
        return read_shards(folder)
    if os.path.lexists(os.path.join(folder, SINGLE)):
        return read_safetensors(member(folder, SINGLE, named_by=folder))
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if len(names) > 1:
        raise Refused(f"{folder}: holds {len(names)} safetensors files and no {INDEX}: name the one that is meant")
    return read_safetensors(member(folder, names[0], named_by=folder)) if names else None


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else repr(value)
