"""Many tensors seen as one vector per sum type, so that they can be cut into equal slices for the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGN = 64
"""Slices are whole multiples of so many elements."""

Sums = list[torch.Tensor | None]
"""A sum over some units, per tensor; None where none of them had a value."""


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are summed."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class FlatLayout:
    """Where each tensor lies in the flat vector of its sum type; the same at every world size. Sizes in elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.types: list[torch.dtype] = []
        self.places: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        for tensor in self.tensors:
            dtype = sum_type(tensor.dtype)
            if dtype.is_complex or not dtype.is_floating_point:
                raise TypeError(f"gradients of type {tensor.dtype} cannot be reduced in order; use torch.view_as_real parameters")
            if dtype not in self.types:
                self.types.append(dtype)
                self.sizes.append(0)
            group = self.types.index(dtype)
            self.places.append((group, self.sizes[group]))
            self.sizes[group] += tensor.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of one sum over all tensors."""
        return sum(n * t.itemsize for n, t in zip(self.sizes, self.types, strict=True))

    def padded(self, world_size: int) -> list[int]:
        """Elements of each flat vector, rounded up so that it splits into equal slices."""
        step = world_size * ALIGN
        return [(size + step - 1) // step * step for size in self.sizes]

    def regions(self, index: int, slice_sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Where tensor number `index` lies when each vector is cut into slices: (slice, offset in it, first and end element of its own)."""
        group, start = self.places[index]
        size, end, found = slice_sizes[group], start + self.tensors[index].numel(), []
        at = start
        while at < end:
            number = at // size
            stop = min(end, (number + 1) * size)
            found.append((number, at - number * size, at - start, stop - start))
            at = stop
        return found

    def view(self, flats: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The part of `flats` that belongs to tensor number `index`, in its shape."""
        group, start = self.places[index]
        tensor = self.tensors[index]
        return flats[group][start : start + tensor.numel()].view(tensor.shape)
