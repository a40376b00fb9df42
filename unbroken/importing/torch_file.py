"""`torch.save` files: looked at twice before torch's restricted unpickler may read them, so that nothing in them is ever executed.

1. The zip: stored members only, each whole (CRC), none inside another, no name twice.
2. Its pickle, as a description (`pickles`): only plain data and tensors, each tensor's storage there in the size that it claims.
3. `torch.load(weights_only=True, mmap=True)`, which has a list of its own of what it makes.
"""

from __future__ import annotations

import io
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from unbroken.capture import tensors
from unbroken.core.errors import Damaged, Refused
from unbroken.core.limits import MAX_JSON_BYTES
from unbroken.importing.files import printable, size_of
from unbroken.importing.pickles import Elsewhere, Global, Made, Table, describe_pickle, everything

MAGIC = b"PK\x03\x04"

_STORAGES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexDouble": 16, "ComplexFloat": 8,
}  # fmt: skip
_STORAGE_SIZES = {f"torch.{name}Storage": size for name, size in _STORAGES.items()} | {"torch.storage.UntypedStorage": 1}

_REBUILD = frozenset(
    f"torch._utils.{name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state")
)
_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
_ARRAYS = frozenset(f"{module}._reconstruct" for module in _NUMPY)
_SCALARS = frozenset(f"{module}.scalar" for module in _NUMPY)
_CALLED = _REBUILD | _ARRAYS | _SCALARS | {
    "collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device", "torch.serialization._get_layout", "numpy.dtype",
    "torch._tensor._rebuild_from_type_v2", "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex",
}  # fmt: skip
_NAMED = {"torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"} | {f"torch.{name}" for name in tensors.DTYPES}
_KNOWN = _CALLED | _NAMED | _STORAGE_SIZES.keys()

_PLAIN_DTYPE = re.compile(r"[<>|=]?([biufcSUMm?])([0-9]{0,6})")

MAX_UNFOLDED = 4
"""Times the size of a file that its tensors may be: views of one storage, or of one element, are cheap to write and dear to read."""


def read_torch_file(path: str) -> Any:
    """The state in a file that torch.save has written; tensors are on the CPU and map the file's bytes.

    Refused where it needs more than plain data and tensors, or is of another age; Damaged where it is torn. Cost: one read of its bytes.
    """
    size = size_of(path)
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise Refused(f"{path}: is no zip file as torch.save writes since 1.6; re-save it, where you trust it:\n{_resaving(path, [])}")
        _examine(file, size, path)
        # the very file that was looked at, whatever stands under its name by now, and whatever torch concludes from a name's end
        return _loaded(f"/proc/self/fd/{file.fileno()}", path, size, mmap=True)


def read_torch_bytes(data: bytes, path: str) -> Any:
    """The same for bytes out of a larger file, which messages call `path`."""
    if data[:4] != MAGIC:
        raise Damaged(path, "is nothing that torch.save has written")
    _examine(io.BytesIO(data), len(data), path)
    return _loaded(io.BytesIO(data), path, len(data), mmap=False)


def is_torch_file(path: str) -> bool:
    """Does it begin like one, of any age?"""
    with open(path, "rb") as file:
        head = file.read(2)
    return head == MAGIC[:2] or head[:1] == b"\x80"


def _examine(file: BinaryIO, size: int, path: str) -> None:
    """Everything that can be known without making anything."""
    members, raw = _members(file, size, path)
    described = describe_pickle(raw, path)
    wanted = sorted({one.name for one in everything(described) if isinstance(one, Global)} - _KNOWN)
    if wanted:
        raise Refused(_unsafe(path, wanted, described))
    for one in everything(described):
        if isinstance(one, Made):
            _check_call(one, path)
        elif isinstance(one, Elsewhere):
            _check_storage(one.id, members, path)


