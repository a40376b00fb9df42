"""One step as a transaction: units in, one reduced gradient, the update applied by all ranks or by none.

begin -> unit (load buffers of the step's beginning; forward and backward by the user; set the gradient aside) ... -> reduce -> apply.
Nothing of the state changes before `reduce` has returned, so that a refused attempt is undone by putting the buffers back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from unbroken.capture.stack import Stack
from unbroken.codec.digest import text_digest
from unbroken.core.ports import failpoint
from unbroken.order.units import blocks
from unbroken.step.early import EarlyStart
from unbroken.step.exchange import Exchange
from unbroken.step.flat import sum_type
from unbroken.step.live_buffers import LiveBuffers
from unbroken.step.optimizers import Applying, Optimizers
from unbroken.step.partial import shift_of
from unbroken.step.reduce import Flags, OrderedReduction, RankFacts, Reduced, UnitFacts, bits


@dataclass(frozen=True)
class Applied:
    """What a step did: `loss` is the weighted mean over its units in unit order; NaN where the script did not tell it.

    `status` "skipped": weights untouched, after an overflow of the scaler, or because of an anomaly, which `reason` names.
    """

    loss: float
    loss_bits: str
    status: Literal["applied", "skipped"]
    num_samples: int
    units: tuple[str, ...]
    reason: str = ""


NO_LOSS = "7ff8000000000000"
"""In the journal: bits of the NaN that stands for a loss which the loop did not tell."""

_NAN = "7ff8000000000001"


def loss_bits(loss: float | None) -> str:
    """A loss as the journal has it: a NaN that was told is another than the one for None, and the same on every machine."""
    if loss is None:
        return NO_LOSS
    return _NAN if math.isnan(loss) else bits(loss)


@dataclass(frozen=True)
class _Unit:
    """One unit set aside: its facts, loss (float64, on the device), which buffers it wrote, and its integer buffers' values."""

    unit: int
    digest: str
    weight: int
    samples: int
    loss: torch.Tensor | None
    changed: Sequence[torch.Tensor]
    integers: Sequence[torch.Tensor] | None


