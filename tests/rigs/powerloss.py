"""A file system (FUSE) that can lose power: what was not fsynced may be lost, in whole, in part, and in any order.

The server keeps everything in memory and records each change, each fsync and each word that a writer says (an extended attribute on the
root). From that record `Drive` makes, for any moment, any number of the states in which a disk might come up after a power loss: bytes of
a file are sure once the file was fsynced, names in a folder once the folder was; of all else any subset may be there.

The server itself is powerloss_server: a process of its own.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

ROOT_NODE = 1
BLOCK_BYTES = 4096
"""What a disk writes at once: a torn write is one of which some blocks are there."""

SAY = "user.said"
LOADED = "loaded"
"""What the server says once the disk holds what it is to hold at first."""

_READY_S = 20.0

Event = tuple[str, Any, Any, Any]
"""("new", node, is folder, -) ("name", folder, name, node or 0) ("write", node, offset, bytes) ("cut", node, length, -)
("sync", node, -, -) ("say", text, -, -)"""


@dataclass
class Node:
    """A file or folder: how it looks, what of it is sure, and what came since."""

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    safe_names: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[int, str, int]] = field(default_factory=list)


class Drive:
    """The state after the events applied so far."""

    def __init__(self) -> None:
        self.nodes = {ROOT_NODE: Node(is_folder=True)}
        self.said: list[str] = []
        self._count = 0

    def apply(self, event: Event) -> None:
        kind, a, b, c = event
        self._count += 1
        if kind == "new":
            self.nodes[a] = Node(is_folder=bool(b))
        elif kind == "name":
            folder = self.nodes[a]
            folder.changes.append((self._count, b, c))
            _put(folder.names, b, c)
        elif kind == "write":
            self.nodes[a].writes.append((b, c))
            _write(self.nodes[a].data, b, c)
        elif kind == "cut":
            self.nodes[a].writes.append((b, b""))
            del self.nodes[a].data[b:]
        elif kind == "sync":
            node = self.nodes[a]
            node.safe, node.writes = bytes(node.data), []
            node.safe_names, node.changes = dict(node.names), []
        else:
            self.said.append(a)

    def find(self, path: str) -> int:
        """Number of the node that a path names now; FileNotFoundError."""
        at = ROOT_NODE
        for name in filter(None, path.split("/")):
            node = self.nodes[at]
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "not there", path)
            at = node.names[name]
        return at

    def links(self, number: int) -> int:
        """How many names a file has."""
        return sum(list(node.names.values()).count(number) for node in self.nodes.values() if node.is_folder)

    def after_loss(self, chance: random.Random) -> dict[str, bytes | None]:
        """One state in which the disk may come up: path -> bytes, None for a folder.

        Drawn: names that are not sure are all there, none, those before some moment, or any of them; bytes likewise, cut into blocks.
        """
        names = chance.choice(("none", "all", "before", "any", "any"))
        content = chance.choice(("none", "all", "any", "any"))
        moment = chance.randrange(self._count + 1)
        found: dict[str, bytes | None] = {}
        bytes_of: dict[int, bytes] = {}

        def walk(number: int, path: str) -> None:
            node = self.nodes[number]
            if not node.is_folder:
                if number not in bytes_of:
                    bytes_of[number] = _surviving(node, content, chance)
                found[path] = bytes_of[number]
                return
            found[path] = None
            kept = dict(node.safe_names)
            for at, name, target in node.changes:
                if names == "all" or (names == "before" and at <= moment) or (names == "any" and chance.random() < 0.5):
                    _put(kept, name, target)
            for name, target in sorted(kept.items()):
                walk(target, f"{path}/{name}" if path else name)

        walk(ROOT_NODE, "")
        del found[""]
        return found


def _put(names: dict[str, int], name: str, node: int) -> None:
    if node:
        names[name] = node
    else:
        names.pop(name, None)


def _write(data: bytearray, offset: int, block: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(block)] = block


def _surviving(node: Node, content: str, chance: random.Random) -> bytes:
    """Of writes that were not fsynced none, all, or any blocks; what is missing below the end reads as zeros."""
    if content == "all":
        return bytes(node.data)
    data = bytearray(node.safe)
    if content == "none":
        return bytes(data)
    for offset, block in node.writes:
        if not block:
            del data[offset:]
        for start in range(0, len(block), BLOCK_BYTES):
            if chance.random() < 0.5:
                _write(data, offset + start, block[start : start + BLOCK_BYTES])
    return bytes(data)


def lay_out(tree: dict[str, bytes | None], folder: Path) -> None:
    """Make these files and folders."""
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(data)


@cache
def missing() -> str:
    """Why this cannot be used here; "" when it can. What somebody can install is said with "install"."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be opened"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed: apt-get install fuse3"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, AttributeError, OSError) as error:
        return f"mfusepy cannot be used ({error}): pip install mfusepy"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with recorded(Path(folder, "mount")):
                return ""
        except (RuntimeError, OSError) as error:
            return f"nothing can be mounted here: {error}"


@dataclass
class Recording:
    """Filled when the mount has ended."""

    events: list[Event] = field(default_factory=list)

    def drive(self, at: int) -> Drive:
        """The disk after so many events."""
        drive = Drive()
        for event in self.events[:at]:
            drive.apply(event)
        return drive


@contextmanager
def recorded(mount: Path, content: Path | None = None) -> Iterator[Recording]:
    """Such a file system at `mount`; afterwards everything that was done there."""
    mount.mkdir(parents=True)
    trace = mount.with_name(f"{mount.name}.trace")
    command = [sys.executable, "-m", "tests.rigs.powerloss_server", str(mount), str(trace), *([str(content)] if content else [])]
    server = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    recording = Recording()
    try:
        deadline = time.monotonic() + _READY_S
        while not os.path.ismount(mount):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{mount} could not be mounted (exit code {server.poll()})")
            time.sleep(0.005)
        yield recording
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False, capture_output=True, timeout=_READY_S)
        try:
            server.wait(_READY_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    recording.events = msgspec.msgpack.decode(trace.read_bytes(), type=list[Event])


def say_on(mount: Path, text: str) -> None:
    """Say something at this moment of the record."""
    os.setxattr(mount, SAY, text.encode())
