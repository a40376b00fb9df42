"""B39: a pickle is looked at, never run; what it describes is bounded by its bytes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.hostile import PICKLES, unfolding
from unbroken.core.errors import Damaged
from unbroken.importing.pickles import Global, Made, Table, describe_pickle, everything


def plain(value: Any) -> Any:
    """A description of plain data as the data."""
    if isinstance(value, Table):
        return {key: plain(one) for key, one in value.pairs}
    if isinstance(value, Made) and value.name in ("builtins.set", "builtins.frozenset"):
        return {"builtins.set": set, "builtins.frozenset": frozenset}[value.name](map(plain, value.items or (value.args or [[]])[0]))
    if isinstance(value, Made) and value.name == "builtins.bytearray":
        return bytearray(value.args[0])
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_are_described_as_they_are(protocol: int) -> None:
    state = {"a": [1, -5, 2**70, 1.5, True, None, "ü", (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ()], 5: {"b": "x" * 300}, "s": {1, 2}}
    if protocol > 2:
        state["bytes"] = b"\x00\xff" * 200
    if protocol == 5:
        state["array"] = bytearray(b"ab")
    assert plain(describe_pickle(pickle.dumps(state, protocol), "f")) == state


@pytest.mark.parametrize("kind", PICKLES)
def test_B39_a_hostile_pickle_is_described_and_not_run(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    described = describe_pickle(PICKLES[kind](marker), "f") if kind != "inst" else None
    if kind == "inst":
        with pytest.raises(Damaged, match="opcode INST"):
            describe_pickle(PICKLES[kind](marker), "f")
    else:
        names = {one.name for one in everything(described) if isinstance(one, Global)}
        assert names & {"builtins.eval", "posix.system", "os.system"}
    assert not marker.exists()


def test_B39_the_hostile_pickles_of_these_tests_do_strike_when_they_are_run(tmp_path: Path) -> None:
    for kind in ("eval", "stack global", "inst"):
        marker = tmp_path / kind.replace(" ", "-")
        pickle.loads(PICKLES[kind](marker))
        assert marker.exists()


def test_B39_few_bytes_that_unfold_into_very_much_are_refused() -> None:
    assert len(unfolding()) < 600
    with pytest.raises(Damaged, match="far more than its bytes can mean"):
        describe_pickle(unfolding(), "f")
    assert describe_pickle(unfolding(3), "f")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02}q\x00",  # no end
        b"\x80\x02NN.",  # two values
        b"\x80\x02(.",  # a mark
        b"\x80\x02h\x05.",  # nothing remembered there
        b"\x80\x02u.",
        b"\x80\x02Nb.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}(K\x01u.",  # a key without value
        b"\x80\x02X\xff\xff\xff\x7fab.",  # a text of 2 GiB
        b"\x80\x04\x8d" + b"\xff" * 8 + b"ab.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",  # nested deep
        b"\x80\x02\x82\x01.",  # an extension's code
        b"\x80\x02Pname\n.",
    ],
)
def test_B04_no_sound_pickle_is_damaged_with_its_name(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"^name: .*(no sound pickle|opcode)"):
        describe_pickle(data, "name")


def test_B04_every_cut_of_a_pickle_is_damaged() -> None:
    data = pickle.dumps({"a": OrderedDict(b=[1, 2.5, "text"]), "c": (b"x" * 300, None)}, 4)
    for at in range(len(data)):
        with pytest.raises(Damaged):
            describe_pickle(data[:at], "f")
