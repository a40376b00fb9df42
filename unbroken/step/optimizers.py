"""The run's optimizers and scaler: who may step them and when, whether they have run, and one update by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from unbroken.capture.finite import fault_of
from unbroken.capture.stack import Stack

Applying = Literal["no", "with a closure", "yes"]
"""May an optimizer take its step: only one that evaluates the loss itself (LBFGS) before the gradients are reduced."""


class Optimizers:
    """Cost in the step path: two Python calls per optimizer.

    reads_norm: a clip norm is looked at at once; else it is kept in `unread`, to be read with the losses of the next step.
    """

    def __init__(self, stack: Stack, *, reads_norm: bool) -> None:
        self._stack = stack
        self._parameters = list(stack.parameters().values())
        self._ran = {id(o): False for o in stack.parts.optimizers.values()}
        self._applying: list[Applying] = ["no"]  # the hooks hold this and `_ran`, not us: an optimizer may outlive the run
        self._undone: list[Callable[[], None]] = []
        self.reads_norm = reads_norm
        self.unread: torch.Tensor | None = None
        for optimizer in stack.parts.optimizers.values():
            self._undone += [hook.remove for hook in _step_hooks(optimizer, self._applying, self._ran)]

    def close(self) -> None:
        """Leave the optimizers as they were found. Idempotent."""
        while self._undone:
            self._undone.pop()()

    def permit(self, applying: Applying) -> None:
        """May the loop call `optimizer.step()` itself from now on?"""
        if self._applying[0] == "no":
            self._forget_ran()
        self._applying[0] = applying

    @property
    def have_run(self) -> bool:
        """Has the loop's own update moved anything? False if a GradScaler has kept all optimizers back."""
        return self._stack.parts.scaler is None or any(self._ran.values())

    def run(self, clip_grad_norm: float | None, *, check_norm: bool, careful: bool) -> tuple[bool, str]:
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
        self._forget_ran()
        self._applying[0] = "yes"
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        self._applying[0] = "no"
        if scaler is None or not optimizers:
            return True, ""
        applied = any(self._ran[id(o)] and not _skipped_inside(scaler, o) for o in optimizers)
        scaler.update()
        return applied, ""

    def show_scaler(self) -> None:
        """A loss that is not finite is no reason to keep its gradient from the scaler, whose scale follows every overflow."""
        scaler = self._stack.parts.scaler
        optimizers = [o for o in self._stack.parts.optimizers.values() if _has_gradient(o)]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if optimizers:
            scaler.update()

    def _forget_ran(self) -> None:
        for key in self._ran:
            self._ran[key] = False

    def _bad_gradient(self) -> str:
        for name, parameter in self._stack.parameters().items():
            found = fault_of(parameter.grad) if parameter.grad is not None else ""
            if found:
                return f"the gradient of {name} holds {found}"
        return ""

    def _bad_norm(self, norm: torch.Tensor, careful: bool) -> str:
        if not (self.reads_norm or careful):
            self.unread = norm.detach()
            return ""
        return "" if bool(norm.isfinite()) else f"the norm of the gradient is {float(norm)}"


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


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _skipped_inside(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Did a fused optimizer, whose `step` always runs, leave all untouched because of an overflow?"""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return any(bool(found) for found in scaler._found_inf_per_device(optimizer).values())
