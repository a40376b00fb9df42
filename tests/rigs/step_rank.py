"""One rank's part of a step, without a Run around it: units in, one update out, and the state as pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unbroken.capture.stack import Parts, Stack, keyed_parts
from unbroken.capture.streams import Streams
from unbroken.capture.tree import Item, write_item
from unbroken.core.records import Piece
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange
from unbroken.step.reduce import Flags
from unbroken.step.update import Applied, Update

CPU = torch.device("cpu")

Loss = Callable[[int], torch.Tensor]


def stack_of(model: Any, optimizer: Any = None, *, seed: int = 0, scheduler: Any = None, scaler: Any = None, **extras: Any) -> Stack:
    """A Stack over these objects; SGD on the model where no optimizer is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    parts = Parts(
        models=keyed_parts(model, "model"),
        optimizers=keyed_parts(optimizer, "optimizer"),
        schedulers=keyed_parts(scheduler, "scheduler"),
        scaler=scaler,
        extras=extras,
    )
    return Stack(parts, Streams(seed, CPU))


def run_units(update: Update, loss_of: Loss, units: range, weights: Mapping[int, int] | None = None, samples: int | None = None) -> None:
    """Forward, backward and setting aside of these units, as Run does it; a unit of weight 0 has no samples and no loss.

    samples: in each unit, where its weight is another number.
    """
    for unit in units:
        weight = (weights or {}).get(unit, 1)
        if weight == 0:
            update.finish_unit(unit, f"{unit:032x}", 0, None, samples)
            continue
        update.start_unit()
        loss = loss_of(unit)
        update.backward(loss, weight, samples, last_unit=unit if unit == units[-1] else None)
        update.finish_unit(unit, f"{unit:032x}", weight, loss, samples)


def step(
    update: Update,
    exchange: Exchange,
    loss_of: Loss,
    num_units: int,
    weights: Mapping[int, int] | None = None,
    *,
    clip: float | None = None,
) -> Applied:
    """A whole step on this rank."""
    update.begin()
    run_units(update, loss_of, blocks(num_units, exchange.world_size)[exchange.rank], weights)
    return update.apply(update.reduce(Flags()), clip)


def raw(item: Item) -> bytes:
    """A piece's bytes."""
    buffer = bytearray(item.nbytes)
    write_item(item, memoryview(buffer))
    return bytes(buffer)


def pieces_of(stack: Stack) -> dict[str, tuple[Piece, bytes]]:
    """All restored pieces of a stack as a checkpoint holds them."""
    return {item.piece.pointer: (item.piece, raw(item)) for item in stack.collect({"step": 0}, {"step": 0}, {})}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of every parameter and buffer, those that state_dict leaves out included."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Equal names and equal bits: -0.0 is not 0.0, NaN is NaN."""

    def bits(t: torch.Tensor) -> list[int]:
        return t.detach().contiguous().flatten().view(torch.uint8).tolist() if t.numel() else []

    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and bits(a[k]) == bits(b[k]) for k in a)
