"""safetensors: one file or shards; headers that lie, names that lead out."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from unbroken.core.errors import Damaged, MissingExtra, NoCheckpoint, Refused
from unbroken.importing.safetensors_files import read_safetensors, read_shards, weights_of


def raw_file(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int = 0, end: int = 16, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_file_and_shards_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0), "b": torch.ones(2).bfloat16()}, tmp_path / "one.safetensors")
    assert read_safetensors(str(tmp_path / "one.safetensors"))["a"].tolist() == [0, 1, 2]
    assert weights_of(str(tmp_path)) is not None
    save_file({"c": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(Refused, match="holds 2 safetensors files and no"):
        weights_of(str(tmp_path))
    table = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert sorted(read_shards(str(tmp_path))) == ["a", "b", "c"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table | {"d": "two.safetensors"}}))
    with pytest.raises(Damaged, match=r"two\.safetensors: holds other tensors than .* says: d"):
        read_shards(str(tmp_path))


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": entry()}, 1 << 62),
        ({"a": entry()}, 90_000_000),
        ({"a": entry(shape=[1 << 40])}, None),
        ({"a": entry(end=1 << 40, shape=[1 << 38])}, None),
        ({"a": entry(), "b": entry()}, None),  # overlapping
        ({"a": entry(0, 12, [3]), "b": entry(8, 16, [2])}, None),
        ({"a": entry(0, 8, [2])}, None),  # a hole
        ({"a": entry(-4, 12)}, None),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, None),
        (b"{" * 2000, None),
        (b"not json", None),
        (b"", None),
    ],
)
def test_B39_lying_headers_are_damage_by_name(tmp_path: Path, header: Any, length: int | None) -> None:
    with pytest.raises(Damaged, match=r"bad\.safetensors"):
        read_safetensors(str(raw_file(tmp_path / "bad.safetensors", header, length=length)))


def test_B04_every_cut_is_damage_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.arange(64.0)}, tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    for at in [*range(0, len(raw), 7), len(raw) - 1]:
        (tmp_path / "a.safetensors").write_bytes(raw[:at])
        with pytest.raises(Damaged, match=r"a\.safetensors"):
            read_safetensors(str(tmp_path / "a.safetensors"))
    (tmp_path / "a.safetensors").write_bytes(raw + b"x")
    with pytest.raises(Damaged, match=r"a\.safetensors"):
        read_safetensors(str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a//b", "", 5, None, ["x"], "link.safetensors", "x" * 5000, "a\\..\\b"]
)
def test_B39_an_index_that_names_files_outside_is_refused(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    os.symlink("../outside.safetensors", folder / "link.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises((Refused, NoCheckpoint), match=r"outside of|no such file"):
        read_shards(str(folder))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, '{"weight_map": {"a": "gone.safetensors"}}'])
def test_B04_an_index_that_is_none_is_an_error_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises((Damaged, NoCheckpoint), match=str(tmp_path)):
        read_shards(str(tmp_path))


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw_file(tmp_path / "a.safetensors", {"a": entry()})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtra, match=r"unbroken\[safetensors\]"):
        read_safetensors(str(tmp_path / "a.safetensors"))
