"""The report's pictures as inline SVG: losses, starts, recoveries. Colours are variables of the page, so that light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from msgspec import Struct

from unbroken.chaos.inject import Struck
from unbroken.demo.story import POWER, Curve, Recovery, moment

WIDTH, LEFT, RIGHT = 960, 64, 16
PLOT_TOP, PLOT_HEIGHT = 40, 260
LANE_HEIGHT = 54
BAR_HEIGHT = 44


class Scene(Struct, frozen=True, kw_only=True):
    """What is drawn: both runs' curves, the strikes in order, and the checkpoints of the run under faults as (generation, step)."""

    total_steps: int
    reference: Sequence[Curve]
    attempts: Sequence[Curve]
    strikes: Sequence[Struck]
    checkpoints: Sequence[tuple[int, int]]
    condemned: Sequence[tuple[int, int]]


def numbered(strikes: Sequence[Struck]) -> list[tuple[int, Struck]]:
    """The strikes worth showing, numbered as in all pictures; a halt is the driver's own preparation."""
    return list(enumerate((struck for struck in strikes if struck.action != "stop"), start=1))


def strike_words(struck: Struck) -> str:
    """What happened, in few words."""
    if struck.action == "preempt":
        return "asked to end (SIGTERM)"
    return "power lost" if struck.at == POWER else f"rank {struck.rank} killed in {moment(struck.at)}"


def key(colour: str, text: str, shape: str = "") -> str:
    """One entry of a legend."""
    return f'<span><i class="key {shape}" style="--c:var(--{colour})"></i>{escape(text)}</span>'


def losses(scene: Scene) -> str:
    """The loss of both runs over the steps."""
    axis = _Axis(scene.total_steps)
    values = [loss for curve in (*scene.reference, *scene.attempts) for loss in curve.losses] or [0.0]
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-9
    bottom = PLOT_TOP + PLOT_HEIGHT

    def y(loss: float) -> float:
        return bottom - PLOT_HEIGHT * (loss - low) / (high - low)

    def path(points: Mapping[int, float], colour: str, width: float) -> str:
        drawn = " ".join(f"{axis.x(step):.1f},{y(loss):.1f}" for step, loss in sorted(points.items()))
        shape = 'fill="none" stroke-linejoin="round" stroke-linecap="round"'
        return f'<polyline points="{drawn}" stroke="var(--{colour})" stroke-width="{width}" {shape}/>' if len(points) > 1 else ""

    parts = [_text(LEFT - 40, 14, "loss (nats per byte)"), _text(WIDTH - RIGHT, bottom + 34, "step", "end")]
    spacing = _spacing(high - low, 5)
    for i in range(math.ceil(low / spacing), math.floor(high / spacing) + 1):
        parts += [_across(y(i * spacing)), _text(LEFT - 8, y(i * spacing) + 4, f"{i * spacing:g}", "end")]
    parts += [_text(axis.x(step), bottom + 18, str(step), "middle") for step in axis.ticks()]
    for number, struck in numbered(scene.strikes):
        x = axis.x(_place(struck))
        parts += [_upright(x, PLOT_TOP, bottom, _colour(struck)), _badge(x, PLOT_TOP - 10, number, struck)]
    surviving: dict[int, float] = {}
    for curve in scene.reference:
        parts.append(path(_points(curve, 0, curve.survives_to), "reference", 8))
    for curve in scene.attempts:
        surviving |= _points(curve, 0, curve.survives_to)
        parts.append(path(_points(curve, curve.survives_to, scene.total_steps), "again", 8))
    parts.append(path(surviving, "run", 2))
    return _svg(bottom + 40, "loss of both runs over the steps", parts)


def starts(scene: Scene) -> str:
    """One lane per generation: the steps that count, those done again, checkpoints, and what ended it."""
    axis = _Axis(scene.total_steps)
    ends = {struck.generation: (number, struck) for number, struck in numbered(scene.strikes)}
    parts = []
    for row, curve in enumerate(scene.attempts):
        end = ends.get(curve.generation)
        parts += _lane(axis, curve, 4 + row * LANE_HEIGHT, end[1] if end else None)
        parts += _dots(axis, scene, curve, 41 + row * LANE_HEIGHT)
        if end is not None:
            x, top = axis.x(_place(end[1])), 4 + row * LANE_HEIGHT
            words, has_room = strike_words(end[1]), x < WIDTH - 220
            parts.append(_badge(x, top + 25, *end))
            parts.append(_text(x + 14, top + 29, words) if has_room else _text(x - 14, top + 29, words, "end", "inside"))
    bottom = 8 + len(scene.attempts) * LANE_HEIGHT
    parts += [_text(axis.x(step), bottom + 12, str(step), "middle") for step in axis.ticks()]
    parts.append(_text(WIDTH - RIGHT, bottom + 28, "step", "end"))
    return _svg(bottom + 34, "each start of the run over the steps", parts)