def _members(file: BinaryIO, size: int, path: str) -> tuple[dict[str, int], bytes]:
    """Sizes of the zip's members by name without its folder, and the pickle among them."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            _check_zip(infos, size, path)
            root = next((name.removesuffix("data.pkl") for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)), None)
            if root is None:
                raise Refused(f"{path}: is a zip file, but none that torch.save has written (it holds no data.pkl)")
            if f"{root}constants.pkl" in archive.namelist():
                raise Refused(f"{path}: is a TorchScript program, which is code: save its state_dict() with torch.save instead")
            raw = b""
            if all(info.CRC == 0 for info in infos):  # torch.serialization.set_crc32_options(False): it holds no checksums
                for info in infos:
                    del info.CRC
            for info in infos:
                with archive.open(info) as stream:  # its reader compares the CRC at the end
                    if info.filename == f"{root}data.pkl":
                        raw = stream.read(MAX_JSON_BYTES)
                    while stream.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, NotImplementedError, OverflowError) as error:
        raise Damaged(path, f"is damaged or cut short ({error})") from error
    return {info.filename.removeprefix(root): info.file_size for info in infos}, raw


def _check_zip(infos: list[zipfile.ZipInfo], size: int, path: str) -> None:
    names = [info.filename for info in infos]
    if len(set(names)) != len(names):
        raise Damaged(path, "holds two members of one name")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise Refused(f"{path}: its member {info.filename[:100]!r} is compressed or encrypted, which torch.save never does")
        if info.filename.startswith("/") or ".." in info.filename.split("/") or "\\" in info.filename:
            raise Refused(f"{path}: its member {info.filename[:100]!r} has a name that leads out of it")
        if info.filename.endswith("/data.pkl") and info.file_size > MAX_JSON_BYTES:
            raise Refused(f"{path}: its pickle has {info.file_size} bytes, where at most {MAX_JSON_BYTES} are read")
    last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.header_offset < last:
            raise Damaged(path, f"its member {info.filename[:100]!r} lies inside another one")
        last = info.header_offset + 30 + info.file_size
    if last > size:
        raise Damaged(path, f"is cut short: {size} bytes where at least {last} must be")


def _check_storage(told: Any, members: dict[str, int], path: str) -> None:
    """What a tensor says of its storage against the member that holds it."""
    if not (isinstance(told, tuple) and len(told) == 5 and told[0] == "storage" and isinstance(told[1], Global)):
        raise Damaged(path, "refers to something other than a tensor's storage")
    _, kind, key, _, num = told
    if kind.name not in _STORAGE_SIZES or not isinstance(key, str) or type(num) is not int:
        raise Damaged(path, f"has a storage of an unknown kind ({kind.name[:60]})")
    claimed, there = num * _STORAGE_SIZES[kind.name], members.get(f"data/{key}")
    if claimed != there:
        raise Damaged(path, f"storage {key[:40]!r} claims {claimed} bytes, and {there if there is not None else 'none'} are there")


def _check_call(made: Made, path: str) -> None:
    """Calls that are safe by name, with arguments as their own writers give them."""
    name, args = made.name, made.args
    if name not in _CALLED or not isinstance(args, tuple):
        raise Refused(f"{path}: wants to call {name or 'something computed'}, which plain data do not need")
    is_sound = True
    if name in _ARRAYS:
        plain = len(args) == 3 and isinstance(args[0], Global) and args[0].name == "numpy.ndarray" and args[1] == (0,)
        is_sound = plain and isinstance(made.state, tuple) and len(made.state) == 5 and _is_plain_dtype(made.state[2])
    elif name in _SCALARS:
        is_sound = len(args) == 2 and _is_plain_dtype(args[0])
    elif name == "numpy.dtype":
        is_sound = _is_plain_dtype(made)
    elif name == "_codecs.encode":
        is_sound = len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1"
    elif name == "builtins.bytearray":
        is_sound = not args or isinstance(args[0], str | bytes | Made)
    elif name == "torch._tensor._rebuild_from_type_v2":
        is_sound = len(args) == 4 and isinstance(args[0], Global) and args[0].name in _REBUILD
    elif name in ("builtins.set", "builtins.complex", "collections.Counter", "collections.OrderedDict"):
        is_sound = all(isinstance(one, list | float | int | Table) for one in args)
    if name == "collections.OrderedDict":  # what is put into its __dict__ would stand before its methods
        is_sound = is_sound and (made.state is None or [key for key, _ in getattr(made.state, "pairs", [("", "")])] == ["_metadata"])
    elif name not in _ARRAYS and name != "numpy.dtype":
        is_sound = is_sound and made.state is None
    if not is_sound:
        raise Damaged(path, f"calls {name} in a way that no writer of data does")


def _is_plain_dtype(made: Any) -> bool:
    """A number's, a text's or a date's: no objects, no fields, and of the width that its code says."""
    if not isinstance(made, Made) or made.name != "numpy.dtype" or not made.args or not isinstance(made.args[0], str):
        return False
    match, state = _PLAIN_DTYPE.fullmatch(made.args[0]), made.state
    if match is None or not isinstance(state, tuple | None) or (state is not None and len(state) < 7):
        return False
    width = int(match[2] or 0) * {"S": 1, "U": 4}.get(match[1], 0)
    return state is None or (state[2:5] == (None, None, None) and state[5] in (-1, width) and state[6] in (-1, 1, 4))


