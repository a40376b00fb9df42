"""What differs between two checkpoints, variable by variable. Equal digests are not read: the cost is that of what changed.

Arrays are streamed: memory is a few chunks on each side, whatever their size. A chunk that both checkpoints share is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from unbroken.archive.elements import Apart, item_bytes
from unbroken.archive.reading import checked_manifests, commit_of, newest_plausible
from unbroken.capture.scalars import decode, is_array, is_scalar
from unbroken.core.errors import Damaged, NoCheckpoint
from unbroken.core.records import CommitEntry, Manifest, StoredPiece
from unbroken.store.loading import Chunks, read_pieces
from unbroken.store.repository import Repository

What = Literal["added", "removed", "type", "role", "value"]
Name = tuple[str, int]
"""Pointer and rank, -1 for what is the same on every rank."""

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_BYTES = 4096
_CONTAINERS = ("py:dict", "py:OrderedDict", "py:Counter", "py:state_dict", "py:list", "py:tuple", "py:deque")


class Difference(Struct, frozen=True, kw_only=True):
    """One variable that is not the same. `before` and `after` are values for people, or dtype and shape.

    `num_differing` of `num_elements` elements of an array have other bits; `first` is the index of the first of them, `max_abs` the
    largest distance between two numbers (None where there is none, as beside a NaN). `counts`: it makes the checkpoints different;
    recorded facts do not, nor what belongs to ranks of which the other side has none.
    """

    name: str
    rank: int | None
    role: str
    what: What
    counts: bool = True
    before: str = ""
    after: str = ""
    num_differing: int = 0
    num_elements: int = 0
    max_abs: float | int | None = None
    first: list[int] | None = None


class _Side(NamedTuple):
    """A stored piece and the manifest that holds it, open for reading."""

    stored: StoredPiece
    manifest: Manifest
    chunks: Chunks


def compare(a: tuple[Repository, CommitEntry], b: tuple[Repository, CommitEntry]) -> list[Difference]:
    """Every difference from checkpoint `a` to checkpoint `b`, by name. Raises Damaged naming what cannot be read."""
    ours, theirs = _sides(*a), _sides(*b)
    found: dict[Name, Difference] = {}
    shared = [name for name in ours.keys() & theirs.keys() if _is_other(ours[name].stored, theirs[name].stored)]
    for name in ours.keys() ^ theirs.keys():
        side = ours.get(name) or theirs[name]
        form = _form(side.stored)
        is_added = name in theirs
        found[name] = _told(side, "added" if is_added else "removed", before="" if is_added else form, after=form if is_added else "")
    num_ranks = [1 + max((rank for _, rank in sides), default=0) for sides in (ours, theirs)]
    moved = {pointer.rpartition("/")[0] for pointer, _ in found}
    for name in sorted(shared, key=lambda name: _place(ours[name])):
        mine, other = ours[name], theirs[name]
        if mine.stored.piece.dtype in _CONTAINERS and name[0] in moved:
            continue  # told by its children that came or went
        found[name] = _difference(a[0], mine, b[0], other)
    return [
        msgspec.structs.replace(found[name], counts=found[name].role != "recorded" and name[1] < min(num_ranks)) for name in sorted(found)
    ]


def _sides(repository: Repository, commit: CommitEntry) -> dict[Name, _Side]:
    found: dict[Name, _Side] = {}
    for manifest in checked_manifests(repository, commit):
        chunks = Chunks(repository.tier, manifest)
        for stored in manifest.pieces:
            found.setdefault((stored.piece.pointer, -1 if stored.rank is None else stored.rank), _Side(stored, manifest, chunks))
    return found


def _is_other(a: StoredPiece, b: StoredPiece) -> bool:
    return (a.digest, a.piece.dtype, a.piece.shape, a.piece.role) != (b.digest, b.piece.dtype, b.piece.shape, b.piece.role)


def _place(side: _Side) -> int:
    """Small pieces share chunks, which are read in order."""
    return side.stored.extents[0].chunk if side.stored.extents else -1


def _difference(a: Repository, mine: _Side, b: Repository, other: _Side) -> Difference:
    one, two = mine.stored.piece, other.stored.piece
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return _told(mine, "type", before=_form(mine.stored), after=_form(other.stored))
    if mine.stored.digest == other.stored.digest:
        return _told(mine, "role", before=one.role, after=two.role)
    size = item_bytes(one.dtype)
    if not size:
        return _told(mine, "value", before=_value(a, mine), after=_value(b, other))
    apart = Apart(one.dtype)
    for offset, x, y in _blocks(mine, other, size):
        apart.add(offset, x, y)
    return Difference(
        name=one.pointer,
        rank=mine.stored.rank,
        role=one.role,
        what="value",
        before=_form(mine.stored),
        after=_form(other.stored),
        num_differing=apart.num,
        num_elements=mine.stored.size_bytes // size,
        max_abs=apart.max_abs,
        first=apart.place(one.shape),
    )


def _blocks(mine: _Side, other: _Side, item: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Whole elements of both pieces, block by block, without the chunks that are the same on both sides."""
    if mine.stored.size_bytes != other.stored.size_bytes:
        raise Damaged(mine.stored.piece.pointer, "has one dtype and shape in both checkpoints, but not one size")
    offset, x, y = 0, b"", b""
    for span in _spans(mine, other):
        here, there = span.mine, span.other
        if not x and span.length % item == 0 and (here.id, here.start) == (there.id, there.start):
            offset += span.length
            continue
        x += here.read(mine, span.length)
        y += there.read(other, span.length)
        whole = len(x) - len(x) % item
        yield offset, x[:whole], y[:whole]
        offset, x, y = offset + whole, x[whole:], y[whole:]


