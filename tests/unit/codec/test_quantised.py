"""Quantised tensors: every element within the stored bound, the same bytes every time, and hostile bytes end in a ValueError."""

from __future__ import annotations

import contextlib
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.memory import at_most
from unbroken.codec import quantised
from unbroken.codec.items import ITEM_BYTES
from unbroken.codec.quantised import BLOCK, DTYPES, Domain, Scheme, bound_of, domain_of, quantise, restore
from unbroken.core.records import Piece

RNG = np.random.default_rng(5)
SCHEMES: tuple[Scheme, ...] = ("fp8", "int8", "int4")
DOMAINS: tuple[Domain, ...] = ("plain", "difference", "root")
EDGES = {
    "float16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0x7D01],
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0x7F81],
    "float32": [0, 1 << 31, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001],
    "float64": [0, 1 << 63, 1, (1 << 52) - 1, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0 << 48, 0xFFF0 << 48, (0x7FF8 << 48) + 1],
}


def values(data: bytes, dtype: str) -> np.ndarray:
    """Elements as float64, without the codec's help."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            padded = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
            return np.frombuffer(padded, "<f4").astype(np.float64)
        return np.frombuffer(data, f"<f{ITEM_BYTES[dtype]}").astype(np.float64)


def assert_kept(data: bytes, dtype: str, scheme: Scheme, domain: Domain, base: bytes | None = None) -> float:
    """Restore what was encoded and hold every element against the bound, exactly; the bound."""
    encoded = quantise(data, dtype, scheme, domain, base)
    assert quantise(bytearray(data), dtype, scheme, domain, base) == encoded, "not the same bytes twice"
    back = restore(encoded.data, dtype, len(data), base)
    assert len(back) == len(data)
    assert bound_of(encoded.data) == encoded.bound
    bound, width = Fraction(encoded.bound), ITEM_BYTES[dtype]
    for number, (was, now) in enumerate(zip(values(data, dtype), values(back, dtype), strict=True)):
        here = slice(number * width, (number + 1) * width)
        if not math.isfinite(was):
            assert back[here] == data[here], "what is not finite keeps its bits"
        else:
            assert abs(Fraction(float(now)) - Fraction(float(was))) <= bound, (number, was, now, encoded.bound)
            assert now == 0 or was != 0 or domain == "difference"
            if domain == "root":
                assert (now == 0) == (was == 0)
                assert now >= 0 or was < 0
    return encoded.bound


def patterns(dtype: str) -> st.SearchStrategy[bytes]:
    """Tensors of any bits, edges among them, some blocks long."""
    width = ITEM_BYTES[dtype]
    one = st.one_of(st.sampled_from(EDGES[dtype]), st.integers(0, 2 ** (8 * width) - 1))
    many = st.lists(one, max_size=12).map(lambda bits: b"".join(bit.to_bytes(width, "little") for bit in bits))
    return st.tuples(many, st.integers(1, 40)).map(lambda pair: pair[0] * pair[1])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from(SCHEMES), st.sampled_from(DOMAINS))
def test_every_element_of_any_bits_is_within_the_bound(data: st.DataObject, dtype: str, scheme: Scheme, domain: Domain) -> None:
    tensor = data.draw(patterns(dtype))
    base = data.draw(patterns(dtype))
    base = (base * (len(tensor) // max(1, len(base)) + 1))[: len(tensor)] if base else None
    assert_kept(tensor, dtype, scheme, domain, base)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEMES), st.sampled_from(DOMAINS), st.sampled_from(["float16", "float32", "float64"]), st.integers(1, 700),
    st.floats(-38, 4), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_numbers_like_those_of_a_training_are_within_the_bound(
    scheme: Scheme, domain: Domain, dtype: str, count: int, magnitude: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        tensor = (rng.standard_normal(count) * 10.0**magnitude).astype(f"<f{ITEM_BYTES[dtype]}")
        tensor = np.abs(tensor) if domain == "root" else tensor
        base = (tensor * 0.99).astype(tensor.dtype)
    assert_kept(tensor.tobytes(), dtype, scheme, domain, base.tobytes())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_shapes_and_blocks_of_zeros(scheme: Scheme, dtype: str, count: int) -> None:
    zeros = bytes(count * ITEM_BYTES[dtype])
    for domain in DOMAINS:
        assert assert_kept(zeros, dtype, scheme, domain, zeros) == 0.0
        numbers = np.frombuffer(RNG.bytes(len(zeros)), f"<u{ITEM_BYTES[dtype]}")
        assert_kept(numbers.tobytes(), dtype, scheme, domain, zeros)


def test_several_slabs_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = RNG.standard_normal(5 * BLOCK + 3).astype("<f4")
    tensor[[2, 300]] = np.nan
    whole = quantise(tensor.tobytes(), "float32", "int4")
    monkeypatch.setattr(quantised, "_SLAB", 2 * BLOCK)
    parts = quantise(tensor.tobytes(), "float32", "int4")
    assert (parts.bound, parts.num_exact) == (whole.bound, whole.num_exact) == (whole.bound, 2)
    assert restore(parts.data, "float32", tensor.nbytes) == restore(whole.data, "float32", tensor.nbytes)


@pytest.mark.parametrize(("scheme", "most_bits", "error"), [("fp8", 8.4, 0.033), ("int8", 8.4, 0.004), ("int4", 4.4, 0.072)])
def test_the_size_and_the_error_are_those_of_the_scheme(scheme: Scheme, most_bits: float, error: float) -> None:
    """The error of each block is at most half a step of its largest number's; fp8 has steps of a sixteenth of the number itself."""
    tensor = RNG.standard_normal(100_000).astype("<f4")
    encoded = quantise(tensor.tobytes(), "float32", scheme)
    assert 8 * len(encoded.data) / len(tensor) < most_bits
    assert encoded.bound <= error * float(np.abs(tensor).max())
    back = np.frombuffer(restore(encoded.data, "float32", tensor.nbytes), "<f4")
    assert encoded.bound == pytest.approx(float(np.abs(back.astype(np.float64) - tensor).max()))
    if scheme == "fp8":
        blocks = np.abs(tensor[: 700 * BLOCK]).reshape(-1, BLOCK)
        off = np.abs(back[: 700 * BLOCK].reshape(-1, BLOCK) - tensor[: 700 * BLOCK].reshape(-1, BLOCK))
        normal = blocks > blocks.max(axis=1, keepdims=True) / 448 * 2**-6
        assert (off[normal] <= blocks[normal] * (2**-4 + 1e-6)).all()


