"""Checkpoints of torch.distributed.checkpoint (DCP): a folder of `__*_*.distcp` files and `.metadata`, which is a pickle.

The metadata are read as a description (`pickles`), in which only the classes that DCP writes are understood; nothing is unpickled.
Each item is a value of torch.save at some place in a file. Sharded tensors are put together; every element must come exactly once.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from unbroken.capture import tensors
from unbroken.core.errors import Damaged, Refused
from unbroken.core.limits import MAX_PIECES
from unbroken.importing.files import member, printable, read_bytes, size_of
from unbroken.importing.pickles import Global, Made, Table, describe_pickle, everything
from unbroken.importing.torch_file import read_torch_bytes

METADATA = ".metadata"

_HOME = "torch.distributed.checkpoint."
_RECORDS = {
    f"{_HOME}metadata.{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
_KNOWN = _RECORDS | {
    f"{_HOME}filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    "pathlib.PosixPath", "pathlib.Path", "pathlib._local.PosixPath", "pathlib._local.Path",
} | {f"torch.{name}" for name in tensors.DTYPES}  # fmt: skip

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""

_ROOM = 1 << 16
"""Bytes that an item may have besides its tensor."""


@dataclass(frozen=True)
class _Place:
    path: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class _Reader:
    """One folder's metadata."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, METADATA)
        described = describe_pickle(read_bytes(member(folder, METADATA, named_by=folder)), self._path)
        wanted = sorted({one.name for one in everything(described) if isinstance(one, Global)} - _KNOWN)
        if wanted:
            needed = printable(", ".join(name[:100] for name in wanted[:8]))
            raise Refused(
                f"{self._path}: needs {needed}, which DCP's own metadata do not, and nothing is "
                f"executed to read them. Re-save it, in its own environment and only where you trust it:\n"
                f"  from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # runs code out of the file\n"
                f"  dcp_to_torch_save({folder!r}, {folder.rstrip('/') + '.pt'!r})"
            )
        fields = self._fields(described, "Metadata")
        self._kinds = self._table(fields.get("state_dict_metadata"), "state_dict_metadata")
        self._places = self._index(self._table(fields.get("storage_data"), "storage_data"))
        planned = fields.get("planner_data")
        self._paths = {k: v for k, v in planned.pairs if isinstance(k, str)} if isinstance(planned, Table) else {}

    def state(self) -> dict[Any, Any]:
        """The nested state that was saved."""
        out: dict[Any, Any] = {}
        for name, kind in self._kinds:
            if not isinstance(name, str) or not isinstance(kind, Made):
                raise self._damaged("an entry without a name")
            is_tensor = kind.name.endswith(".TensorStorageMetadata")
            value = self._tensor(name, self._form(name, kind)) if is_tensor else self._value(name)
            self._put(out, name, self._paths.get(name, (name,)), value)
        return out

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(self._path, f"are no metadata of DCP: {reason}")

    def _fields(self, value: Any, name: str) -> dict[str, Any]:
        """The fields of a record of DCP."""
        if not isinstance(value, Made) or value.name.rpartition(".")[2] != name:
            raise self._damaged(f"no {name} where one must be")
        pairs = value.state.pairs if isinstance(value.state, Table) else []
        return {key: one for key, one in pairs if isinstance(key, str)}

    def _table(self, value: Any, what: str) -> list[tuple[Any, Any]]:
        if not isinstance(value, Table) or len(value.pairs) > MAX_PIECES:
            raise self._damaged(f"{what} is no table, or one of more than {MAX_PIECES} entries")
        return value.pairs

    def _sizes_of(self, value: Any) -> tuple[int, ...]:
        args = value.args if isinstance(value, Made) and value.name == "torch.Size" else None
        numbers = args[0] if isinstance(args, tuple) and args else ()
        if args is None or not isinstance(numbers, tuple | list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise self._damaged("a shape that is none")
        return tuple(numbers)

    def _index(self, pairs: list[tuple[Any, Any]]) -> dict[str, dict[tuple[int, ...] | None, _Place]]:
        found: dict[str, dict[tuple[int, ...] | None, _Place]] = defaultdict(dict)
        for key, value in pairs:
            index, info = self._fields(key, "MetadataIndex"), self._fields(value, "_StorageInfo")
            name, offset, length = index.get("fqn"), info.get("offset"), info.get("length")
            if not isinstance(name, str) or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
                raise self._damaged("a place without a name, an offset or a length")
            if info.get("transform_descriptors"):
                raise Refused(f"{self._path}: {name!r} is stored through a transform (compression), which is not understood")
            where = index.get("offset")
            path = member(self._folder, info.get("relative_path"), named_by=self._path)
            found[name][None if where is None else self._sizes_of(where)] = _Place(path, offset, length)
        total: dict[str, int] = defaultdict(int)
        for place in (place for places in found.values() for place in places.values()):
            total[place.path] += place.length
        for path, length in total.items():
            if length > size_of(path):  # items that share their bytes would become more than there is
                raise Damaged(path, f"is cut short: {size_of(path)} bytes where its items take {length}")
        return found

    def _form(self, name: str, kind: Made) -> _Tensor:
        fields = self._fields(kind, "TensorStorageMetadata")
        properties = fields.get("properties")
        told = properties.state[0] if isinstance(properties, Made) and isinstance(properties.state, tuple) and properties.state else None
        dtype = told.name.removeprefix("torch.") if isinstance(told, Global) else ""
        chunks = fields.get("chunks")
        if dtype not in tensors.DTYPES or not isinstance(chunks, list):
            raise self._damaged(f"{name!r} has no dtype or no chunks")
        boxes = []
        for chunk in chunks:
            told_of = self._fields(chunk, "ChunkStorageMetadata")
            boxes.append((self._sizes_of(told_of.get("offsets")), self._sizes_of(told_of.get("sizes"))))
        return _Tensor(dtype, self._sizes_of(fields.get("size")), tuple(boxes))

    def _tensor(self, name: str, form: _Tensor) -> torch.Tensor:
        """A whole tensor from its chunks. What is claimed is compared with what the files hold before anything is allocated."""
        width = tensors.DTYPES[form.dtype].itemsize
        if math.prod(form.shape) != sum(math.prod(sizes) for _, sizes in form.boxes) or len(form.shape) > 64:
            raise self._damaged(f"the chunks of {name!r} are not as large as it is")
        places = []
        for offsets, sizes in form.boxes:
            place = self._places.get(name, {}).get(offsets)
            is_inside = len(offsets) == len(sizes) == len(form.shape) and all(
                o + s <= n for o, s, n in zip(offsets, sizes, form.shape, strict=True)
            )
            if place is None or not is_inside or math.prod(sizes) * width > place.length:
                raise self._damaged(f"the chunk of {name!r} at {list(offsets)} is nowhere, or not inside of it")
            if place.length > math.prod(sizes) * width + _ROOM:
                raise self._damaged(f"the chunk of {name!r} at {list(offsets)} takes {place.length} bytes, far more than it holds")
            places.append(place)
        out = torch.empty(form.shape, dtype=tensors.DTYPES[form.dtype])
        seen = torch.zeros(form.shape, dtype=torch.bool) if len(places) > 1 else None
        for (offsets, sizes), place in zip(form.boxes, places, strict=True):
            part = self._read(place)
            if not isinstance(part, torch.Tensor) or part.dtype is not out.dtype or tuple(part.shape) != sizes:
                raise Damaged(place.path, f"the chunk of {name!r} at {list(offsets)} is not what the metadata say")
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            if seen is not None:
                if bool(seen[box].any()):
                    raise self._damaged(f"two chunks of {name!r} overlap")
                seen[box] = True
            out[box] = part
        return out

    def _value(self, name: str) -> Any:
        place = self._places.get(name, {}).get(None)
        if place is None:
            raise self._damaged(f"{name!r} is nowhere")
        return self._read(place)

    def _read(self, place: _Place) -> Any:
        with open(place.path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        if len(data) != place.length:
            raise Damaged(place.path, f"is cut short: {place.offset + place.length} bytes must be there")
        return read_torch_bytes(data, f"{place.path} (at byte {place.offset})")

    def _put(self, out: dict[Any, Any], name: str, path: Any, value: Any) -> None:
        """Into nested dicts and lists, whose keys `path` has: a text is a dict's, a number a list's."""
        keys = list(path) if isinstance(path, tuple) else []
        if not keys or type(keys[0]) is not str or any(type(key) not in (str, int) for key in keys):
            raise self._damaged(f"{name!r} has no place in the state")
        here: Any = out
        for key, following in zip(keys, [*keys[1:], None], strict=True):
            is_list, is_last = type(key) is int, following is None
            if not isinstance(here, list if is_list else dict):
                raise self._damaged(f"{name!r} lies beneath a value that is no container")
            if is_list and not 0 <= key <= len(self._kinds):
                raise self._damaged(f"{name!r} is number {key} of a list")
            if isinstance(here, list):
                here.extend([None] * (key + 1 - len(here)))
            there = here[key] if isinstance(here, list) else here.get(key)
            if is_last and there is not None:
                raise self._damaged(f"{name!r} comes twice")
            if there is None:
                there = value if is_last else [] if type(following) is int else {}
                here[key] = there
            here = there


def read_dcp(folder: str) -> dict[Any, Any]:
    """The state in a folder that torch.distributed.checkpoint has written. Keys of dicts are texts, as DCP makes them.

    Refused, Damaged, NoCheckpoint name the file. Cost: one read of the files; memory: the state.
    """
    return _Reader(folder).state()
