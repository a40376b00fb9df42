"""Non-finite numbers are found in bytes, for each type of torch, and nothing else is taken for one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.capture.finite import fault_of
from unbroken.capture.tensors import DTYPES
from unbroken.codec.finite import fault, poison
from unbroken.core.records import Piece

FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.is_floating_point or dtype.is_complex)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize <= 2])
def test_B38_every_bit_pattern_of_a_small_type_is_judged_as_torch_judges_it(dtype: str) -> None:
    width = DTYPES[dtype].itemsize
    patterns = np.arange(1 << (8 * width), dtype=f"<u{width}")
    values = torch.frombuffer(bytearray(patterns.tobytes()), dtype=DTYPES[dtype]).float()
    for pattern, value in zip(patterns, values.tolist(), strict=True):
        expected = "NaN" if math.isnan(value) else "inf" if math.isinf(value) else ""
        assert fault(dtype, pattern.tobytes()) == expected, (hex(pattern), value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70_000, -1])
def test_B38_one_element_among_many_is_found_wherever_it_is(dtype: str, value: float, place: int) -> None:
    tensor = torch.linspace(-1e30, 1e30, 140_001).to(DTYPES[dtype])
    assert fault(dtype, bytes_of(tensor)) == fault_of(tensor) == ""
    tensor[place] = value
    assert fault(dtype, bytes_of(tensor)) == fault_of(tensor) == ("NaN" if math.isnan(value) else "inf")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40))
def test_any_numbers_are_judged_as_python_judges_them(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    expected = "NaN" if any(map(math.isnan, values)) else "inf" if any(map(math.isinf, values)) else ""
    assert fault("float32", bytes_of(tensor)) == fault_of(tensor) == expected


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8", "py:float", "alias", "unheard_of"])
def test_other_types_hold_no_numbers_that_could_be_bad(dtype: str) -> None:
    assert fault(dtype, b"\xff" * 64) == ""


def test_no_bytes_are_sound() -> None:
    assert [fault(dtype, b"") for dtype in FLOATS] == [""] * len(FLOATS)


@pytest.mark.parametrize(
    ("kind", "value", "is_poison"),
    [
        ("parameter", math.nan, True),
        ("parameter", math.inf, True),
        ("optimizer_state", -math.inf, True),
        ("optimizer_state", math.nan, True),
        ("buffer", math.nan, True),
        ("buffer", -math.inf, False),
        ("frozen", -math.inf, False),
        ("frozen", math.nan, True),
        ("extra", math.nan, False),
        ("nan_buffer", math.nan, False),
        ("scheduler", math.inf, False),
        ("parameter", 3e38, False),
    ],
)
def test_B38_what_is_poison_depends_on_the_piece(kind: str, value: float, is_poison: bool) -> None:
    data = np.array([1.0, value], dtype="<f4").tobytes()
    found = poison(Piece(pointer="/there/w", dtype="float32", shape=(2,), kind=kind), data)
    assert found == (f"/there/w holds {'NaN' if math.isnan(value) else 'inf'}" if is_poison else "")


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[::2], lambda t: t.conj(), lambda t: t.requires_grad_()])
def test_live_tensors_of_any_layout_are_looked_at(make: object) -> None:
    tensor = torch.ones(4, 6, dtype=torch.complex64)
    assert fault_of(make(tensor.clone())) == ""  # type: ignore[operator]
    tensor[0, 0] = math.nan
    assert fault_of(make(tensor)) == "NaN"  # type: ignore[operator]