class Update:
    """Holds one step's gradients until they are applied.

    Cost in the step path: an addition of gradients per unit but the first, the collectives of `OrderedReduction.reduce`, on CPU beside
    backward of the last unit; nothing is copied into `.grad`. Float buffers travel with the gradients. On accelerators the losses and
    facts are read once per step, and the clip norm with those of the next one: reading it at once would wait for the device.
    `full_weight`: samples of a full step (default: one per unit).
    """

    def __init__(self, stack: Stack, num_units: int, exchange: Exchange, full_weight: int = 0, *, silence: bool = True) -> None:
        self._stack = stack
        self._parameters = [p for p in stack.parameters().values()]
        self._buffers = LiveBuffers(stack.parts.models)
        self._full_weight = full_weight or num_units
        self._exchange = exchange
        integer_bytes = sum(b.numel() * b.element_size() for b in self._buffers.integers)
        tensors = [*self._parameters, *self._buffers.floats]
        self.reduction = OrderedReduction(tensors, num_units, exchange, integer_bytes, num_early=len(self._parameters))
        early = [bucket.indices for bucket in self.reduction.buckets[:-1]] if exchange.device.type == "cpu" else []
        is_alone = len(blocks(num_units, exchange.world_size)[exchange.rank]) == 1
        self._early = EarlyStart(self._parameters, early, self._leave, self._take if is_alone else None)
        self._place = {index: (number, place) for number, group in enumerate(early) for place, index in enumerate(group)}
        self._last = (-1, 0)
        self._turn = 0
        self.collected: list[_Unit] = []
        self.optimizers = Optimizers(stack, reads_norm=exchange.device.type == "cpu")
        self._undone: list[Callable[[], None]] = []
        self._epochs: list[Any] | None = None
        for model in stack.parts.models.values():
            if silence and isinstance(model, DistributedDataParallel):
                self._silence(model)

    def close(self) -> None:
        """Leave the user's objects as they were found. Idempotent."""
        while self._undone:
            self._undone.pop()()
        self.optimizers.close()
        self._early.close()
        self.reduction.close()

    def _silence(self, model: DistributedDataParallel) -> None:
        """Ordered reduction is ours: DDP's own, bucket-wise one must stay silent, and buffers follow the units."""
        before = {name: getattr(model, name) for name in ("require_backward_grad_sync", "broadcast_buffers")}
        self._undone.append(lambda: model.__dict__.update(before))
        model.require_backward_grad_sync = False
        model.broadcast_buffers = False

    def begin(self) -> None:
        """Start an attempt: remember the buffers as they stand, forget gradients of the user's own. Cost: a copy of the buffers."""
        if self._epochs not in (None, self._scheduler_epochs()):
            raise RuntimeError(
                "a scheduler was stepped by the loop, which run.step() does: leave scheduler.step() out, or scheduler= of Run"
            )
        self.optimizers.permit("no")
        self._clear_gradients()
        self._turn = -1
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forget the units set aside; those to come start from the buffers as they stand now. Cost: a copy of the buffers."""
        self._turn += 1
        self._early.was_late = False
        self.reduction.reset()
        self.collected.clear()
        self._buffers.remember()

    def undo(self) -> None:
        """Give up the attempt: buffers, gradients and collected units are as they were at its beginning."""
        self._buffers.rewind()
        self.begin()

    def start_unit(self) -> None:
        """Every unit starts from the buffers of the step's beginning, and without gradients."""
        self._buffers.rewind()
        self._clear_gradients()

    def backward(self, loss: torch.Tensor, weight: int, samples: int | None = None, *, last_unit: int | None = None) -> None:
        """Backward of a unit's mean loss, scaled to its share of a full step: the sum over units is the gradient then, undivided.

        samples: in the unit (default: its weight). last_unit: the unit's number if it is this rank's last one, so that gradients may
        leave as soon as they are made.
        """
        share = self._share(weight, samples)
        loss = scaled(self._stack.parts.scaler, loss if share == 1.0 else loss * share)
        if last_unit is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._last = (last_unit, _shift(weight, samples))
        with self._early.watch(self._turn):
            loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take_over(self, weight: int, samples: int) -> None:
        """The same for gradients of a unit's mean loss that the loop's own backward calls have left. Cost: a pass over them."""
        share = self._share(weight, samples)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if share != 1.0 and gradients:
            torch._foreach_mul_(gradients, share)

    def _share(self, weight: int, samples: int | None) -> float:
        return math.ldexp(weight / self._full_weight, -_shift(weight, samples))

    def _take(self, index: int) -> None:
        """This gradient is final: it is packed while it is still in the cache, and its memory is free for the next one."""
        parameter = self._parameters[index]
        gradient = _dense(parameter.grad)
        assert gradient is not None
        self.reduction.put(*self._place[index], gradient)
        parameter.grad = None

    def _leave(self, bucket: int) -> None:
        """All gradients of this bucket are there: they need not wait for the end of backward."""
        parameters = [self._parameters[index] for index in self.reduction.buckets[bucket].indices]
        unit, shift = self._last
        self.reduction.start(unit, [_dense(parameter.grad) for parameter in parameters], shift)
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish_unit(self, unit: int, digest: str, weight: int, loss: torch.Tensor | None, samples: int | None = None) -> None:
        """Set the unit's gradients and buffers aside and clear `.grad`. One that weighs nothing has no loss, and what it did is gone."""
        shift = _shift(weight, samples)
        # a unit without samples has run nothing: what the buffers hold is the beginning's, or another unit's
        self._buffers.settle()
        gradients = [_dense(p.grad) if weight else None for p in self._parameters]
        self._clear_gradients()
        floats = [b.to(sum_type(b.dtype)) * math.ldexp(weight, -shift) if weight else None for b in self._buffers.floats]
        self.reduction.add(unit, [*gradients, *floats], shift)
        integers = [b.detach().clone() for b in self._buffers.integers] if weight else None
        self.keep(unit, digest, weight, loss, samples, changed=self._buffers.changed() if weight else (), integers=integers)

    def keep(
        self,
        unit: int,
        digest: str,
        weight: int,
        loss: torch.Tensor | None,
        samples: int | None,
        *,
        changed: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Remember a unit's facts until the collective phase; nothing is read from the device yet."""
        samples = weight if samples is None else samples
        told = None if loss is None else loss.detach().double()
        self.collected.append(_Unit(unit, digest, weight, samples, told, changed, integers))

    def reduce(self, flags: Flags, waiting: Callable[[], None] = lambda: None) -> Reduced:
        """The collective phase. Raises ExchangeFailed; the state is then still that of the step's beginning.

        `waiting` is called when all that is this rank's own is done, the device's work included: from here on it waits for others.
        """
        self._buffers.rewind()
        units, raw = [], b""
        told = self._read_facts()
        num_floats = len(self._buffers.floats)
        present = bytearray(self.reduction.present)
        present[len(self._parameters) :] = bytes(num_floats)  # a buffer counts where a unit has written it
        for u, (loss, changed) in zip(self.collected, told, strict=True):
            digest = ""
            for j, flag in enumerate(changed[:num_floats]):
                present[len(self._parameters) + j] |= flag
            if any(changed[num_floats:]):
                raw = b"".join(tensor_bytes(b) for b in u.integers or ())
                digest = text_digest(raw)[:32]
            units.append(UnitFacts(u.unit, u.digest, u.weight, "" if loss is None else bits(loss), digest, u.samples))
        late = self._early.was_late
        if late:
            self._early.stop()
        facts = RankFacts(units=tuple(units), flags=self._with_norm(flags), present=bytes(present), integers=raw, late=late)
        waiting()
        return self.reduction.reduce(facts)

    def has_bad_norm(self) -> bool:
        """Was the norm of the step before, which nobody has looked at yet, not finite?"""
        unread = self.optimizers.unread
        return unread is not None and not bool(unread.isfinite())

    def _with_norm(self, flags: Flags) -> Flags:
        return msgspec.structs.replace(flags, bad_norm=True) if self.has_bad_norm() else flags

    def _read_facts(self) -> list[tuple[float | None, list[bool]]]:
        """Of each unit its loss and which buffers it wrote; one copy from the device, which waits for the step's forward passes."""
        told = [[*(() if u.loss is None else [u.loss.reshape(())]), *u.changed] for u in self.collected]
        unread = self.optimizers.unread
        flat = [value for unit in told for value in unit] + ([] if unread is None else [unread])
        read = iter(torch.stack([value.to(flat[0].device, torch.float64) for value in flat]).tolist() if flat else ())
        facts: list[tuple[float | None, list[bool]]] = []
        for u in self.collected:
            loss = None if u.loss is None else next(read)
            facts.append((loss, [bool(next(read)) for _ in u.changed]))
        self.optimizers.unread = None if unread is None else torch.tensor(next(read))
        return facts

    def apply(
        self, reduced: Reduced, clip_grad_norm: float | None, *, skip: str = "", check_norm: bool = False, careful: bool = False
    ) -> Applied:
        """Unscale, clip, optimizers, schedulers, zero_grad. All ranks do the same on the same bits.

        skip: why the step must not be applied. check_norm: skip it, too, where the clip norm is not finite. careful: where any gradient
        is not, which costs a pass over them. Buffers of a skipped step are those of its beginning.
        """
        self._check_integers(reduced.units())
        applied, reason = False, skip
        self.optimizers.unread = None
        if not skip:
            self._deliver(reduced)
            failpoint("step.optimizer")
            applied, reason = self.optimizers.run(clip_grad_norm, check_norm=check_norm, careful=careful)
        elif self._stack.parts.scaler is not None and reduced.loss is not None and not math.isfinite(reduced.loss):
            self._deliver(reduced)
            self.optimizers.show_scaler()
        if reason:
            self._buffers.rewind()
        if applied:
            for scheduler in self._stack.parts.schedulers.values():
                scheduler.step()
        return self.finish(reduced, applied, reason)

    def own(self, applying: Applying) -> None:
        """May the loop call `optimizer.step()` itself now? Schedulers are its own, too."""
        self._epochs = None
        self.optimizers.permit(applying)

    def deliver(self, reduced: Reduced) -> None:
        """Put the reduced gradients into `.grad`, and the buffers' new values into place: the loop applies them by itself."""
        self._check_integers(reduced.units())
        self.optimizers.unread = None
        self._deliver(reduced)

    def finish(self, reduced: Reduced, applied: bool, reason: str = "") -> Applied:
        """The update is done: what it was."""
        self.optimizers.permit("no")
        self._clear_gradients()
        self._epochs = self._scheduler_epochs()
        units, loss = reduced.units(), reduced.loss
        return Applied(
            loss=float("nan") if loss is None else loss,
            loss_bits=loss_bits(loss),
            status="applied" if applied else "skipped",
            num_samples=sum(u.samples for u in units),
            units=tuple(u.digest for u in units),
            reason=reason,
        )

    def _scheduler_epochs(self) -> list[Any]:
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._stack.parts.schedulers.values()]

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _deliver(self, reduced: Reduced) -> None:
        num_parameters, total = len(self._parameters), reduced.total_weight
        gradients = [value for value in reduced.sums[:num_parameters] if value is not None]
        share = math.ldexp(total / self._full_weight, -reduced.shift) if total else 1.0
        if share != 1.0 and gradients:
            torch._foreach_div_(gradients, share)
        for parameter, value in zip(self._parameters, reduced.sums, strict=False):
            parameter.grad = None if value is None else _as_gradient(value, parameter)
        for buffer, value in zip(self._buffers.floats, reduced.sums[num_parameters:], strict=True):
            if value is not None:
                buffer.copy_(value / math.ldexp(total, -reduced.shift))
        raw = next((rank.integers for rank in reduced.facts if rank.integers), b"")
        if raw:
            offset = 0
            for buffer in self._buffers.integers:
                size = buffer.numel() * buffer.element_size()
                part = torch.frombuffer(bytearray(raw[offset : offset + size]), dtype=torch.uint8) if size else None
                if part is not None:
                    buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
                offset += size

    def _check_integers(self, units: list[UnitFacts]) -> None:
        told = {u.integers for u in units if u.weight}  # "" where a unit left them alone
        if len(told) > 1:
            raise ValueError(
                f"integer buffers {self._integer_names()} came out different from different units of one step, so that no order of units "
                "gives one result; make them a function of the step only, or keep them outside the model"
            )

    def _integer_names(self) -> list[str]:
        return sorted(name for name, buffer in self._stack.buffers().items() if not buffer.is_floating_point())


