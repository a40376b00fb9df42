"""State to pieces and back: every storable value with its type and bits, everything else refused by name."""

from __future__ import annotations

import enum
import math
import random
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.capture import pointers
from unbroken.capture.tree import Item, flatten, rebuild, write_item
from unbroken.core.errors import Damaged
from unbroken.core.limits import MAX_DEPTH
from unbroken.core.records import Piece

Stored = dict[str, tuple[Piece, bytes]]


def stored(items: list[Item]) -> Stored:
    out: Stored = {}
    for item in items:
        raw = bytearray(item.nbytes)
        write_item(item, memoryview(raw))
        assert item.piece.pointer not in out
        out[item.piece.pointer] = (item.piece, bytes(raw))
    return out


def cycle(state: Any) -> Any:
    return rebuild(stored(flatten(state)))


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and bits, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def from_bits(dtype: torch.dtype, value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8).view(dtype)


KEYS = st.recursive(
    st.one_of(st.text(max_size=6), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.binary(max_size=4)),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.binary(max_size=8).map(bytearray),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32).map(np.float32),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float32)),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, np.uint8)),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda v: deque(v, 5)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.frozensets(KEYS, max_size=3),
        st.sets(KEYS, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATES)
def test_any_state_comes_back_as_it_was_and_saves_to_the_same_bytes_again(state: Any) -> None:
    first = stored(flatten(state))
    back = rebuild(first)
    assert same(back, state)
    assert stored(flatten(back)) == first


@settings(max_examples=300, deadline=None)
@given(KEYS, KEYS)
def test_tokens_are_one_to_one(a: Any, b: Any) -> None:
    assert same(pointers.key(pointers.token(a)), a)
    assert "/" not in pointers.token(a)
    assert (pointers.token(a) == pointers.token(b)) == same(a, b)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=12), st.text("#~:01xinttuplefloat[]\"'na,", max_size=16).map(lambda s: "#" + s)))
def test_a_token_is_read_only_if_it_is_the_spelling_of_a_key(text: str) -> None:
    try:
        found = pointers.key(text)
    except ValueError:
        return
    assert pointers.token(found) == text


@pytest.mark.parametrize(
    ("key", "token"),
    [
        ("weight", "weight"),
        ("a/b~c", "a~1b~0c"),
        ("", ""),
        ("25", "25"),
        (25, "#int:25"),
        (2**70, "#int:0x400000000000000000"),
        ("#int:25", "##int:25"),
        (1.5, "#float:1.5"),
        (True, "#bool:True"),
        (None, "#none"),
        (b"\x00\xff", "#bytes:00ff"),
        (("a", 1), '#tuple:["a","#int:1"]'),
        ("\ud800", "#str:eda080"),
    ],
)
def test_spelling_of_keys(key: Any, token: str) -> None:
    assert pointers.token(key) == token
    assert same(pointers.key(token), key)


ODD_TENSORS = {
    "scalar": torch.tensor(3.5),
    "one": torch.ones(1),
    "none": torch.ones(0),
    "none2": torch.ones(3, 0, 2),
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([255], dtype=torch.uint8),
    "int64": torch.tensor([2**62 + 1]),
    "uint64": torch.tensor([2**63 + 3], dtype=torch.uint64),
    "float16": torch.tensor([65504.0], dtype=torch.float16),
    "bfloat16": from_bits(torch.bfloat16, b"\x81\x3f"),
    "float8": from_bits(torch.float8_e4m3fn, b"\x7e"),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
    "quiet nan with payload": from_bits(torch.float32, bytes.fromhex("0100c07f")),
    "signalling nan": from_bits(torch.float32, bytes.fromhex("0100807f")),
    "-0.0, inf, denormal": torch.tensor([-0.0, math.inf, 1e-45]),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "strided nan": from_bits(torch.float32, bytes.fromhex("0100807f") * 4)[::2],
    "expanded": torch.tensor(7.0).expand(4),
    "channels_last": torch.arange(8.0).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last),
    "conj": torch.tensor([1 + 2j, 3j]).conj(),
    "neg": torch.tensor([1 + 2j, 3j]).conj().imag,
    "odd size beside float64": torch.arange(300, dtype=torch.int32).to(torch.uint8),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_B16_odd_tensors_keep_dtype_shape_and_bits(name: str) -> None:
    tensor = ODD_TENSORS[name]
    back = cycle({"x": tensor, "f": torch.tensor(1.5, dtype=torch.float64)})["x"]
    assert same(back, tensor)
    assert back.is_contiguous() and back.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5)[::-1],
        np.array(3.5),
        np.zeros((0, 3), np.int16),
        np.arange(6.0).reshape(2, 3).T,
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["ab", "µ"]),
        np.array([b"ab"]),
        np.array(["2020-01-01"], "M8[ns]"),
        np.frombuffer(bytes.fromhex("0100807f"), np.float32),
    ],
    ids=str,
)
def test_arrays_come_back_as_arrays_and_scalars_as_scalars(array: np.ndarray) -> None:
    assert same(cycle([array])[0], array)
    if array.size:
        assert same(cycle([array.flat[0]])[0], array.reshape(-1)[0])


