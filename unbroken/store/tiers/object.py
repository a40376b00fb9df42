"""A tier in an object store: s3://, gs://, az:// (and file://, memory:// for tests), over obstore.

Put-if-absent is the store's own conditional put, for objects up to CONDITIONAL_BYTES. Larger ones are looked for and then streamed, which
does not exclude a second writer of the same name: only packs and manifests grow so large, and their names are never used again.

An object store cannot append. What `append` made is an empty object at `path`, which says that it exists, and numbered parts, each put if
absent, in the folder `.parts-<name>` beside it: not below `path`, where some servers allow no object. Nobody sees the parts: list, size
and read show one object.
"""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from unbroken.core.errors import MissingExtra, Permanent, StoreError, Transient
from unbroken.core.ports import Buffer, Clock, Nonces, SystemNonces, failpoint
from unbroken.store.paths import is_inside
from unbroken.store.tiers.traits import Traits

try:
    from unbroken.store.tiers.bucket import Bucket
    from unbroken.store.tiers.places import Credentials
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "obstore":
        raise
    raise MissingExtra("obstore", "object") from error

CONDITIONAL_BYTES = 16 << 20
"""Objects up to this size are held in memory and put in one conditional request, which must arrive within a third of `timeout_s`.

Log entries and all that is raced for are far smaller.
"""

_MAX_KEY_BYTES = 1024
_PARTS = ".parts-"
_PART_DIGITS = 8
_READERS = 8