def test_fp8_is_e4m3_as_torch_has_it() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    meant = codes.view(torch.float8_e4m3fn).to(torch.float64).numpy()
    finite = np.isfinite(meant)
    assert (quantised._FP8[finite] == meant[finite]).all() and finite.sum() == 254
    numbers = np.abs(RNG.standard_normal(5000)) * np.exp2(RNG.uniform(-12, 8, 5000))
    numbers = np.minimum(np.concatenate((numbers, meant[:127], (meant[:126] + meant[1:127]) / 2)), 448)
    theirs = torch.from_numpy(numbers.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (quantised._fp8_codes(numbers.astype(np.float32).astype(np.float64)) == theirs).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_errors_do_not_add_up_over_a_long_history(scheme: Scheme) -> None:
    """Differences are taken from what was restored, so that each checkpoint has the error of one rounding, however many came before."""
    rng = np.random.default_rng(1)
    exact = rng.standard_normal(4000).astype("<f4")
    base, errors = exact.tobytes(), []
    for _ in range(200):
        exact = (exact + rng.standard_normal(4000).astype("<f4") * np.float32(1e-3)).astype("<f4")
        encoded = quantise(exact.tobytes(), "float32", scheme, "difference", base)
        base = restore(encoded.data, "float32", exact.nbytes, base)
        errors.append(float(np.abs(np.frombuffer(base, "<f4") - exact).max()))
        assert errors[-1] <= encoded.bound
    assert max(errors[-50:]) < 1.5 * max(errors[:50])
    assert max(errors) < 1e-3


def test_a_second_moment_can_be_divided_by() -> None:
    """Values over twelve decades in one block: the small ones are too large afterwards, never zero, and zeros stay."""
    tensor = (10.0 ** RNG.uniform(-18, -6, 1000)).astype("<f4")
    tensor[::7] = 0
    for scheme in SCHEMES:
        encoded = quantise(tensor.tobytes(), "float32", scheme, "root")
        back = np.frombuffer(restore(encoded.data, "float32", tensor.nbytes), "<f4")
        assert ((back == 0) == (tensor == 0)).all() and (back >= 0).all()


def test_what_is_rounded_follows_from_the_pieces_name_and_kind() -> None:
    def of(pointer: str, kind: str) -> str:
        return domain_of(Piece(pointer=pointer, dtype="float32", shape=(4,), kind=kind))

    assert of("/model/parameters/head.weight", "parameter") == "difference"
    assert of("/optimizer/state/head.weight/exp_avg", "optimizer_state") == "plain"
    assert of("/optimizer/state/head.weight/exp_avg_sq", "optimizer_state") == "root"
    assert of("/model/buffers/running_var", "buffer") == "plain"


# -- hostile bytes -------------------------------------------------------------------------------------------------------------


def encoded_tensor(scheme: Scheme = "int8", count: int = 300) -> tuple[bytes, int]:
    tensor = RNG.standard_normal(count).astype("<f4")
    tensor[5] = np.inf
    return quantise(tensor.tobytes(), "float32", scheme).data, tensor.nbytes


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 2000), bit=st.integers(0, 7), cut=st.integers(0, 2000), scheme=st.sampled_from(SCHEMES))
def test_I3_changed_or_cut_bytes_give_a_tensor_or_a_valueerror(at: int, bit: int, cut: int, scheme: Scheme) -> None:
    stored, size = encoded_tensor(scheme)
    changed = bytearray(stored)
    changed[at % len(stored)] ^= 1 << bit
    with contextlib.suppress(ValueError):
        assert len(restore(changed, "float32", size)) == size
    with pytest.raises(ValueError):
        restore(stored[: cut % len(stored)], "float32", size)
    with pytest.raises(ValueError):
        restore(stored + b"x", "float32", size)