def test_a_parameter_comes_back_as_a_plain_tensor_that_owns_its_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    back = cycle({"p": parameter})["p"]
    assert type(back) is torch.Tensor and not back.requires_grad
    back.add_(1)
    assert parameter.tolist() == [1, 1, 1]


def test_flatten_references_tensors_and_copies_nothing() -> None:
    tensor = torch.zeros(4)
    item = flatten({"x": tensor})[1]
    tensor.fill_(5)
    raw = bytearray(item.nbytes)
    write_item(item, memoryview(raw))
    assert np.frombuffer(raw, np.float32).tolist() == [5] * 4


def test_labels_go_into_every_piece() -> None:
    items = flatten({"a": 1}, "/rng", scope="rank", role="compared", layer="hardware", kind="rng", captured="step")
    assert [(i.piece.pointer, i.piece.scope, i.piece.role, i.piece.layer, i.piece.kind, i.piece.captured) for i in items] == [
        ("/rng", "rank", "compared", "hardware", "container", "step"),
        ("/rng/a", "rank", "compared", "hardware", "rng", "step"),
    ]


# --- B17: aliases -------------------------------------------------------------------------------------------------------------


def test_B17_a_tied_weights_stay_tied_and_are_stored_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(100, 8)
            self.head = torch.nn.Linear(8, 100, bias=False)
            self.head.weight = self.emb.weight

    items = flatten(Tied())
    assert sum(i.nbytes for i in items if i.piece.dtype == "float32") == 100 * 8 * 4
    back = rebuild(stored(items))
    back["emb.weight"].add_(1)
    assert torch.equal(back["emb.weight"], back["head.weight"])


def test_B17_b_tensors_that_drifted_apart_stay_apart() -> None:
    emb = torch.arange(4.0)
    back = cycle({"emb": emb, "head": emb + 1.0, "tied": True})
    assert torch.equal(back["head"] - back["emb"], torch.ones(4))


def test_B17_c_a_slice_stores_only_its_elements() -> None:
    big = torch.arange(1_000_000.0)
    items = flatten({"x": big[:10]})
    assert sum(i.nbytes for i in items) < 1000
    assert torch.equal(rebuild(stored(items))["x"], big[:10])


def test_B17_d_overlapping_views_keep_their_values() -> None:
    x = torch.arange(20.0)
    back = cycle({"a": x[:10], "b": x[5:15]})
    assert torch.equal(back["a"], x[:10]) and torch.equal(back["b"], x[5:15])


def test_B17_e_a_complex_tensor_and_its_parts() -> None:
    a = torch.randn(10, dtype=torch.complex64)
    back = cycle({"a": a, "re": a.real, "im": a.imag})
    assert torch.equal(back["a"], a) and torch.equal(back["a"].real, back["re"]) and torch.equal(back["a"].imag, back["im"])