class ObjectTier:
    """Objects in a bucket, under the URL's path.

    Credentials: `credentials`, AWS_* and the like in the environment, AWS_PROFILE (with boto3), the instance's role, in this order. Plain
    http only where `endpoint` (or AWS_ENDPOINT_URL) says http. Errors of a call: those of every tier; a call that gets no answer is
    Transient after at most about `timeout_s`, a large upload that has begun after 30 s more. ValueError for a URL that is none.

    Requests: read 1; create 1, or 3 and one per 8 MiB; append 3; read and size of an appended object 2, and one for each part read; list
    one per 1,000 objects; delete 2. Memory: CONDITIONAL_BYTES and 5 parts of 8 MiB. No forked child of a process that has used one
    may use it, or make another.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 15.0,
        nonces: Nonces | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.traits = Traits(conditional_put=True, atomic_replace=True, durable=not url.startswith(("file:", "memory:")))
        self._bucket = Bucket(url, endpoint=endpoint, credentials=credentials, timeout_s=timeout_s, clock=clock)
        self._nonces = nonces or SystemNonces()
        self._writer = self._nonces.nonce()
        self._appending = threading.Lock()
        self._sizes: dict[str, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"ObjectTier({self.url!r})"

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        self._check(path)
        coming = iter(parts)
        first, num_bytes = _up_to(coming, CONDITIONAL_BYTES)
        failpoint("store.create.before_put")
        mark = self._nonces.nonce()
        if num_bytes <= CONDITIONAL_BYTES:
            self._bucket.put_new(path, b"".join(first), mark)
        else:
            if self._bucket.size_if_there(path) is not None:
                raise FileExistsError(path)
            num_bytes = self._bucket.upload(path, itertools.chain(_drained(first), coming), mark)
        failpoint("store.create.after_put")
        return num_bytes

    def append(self, path: str, data: Buffer) -> None:
        """As everywhere; an object that `create` made with content cannot be added to (Permanent).

        All of `data` or nothing, up to CONDITIONAL_BYTES. Permanent when another writer has added a part in between, of whom nothing is
        replaced.
        """
        self._check(path)
        view = memoryview(data).cast("B")
        with self._appending:
            self._make_appendable(path)
            sizes = self._part_sizes(path)
            failpoint("store.append.before_put")
            try:
                for start in range(0, len(view), CONDITIONAL_BYTES):
                    block = bytes(view[start : start + CONDITIONAL_BYTES])
                    self._put_part(path, len(sizes), block)
                    sizes = (*sizes, len(block))
            except BaseException as error:  # raised again: half of the data must not stay, as far as that can be helped
                self._sizes.pop(path, None)
                if not isinstance(error, Permanent):  # else another's part may follow ours, and a gap would make it unreadable
                    self._take_back(path, sizes, start)
                raise
            self._sizes[path] = sizes

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._check(path)
        if length is not None and length <= 0:
            self._bucket.size(path)
            return b""
        data, size = self._bucket.read(path, offset, length)
        return data if size else self._read_parts(path, offset, length)

    def size(self, path: str) -> int:
        self._check(path)
        return self._bucket.size(path) or sum(self._part_sizes(path))

    def sweep(self) -> list[str]:
        """Nothing: uploads that were broken off cannot be seen through obstore. A lifecycle rule of the bucket removes them (format.md)."""
        return []

    def list(self, prefix: str) -> list[str]:
        if prefix:
            self._check(prefix)
        return sorted(path for path, _ in self._bucket.list(prefix) if is_inside(path) and not _is_part(path))

    def folders(self, prefix: str) -> builtins.list[str]:
        self._check(prefix)
        return sorted(name for name in self._bucket.folders(prefix) if is_inside(name) and not _is_part(name))

    def delete(self, path: str) -> None:
        """The object itself goes last, so that what a killed delete leaves is still seen, and removed by the next one."""
        self._check(path)
        failpoint("store.delete")
        size = self._bucket.size_if_there(path)
        if size is None:
            return
        if size == 0:
            self._delete_parts(path)
        self._bucket.delete(path)

    def _make_appendable(self, path: str) -> None:
        size = self._bucket.size_if_there(path)
        if size is None:
            self._sizes.pop(path, None)
            with suppress(FileExistsError):  # another writer was faster: the parts decide between us
                self._bucket.put_new(path, b"", self._nonces.nonce())
                return
            size = self._bucket.size(path)
        if size:
            raise Permanent(f"{path}: an object of {size} bytes that was made whole; an object store cannot add to it")

    def _put_part(self, path: str, n: int, data: bytes) -> None:
        part = _part(path, n)
        try:
            self._bucket.put_new(part, data, self._writer)
        except FileExistsError as error:
            # Ours when an earlier attempt that was given up has arrived after all.
            is_ours = self._bucket.has_marks and self._bucket.is_ours(part, data, self._writer)
            if not is_ours or self._bucket.read(part, 0, None)[0] != data:
                raise Permanent(f"{path}: another writer adds to it: part {n} is there already, and was left as it is") from error

    def _take_back(self, path: str, sizes: tuple[int, ...], done_bytes: int) -> None:
        """Remove the parts that a failed append has put, the last first."""
        n = len(sizes)
        with suppress(StoreError):  # the first error is the one to report
            while done_bytes > 0:
                n -= 1
                self._bucket.delete(_part(path, n))
                done_bytes -= sizes[n]

    def _part_sizes(self, path: str) -> tuple[int, ...]:
        """Sizes of the parts: those known (a part never changes), and those that came since. One request when none did.

        A listing may lag: what it does not name is asked for. Permanent when a part is missing before one that is there.
        """
        known = list(self._sizes.get(path, ()))
        following = self._bucket.size_if_there(_part(path, len(known)))
        if following is None:
            return tuple(known)
        known.append(following)
        listed = dict(self._listed_parts(path))
        while True:
            n = len(known)
            size = listed[n] if n in listed else self._bucket.size_if_there(_part(path, n))
            if size is None:
                break
            known.append(size)
        if max(listed, default=0) > len(known):
            raise Permanent(f"{path}: part {len(known)} is missing, and later ones are there: somebody removed it")
        self._sizes[path] = tuple(known)
        return tuple(known)

    def _listed_parts(self, path: str) -> Iterator[tuple[int, int]]:
        folder = _part(path, 0).rpartition("/")[0]
        for part, size in self._bucket.list(folder):
            name = part.rpartition("/")[2]
            if name.isdecimal() and _part(path, int(name)) == part:
                yield int(name), size

    def _read_parts(self, path: str, offset: int, length: int | None) -> bytes:
        sizes = self._part_sizes(path)
        end = sum(sizes) if length is None else offset + length
        wanted = []
        start = 0
        for n, size in enumerate(sizes):
            low, high = max(offset, start), min(end, start + size)
            if low < high:
                wanted.append((_part(path, n), low - start, high - low))
            start += size
        with ThreadPoolExecutor(max(1, min(_READERS, len(wanted)))) as readers:
            blocks = list(readers.map(lambda ask: self._bucket.read(*ask)[0], wanted))
        if [len(block) for block in blocks] != [length for _, _, length in wanted]:
            self._sizes.pop(path, None)
            raise Transient(f"{path}: changed while it was read")
        return b"".join(blocks)

    def _delete_parts(self, path: str) -> None:
        self._sizes.pop(path, None)
        numbers = {n for n, _ in self._listed_parts(path)}
        with suppress(Permanent):  # a missing part is what a broken-off delete leaves, or damage: the others go all the same
            numbers |= set(range(len(self._part_sizes(path))))
        for n in sorted(numbers, reverse=True):
            self._bucket.delete(_part(path, n))
        self._sizes.pop(path, None)

    def _check(self, path: str) -> None:
        if not is_inside(path) or _is_part(path):
            raise Permanent(f"{path[:200]!r}: not a path inside the store")
        if len(f"{self._bucket.place.prefix}/{path}/{_PARTS}".encode()) + _PART_DIGITS > _MAX_KEY_BYTES:
            raise Permanent(
                f"{path[:200]!r}: longer than the names in an object store can be ({_MAX_KEY_BYTES} bytes): choose a shorter place"
            )


def _part(path: str, n: int) -> str:
    """Where part `n` of an appended object lies."""
    folder, separator, name = path.rpartition("/")
    return f"{folder}{separator}{_PARTS}{name}/{n:0{_PART_DIGITS}d}"


def _is_part(path: str) -> bool:
    return path.startswith(_PARTS) or f"/{_PARTS}" in path


def _up_to(parts: Iterator[Buffer], limit: int) -> tuple[builtins.list[memoryview], int]:
    """Parts until they are more than `limit` bytes together, or until there are none; how many bytes they are."""
    found: list[memoryview] = []
    num_bytes = 0
    while num_bytes <= limit:
        part = next(parts, None)
        if part is None:
            break
        found.append(memoryview(part).cast("B"))
        num_bytes += len(found[-1])
    return found, num_bytes


def _drained(parts: builtins.list[memoryview]) -> Iterator[memoryview]:
    """Each part once, held no longer than it is needed."""
    while parts:
        yield parts.pop(0)
