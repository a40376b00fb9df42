"""One step as a transaction: units in, one reduced gradient, the update applied by all ranks or by none.

begin -> unit (load buffers of the step's beginning; forward and backward by the user; set the gradient aside) ... -> reduce -> apply.
Nothing of the state changes before `reduce` has returned, so that a refused attempt is undone by putting the buffers back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from unbroken.capture.stack import Stack
from unbroken.codec.digest import text_digest
from unbroken.core.ports import failpoint
from unbroken.order.tree import Node, merge
from unbroken.step.exchange import Exchange
from unbroken.step.live_buffers import LiveBuffers
from unbroken.step.reduce import Flags, OrderedReduction, RankFacts, Reduced, UnitFacts, shift_of, sum_type

Applying = Literal["no", "with a closure", "yes"]
"""May an optimizer take its step: only one that evaluates the loss itself (LBFGS) before the gradients are reduced."""


@dataclass(frozen=True)
class Applied:
    """What a step did: `loss` is the weighted mean over its units in unit order; `status` "skipped" after a scaler overflow."""

    loss: float
    loss_bits: str
    status: Literal["applied", "skipped"]
    num_samples: int
    units: tuple[str, ...]


def bits(value: float) -> str:
    """The 64 bits of a float as 16 hex digits, most significant first."""
    return struct.pack(">d", value).hex()


def from_bits(text: str) -> float:
    """The float that `bits` wrote."""
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


NO_LOSS = "7ff8000000000000"
"""Bits of the NaN that stands for a loss which the loop did not tell."""

_NAN = "7ff8000000000001"


def loss_bits(loss: float | None) -> str:
    """Bits of a loss: a NaN that was told is another than the one for None, and the same on every machine."""
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

    Cost in the step path: an addition of gradients per unit but the first, the collectives of `OrderedReduction.reduce`; nothing is
    copied into `.grad`. Float buffers travel with the gradients. On accelerators the losses and facts are read once per step.
    `full_weight`: samples of a full step (default: one per unit).
    """

    def __init__(self, stack: Stack, num_units: int, exchange: Exchange, full_weight: int = 0, *, silence: bool = True) -> None:
        self._stack = stack
        self._parameters = [p for p in stack.parameters().values()]
        self._buffers = LiveBuffers(stack.parts.models)
        self._num_units = num_units
        self._full_weight = full_weight or num_units
        self._exchange = exchange
        integer_bytes = sum(b.numel() * b.element_size() for b in self._buffers.integers)
        self.reduction = OrderedReduction([*self._parameters, *self._buffers.floats], num_units, exchange, integer_bytes)
        self.collected: list[_Unit] = []
        self._ran = {id(o): False for o in stack.parts.optimizers.values()}
        self._applying: list[Applying] = ["no"]  # the hooks hold this and `_ran`, not us: an optimizer may outlive the run
        self._undone: list[Callable[[], None]] = []
        self._epochs: list[Any] | None = None
        for optimizer in stack.parts.optimizers.values():
            self._undone += [hook.remove for hook in _step_hooks(optimizer, self._applying, self._ran)]
        for model in stack.parts.models.values():
            if silence and isinstance(model, DistributedDataParallel):
                self._silence(model)

    def close(self) -> None:
        """Leave the user's objects as they were found. Idempotent."""
        while self._undone:
            self._undone.pop()()

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
        self._applying[0] = "no"
        self._clear_gradients()
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forget the units set aside; those to come start from the buffers as they stand now. Cost: a copy of the buffers."""
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

    def backward(self, loss: torch.Tensor, weight: int, samples: int | None = None) -> None:
        """Backward of a unit's mean loss, scaled to its share of a full step: the sum over units is the gradient then, undivided.

        samples: in the unit (default: its weight).
        """
        share = self._share(weight, samples)
        scaled(self._stack.parts.scaler, loss if share == 1.0 else loss * share).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take_over(self, weight: int, samples: int) -> None:
        """The same for gradients of a unit's mean loss that the loop's own backward calls have left. Cost: a pass over them."""
        share = self._share(weight, samples)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if share != 1.0 and gradients:
            torch._foreach_mul_(gradients, share)

    def _share(self, weight: int, samples: int | None) -> float:
        return math.ldexp(weight / self._full_weight, -shift_of(weight, weight if samples is None else samples))

    @torch.no_grad()
    def finish_unit(self, unit: int, digest: str, weight: int, loss: torch.Tensor | None, samples: int | None = None) -> None:
        """Set the unit's gradients and buffers aside and clear `.grad`. One that weighs nothing has no loss, and what it did is gone."""
        samples = weight if samples is None else samples
        shift = shift_of(weight, samples)
        # a unit without samples has run nothing: what the buffers hold is the beginning's, or another unit's
        self._buffers.settle()
        gradients = [_dense(p.grad) if weight else None for p in self._parameters]
        self._clear_gradients()
        floats = [b.to(sum_type(b.dtype)) * math.ldexp(weight, -shift) if weight else None for b in self._buffers.floats]
        self.reduction.add(unit, [*gradients, *floats], shift)
        integers = [b.detach().clone() for b in self._buffers.integers] if weight else None
        self.keep(unit, digest, weight, loss, samples=samples, changed=self._buffers.changed() if weight else (), integers=integers)

    def keep(
        self,
        unit: int,
        digest: str,
        weight: int,
        loss: torch.Tensor | None,
        *,
        samples: int,
        changed: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Remember a unit's facts until the collective phase; nothing is read from the device yet."""
        told = None if loss is None else loss.detach().double()
        self.collected.append(_Unit(unit, digest, weight, samples, told, changed, integers))

    def reduce(self, flags: Flags) -> Reduced:
        """The collective phase. Raises ExchangeFailed; the state is then still that of the step's beginning."""
        self._buffers.rewind()
        units, raw = [], b""
        num_floats = len(self._buffers.floats)
        present = bytearray(self.reduction.present)
        present[len(self._parameters) :] = bytes(num_floats)  # a buffer counts where a unit has written it
        for u, (loss, changed) in zip(self.collected, self._read_facts(), strict=True):
            digest = ""
            for j, flag in enumerate(changed[:num_floats]):
                present[len(self._parameters) + j] |= flag
            if any(changed[num_floats:]):
                raw = b"".join(tensor_bytes(b) for b in u.integers or ())
                digest = text_digest(raw)[:32]
            shift = shift_of(u.weight, u.samples)
            units.append(UnitFacts(u.unit, u.digest, u.weight, loss_bits(loss), digest, u.samples, shift))
        facts = RankFacts(units=tuple(units), flags=flags, present=bytes(present), integers=raw)
        return self.reduction.reduce(facts)

    def _read_facts(self) -> list[tuple[float | None, list[bool]]]:
        """Of each unit its loss and which buffers it wrote; one copy from the device, which waits for the step's forward passes."""
        told = [[*(() if u.loss is None else [u.loss.reshape(())]), *u.changed] for u in self.collected]
        flat = [value for unit in told for value in unit]
        read = iter(torch.stack([value.to(flat[0].device, torch.float64) for value in flat]).tolist() if flat else ())
        facts: list[tuple[float | None, list[bool]]] = []
        for u in self.collected:
            loss = None if u.loss is None else next(read)
            facts.append((loss, [bool(next(read)) for _ in u.changed]))
        return facts

    def apply(self, reduced: Reduced, clip_grad_norm: float | None) -> Applied:
        """Unscale, clip, optimizers, schedulers, zero_grad. All ranks do the same on the same bits."""
        self.deliver(reduced)
        failpoint("step.optimizer")
        self._applying[0] = "yes"
        applied = self._run_optimizers(clip_grad_norm)
        if applied:
            for scheduler in self._stack.parts.schedulers.values():
                scheduler.step()
        return self.finish(reduced, applied)

    def own(self, applying: Applying) -> None:
        """Whether the loop may call `optimizer.step()` itself now."""
        if self._applying[0] == "no":
            self._forget_ran()
        self._applying[0] = applying

    def finish(self, reduced: Reduced, applied: bool | None = None) -> Applied:
        """The update is done: what it was. `applied` None: by the loop, then it is skipped if a GradScaler has kept all optimizers back."""
        if applied is None:
            applied = self._stack.parts.scaler is None or any(self._ran.values())
        self._applying[0] = "no"
        self._clear_gradients()
        self._epochs = self._scheduler_epochs()
        units = reduced.units()
        loss = self.loss_of(reduced)
        return Applied(
            loss=float("nan") if loss is None else loss,
            loss_bits=loss_bits(loss),
            status="applied" if applied else "skipped",
            num_samples=sum(u.samples for u in units),
            units=tuple(u.digest for u in units),
        )

    def _scheduler_epochs(self) -> list[Any]:
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._stack.parts.schedulers.values()]

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def deliver(self, reduced: Reduced) -> None:
        """Put the reduced gradients into `.grad`, and the buffers' new values into place."""
        self._check_integers(reduced.units())
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

    def _run_optimizers(self, clip_grad_norm: float | None) -> bool:
        scaler, optimizers = self._stack.parts.scaler, list(self._stack.parts.optimizers.values())
        if scaler is not None:
            optimizers = [o for o in optimizers if _has_gradient(o)]  # a scaler refuses the others
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, clip_grad_norm)
        self._forget_ran()
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is None or not optimizers:
            return True
        applied = any(self._ran[id(o)] and not _skipped_inside(scaler, o) for o in optimizers)
        scaler.update()
        return applied

    def _forget_ran(self) -> None:
        for key in self._ran:
            self._ran[key] = False

    def loss_of(self, reduced: Reduced) -> float | None:
        """The weighted mean loss in unit order; None where a unit did not tell its own, or none weighs anything."""
        units = reduced.units()
        if not reduced.total_weight or any(u.weight and u.loss == NO_LOSS for u in units):
            return None
        nodes = merge({Node(0, u.unit): u.weight * from_bits(u.loss) if u.weight else 0.0 for u in units}, float.__add__, self._num_units)
        assert len(nodes) == 1
        return float(next(iter(nodes.values()))) / reduced.total_weight


def _step_hooks(optimizer: torch.optim.Optimizer, applying: list[Applying], ran: dict[int, bool]) -> list[Any]:
    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if applying[0] == "no":
            raise RuntimeError(
                "optimizer.step() was called by the loop: call run.step() instead, which steps the optimizers of Run, "
                "or step them yourself inside `with run.update() as update:`"
            )
        has_closure = (named.get("closure") or (arguments[1] if len(arguments) > 1 else None)) is not None  # the first is the optimizer
        if applying[0] == "with a closure" and not has_closure:
            raise RuntimeError("optimizer.step() before update.reduce(): the gradients are those of this rank's units only")

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
