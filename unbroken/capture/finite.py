"""Non-finite numbers in live pieces: the rule of `codec.finite` on tensors, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unbroken.capture.flatten import Item
from unbroken.capture.tensors import name_of
from unbroken.codec.finite import NO_NAN, NUMBERS_ONLY, fault


def first_poison(items: Iterable[Item]) -> str:
    """The first piece that must not be in a checkpoint, in words; "" if all are sound. Cost: one pass; on accelerators a few waits."""
    for item in items:
        if item.piece.kind in NO_NAN and isinstance(item.data, torch.Tensor):
            found = fault_of(item.data)
            if found == "NaN" or (found and item.piece.kind in NUMBERS_ONLY):
                return f"{item.piece.pointer} holds {found}"
    return ""


@torch.no_grad()
def fault_of(tensor: torch.Tensor) -> str:
    """ "NaN", "inf" or "": the worse of what is among the elements."""
    value = tensor.detach()
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return ""
    if value.device.type == "cpu" or value.element_size() == 1:  # float8 has no isfinite
        flat = value.cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return fault(name_of(value.dtype), flat.view(torch.uint8).numpy().data)
    if bool(value.isfinite().all()):
        return ""
    return "NaN" if bool(value.isnan().any()) else "inf"
