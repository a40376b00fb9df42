"""Real text without a download: the Python standard library's own sources, as samples of bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 << 20


def library_text(max_bytes: int = MAX_BYTES) -> bytes:
    """The sources of the standard library's top-level modules, in the order of their names, cut at `max_bytes`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    taken = bytearray()
    for path in sorted(folder.glob("*.py")):
        taken += path.read_bytes()
        if len(taken) >= max_bytes:
            break
    return bytes(taken[:max_bytes])


class ByteWindows:
    """A dataset: sample i is (x, y), both [context] int64, y shifted by one byte. Windows do not overlap; `text` is read once."""

    def __init__(self, text: bytes, context: int = 64) -> None:
        if len(text) <= context:
            raise ValueError(f"{len(text)} bytes of text give no sample of {context} bytes: use more text or a shorter context")
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.data[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]