def passed_over(facts: list[RankFacts], reason: str) -> Applied:
    """A step that is committed without having been computed: nobody knows its loss."""
    units = Reduced(facts=facts, total_weight=0).units()
    return Applied(
        loss=float("nan"),
        loss_bits=NO_LOSS,
        status="skipped",
        num_samples=sum(u.samples for u in units),
        units=tuple(u.digest for u in units),
        reason=reason,
    )


def check_clip(norm: float | None) -> None:
    """ValueError or TypeError unless this is a norm that gradients can be clipped to."""
    if norm is None:
        return
    if isinstance(norm, bool) or not isinstance(norm, int | float):
        raise TypeError(f"clip_grad_norm={norm!r}: give a number, or leave it out")
    if not norm > 0:
        raise ValueError(f"clip_grad_norm={norm!r}: give a norm above 0, or leave it out")


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes, in logical order."""
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _shift(weight: int, samples: int | None) -> int:
    return shift_of(weight, weight if samples is None else samples)


def _as_gradient(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the parameter's type and strides: a fused optimizer walks memory, not elements."""
    if value.stride() == parameter.stride():
        return value.to(parameter.dtype)
    return torch.empty_like(parameter).copy_(value)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def scaled(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss times the scaler's scale; the loss itself without a scaler."""
    return loss if scaler is None else scaler.scale(loss)