def test_B17_f_one_dict_in_two_places_is_right_twice_and_a_cycle_is_an_error() -> None:
    shared = {"x": 1}
    assert cycle({"a": shared, "b": [shared, shared]}) == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}]}
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(TypeError, match=r"^sched\.loop\[1\]: cannot store a container that holds itself"):
        flatten({"sched": {"loop": loop}})


def test_empty_tensors_and_same_memory_in_another_shape_are_no_aliases() -> None:
    x = torch.arange(6.0)
    items = flatten([x, x.view(2, 3), x.view(torch.int32), torch.empty(0), torch.empty(0), x[:0], x])
    assert [i.piece.dtype for i in items] == ["py:list", "float32", "float32", "int32", "float32", "float32", "float32", "alias"]


def test_a_conjugate_view_is_no_alias() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    back = cycle([x, x.conj(), x.imag, x.conj().imag])
    assert same(back, [x, x.conj().resolve_conj(), x.imag, -x.imag])


# --- B19: containers, keys, things that cannot be stored ------------------------------------------------------------------------


def test_B19_a_types_of_keys_and_values_survive_two_cycles() -> None:
    state = {
        "ms": {25: 1, 50: 2},
        1.5: "y",
        True: "x",
        "t": (1, 2),
        "none": None,
        "el": [],
        "ed": {},
        "by": b"\x00\xff",
        "big": 2**70,
        "f": 0.1,
        "nan": math.nan,
        "inf": -math.inf,
        "np": np.int64(3),
        "25": {25: "int", "25": "text", "#int:25": "mark"},
        "counter": Counter("aab"),
        "ordered": OrderedDict(b=1, a=2),
        "recent": deque([1, 2], 5),
        "sets": [{1, 2, "a"}, frozenset({(1, None)})],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
    }
    once = cycle(state)
    twice = cycle(once)
    assert same(once, state) and same(twice, state)
    assert list(twice["ms"]) == [25, 50] and all(type(k) is int for k in twice["ms"])
    assert twice["recent"].maxlen == 5


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")

UNSTORABLE = {
    "lambda": lambda: lambda: 0,
    "file": lambda: open("/dev/null"),  # noqa: SIM115
    "generator": lambda: (i for i in range(3)),
    "lock": threading.Lock,
    "class": lambda: torch.nn.Linear,
    "enum": lambda: Colour.RED,
    "int enum": lambda: Level.LOW,
    "named tuple": lambda: Point(1, 2),
    "defaultdict": lambda: defaultdict(int),
    "object array": lambda: np.array([object()]),
    "record array": lambda: np.zeros(2, [("a", "i4")]),
    "big-endian array": lambda: np.zeros(2, ">f4"),
    "long double": lambda: np.longdouble(1),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "bad key": lambda: {object(): 1},
    "two nan keys": lambda: {math.nan: 1, float("nan"): 2},
}


@pytest.mark.parametrize("what", UNSTORABLE)
def test_B19_d_what_cannot_be_stored_is_named_by_its_path(what: str) -> None:
    value = UNSTORABLE[what]()
    with pytest.raises(TypeError, match=r"^sched\.fns\[0\]: cannot store "):
        flatten({"ok": 1, "sched": {"fns": [value]}})
    if what == "file":
        value.close()


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({25: object()}, "[25]"),
        ({"a b": {"c.d": [0, object()]}}, 'a b["c.d"][1]'),
        ({("x", 1): object()}, "[('x', 1)]"),
        (object(), "state"),
    ],
)
def test_paths_read_like_python(state: Any, path: str) -> None:
    with pytest.raises(TypeError) as caught:
        flatten(state)
    assert str(caught.value).startswith(f"{path}: cannot store")


def test_the_path_begins_at_the_pointer_given() -> None:
    with pytest.raises(TypeError, match=r"^extras\.list\[0\]\.f: "):
        flatten({"f": object()}, "/extras/list/0")


def test_deep_nesting_is_refused_by_name_not_by_recursion() -> None:
    state: Any = 1
    for _ in range(MAX_DEPTH):
        state = [state]
    assert same(cycle(state), state)
    with pytest.raises(TypeError, match=f"nested more than {MAX_DEPTH} deep"):
        flatten([state])


