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

from unbroken.capture.finite import fault_of
from unbroken.capture.stack import Stack
from unbroken.codec.digest import text_digest
from unbroken.core.ports import failpoint
from unbroken.order.units import blocks
from unbroken.step.early import EarlyStart
from unbroken.step.exchange import Exchange
from unbroken.step.flat import sum_type
from unbroken.step.live_buffers import LiveBuffers
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


@dataclass(frozen=True)
class _Unit:
    """One unit set aside: its facts, loss (float64, on the device), which buffers it wrote, and its integer buffers' values."""

    unit: int
    digest: str
    weight: int
    loss: torch.Tensor | None
    changed: Sequence[torch.Tensor]
    integers: Sequence[torch.Tensor] | None


class Update:
    """Holds one step's gradients until they are applied.

    Cost in the step path: an addition of gradients per unit but the first, the collectives of `OrderedReduction.reduce`, on CPU beside
    backward of the last unit; nothing is copied into `.grad`. Float buffers travel with the gradients. On accelerators the losses and
    facts are read once per step, and the clip norm with those of the next one (`reads_norm` is False): reading it at once would wait for
    the device.
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
        self._last_unit = -1
        self.collected: list[_Unit] = []
        self._ran = {id(o): False for o in stack.parts.optimizers.values()}
        self._applying = [False]  # the hooks hold this and `_ran`, not us: an optimizer may outlive the run
        self._undone: list[Callable[[], None]] = []
        self._epochs: list[Any] | None = None
        self.reads_norm = exchange.device.type == "cpu"
        self._unread: torch.Tensor | None = None
        for optimizer in stack.parts.optimizers.values():
            self._undone += [hook.remove for hook in _step_hooks(optimizer, self._applying, self._ran)]
        for model in stack.parts.models.values():
            if silence and isinstance(model, DistributedDataParallel):
                self._silence(model)

    def close(self) -> None:
        """Leave the user's objects as they were found. Idempotent."""
        while self._undone:
            self._undone.pop()()
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
        self._clear_gradients()
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

    def backward(self, loss: torch.Tensor, weight: int, last_unit: int | None = None) -> None:
        """Backward of a unit's mean loss, scaled to its share of a full step: the sum over units is the gradient then, undivided.

        last_unit: the unit's number if it is this rank's last one, so that gradients may leave as soon as they are made.
        """
        share = weight / self._full_weight
        loss = scaled(self._stack.parts.scaler, loss if share == 1.0 else loss * share)
        if last_unit is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._last_unit = last_unit
        with self._early.watch():
            loss.backward()  # type: ignore[no-untyped-call]

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
        self.reduction.start(self._last_unit, [_dense(parameter.grad) for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish_unit(self, unit: int, digest: str, weight: int, loss: torch.Tensor | None) -> None:
        """Set the unit's gradients and buffers aside and clear `.grad`. A unit without samples has weight 0 and no loss."""
        # a unit without samples has run nothing: what the buffers hold is the beginning's, or another unit's
        self._buffers.settle()
        gradients = [_dense(p.grad) if weight else None for p in self._parameters]
        self._clear_gradients()
        floats = [b.to(sum_type(b.dtype)) * float(weight) if weight else None for b in self._buffers.floats]
        self.reduction.add(unit, [*gradients, *floats])
        integers = [b.detach().clone() for b in self._buffers.integers] if loss is not None else None
        self.keep(unit, digest, weight, loss, changed=self._buffers.changed(), integers=integers)

    def keep(
        self,
        unit: int,
        digest: str,
        weight: int,
        loss: torch.Tensor | None,
        *,
        changed: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Remember a unit's facts until the collective phase; nothing is read from the device yet."""
        self.collected.append(_Unit(unit, digest, weight, None if loss is None else loss.detach().double(), changed, integers))

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
            units.append(UnitFacts(u.unit, u.digest, u.weight, bits(loss), digest))
        late = self._early.was_late
        if late:
            self._early.stop()
        facts = RankFacts(units=tuple(units), flags=self._with_norm(flags), present=bytes(present), integers=raw, late=late)
        waiting()
        return self.reduction.reduce(facts)

    def has_bad_norm(self) -> bool:
        """Was the norm of the step before, which nobody has looked at yet, not finite?"""
        return self._unread is not None and not bool(self._unread.isfinite())

    def _with_norm(self, flags: Flags) -> Flags:
        return msgspec.structs.replace(flags, bad_norm=True) if self.has_bad_norm() else flags

    def _read_facts(self) -> list[tuple[float, list[bool]]]:
        """Of each unit its loss and which buffers it wrote; one copy from the device, which waits for the step's forward passes."""
        told = [[] if u.loss is None else [u.loss.reshape(()), *(u.changed if u.integers is not None else ())] for u in self.collected]
        flat = [value for unit in told for value in unit] + ([] if self._unread is None else [self._unread])
        read = iter(torch.stack([value.to(flat[0].device, torch.float64) for value in flat]).tolist() if flat else ())
        facts = []
        for unit in told:
            loss, *changed = [next(read) for _ in unit] or [0.0]
            facts.append((loss, [bool(flag) for flag in changed]))
        self._unread = None if self._unread is None else torch.tensor(next(read))
        return facts

    def apply(
        self, reduced: Reduced, clip_grad_norm: float | None, *, skip: str = "", check_norm: bool = False, careful: bool = False
    ) -> Applied:
        """Unscale, clip, optimizers, schedulers, zero_grad. All ranks do the same on the same bits.

        skip: why the step must not be applied. check_norm: skip it, too, where the clip norm is not finite. careful: where any gradient
        is not, which costs a pass over them. Buffers of a skipped step are those of its beginning.
        """
        units = reduced.units()
        self._check_integers(units)
        applied, reason = False, skip
        self._unread = None
        if not skip:
            self._deliver(reduced)
            failpoint("step.optimizer")
            self._applying[0] = True
            applied, reason = self._run_optimizers(clip_grad_norm, check_norm, careful)
            self._applying[0] = False
        elif reduced.loss is not None and not math.isfinite(reduced.loss):
            self._show_scaler(reduced)
        if reason:
            self._buffers.rewind()
        self._clear_gradients()
        if applied:
            for scheduler in self._stack.parts.schedulers.values():
                scheduler.step()
        self._epochs = self._scheduler_epochs()
        loss = float("nan") if reduced.loss is None else reduced.loss
        return Applied(
            loss=loss,
            loss_bits=bits(loss),
            status="applied" if applied else "skipped",
            num_samples=sum(u.weight for u in units),
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
        if total not in (0, self._full_weight) and gradients:
            torch._foreach_div_(gradients, total / self._full_weight)
        for parameter, value in zip(self._parameters, reduced.sums, strict=False):
            parameter.grad = None if value is None else _as_gradient(value, parameter)
        for buffer, value in zip(self._buffers.floats, reduced.sums[num_parameters:], strict=True):
            if value is not None:
                buffer.copy_(value / max(total, 1))
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

    def _run_optimizers(self, clip_grad_norm: float | None, check_norm: bool, careful: bool) -> tuple[bool, str]:
        """Whether they ran, and which anomaly kept them from it; a scaler's overflow is none, and it looks at gradients by itself."""
        scaler, optimizers = self._stack.parts.scaler, list(self._stack.parts.optimizers.values())
        if scaler is not None:
            optimizers = [o for o in optimizers if _has_gradient(o)]  # a scaler refuses the others
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip_grad_norm)
        if scaler is None:
            reason = self._bad_gradient() if careful else ""
            if not reason and check_norm and clip_grad_norm is not None:
                reason = self._bad_norm(norm, careful)
            if reason:
                return False, reason
        for key in self._ran:
            self._ran[key] = False
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is None or not optimizers:
            return True, ""
        applied = any(self._ran[id(o)] and not _skipped_inside(scaler, o) for o in optimizers)
        scaler.update()
        return applied, ""

    def _show_scaler(self, reduced: Reduced) -> None:
        """A loss that is not finite is no reason to keep its gradient from the scaler, whose scale follows every overflow."""
        scaler = self._stack.parts.scaler
        if scaler is None:
            return
        self._deliver(reduced)
        optimizers = [o for o in self._stack.parts.optimizers.values() if _has_gradient(o)]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if optimizers:
            scaler.update()

    def _bad_gradient(self) -> str:
        for name, parameter in self._stack.parameters().items():
            found = fault_of(parameter.grad) if parameter.grad is not None else ""
            if found:
                return f"the gradient of {name} holds {found}"
        return ""

    def _bad_norm(self, norm: torch.Tensor, careful: bool) -> str:
        if not (self.reads_norm or careful):
            self._unread = norm.detach()
            return ""
        return "" if bool(norm.isfinite()) else f"the norm of the gradient is {float(norm)}"


def passed_over(facts: list[RankFacts], reason: str) -> Applied:
    """A step that is committed without having been computed: nobody knows its loss."""
    units = Reduced(facts=facts, total_weight=0).units()
    return Applied(
        loss=float("nan"),
        loss_bits=bits(float("nan")),
        status="skipped",
        num_samples=sum(u.weight for u in units),
        units=tuple(u.digest for u in units),
        reason=reason,
    )


def _step_hooks(optimizer: torch.optim.Optimizer, applying: list[bool], ran: dict[int, bool]) -> list[Any]:
    def before(*_: Any) -> None:
        if not applying[0]:
            raise RuntimeError("optimizer.step() was called by the loop: call run.step() instead, which steps the optimizers of Run")

    def after(*_: Any) -> None:
        ran[id(optimizer)] = True

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


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


def _as_gradient(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the parameter's type and strides: a fused optimizer walks memory, not elements."""
    if value.stride() == parameter.stride():
        return value.to(parameter.dtype)
    return torch.empty_like(parameter).copy_(value)


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _skipped_inside(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Did a fused optimizer, whose `step` always runs, leave all untouched because of an overflow?"""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return any(bool(found) for found in scaler._found_inf_per_device(optimizer).values())


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def scaled(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss times the scaler's scale; the loss itself without a scaler."""
    return loss if scaler is None else scaler.scale(loss)