def bars(recoveries: Sequence[Recovery], strikes: Sequence[Struck]) -> str:
    """Each recovery as one bar made of its phases."""
    numbers = {(struck.at, struck.step, struck.generation): number for number, struck in numbered(strikes)}
    by_strike = {(struck.at, struck.step): struck for _, struck in numbered(strikes)}
    longest = max((recovery.total_s for recovery in recoveries), default=1.0) or 1.0
    parts = []
    for row, recovery in enumerate(recoveries):
        top = 4 + row * BAR_HEIGHT
        struck = by_strike[recovery.at, recovery.step]
        words = f"{strike_words(struck)}, step {recovery.step}: {recovery.total_s:.2f} s, state from {recovery.source}"
        parts.append(_badge(LEFT - 22, top + 17, numbers[struck.at, struck.step, struck.generation], struck))
        parts.append(_text(LEFT, top + 12, words, style="strong"))
        x = float(LEFT)
        for i, (name, seconds) in enumerate(recovery.phases()):
            width = (WIDTH - LEFT - RIGHT) * max(0.0, seconds) / longest
            box = f'<rect x="{x:.1f}" y="{top + 18}" width="{width:.1f}" height="14" fill="var(--p{i})">'
            parts.append(f"{box}<title>{name.replace('_', ' ')}: {seconds * 1000:.0f} ms</title></rect>")
            x += width
    return _svg(8 + len(recoveries) * BAR_HEIGHT, "phases of each recovery", parts)


class _Axis:
    """Steps 0..last on the plot's width."""

    def __init__(self, last: int) -> None:
        self.last = max(1, last)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def ticks(self) -> list[int]:
        return list(range(0, self.last + 1, max(1, round(_spacing(self.last, 12)))))


def _place(struck: Struck) -> float:
    """Step s spans s-1..s on the axis: a strike at a step's boundary stands at its end, any other within it."""
    return struck.step if struck.at.startswith("capture.") or struck.action == "preempt" else struck.step - 0.5


def _lane(axis: _Axis, curve: Curve, top: float, end: Struck | None) -> list[str]:
    last = curve.first_step + len(curve.losses) - 1
    start, kept = axis.x(curve.first_step - 1), axis.x(max(curve.first_step - 1, min(curve.survives_to, last)))
    origin = "a fresh start" if curve.source == "fresh" else f"from step {curve.first_step - 1} in {curve.source}"
    words = f"generation {curve.generation}, {curve.world_size} ranks: {origin}"
    parts = [_text(min(start, axis.x(axis.last * 0.66)), top + 12, words, style="strong")]
    for x1, x2, colour in ((start, kept, "run"), (kept, axis.x(last), "again")):
        if x2 > x1:
            parts.append(f'<rect x="{x1:.1f}" y="{top + 19:.1f}" width="{x2 - x1:.1f}" height="12" rx="2" fill="var(--{colour})"/>')
    if end is not None and end.at == POWER and end.step - 1 > last:
        x1, x2 = axis.x(last), axis.x(end.step - 1)
        outline = 'fill="none" stroke="var(--again)" stroke-width="1.5" stroke-dasharray="4 2"'
        parts.append(f'<rect x="{x1 + 1:.1f}" y="{top + 19.5:.1f}" width="{x2 - x1 - 1:.1f}" height="11" rx="2" {outline}/>')
    return parts


def _dots(axis: _Axis, scene: Scene, curve: Curve, y: float) -> list[str]:
    parts = []
    for generation, step in scene.checkpoints:
        if generation == curve.generation:
            bad = (generation, step) in scene.condemned
            colour, what = ("fault", "damaged checkpoint") if bad else ("good", "checkpoint")
            dot = f'<circle cx="{axis.x(step):.1f}" cy="{y:.1f}" r="{4 if bad else 3}" fill="var(--{colour})">'
            parts.append(f"{dot}<title>{what}, step {step}</title></circle>")
    return parts


def _points(curve: Curve, first: int, last: int) -> dict[int, float]:
    """Step -> loss of those of the curve's steps that lie in first..last."""
    return {step: loss for step, loss in enumerate(curve.losses, curve.first_step) if first <= step <= last}


def _colour(struck: Struck) -> str:
    return "soft" if struck.action == "preempt" else "fault"


def _badge(x: float, y: float, number: int, struck: Struck) -> str:
    disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="var(--{_colour(struck)})"/>'
    hint = f"<title>{escape(strike_words(struck))}, step {struck.step}</title>"
    return f"<g>{hint}{disc}{_text(x, y + 4, str(number), 'middle', 'badge')}</g>"


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _across(y: float) -> str:
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="var(--line)"/>'


def _upright(x: float, top: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="var(--{colour})" stroke-dasharray="3 4"/>'


def _spacing(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and their fractions) that cuts `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * most)
