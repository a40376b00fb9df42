"""The two record files of other tools, read to learn how far they got: of each the whole, undamaged records from the beginning.

Both tools' own readers are internal and move between versions; the formats do not.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

_BLOCK_BYTES = 1 << 15
_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD_BYTES = 64 << 20


def leveldb_records(path: str) -> Iterator[bytes]:
    """Records of a LevelDB log behind 7 bytes of header, as wandb and SwanLab write; up to the first that is torn or damaged."""
    record = b""
    with open(path, "rb") as file:
        at = len(file.read(_HEADER_BYTES))
        while True:
            left = _BLOCK_BYTES - at % _BLOCK_BYTES
            if left < _HEADER_BYTES:
                at += len(file.read(left))
            head = file.read(_HEADER_BYTES)
            if len(head) < _HEADER_BYTES:
                return
            crc, length, kind = struct.unpack("<IHB", head)
            data = file.read(length)
            at += _HEADER_BYTES + length
            if len(data) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
                return
            record = data if kind in (_FULL, _FIRST) else record + data
            if len(record) > _MAX_RECORD_BYTES:
                return
            if kind in (_FULL, _LAST):
                yield record


def tf_records(path: str, masked_crc: Callable[[bytes], int]) -> Iterator[tuple[bytes, int]]:
    """Records of an event file and the offset behind each; up to the first that is torn.

    A crash tears the end only, and the checksum is slow Python: the last whole record's is checked, and no other's.
    """
    with open(path, "rb") as file:
        at, last = 0, b""
        while True:
            head = file.read(12)
            length = int.from_bytes(head[:8], "little")
            body = file.read(length + 4) if len(head) == 12 and length <= _MAX_RECORD_BYTES else b""
            is_whole = len(body) == length + 4
            if last and (is_whole or masked_crc(last[:-4]) == int.from_bytes(last[-4:], "little")):
                yield last[:-4], at
            if not is_whole:
                return
            at, last = at + 16 + length, body