def test_a_name_too_long_is_refused() -> None:
    with pytest.raises(TypeError, match="characters"):
        flatten({"k" * 5000: 1})


# --- generators and objects -------------------------------------------------------------------------------------------------------


def test_generators_go_on_where_they_stood() -> None:
    made = {
        "py": random.Random(0),
        "np": np.random.default_rng(3),
        "mt": np.random.Generator(np.random.MT19937(3)),
        "legacy": np.random.RandomState(4),
        "torch": torch.Generator().manual_seed(5),
    }
    draws = {
        "py": lambda g: [g.random(), g.gauss()],
        "np": lambda g: g.normal(size=3).tolist(),
        "mt": lambda g: g.integers(1 << 30, size=3).tolist(),
        "legacy": lambda g: g.randn(3).tolist(),
        "torch": lambda g: torch.randn(3, generator=g).tolist(),
    }
    for name, generator in made.items():
        draws[name](generator)
    back = cycle(made)
    for name, generator in made.items():
        assert type(back[name]) is type(generator)
        assert draws[name](back[name]) == draws[name](generator), name


def test_B24_a_the_known_fourth_draw() -> None:
    generator = random.Random(0)
    for _ in range(3):
        generator.random()
    assert cycle([generator])[0].random() == 0.25891675029296335


def test_objects_with_state_dict_are_stored_like_dicts() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    items = flatten({"model": model, "optimizer": optimizer})
    assert {i.piece.pointer: i.piece.dtype for i in items}["/model"] == "py:state_dict"
    back = rebuild(stored(items))
    assert same({k: v.detach() for k, v in model.state_dict().items()}, back["model"])
    assert same(optimizer.state_dict(), back["optimizer"])


def test_an_object_whose_state_is_no_dict_is_refused() -> None:
    class Odd:
        def state_dict(self) -> list[int]:
            return [1]

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(TypeError, match=r"^odd: cannot store an object whose state_dict"):
        flatten({"odd": Odd()})


# --- hostile pieces ---------------------------------------------------------------------------------------------------------------


def piece(pointer: str, dtype: str, data: bytes, shape: tuple[int, ...] = ()) -> tuple[str, tuple[Piece, bytes]]:
    return pointer, (Piece(pointer=pointer, dtype=dtype, shape=shape), data)


