"""The server of the file system that can lose power, see powerloss.

python -m tests.rigs.powerloss_server MOUNT TRACE [FOLDER]     FOLDER: what the disk holds at first, durably
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import mfusepy
import msgspec

from tests.rigs.powerloss import LOADED, ROOT_NODE, Drive, Event


class Recorder(mfusepy.Operations):  # type: ignore[misc]
    """Where everything is taken down."""

    use_ns = True

    def __init__(self) -> None:
        self.drive = Drive()
        self.events: list[Event] = []
        self.newest = ROOT_NODE

    def do(self, kind: str, a: Any, b: Any = None, c: Any = None) -> None:
        """Something happens."""
        event = (kind, a, b, c)
        self.events.append(event)
        self.drive.apply(event)

    def make(self, path: str, is_folder: bool) -> int:
        """A new file or folder; its number."""
        folder, _, name = path.rpartition("/")
        parent = self.at(folder)
        self.newest += 1
        self.do("new", self.newest, is_folder)
        self.do("name", parent, name, self.newest)
        return self.newest

    def at(self, path: str) -> int:
        """The number of what a path names."""
        try:
            return self.drive.find(path)
        except FileNotFoundError:
            raise mfusepy.FuseOSError(errno.ENOENT) from None

    def load(self, content: Path) -> None:
        """What the disk holds at first."""
        for path in sorted(content.rglob("*")):
            number = self.make(f"/{path.relative_to(content)}", path.is_dir())
            if path.is_file():
                self.do("write", number, 0, path.read_bytes())
        for number in list(self.drive.nodes):
            self.do("sync", number)
        self.do("say", LOADED)


class Names(Recorder):
    """Files and folders."""

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        number = fh or self.at(path)
        node = self.drive.nodes[number]
        mode = stat.S_IFDIR | 0o755 if node.is_folder else stat.S_IFREG | 0o644
        links = 2 if node.is_folder else self.drive.links(number)
        return {"st_mode": mode, "st_size": len(node.data), "st_nlink": links, "st_ino": number, "st_uid": os.geteuid()}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self.drive.nodes[self.at(path)].names]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return self.make(path, False)

    def open(self, path: str, flags: int) -> int:
        return self.at(path)

    def mkdir(self, path: str, mode: int) -> int:
        self.make(path, True)
        return 0

    def link(self, target: str, source: str) -> int:
        folder, _, name = target.rpartition("/")
        self.do("name", self.at(folder), name, self.at(source))
        return 0

    def rename(self, old: str, new: str) -> int:
        self.link(new, old)
        return self.unlink(old)

    def unlink(self, path: str) -> int:
        folder, _, name = path.rpartition("/")
        self.do("name", self.at(folder), name, 0)
        return 0

    rmdir = unlink


class Server(Names):
    """And what is in them."""

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self.drive.nodes[fh].data[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.do("write", fh, offset, bytes(data))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self.do("cut", fh or self.at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.do("sync", fh or self.at(path))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.do("sync", self.at(path))
        return 0

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        self.do("say", bytes(value).decode())
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 20, "f_bfree": 1 << 20, "f_bavail": 1 << 20, "f_namemax": 255}

    def flush(self, path: str, fh: int) -> int:
        return 0

    release = utimens = chmod = flush

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0


def serve(mount: str, trace: str, content: str | None) -> None:
    """Until it is unmounted, or SIGTERM; then the record is written."""
    server = Server()
    if content is not None:
        server.load(Path(content))
    mfusepy.FUSE(
        server, mount, foreground=True, nothreads=True, direct_io=True, use_ino=True, hard_remove=True,
        attr_timeout=0, entry_timeout=0, negative_timeout=0, fsname="powerloss",
    )  # fmt: skip
    Path(trace).write_bytes(msgspec.msgpack.encode(server.events))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
