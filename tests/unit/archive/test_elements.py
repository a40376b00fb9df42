"""Elements as numbers without torch agree with torch, and differences are counted by bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.rigs.odd_tensors import from_bits
from unbroken.archive.elements import Apart, item_bytes, numbers
from unbroken.capture.tensors import DTYPES


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.itemsize == 1 and dtype.is_floating_point])
def test_every_float8_pattern_is_the_number_that_torch_reads(name: str) -> None:
    found = numbers(name, bytes(range(256)))
    wanted = torch.arange(256).to(torch.uint8).view(DTYPES[name]).to(torch.float64).numpy()
    assert found is not None
    assert np.array_equal(found, wanted, equal_nan=True)


def test_every_bfloat16_pattern_is_the_number_that_torch_reads() -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).tobytes()
    found = numbers("bfloat16", raw)
    wanted = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).to(torch.float64).numpy()
    assert found is not None
    assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_the_element_size_of_torch_and_numbers(name: str) -> None:
    assert item_bytes(name) == DTYPES[name].itemsize
    found = numbers(name, bytes(4 * DTYPES[name].itemsize))
    assert found is not None
    assert len(found) == 4


def apart(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> Apart:
    found = Apart(str(dtype).removeprefix("torch."))
    raw = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in (a, b)]
    found.add(0, *raw)
    return found


def test_zero_and_minus_zero_differ_and_are_not_apart() -> None:
    found = apart(torch.float32, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.num, found.first, found.max_abs) == (1, 0, 0.0)


def test_a_nan_equals_itself_by_bits_only() -> None:
    nan, other = from_bits(torch.float32, 0x7FC00001), from_bits(torch.float32, 0x7FC00002)
    assert apart(torch.float32, nan, nan).num == 0
    found = apart(torch.float32, nan, other)
    assert (found.num, found.max_abs) == (1, None)
    mixed = apart(torch.float32, torch.cat([nan, torch.tensor([1.0])]), torch.tensor([1.0, 3.0]))
    assert (mixed.num, mixed.max_abs) == (2, 2.0)


def test_infinities_are_apart() -> None:
    found = apart(torch.float64, torch.tensor([math.inf], dtype=torch.float64), torch.tensor([-math.inf], dtype=torch.float64))
    assert found.max_abs == math.inf


@pytest.mark.parametrize(
    ("dtype", "a", "b", "far"),
    [
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.uint64, 0, 2**64 - 1, 2**64 - 1),
        (torch.int8, -128, 127, 255),
        (torch.uint8, 255, 0, 255),
        (torch.bool, False, True, 1),
    ],
)
def test_the_distance_of_integers_is_exact(dtype: torch.dtype, a: int, b: int, far: int) -> None:
    assert apart(dtype, torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)).max_abs == far


def test_blocks_add_up() -> None:
    found = Apart("int32")
    zeros = np.zeros(4, np.int32)
    found.add(0, zeros.tobytes(), zeros.tobytes())
    found.add(16, zeros.tobytes(), np.array([0, 0, 5, 1], np.int32).tobytes())
    found.add(32, zeros.tobytes(), np.array([-7, 0, 0, 0], np.int32).tobytes())
    assert (found.num, found.first, found.max_abs) == (3, 6, 7)
    assert found.place((3, 4)) == [1, 2]


def test_text_and_dates_are_compared_without_numbers() -> None:
    for kind, a, b in (("<U2", "ab", "ac"), ("<M8[D]", "2020-01-01", "2020-01-02")):
        found = Apart(f"np.array:{kind}")
        found.add(0, np.array([a, a], kind).tobytes(), np.array([a, b], kind).tobytes())
        assert (found.num, found.first, found.max_abs) == (1, 1, None)