HOSTILE = {
    "tensor too short": [piece("/x", "float32", b"\0" * 12, (4,))],
    "tensor too long": [piece("/x", "float32", b"\0" * 20, (4,))],
    "tensor of 2**40": [piece("/x", "float32", b"\0" * 16, (2**40,))],
    "tensor of 2**62 x 0": [piece("/x", "float32", b"", (2**62, 4, 0))],
    "tensor of 100 dimensions": [piece("/x", "float32", b"\0" * 4, (1,) * 100)],
    "bool of 2": [piece("/x", "bool", b"\2", (1,))],
    "unknown dtype": [piece("/x", "float33", b"\0" * 4, (1,))],
    "array too short": [piece("/x", "np.array:float32", b"\0" * 12, (4,))],
    "array of 2**62": [piece("/x", "np.array:float32", b"", (2**62, 2**62))],
    "array of objects": [piece("/x", "np.array:object", b"\0" * 8, (1,))],
    "array of huge text": [piece("/x", "np.array:<U99999999", b"", (1,))],
    "array of no unicode": [piece("/x", "np.array:<U1", b"\xff" * 4, (1,))],
    "array of bad dates": [piece("/x", "np.array:<M8[zz]", b"\0" * 8, (1,))],
    "np scalar too short": [piece("/x", "np:int64", b"\0" * 4)],
    "float of 4 bytes": [piece("/x", "py:float", b"\0" * 4)],
    "bool of 9": [piece("/x", "py:bool", b"\x09")],
    "none of 1": [piece("/x", "py:none", b"\0")],
    "str no utf-8": [piece("/x", "py:str", b"\xff\xfe")],
    "int with a shape": [piece("/x", "py:int", b"\0" * 8, (1,))],
    "list of 2**40": [piece("/x", "py:list", b"1099511627776")],
    "list of -1": [piece("/x", "py:list", b"-1")],
    "list of text": [piece("/x", "py:list", b'"a"')],
    "list of missing": [piece("/x", "py:list", b"1"), piece("/y", "py:int", b"\0" * 8)],
    "deque over its limit": [piece("/x", "py:deque", b"[1,0]"), piece("/x/0", "py:int", b"\0" * 8)],
    "dict of missing": [piece("/x", "py:dict", b'["a"]')],
    "dict with a key twice": [piece("/x", "py:dict", b'["a","a"]'), piece("/x/a", "py:int", b"\0" * 8)],
    "dict with equal keys": [
        piece("/x", "py:dict", b'["#int:1","#bool:True"]'),
        piece("/x/#int:1", "py:none", b""),
        piece("/x/#bool:True", "py:none", b""),
    ],
    "dict of bad spelling": [piece("/x", "py:dict", b'["#int:01"]'), piece("/x/#int:01", "py:none", b"")],
    "dict cut": [piece("/x", "py:dict", b'["a')],
    "dict no utf-8": [piece("/x", "py:dict", b'["\xff"]')],
    "set of lists": [piece("/x", "py:set", b"[[1]]")],
    "alias of itself": [piece("/x", "alias", b"/x")],
    "alias loop": [piece("/x", "alias", b"/y"), piece("/y", "alias", b"/x")],
    "alias of nothing": [piece("/x", "alias", b"/z")],
    "alias of a number": [piece("/x", "alias", b"/y"), piece("/y", "py:int", b"\0" * 8)],
    "set with a key twice": [piece("/x", "py:set", b'["a","a"]')],
    "alias of a list": [piece("/x", "alias", b"/y"), piece("/y", "py:list", b"0")],
    "unknown type": [piece("/x", "py:lambda", b"")],
    "generator of nothing": [piece("/x", "np.random.Generator", b"[]")],
    "generator of a module": [
        piece("/x", "np.random.Generator", b'["bit_generator"]'),
        piece("/x/bit_generator", "py:str", b"seed"),
    ],
    "generator too short": [
        piece("/x", "torch.Generator", b'["device","state"]'),
        piece("/x/device", "py:str", b"cpu"),
        piece("/x/state", "uint8", b"\0" * 8, (8,)),
    ],
    "random of no words": [
        piece("/x", "random.Random", b'["version","words","gauss"]'),
        piece("/x/version", "py:int", b"\3" + b"\0" * 7),
        piece("/x/words", "np.array:uint32", b"\0" * 8, (2,)),
        piece("/x/gauss", "py:none", b""),
    ],
    "dtype of no torch": [piece("/x", "torch.dtype", b"nn")],
    "device of no torch": [piece("/x", "torch.device", b"moon")],
    "size of text": [piece("/x", "torch.Size", b'["a"]')],
    "nothing": [],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_I3_hostile_pieces_are_an_error_that_names_the_pointer(what: str) -> None:
    with pytest.raises(Damaged) as caught:
        rebuild(dict(HOSTILE[what]), "/x")
    assert caught.value.path.startswith("/x")


def test_deep_pieces_are_an_error_not_a_recursion() -> None:
    pieces = dict(piece("/x" + "/0" * i, "py:list", b"1") for i in range(500))
    with pytest.raises(Damaged, match="deep"):
        rebuild(pieces, "/x")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_I3_one_changed_byte_is_an_error_or_another_value_never_a_crash(data: st.DataObject) -> None:
    state = {"a": [1, (2.5, "x")], 3: {"t": torch.arange(3), "b": torch.tensor([True]), "s": {1, "q"}}, "g": np.random.default_rng(1)}
    pieces = stored(flatten(state))
    pointer = data.draw(st.sampled_from(sorted(p for p in pieces if pieces[p][1])))
    found, raw = pieces[pointer]
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    pieces[pointer] = (found, bytes(changed))
    with suppress(Damaged):
        rebuild(pieces)
