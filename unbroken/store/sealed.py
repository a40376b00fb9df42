"""Sealed files: one JSON object whose body is covered by a checksum, so that a changed byte anywhere is found before use.

    {"magic":"unbroken/<kind>","format":1,"min_reader":1,"checksum":"<64 hex>","body":{...}}

The envelope is the same for all formats to come. Unknown fields are passed over, in the envelope and in the body.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from unbroken.codec.digest import text_digest
from unbroken.core.errors import Damaged, NewerFormat, Permanent
from unbroken.core.limits import MAX_JSON_BYTES
from unbroken.core.ports import Tier

FORMAT = 3
"""The newest that this version reads."""

SHARDED_FORMAT = 3
"""What is written of sharded states."""

ENCODED_FORMAT = 2
"""What is written with differences and codecs."""

PLAIN_FORMAT = 1
"""What is written of everything that the first version can read, too: all but the above."""

BROKEN_INPUT = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding hostile JSON may raise."""

T = TypeVar("T", bound=Struct)


class _Envelope(Struct, frozen=True, kw_only=True):
    magic: str
    format: int
    min_reader: int
    checksum: str
    body: Raw


def seal(kind: str, body: Struct, number: int = PLAIN_FORMAT) -> bytes:
    """The file of `body`; readers of formats below `number` refuse it."""
    raw = msgspec.json.encode(body)
    magic = f"unbroken/{kind}"
    return _encoded(_Envelope(magic=magic, format=number, min_reader=number, checksum=_checksum(magic, number, number, raw), body=Raw(raw)))


def unseal(kind: str, raw: bytes, type: type[T], path: str) -> T:
    """The body of a file; `path` only names it in errors. Raises Damaged, or NewerFormat when this version cannot read it."""
    if len(raw) > MAX_JSON_BYTES:
        raise Damaged(path, f"larger than {MAX_JSON_BYTES} bytes")
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except BROKEN_INPUT as e:
        raise Damaged(path, f"not a sealed file, or cut short ({e})") from e
    if envelope.magic != f"unbroken/{kind}":
        raise Damaged(path, f"magic is {envelope.magic[:40]!r} where 'unbroken/{kind}' must be")
    check_format(envelope.format, envelope.min_reader, path)
    body = bytes(envelope.body)
    if envelope.checksum != _checksum(envelope.magic, envelope.format, envelope.min_reader, body):
        raise Damaged(path, "checksum does not match the content")
    if _encoded(envelope) != raw and not _has_more_fields(raw):
        raise Damaged(path, "the envelope was changed")
    try:
        return msgspec.json.decode(body, type=type)
    except BROKEN_INPUT as e:
        raise Damaged(path, f"field of the wrong type or out of bounds ({e})") from e


def check_format(number: int, min_reader: int, path: str) -> None:
    """Raises NewerFormat for a file that only a newer version reads. One changed digit cannot look like one: it takes both numbers."""
    if number > FORMAT and min_reader > FORMAT:
        raise NewerFormat(f"{path}: written by a newer version (format {number}, this reads <= {FORMAT}): upgrade unbroken")


def read_sealed(tier: Tier, path: str, kind: str, type: type[T]) -> tuple[T, bytes]:
    """The body of a stored file, and the file's bytes. Raises FileNotFoundError, Damaged (unreadable counts) or NewerFormat."""
    raw = read_bounded(tier, path)
    return unseal(kind, raw, type, path), raw


def read_bounded(tier: Tier, path: str) -> bytes:
    """All bytes of a small file. Raises FileNotFoundError, and Damaged when it is too large or cannot be read."""
    try:
        raw = tier.read(path, 0, MAX_JSON_BYTES + 1)
    except Permanent as e:
        raise Damaged(path, f"cannot be read ({e})") from e
    if len(raw) > MAX_JSON_BYTES:
        raise Damaged(path, f"larger than {MAX_JSON_BYTES} bytes")
    return raw


def _checksum(magic: str, number: int, min_reader: int, body: bytes) -> str:
    return text_digest(magic, str(number), str(min_reader), body)


def _encoded(envelope: _Envelope) -> bytes:
    return msgspec.json.encode(envelope)


def _has_more_fields(raw: bytes) -> bool:
    return bool(msgspec.json.decode(raw, type=dict[str, Raw]).keys() - set(_Envelope.__struct_fields__))
