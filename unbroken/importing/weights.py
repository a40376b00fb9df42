"""Foreign weights against live ones: by name, marks of wrappers seen through when that makes all of them match, every misfit at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from unbroken.capture import names, tensors
from unbroken.capture.stack import Stack
from unbroken.core.limits import MAX_DEPTH

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Of DDP and DataParallel, of torch.compile, and what a LightningModule most often calls its model."""

_INNER = re.compile(r"(?:(?<=^)|(?<=\.))(?:module|_orig_mod)\.")


@dataclass
class Pairing:
    """Which foreign tensor belongs into which live one, and what fits nowhere. `stripped` tells what was seen through, in words."""

    pairs: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    stripped: str = ""


@dataclass
class Live:
    """Live tensors by all their names. `needed`: names of one tensor together, of which a source must have one; others may be there."""

    tensors: dict[str, torch.Tensor]
    needed: list[list[str]]

    @classmethod
    def of(cls, stack: Stack) -> Live:
        """Parameters and buffers; those that state_dict leaves out need not come."""
        found: dict[str, torch.Tensor] = {}
        for key, model in stack.parts.models.items():
            for name, value in (names.parameters(model) | names.buffers(model)).items():
                found[f"{key}.{name}" if key else name] = value
        transient = set(names.transient_buffers(stack.parts.models))
        tied: dict[int, list[str]] = {}
        for name, value in found.items():
            if name not in transient:
                tied.setdefault(id(value), []).append(name)
        return cls(found, list(tied.values()))


def peeled(given: Mapping[str, str]) -> Iterator[tuple[dict[str, str], str]]:
    """Bare name -> name, with more and more taken off the front, as long as all names have it; and what was."""
    current, gone = dict(given), ""
    for _ in range(MAX_DEPTH):
        yield current, gone
        prefix = next((w for w in WRAPPERS if current and all(name.startswith(w) for name in current)), None)
        if prefix is None:
            break
        current, gone = {name.removeprefix(prefix): value for name, value in current.items()}, gone + prefix
    inside = {_INNER.sub("", name): value for name, value in given.items()}
    if len(inside) == len(given) and inside != given:
        yield inside, "module. and _orig_mod. inside names"


def pair(live: Live, foreign: Mapping[str, torch.Tensor], *, cast: bool) -> Pairing:
    """Every live tensor with its foreign one. Of all ways to see through wrappers that which leaves least over, the plainest first."""
    best: Pairing | None = None
    ours, theirs = {name: name for name in live.tensors}, {name: name for name in foreign}
    for mine, mine_gone in peeled(ours):
        for other, other_gone in peeled(theirs):
            found = _matched(live, mine, other)
            found.stripped = "; ".join(
                text
                for text, gone in ((f"names in the source lose {other_gone}", other_gone), (f"live names lose {mine_gone}", mine_gone))
                if gone
            )
            if best is None or _rest(found) < _rest(best):
                best = found
    assert best is not None
    for name, source in best.pairs.items():
        best.mismatched += _misfit(name, live.tensors[name], foreign[source], cast=cast)
    best.mismatched += _drifted(live, best, foreign)
    return best


def _rest(found: Pairing) -> int:
    return len(found.missing) + len(found.unexpected)


def _matched(live: Live, mine: Mapping[str, str], other: Mapping[str, str]) -> Pairing:
    found = Pairing()
    bare = {name: short for short, name in mine.items()}
    found.pairs = {name: other[short] for short, name in mine.items() if short in other}
    found.unexpected = [name for short, name in other.items() if short not in mine]
    for tied in live.needed:
        if not any(bare.get(name) in other for name in tied):
            found.missing.append(tied[0])
    return found


def form(tensor: torch.Tensor) -> str:
    """ "float32[4, 3]"."""
    return f"{tensors.name_of(tensor.dtype)}{list(tensor.shape)}"


def _misfit(name: str, live: torch.Tensor, foreign: torch.Tensor, *, cast: bool) -> list[str]:
    reason = tensors.refusal(foreign.detach()) if type(foreign) is not torch.Tensor else tensors.refusal(foreign)
    castable = foreign.dtype is live.dtype or (cast and torch.can_cast(foreign.dtype, live.dtype))
    if reason is None and foreign.shape == live.shape and castable:
        return []
    hint = "; cast=True converts it" if reason is None and foreign.shape == live.shape and not cast else ""
    return [f"{name}: {reason or form(foreign)} in the source, {form(live)} live{hint}"]


def _drifted(live: Live, found: Pairing, foreign: Mapping[str, torch.Tensor]) -> list[str]:
    """One live tensor, for which the source has two values."""
    wrong = []
    for tied in live.needed:
        have = [name for name in tied if name in found.pairs]
        first = foreign[found.pairs[have[0]]] if have else None
        for name in have[1:]:
            other = foreign[found.pairs[name]]
            if first is not None and (first.shape != other.shape or first.dtype != other.dtype or not torch.equal(first, other)):
                wrong.append(f"{name}: is one tensor with {have[0]} here, and the source has other values for it")
    return wrong