def _loaded(source: Any, path: str, size: int, *, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_numpy_classes()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The one call that reads torch's format: without code from the file, and only what `_examine` has understood.
            state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)  # noqa: TID251
    except Exception as error:  # raised again as ours: torch has a dozen classes for a file that it cannot read
        raise Damaged(path, f"torch cannot read it ({str(error)[:300]})") from error
    unfolded = sum({(t.data_ptr(), t.shape, t.stride()): t.numel() * t.element_size() for t in tensors_in(state)}.values())
    if unfolded > MAX_UNFOLDED * size + (1 << 20):
        raise Refused(f"{path}: {size} bytes whose tensors would become {unfolded}: views of shared memory; save them with tensor.clone()")
    return state


def tensors_in(state: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple | set) and depth <= 100:
        for one in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(one, depth + 1)


def _numpy_classes() -> list[Any]:
    """What a pickle of plain arrays and scalars names, as NumPy 1 and 2 spell it."""
    array, scalar = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    named = [(array, name) for name in sorted(_ARRAYS)] + [(scalar, name) for name in sorted(_SCALARS)]
    kinds = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"]
    return [*named, np.ndarray, np.dtype, *dict.fromkeys(kinds)]


def _unsafe(path: str, wanted: list[str], described: Any) -> str:
    names = printable(", ".join(name[:100] for name in wanted[:8])) + (f" and {len(wanted) - 8} more" if len(wanted) > 8 else "")
    culprits = [key for key, value in described.pairs if isinstance(key, str) and _needs(value)] if isinstance(described, Table) else []
    return (
        f"{path}: holds more than data: it needs {names}, and nothing is executed to read a file"
        + (f"; that is in {', '.join(map(repr, culprits[:8]))}" if culprits else "")
        + f". Re-save it without that, in its own environment and only where you trust it:\n{_resaving(path, culprits)}"
    )


def _needs(value: Any) -> bool:
    return any(isinstance(one, Global) and one.name not in _KNOWN for one in everything(value))


def _resaving(path: str, culprits: list[str]) -> str:
    """Two lines of Python for the user's own environment."""
    new = re.sub(r"(\.\w{1,5})?$", ".plain.pt", path, count=1)
    if culprits:
        what = f"{{key: value for key, value in state.items() if key not in {culprits!r}}}"
    else:
        what = "state if isinstance(state, dict) else state.state_dict()"
    return (
        f"  import torch; state = torch.load({path!r}, map_location='cpu', weights_only=False)  # runs code out of the file\n"
        f"  torch.save({what}, {new!r})"
    )
