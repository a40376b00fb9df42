"""A plain loop under the user's own DDP: gradients are reduced by DDP in backward, Run only applies them (`reduce="ring"`).

The claim is smaller: a resumed run has the same bits only at the same world size, and only if DDP keeps its buckets in one order. By
default DDP rebuilds them after the first backward, so that a resumed process adds in another order on 3 and more ranks;
`find_unused_parameters=True` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unbroken.capture.stack import Stack
from unbroken.step.exchange import Exchange
from unbroken.step.reduce import Flags, RankFacts, Reduced, UnitFacts, bits
from unbroken.step.update import Update, scaled


def require_fixed_buckets(models: Mapping[str, nn.Module], world_size: int) -> None:
    """ValueError with the line to change where a model's gradients would not be reduced in a fixed order, or not at all."""
    for key, model in models.items():
        label = f"model {key!r}" if key else "the model"
        if isinstance(model, DistributedDataParallel):
            if not model.find_unused_parameters:
                raise ValueError(
                    f'reduce="ring": {label} would add gradients in another order after a resume, because DDP rebuilds its buckets; '
                    "wrap it as DDP(model, find_unused_parameters=True), or use the default reduce with micro.backward(loss)"
                )
        elif world_size > 1:
            raise ValueError(
                f'reduce="ring": {label} is not wrapped in DistributedDataParallel, so that nobody reduces its gradients; wrap it as '
                "DDP(model, find_unused_parameters=True), or use the default reduce with micro.backward(loss)"
            )


def require_equal_shares(units: int, world_size: int) -> None:
    """ValueError unless every rank has equally many units: each backward is a collective of DDP's, which all ranks must enter."""
    if units % world_size:
        raise ValueError(
            f'reduce="ring": units={units} cannot be shared out equally to {world_size} ranks, so that DDP would wait forever; '
            f"use units={-(-units // world_size) * world_size}, or the default reduce with micro.backward(loss)"
        )


class RingUpdate(Update):
    """The transaction of a step whose gradients DDP has reduced. Cost besides DDP's: one gather of the step's facts.

    A collective that fails inside the user's backward raises there: this mode has no retry in place.
    """

    def __init__(self, stack: Stack, num_units: int, exchange: Exchange, full_weight: int = 0) -> None:
        super().__init__(stack, num_units, exchange, full_weight, silence=False)

    def start_unit(self) -> None:
        """Buffers are DDP's business."""

    def backward(self, loss: torch.Tensor, weight: int, samples: int | None = None, *, last_unit: int | None = None) -> None:
        """As in a plain loop: DDP averages over ranks by itself."""
        scaled(self._stack.parts.scaler, loss).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take_over(self, weight: int, samples: int) -> None:
        """Gradients stay as they are."""

    @torch.no_grad()
    def finish_unit(self, unit: int, digest: str, weight: int, loss: torch.Tensor | None, samples: int | None = None) -> None:
        """Keep the unit's facts; its gradient stays in `.grad`. ValueError for a weight of its own, of which DDP knows nothing."""
        if samples not in (None, weight):
            raise ValueError('micro.weight needs the default reduction: under reduce="ring" DDP has added the gradients already')
        self.keep(unit, digest, weight, loss, samples)

    def reduce(self, flags: Flags, waiting: Callable[[], None] = lambda: None) -> Reduced:
        """Tell all ranks what each has computed; rank 0's buffers become everybody's, as DDP would make them at the next forward."""
        losses = ["" if u.loss is None else bits(u.loss.item()) for u in self.collected]  # a plain loop need not tell us its loss
        units = tuple(UnitFacts(u.unit, u.digest, u.weight, loss, "", u.samples) for u, loss in zip(self.collected, losses, strict=True))
        waiting()
        facts = self._exchange.share(RankFacts(units=units, flags=self._with_norm(flags)), RankFacts)
        self._buffers.settle()
        for buffer in self._buffers.all:
            flat = buffer.detach().contiguous().flatten().view(torch.uint8)
            if flat.numel():
                first = self._exchange.gather(flat)[: flat.numel()]
                buffer.copy_(first.view(buffer.dtype).view(buffer.shape))
        return Reduced(facts=facts, total_weight=sum(u.weight for rank in facts for u in rank.units))

    def _deliver(self, reduced: Reduced) -> None:
        pass  # the gradients are already in .grad