@pytest.mark.parametrize(
    ("offset", "form", "value", "words"),
    [
        (0, "<B", 9, "no scheme 9"),
        (1, "<B", 3, "domain 3"),
        (2, "<B", 5, "scales of 5 bytes"),
        (3, "<B", 1, "no scheme"),
        (4, "<Q", 2**63, "elements"),
        (4, "<Q", 301, "301 elements"),
        (12, "<Q", 2**60, "of them exact"),
        (20, "<d", math.nan, "a bound of nan"),
        (20, "<d", -1.0, "a bound of -1"),
        (29, "<Q", 2**62, "cut short"),
        (28, "<B", 2, "a section of codec 2"),
    ],
)
def test_I3_a_head_that_lies_is_refused_before_anything_is_allocated(offset: int, form: str, value: float, words: str) -> None:
    stored, size = encoded_tensor()
    lying = bytearray(stored)
    struct.pack_into(form, lying, offset, value)
    with at_most(4 << 20), pytest.raises(ValueError, match=words):
        restore(bytes(lying), "float32", size)


def test_what_does_not_fit_is_refused() -> None:
    stored, size = encoded_tensor()
    difference = quantise(bytes(4000), "float32", "int8", "difference", bytes(4000)).data
    with pytest.raises(ValueError, match="int64 is not quantised: bfloat16, float16, float32, float64 are"):
        quantise(bytes(80), "int64", "int8")
    with pytest.raises(ValueError, match="7 bytes are no whole number of float32"):
        restore(stored, "float32", 7)
    with pytest.raises(ValueError, match="300 elements, 1 of them exact, where 600 belong"):
        restore(stored, "float16", size)
    with pytest.raises(ValueError, match="differences from a tensor of 4000 bytes, but that has 0"):
        restore(difference, "float32", 4000)
