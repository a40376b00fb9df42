"""The requests that an object tier makes, each with an end, each answer one of our errors. What an answer left open is found out here.

Three settings of one client: reads are asked again for a while; a conditional put never by the client, which could not tell its own success
from another's; large uploads get longer for one answer. A dead endpoint costs `timeout_s` at most before an upload has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import obstore

from unbroken.core.errors import StoreError, Transient
from unbroken.core.ports import Buffer, Clock, SystemClock
from unbroken.store.tiers.answers import ANSWERS, explained
from unbroken.store.tiers.places import Credentials, Place, place_of

T = TypeVar("T")

PART_BYTES = 8 << 20
"""One request of a large upload."""

IN_FLIGHT = 4
"""Requests of a large upload at once: memory is this many parts, and one that is being filled."""

UPLOAD_TIMEOUT_S = 30.0
"""At least, for the answer to one part of a large upload: 4 parts of 8 MiB in it need 1.1 MB/s."""

_MARK = "unbrokenwriter"
"""Metadata that tells whose object it is. Letters only: Azure takes nothing else."""

_FIRST_PAUSE_S = 0.1


class Bucket:
    """Objects by key, under the prefix of the URL. Errors: FileNotFoundError, FileExistsError, Permanent with a remedy, Transient."""

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = 15.0,
        clock: Clock | None = None,
    ) -> None:
        self.place: Place = place_of(url, endpoint, credentials)
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        third = timeout_s / 3  # no attempt begins later than two of them, and none lasts longer than one
        self._asking = self._opened(third, 2 * third)
        self._once = self._opened(third, 0)
        self._uploading = self._opened(max(timeout_s, UPLOAD_TIMEOUT_S), timeout_s)
        self.has_marks = self.place.scheme != "file"

    def __repr__(self) -> str:
        return f"Bucket({self.place.url!r})"

    def put_new(self, path: str, data: bytes, mark: str) -> None:
        """Put if absent; FileExistsError when another's is there. An answer that did not come is found out, not guessed.

        `mark` says who puts; it must never be another's.
        """
        deadline = self._clock.monotonic() + self._timeout_s * 2 / 3
        is_unsure, pause_s = False, _FIRST_PAUSE_S
        while True:
            try:
                self._call(path, lambda: obstore.put(self._once, path, data, mode="create", attributes=self._attributes(mark)))
                return
            except FileExistsError as error:
                if is_unsure and self.is_ours(path, data, mark):
                    return
                if self.size_if_there(path) is not None:
                    raise
                failure: Exception = Transient(f"{path}: put while another request for it was under way")
                failure.__cause__ = error.__cause__
            except Transient as error:
                is_unsure, failure = True, error
            if self._clock.monotonic() + pause_s >= deadline:
                raise failure
            self._clock.sleep(pause_s)
            pause_s *= 2

    def upload(self, path: str, parts: Iterable[Buffer], mark: str) -> int:
        """Put a large object, whatever was there before; bytes. What `parts` raises is raised, and nothing is there then."""
        feed = _Feed(parts)
        try:
            self._call(
                path,
                lambda: obstore.put(
                    self._uploading,
                    path,
                    feed,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=IN_FLIGHT,
                    attributes=self._attributes(mark),
                ),
            )
        except StoreError:
            if feed.error is None and feed.is_at_end and self.has_marks and self._mark_of(path) == mark:
                return feed.num_bytes  # the answer to the last request was lost, not the request
            if feed.error is None:
                raise
        if feed.error is not None:
            raise feed.error
        return feed.num_bytes

    def is_ours(self, path: str, data: bytes, mark: str) -> bool:
        """Was the object put with this mark? In a store that keeps no marks: does it hold the same?"""
        found = self._mark_of(path)
        return self.read(path, 0, None)[0] == data if found is None else found == mark

    def read(self, path: str, offset: int, length: int | None) -> tuple[bytes, int]:
        """Bytes from `offset` on, at most `length` (positive) of them, and the size of the object. One request; one more beyond the end."""
        options: Any = None
        if length is not None:
            options = {"range": (offset, offset + length)}
        elif offset:
            options = {"range": {"offset": offset}}
        try:
            return self._call(path, lambda: _content(obstore.get(self._asking, path, options=options)))
        except StoreError as error:
            if options is None or "range" not in str(error).lower():
                raise
            size = self.size(path)
            if offset < size:
                raise
            return b"", size  # stores call a range beyond the end an error, each in its own words

    def size(self, path: str) -> int:
        """Bytes of an object."""
        return int(self._call(path, lambda: obstore.head(self._asking, path))["size"])

    def size_if_there(self, path: str) -> int | None:
        """Bytes of an object, None when there is none."""
        try:
            return self.size(path)
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Path and size of every object below a folder, page by page, in no order."""
        pages = self._call(prefix, lambda: iter(obstore.list(self._asking, prefix or None)))
        while True:
            page = self._call(prefix, lambda: next(pages, None))
            if page is None:
                return
            yield from ((str(entry["path"]), int(entry["size"])) for entry in page)

    def folders(self, prefix: str) -> set[str]:
        """Names of the folders directly below a folder."""
        found = self._call(prefix, lambda: obstore.list_with_delimiter(self._asking, prefix or None))
        return {str(path).rpartition("/")[2] for path in found["common_prefixes"]}

    def delete(self, path: str) -> None:
        """Remove; no error when it is not there."""
        try:
            self._call(path, lambda: obstore.delete(self._asking, path))
        except FileNotFoundError:
            return

    def _mark_of(self, path: str) -> str | None:
        found = self._call(path, lambda: obstore.get(self._asking, path, options={"head": True}).attributes)
        return next((str(value) for name, value in found.items() if str(name).lower() == _MARK), None)

    def _attributes(self, mark: str) -> Any:
        return {_MARK: mark} if self.has_marks else None

    def _opened(self, timeout_s: float, retry_s: float) -> Any:
        return self._call("", lambda: self.place.opened(timeout_s=timeout_s, retry_s=retry_s))

    def _call(self, path: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except ANSWERS as error:
            failure = explained(path, error, self.place.secrets)
        raise failure  # outside of the handler: what obstore said may hold a secret, and must not hang on the error as its context


class _Feed:
    """The parts of an upload in pieces that fit one request, so that no more than those in flight are in memory. What broke it is kept."""

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self.num_bytes = 0
        self.is_at_end = False
        self.error: BaseException | None = None
        self._pieces = self._cut(parts)

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.is_at_end = True
            raise
        except BaseException as error:  # kept as it is: what obstore makes of it on the way may be another kind
            self.error = error
            raise
        self.num_bytes += len(piece)
        return piece

    @staticmethod
    def _cut(parts: Iterable[Buffer]) -> Iterator[memoryview]:
        for part in parts:
            view = memoryview(part).cast("B")
            yield from (view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES))


def _content(result: Any) -> tuple[bytes, int]:
    return bytes(result.bytes()), int(result.meta["size"])
