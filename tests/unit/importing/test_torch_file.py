"""torch.save files: read with all their types, or refused with the class they want and the lines that re-save them; never executed."""

from __future__ import annotations

import argparse
import pickle
import random
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rigs.hostile import PICKLES, Strike, torch_zip, unfolding
from unbroken.core.errors import Damaged, NoCheckpoint, Refused, UnbrokenError
from unbroken.importing.torch_file import read_torch_file


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def odd_state() -> dict[Any, Any]:
    return {
        "ms": {25: 1, 50: 2}, 1.5: "y", True: "x", "t": (1, 2), "none": None, "el": [], "ed": {}, "by": b"\x00\xff", "big": 2**70,
        "f": 0.1, "inf": float("-inf"), "np": np.int64(3), "set": {1, 2}, "c": 1 + 2j, "ba": bytearray(b"ab"), "od": OrderedDict(a=1),
        "counter": Counter("aab"), "size": torch.Size([1, 2]), "dtype": torch.float16, "device": torch.device("cpu"),
    }  # fmt: skip


def test_B19_types_of_values_and_keys_are_kept(tmp_path: Path) -> None:
    state = odd_state()
    back = read_torch_file(str(saved(tmp_path / "a.pt", state)))
    assert back == state
    assert [type(key) for key in back] == [type(key) for key in state]
    assert [type(value) for value in back.values()] == [type(value) for value in state.values()]


def test_B39_numpy_python_and_torch_random_states_are_read_with_safety_on(tmp_path: Path) -> None:
    state = {
        "np": np.random.get_state(),
        "py": random.getstate(),
        "t": torch.get_rng_state(),
        "g": np.random.default_rng(1).bit_generator.state,
    }
    back = read_torch_file(str(saved(tmp_path / "a.pt", state)))
    assert back["py"] == state["py"] and torch.equal(back["t"], state["t"]) and back["g"] == state["g"]
    assert back["np"][1].tolist() == state["np"][1].tolist()


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3).T, np.array(["a", "bcd"]), np.array(["2020-01-01"], "M8[D]"), np.array([b"ab"])]
)
def test_arrays_keep_values_and_types(tmp_path: Path, array: Any) -> None:
    back = read_torch_file(str(saved(tmp_path / "a.pt", {"a": array, "s": array.flat[0]})))
    assert back["a"].dtype == array.dtype and (back["a"] == array).all() and back["s"] == array.flat[0]


def test_tensors_keep_bits_types_views_and_ties(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    state = {"t": base, "view": base.t()[1:], "tied": base, "bf": torch.randn(3).bfloat16(), "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    state |= {"p": torch.nn.Parameter(torch.ones(2)), "zero": torch.zeros(0, 3), "scalar": torch.tensor(5)}
    back = read_torch_file(str(saved(tmp_path / "a.pt", state)))
    for name, value in state.items():
        assert back[name].dtype is value.dtype and torch.equal(back[name].float(), value.float()), name
    assert back["t"].data_ptr() == back["tied"].data_ptr()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_B39_a_payload_anywhere_in_a_torch_file_is_refused_by_name_and_not_run(tmp_path: Path, depth: int, protocol: int) -> None:
    marker, state = tmp_path / "marker", Strike(tmp_path / "marker")
    for _ in range(depth):
        state = {"config": [state], "w": torch.ones(2)}  # type: ignore[assignment]
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    with pytest.raises(Refused) as error:
        read_torch_file(str(tmp_path / "a.pt"))
    text = str(error.value)
    assert str(tmp_path / "a.pt") in text and "posix.system" in text
    assert not marker.exists()
    assert "weights_only=False" in text and "torch.save(" in text and ("'config'" in text) == (depth > 0)


@pytest.mark.parametrize("kind", PICKLES)
def test_B39_hand_made_pickles_in_a_zip_file_and_without_one(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    data = PICKLES[kind](marker)
    (tmp_path / "raw.pt").write_bytes(data)
    for path in (torch_zip(tmp_path / "a.pt", data), tmp_path / "raw.pt"):
        with pytest.raises(UnbrokenError, match=path.name):
            read_torch_file(str(path))
    assert not marker.exists()


def test_the_lines_of_the_error_re_save_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1), "paths": Path("x"), "step": 3})
    with pytest.raises(Refused, match=r"argparse\.Namespace") as error:
        read_torch_file(str(path))
    first, second = str(error.value).splitlines()[-2:]
    exec(f"{first.strip()}\n{second.strip()}", {})  # the user's own decision, here with the test's own file
    back = read_torch_file(str(tmp_path / "a.plain.pt"))
    assert back.keys() == {"model", "step"} and torch.equal(back["model"]["w"], torch.ones(2))


