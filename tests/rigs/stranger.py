"""A reader written from docs/format.md alone, with nothing of ours: if it cannot read a run, the page lacks something.

It reads the newest checkpoint of a folder and checks every digest on the way; `Broken` says what does not fit.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

LEAF = 1 << 20
NAMES = (
    re.compile(r"manifests/\d{12,18}-\d{1,18}-[0-9a-f]{32}-\d{1,9}\.json"),
    re.compile(r"packs/([0-9a-f]{2})/\1[0-9a-f]{30}\.pack"),
)
Json = dict[str, Any]


class Broken(Exception):
    """The folder is not what the page says."""


def need(fits: bool, what: str) -> None:
    if not fits:
        raise Broken(what)


def D(data: bytes) -> bytes:
    leaves = [blake3(data[i : i + LEAF]).digest() for i in range(0, len(data), LEAF)]
    return blake3(data).digest() if len(data) <= LEAF else blake3(b"unbroken.tree.1\0" + b"".join(leaves)).digest()


def T(*parts: str | bytes) -> bytes:
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    return blake3(b"".join(struct.pack("<Q", len(part)) + part for part in raw)).digest()


def root(tag: str, stored: list[Json]) -> str:
    entries = []
    for one in sorted(stored, key=lambda one: one["piece"]["pointer"]):
        piece = one["piece"]
        shape = ",".join(map(str, piece["shape"]))
        entries.append(T(piece["pointer"], piece["dtype"], shape, bytes.fromhex(one["digest"])))
    return blake3(f"unbroken.{tag}.1\0".encode() + b"".join(entries)).hexdigest()


def unseal(kind: str, raw: bytes) -> Json:
    match = re.fullmatch(rb'\{"magic":"([^"]*)","format":(\d+),"min_reader":(\d+),"checksum":"([0-9a-f]{64})","body":(.*)\}', raw, re.S)
    need(match is not None, f"not a sealed {kind}")
    assert match is not None
    magic, number, min_reader, checksum, body = match.groups()
    need(magic.decode() == f"unbroken/{kind}", f"a {magic.decode()}, not a {kind}")
    need(int(number) <= 2 or int(min_reader) <= 2, "a newer format")
    need(T(magic, number, min_reader, body).hex() == checksum.decode(), f"checksum of a {kind}")
    found: Json = json.loads(body)
    return found


def decoded(codec: int, stored: bytes, size: int, base: bytes) -> bytes:
    """The bytes of a chunk."""
    if codec == 0:
        return stored
    width, at, planes = stored[0], 1, []
    for _ in range(width):
        mode, length = struct.unpack_from("<BI", stored, at)
        part = stored[at + 5 : at + 5 + length]
        planes.append({0: part, 1: zstandard.decompress(part) if mode == 1 else b"", 2: part * (size // width)}[mode])
        at += 5 + length
    numbers = [int.from_bytes(bytes(number), "little") for number in zip(*planes, strict=True)]
    old = [int.from_bytes(base[i : i + width], "little") for i in range(0, size // width * width, width)]
    if codec == 2:
        numbers = [((n >> 1) ^ -(n & 1)) + b for n, b in zip(numbers, old, strict=True)]
    if codec == 3:
        numbers = [n ^ b for n, b in zip(numbers, old, strict=True)]
    return b"".join((n % (1 << 8 * width)).to_bytes(width, "little") for n in numbers) + stored[at:]


class Folder:
    """One lineage of a run folder."""

    def __init__(self, path: Path, lineage: str = "main") -> None:
        self.path = path
        self.log = path / "runs" / lineage / "log"
        self.journals = path / "runs" / lineage / "journal"
        self.lineage = lineage
        self.facts = unseal("run", (path / "run.json").read_bytes())
        self.state: Json = {"generations": {}, "commits": {}, "condemned": set(), "pruned": set()}
        self._fold()

    def _fold(self) -> None:
        previous = ""
        for n, file in enumerate(sorted(self.log.glob("*.json"))):
            raw = file.read_bytes()
            entry = unseal("log", raw)
            need(entry["n"] == n and file.name == f"{n:08d}.json", f"{file} holds entry {entry['n']}")
            need(entry["previous"] in ("", previous), f"{file} follows another entry")
            previous = D(raw).hex()
            for generation in entry["lineage"]:
                self.state["generations"].setdefault(generation["number"], generation)
            self._take(entry["entry"])

    def _take(self, entry: Json) -> None:
        key = (entry.get("step"), entry["generation"]) if entry["type"] in ("commit", "condemn") else None
        match entry["type"]:
            case "commit":
                self.state["commits"][key] = entry
                self.state["pruned"].discard(key)
            case "condemn":
                self.state["condemned"].add(key)
            case "prune":
                self.state["pruned"] |= set(map(tuple, entry["commits"]))

    def visible(self) -> list[Json]:
        generations, limits, limit = self.state["generations"], {}, float("inf")
        at = max(generations, default=None)
        while at is not None and at not in limits:
            limits[at] = limit
            limit = min(limit, generations[at]["base_step"])
            at = generations[at]["parent"]
        best: dict[int, Json] = {}
        for key, commit in self.state["commits"].items():
            counts = commit["step"] <= limits.get(commit["generation"], -1)
            if counts and key not in self.state["condemned"] | self.state["pruned"]:
                best[commit["step"]] = max(commit, best.get(commit["step"], commit), key=lambda c: c["generation"])
        return [best[step] for step in sorted(best)]

    def pieces(self, commit: Json) -> dict[tuple[int | None, str], bytes]:
        """Every piece of a commit by (rank, pointer), all verified."""
        found: dict[tuple[int | None, str], bytes] = {}
        for ref in commit["manifests"]:
            need(NAMES[0].fullmatch(ref["path"]) is not None, f"{ref['path']} is no manifest's name")
            raw = (self.path / ref["path"]).read_bytes()
            need((len(raw), D(raw).hex()) == (ref["size_bytes"], ref["digest"]), f"{ref['path']} is another file")
            manifest = unseal("manifest", raw)
            need(manifest["state_root"] == commit["state_root"], f"{ref['path']}: state root")
            chunks: list[bytes] = []
            for chunk in manifest["chunks"]:
                chunks.append(self._chunk(chunk, chunks))
            for stored in manifest["pieces"]:
                data = b"".join(chunks[n][start : start + length] for n, start, length in stored["extents"])
                need((len(data), D(data).hex()) == (stored["size_bytes"], stored["digest"]), stored["piece"]["pointer"])
                found[stored["rank"], stored["piece"]["pointer"]] = data
            self._check_roots(manifest)
        return found

    def _check_roots(self, manifest: Json) -> None:
        restored = [stored for stored in manifest["pieces"] if stored["piece"]["role"] == "restored"]
        need(root("state-root", [s for s in restored if s["rank"] is None]) == manifest["state_root"], "state root")
        for rank, value in zip(manifest["ranks"], manifest["rank_roots"], strict=True):
            need(root("rank-root", [s for s in restored if s["rank"] == rank]) == value, f"root of rank {rank}")

    def _chunk(self, chunk: Json, before: list[bytes]) -> bytes:
        need(NAMES[1].fullmatch(chunk["pack"]) is not None, f"{chunk['pack']} is no pack's name")
        raw = (self.path / chunk["pack"]).read_bytes()
        header, trailer = raw[:64], struct.unpack("<QQ32s8x8s", raw[-64:])
        magic, number, min_reader, _, nonce = struct.unpack("<16sIIQ16s16x", header)
        need((magic, trailer[3]) == (b"unbroken/pack\0\0\0", b"unbr/end") and (number <= 2 or min_reader <= 2), chunk["pack"])
        need(nonce.hex()[:16] in chunk["pack"] and trailer[0] + trailer[1] + 64 == len(raw), chunk["pack"])
        footer = raw[trailer[0] : -64]
        need(T(header, footer) == trailer[2], f"footer of {chunk['pack']}")
        line = [chunk.get("sum", chunk["id"]), *(chunk[name] for name in ("offset", "stored_bytes", "raw_bytes", "codec"))]
        need(line in json.loads(footer) and chunk["offset"] % 4096 == 0, f"{chunk} is not in its pack")
        stored = raw[chunk["offset"] : chunk["offset"] + chunk["stored_bytes"]]
        need(D(stored).hex() == line[0], f"chunk at {chunk['offset']} of {chunk['pack']}")
        base = before[chunk["base"]] if "base" in chunk else b""
        data = decoded(chunk["codec"], stored, chunk["raw_bytes"], base)
        need(D(data).hex() == chunk["id"], f"chunk at {chunk['offset']} of {chunk['pack']}, decoded")
        return data

    def journal(self, generation: int) -> Iterator[tuple[str, Json]]:
        """(chain, record) of each complete line."""
        header, *lines, _torn = (self.journals / f"{generation:08d}.jsonl").read_bytes().split(b"\n")
        told = json.loads(header)
        facts = (told["magic"], str(told["format"]), str(told["min_reader"]), told["lineage"], str(told["generation"]), told["nonce"])
        need(T(*facts).hex() == told["checksum"] and told["generation"] == generation, "header of a journal")
        need(told["nonce"] == self.state["generations"][generation]["nonce"], "nonce of a journal")
        chain = T("unbroken/journal", str(generation), told["nonce"])
        for line in lines:
            match = re.fullmatch(rb'\{"chain":"([0-9a-f]{64})","record":(.*)\}', line)
            need(match is not None, "a line of a journal")
            assert match is not None
            chain = blake3(chain + match[2]).digest()
            need(chain.hex() == match[1].decode(), "chain of a journal")
            yield chain.hex(), json.loads(match[2])