class _At(NamedTuple):
    """A place in a chunk."""

    number: int
    id: str
    start: int

    def read(self, side: _Side, length: int) -> bytes:
        return bytes(memoryview(side.chunks.get(self.number).data)[self.start : self.start + length])


class _Span(NamedTuple):
    length: int
    mine: _At
    other: _At


def _spans(mine: _Side, other: _Side) -> Iterator[_Span]:
    """Both pieces cut at the borders of both sides' extents."""
    places = [iter(_extents(side)) for side in (mine, other)]
    at = [(_At(0, "", 0), 0), (_At(0, "", 0), 0)]
    left = mine.stored.size_bytes
    while left:
        at = [next(place) if not now[1] else now for place, now in zip(places, at, strict=True)]
        length = min(now[1] for now in at)
        yield _Span(length, at[0][0], at[1][0])
        at = [(now._replace(start=now.start + length), rest - length) for now, rest in at]
        left -= length


def _extents(side: _Side) -> Iterator[tuple[_At, int]]:
    for extent in side.stored.extents:
        yield _At(extent.chunk, side.manifest.chunks[extent.chunk].id, extent.offset), extent.length


def _told(side: _Side, what: What, *, before: str, after: str) -> Difference:
    piece = side.stored.piece
    return Difference(name=piece.pointer, rank=side.stored.rank, role=piece.role, what=what, before=before, after=after)


def _form(stored: StoredPiece) -> str:
    piece = stored.piece
    return f"{piece.dtype}{list(piece.shape)}" if item_bytes(piece.dtype) else piece.dtype


def _value(repository: Repository, side: _Side) -> str:
    """A scalar, or what a container lists, for people."""
    piece = side.stored.piece
    if side.stored.size_bytes > _MAX_SHOWN_BYTES:
        return f"{piece.dtype} of {side.stored.size_bytes} bytes"
    ((_, data),) = read_pieces(repository.tier, side.manifest, [side.stored])
    if is_scalar(piece.dtype) and not is_array(piece.dtype):
        try:
            text = repr(decode(piece.dtype, piece.shape, memoryview(data)))
        except ValueError as error:
            raise Damaged(piece.pointer, str(error)) from error
    else:
        text = bytes(data).decode("utf-8", "backslashreplace")
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def choose_commits(a: Repository, step_a: int | None, b: Repository, step_b: int | None) -> tuple[CommitEntry, CommitEntry]:
    """The checkpoints of the named steps; where neither is named, those of the newest step that both hold, else the newest of each.

    NoCheckpoint where there is none.
    """
    if step_a is None and step_b is None:
        common = {commit.step for commit in a.visible()} & {commit.step for commit in b.visible()}
        step_a = step_b = max(common, default=None)
    return _commit(a, step_a), _commit(b, step_b)


def _commit(repository: Repository, step: int | None) -> CommitEntry:
    commit = commit_of(repository, step) if step is not None else newest_plausible(repository)
    if commit is None:
        raise NoCheckpoint("no checkpoint has been committed here yet")
    return commit