def test_a_whole_module_is_refused_with_lines_that_save_its_state_dict(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", torch.nn.Linear(2, 2))
    with pytest.raises(Refused, match=r"torch\.nn\.modules\.linear\.Linear") as error:
        read_torch_file(str(path))
    first, second = str(error.value).splitlines()[-2:]
    exec(f"{first.strip()}\n{second.strip()}", {})
    assert read_torch_file(str(tmp_path / "m.plain.pt")).keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    "value", [defaultdict(list), np.array([{}], dtype=object), torch.ones(2).to_sparse()], ids=["defaultdict", "objects", "sparse"]
)
def test_B19_what_is_no_plain_data_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnbrokenError, match=r"a\.pt"):
        read_torch_file(str(saved(tmp_path / "a.pt", {"x": value})))


def test_a_file_of_an_older_torch_and_a_torchscript_are_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Refused, match=r"since 1\.6(.|\n)*torch\.save\("):
        read_torch_file(str(tmp_path / "old.pt"))
    script = torch_zip(tmp_path / "script.pt", b"\x80\x02}.", {"a/constants.pkl": b"\x80\x02)."})
    with pytest.raises(Refused, match="TorchScript"):
        read_torch_file(str(script))


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "a.pt", {"a": torch.arange(5)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_torch_file(str(tmp_path / "a.pt"))["a"].tolist() == [0, 1, 2, 3, 4]


def test_B04_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {"a": torch.randn(256), "b": torch.randn(256), "step": 7}
    raw = saved(tmp_path / "a.pt", state).read_bytes()
    bad, num_refused = tmp_path / "bad.pt", 0
    for at in range(3, len(raw), len(raw) // 150):
        bad.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        try:
            back = read_torch_file(str(bad))
        except UnbrokenError as error:
            num_refused += 1
            assert str(bad) in str(error)
        else:
            assert back["step"] == 7 and torch.equal(back["a"], state["a"]) and torch.equal(back["b"], state["b"]), at
    assert num_refused > 75


def test_B04_cut_or_lengthened_files_are_errors_by_name(tmp_path: Path) -> None:
    raw = saved(tmp_path / "a.pt", {"a": torch.arange(256.0)}).read_bytes()
    bad = tmp_path / "bad.pt"
    for at in range(0, len(raw), len(raw) // 64):
        bad.write_bytes(raw[:at])
        with pytest.raises(UnbrokenError, match=r"bad\.pt"):
            read_torch_file(str(bad))
    bad.write_bytes(raw + b"x")  # a comment that the zip's end does not announce: the same bits, or an error
    with suppress(UnbrokenError):
        assert read_torch_file(str(bad))["a"].tolist() == list(range(256))


def tensor_pickle(num: int, shape: tuple[int, ...], stride: tuple[int, ...], copies: int = 1) -> bytes:
    """What torch.save writes for tensors on one storage that claims `num` floats."""

    class Storage:
        pass

    class Tensor:
        def __init__(self, offset: int) -> None:
            self.offset = offset

        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (storage, self.offset, shape, stride, False, OrderedDict())

    class Pickler(pickle._Pickler):  # the one in Python asks for every object
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", num) if value is storage else None

    import io

    storage, out = Storage(), io.BytesIO()
    Pickler(out, 2).dump({str(i): Tensor(i) for i in range(copies)})
    return out.getvalue()


def test_the_hand_made_tensor_is_one(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor_pickle(8, (2, 3), (3, 1)), {"a/data/0": bytes(32)})
    assert read_torch_file(str(path))["0"].tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensor_pickle(1 << 40, (1 << 40,), (1,)), "claims 4398046511104 bytes, and 32 are there"),
        (tensor_pickle(6, (6,), (1,)), "claims 24 bytes, and 32 are there"),
        (tensor_pickle(8, (1 << 40,), (0,)), "would become 4398046511104"),
        (tensor_pickle(8, (100,), (1,)), "torch cannot read it"),
        (tensor_pickle(8, (8,), (0,), copies=7), None),
        (unfolding(), "far more than its bytes"),
        (b"\x80\x02ctorch\nFloatTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85\x81.", "needs torch.FloatTensor"),
        (b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.", "calls builtins.bytearray in a way"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\x00\x00\x00\x40\x85U\x01b\x87R.", "in a way"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsc__builtin__\nset\nsb.", "calls collections.OrderedDict in a way"),
    ],
)  # fmt: skip
def test_B39_lying_sizes_are_refused_before_memory_is_taken(tmp_path: Path, data: bytes, words: str | None) -> None:
    path = torch_zip(tmp_path / "a.pt", data, {"a/data/0": bytes(32)})
    tracemalloc.start()
    try:
        if words is None:
            read_torch_file(str(path))
        else:
            with pytest.raises(UnbrokenError, match=words):
                read_torch_file(str(path))
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_B39_many_views_of_one_storage_are_refused_when_they_would_unfold(tmp_path: Path) -> None:
    data = tensor_pickle(1 << 20, ((1 << 20) - 64,), (1,), copies=32)
    path = torch_zip(tmp_path / "a.pt", data, {"a/data/0": bytes(4 << 20)})
    with pytest.raises(Refused, match=r"views of shared memory; save them with tensor\.clone"):
        read_torch_file(str(path))


def test_B39_a_compressed_member_is_refused_unread(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", b"\x80\x02}.", {"a/data/0": bytes(100 << 20)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Refused, match=r"compressed or encrypted, which torch\.save never does"):
        read_torch_file(str(path))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_B39_members_with_bad_names_twice_or_inside_each_other(tmp_path: Path) -> None:
    for name in ("a/../../x", "/etc/passwd", "a\\..\\x"):
        with pytest.raises(Refused, match="leads out of it"):
            read_torch_file(str(torch_zip(tmp_path / "a.pt", b"\x80\x02}.", {name: b"x"})))
    with zipfile.ZipFile(torch_zip(tmp_path / "b.pt", b"\x80\x02}."), "a") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
    with pytest.raises(Damaged, match="two members of one name"):
        read_torch_file(str(tmp_path / "b.pt"))
    inner = torch_zip(tmp_path / "inner", b"\x80\x02}.", {"a/data/1": bytes(64)}).read_bytes()
    record = inner[inner.rindex(b"PK\x03\x04") :][: 30 + len("a/data/1") + 64]  # a whole member, as the bytes of another one
    raw = bytearray(torch_zip(tmp_path / "c.pt", b"\x80\x02}.", {"a/data/0": record, "a/data/1": bytes(64)}).read_bytes())
    entry = raw.rindex(b"PK\x01\x02")
    raw[entry + 42 : entry + 46] = raw.index(record).to_bytes(4, "little")
    (tmp_path / "c.pt").write_bytes(raw)
    with pytest.raises(Damaged, match=r"c\.pt: its member 'a/data/1' lies inside another one"):
        read_torch_file(str(tmp_path / "c.pt"))


def test_what_is_no_file(tmp_path: Path) -> None:
    import os

    with pytest.raises(NoCheckpoint, match="no such file"):
        read_torch_file(str(tmp_path / "gone.pt"))
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", tmp_path, Path("/dev/zero")):
        with pytest.raises(Refused, match="is no regular file"):
            read_torch_file(str(path))


def test_B39_names_in_an_error_cannot_move_a_terminals_cursor(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", b"\x80\x02c\x1b[2Jos\nsys\x1btem\n.")
    with pytest.raises(Refused, match=r"\\x1b\[2Jos\.sys\\x1btem") as error:
        read_torch_file(str(path))
    assert "\x1b" not in str(error.value)
