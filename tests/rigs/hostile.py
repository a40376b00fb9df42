"""Files that want to be more than data: pickles that would call something, and zip files around them."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any


class Strike:
    """Unpickled, it would make a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def by_eval(marker: Path) -> bytes:
    """The same through builtins, by hand: protocol 2."""
    code = f"open({str(marker)!r}, 'w').close()".encode()
    return b"\x80\x02c__builtin__\neval\nX" + struct.pack("<I", len(code)) + code + b"\x85R."


def by_stack_global(marker: Path) -> bytes:
    """The same with the name computed on the stack: protocol 4."""
    return pickle.dumps(Strike(marker), protocol=4)


def by_inst(marker: Path) -> bytes:
    """The same with the oldest opcode."""
    return f"(S'touch {marker}'\nios\nsystem\n.".encode()


def by_build(marker: Path) -> bytes:
    """A harmless class whose state would be set."""
    return b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R}X\x01\x00\x00\x00bK\x01sb."


PICKLES = {"eval": by_eval, "stack global": by_stack_global, "inst": by_inst, "build": by_build}


def unfolding(levels: int = 60) -> bytes:
    """A few hundred bytes that describe 2 to the `levels` values: each tuple holds the one before twice."""
    out = b"\x80\x02)q\x00"
    for i in range(levels):
        out += b"0h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    return out + b"."


def torch_zip(path: Path, data: bytes, members: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file as torch.save lays it out around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in {"a/data.pkl": data, "a/byteorder": b"little", "a/version": b"3\n", **(members or {})}.items():
            archive.writestr(name, raw)
    return path
