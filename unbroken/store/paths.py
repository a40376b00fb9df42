"""Where everything lies in a run folder. Relative, '/'-separated, and recognised by full patterns only: strays are never ours.

    run.json
    writer.json, runs/<lineage>/writer.json                         who writes the main lineage, and another one
    runs/<lineage>/log/<n>.json                                     8 or more digits
    runs/<lineage>/journal/<generation>.jsonl                       8 digits
    manifests/<step>-<generation>-<nonce>-<node>.json               step in 12 digits
    packs/<first 2 hex of nonce>/<nonce>.pack
    hangs/<step>-<generation>-<n>.txt                               stacks, for people: no reader needs them

A name's nonce is 16 hex digits that tell which generation wrote the object and 16 that are never used again: so a name is never reused,
and a collector sees from the name alone whether the writer is of an older generation than its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from unbroken.codec.digest import text_digest
from unbroken.core.limits import MAX_POINTER_CHARS
from unbroken.core.records import MAIN_LINEAGE

RUN = "run.json"
WRITER = "writer.json"
RUNS = "runs"
MAIN = MAIN_LINEAGE
MANIFESTS = "manifests"
PACKS = "packs"
HANGS = "hangs"

_NONCE = re.compile(r"[0-9a-f]{32}")
_LINEAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBER = re.compile(r"(\d{8,18})\.(json|jsonl)")
_MANIFEST = re.compile(r"manifests/(\d{12,18})-(\d{1,18})-([0-9a-f]{32})-(\d{1,9})\.json")
_IN_LINEAGE = re.compile(rf"runs/{_LINEAGE.pattern}/(?:log|journal)/[^/]+")
_STACKS = re.compile(r"hangs/\d{12,18}-\d{1,18}-\d{1,9}\.txt")
_PACK = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})\.pack")


class ManifestName(NamedTuple):
    """What a manifest's name says. `origin` names the generation that wrote it."""

    step: int
    generation: int
    origin: str
    node: int


def is_lineage(name: str) -> bool:
    """Can this be the name of a lineage?"""
    return isinstance(name, str) and _LINEAGE.fullmatch(name) is not None


def check_lineage(name: str) -> str:
    """The name itself; ValueError when it cannot be a folder's name."""
    if not is_lineage(name):
        raise ValueError(f"lineage {name!r}: use letters, digits, '.', '_' and '-', at most 64, starting with a letter or digit")
    return name


def writer(lineage: str) -> str:
    """Who writes a lineage: each has one writer at a time, and they do not shut one another out."""
    return WRITER if lineage == MAIN else f"{RUNS}/{check_lineage(lineage)}/{WRITER}"


def log_folder(lineage: str) -> str:
    return f"runs/{lineage}/log"


def log_entry(lineage: str, n: int) -> str:
    return f"runs/{lineage}/log/{n:08d}.json"


def journal_folder(lineage: str) -> str:
    return f"runs/{lineage}/journal"


def journal(lineage: str, generation: int) -> str:
    return f"runs/{lineage}/journal/{generation:08d}.jsonl"


def number(path: str) -> int | None:
    """The number of a log entry or journal, None for a stray. A name has one spelling: `000000007.json` is a stray."""
    name = path.rsplit("/", 1)[-1]
    match = _NUMBER.fullmatch(name)
    if match is None or f"{int(match[1]):08d}.{match[2]}" != name:
        return None
    return int(match[1])


def nonce_hex(nonce: str) -> str:
    """32 hex digits that stand for a generation's nonce: itself when it is that, as ours are, else digits of its digest."""
    return nonce if _NONCE.fullmatch(nonce) else text_digest(nonce)[:32]


def origin(nonce: str) -> str:
    """The half of a name's nonce that marks what the generation with this nonce wrote."""
    return nonce_hex(nonce)[:16]


def manifest(step: int, generation: int, nonce: str, node: int) -> str:
    return f"manifests/{step:012d}-{generation}-{nonce}-{node}.json"


def manifest_name(path: str) -> ManifestName | None:
    """What the name of a manifest says, None for a stray."""
    match = _MANIFEST.fullmatch(path)
    return None if match is None else ManifestName(int(match[1]), int(match[2]), match[3][:16], int(match[4]))


def manifest_node(path: str) -> int:
    """Which node wrote a manifest, as its name says; -1 for a stray."""
    match = _MANIFEST.fullmatch(path)
    return -1 if match is None else int(match[4])


def pack(nonce: str) -> str:
    return f"packs/{nonce[:2]}/{nonce}.pack"


def pack_origin(path: str) -> str | None:
    """Which generation wrote a pack, as its name says; None for a stray."""
    match = _PACK.fullmatch(path)
    return None if match is None else match[2][:16]


def origin_of(path: str) -> str | None:
    """Which generation wrote a manifest or a pack; None for a stray."""
    name = manifest_name(path)
    return name.origin if name is not None else pack_origin(path)


def stacks(step: int, generation: int, n: int) -> str:
    return f"hangs/{step:012d}-{generation}-{n}.txt"


def is_stacks(path: str) -> bool:
    """True for the name of a file with stacks."""
    return bool(_STACKS.fullmatch(path))


def is_ours(path: str) -> bool:
    """True for the name of a manifest, a pack, a log entry or a journal."""
    return (
        manifest_name(path) is not None or pack_origin(path) is not None or bool(_IN_LINEAGE.fullmatch(path) and number(path) is not None)
    )


def is_inside(path: str) -> bool:
    """True for a relative path of plain names: no '..', no empty part, no backslash, no control character."""
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and len(path) <= MAX_POINTER_CHARS and "\\" not in path and path.isprintable()
