"""report.html: the whole story on one page that needs nothing else. Inline SVG, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from msgspec import Struct

from unbroken.chaos.inject import Struck
from unbroken.demo.story import PHASES, Curve, Recovery, moment
from unbroken.recover.certify import Certificate

WIDTH, LEFT, RIGHT = 960, 64, 16
PLOT_TOP, PLOT_HEIGHT = 28, 260
LANE_HEIGHT = 26

STYLE = """
:root{--page:#fbfbfa;--card:#fff;--ink:#1d1f23;--soft:#646b75;--line:#dfe2e6;--reference:#b9c4d6;--run:#1f5fbf;--again:#d9a441;
--fault:#c2352b;--good:#1e7d4f;--p0:#8a3ffc;--p1:#1f5fbf;--p2:#1192a8;--p3:#198038;--p4:#b28600;--p5:#d9772b;--p6:#b5487f}
@media(prefers-color-scheme:dark){:root{--page:#14161a;--card:#1b1e24;--ink:#e8eaee;--soft:#9aa3af;--line:#31363f;--reference:#4a566b;
--run:#6ea8ff;--again:#e0b65c;--fault:#ff7b6e;--good:#5fcf95;--p0:#a98bff;--p1:#6ea8ff;--p2:#4fc3d6;--p3:#55c078;--p4:#e0b65c;--p5:#f09a57;
--p6:#e580b4}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0 0 4px}h2{font-size:17px;margin:0 0 2px}
p{margin:0 0 12px;color:var(--soft)}section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;
margin-top:18px;overflow-x:auto}svg{display:block;width:100%;min-width:720px;height:auto}svg text{font:12px system-ui,sans-serif;
fill:var(--soft)}svg .strong{fill:var(--ink)}svg .fault{fill:var(--fault)}table{border-collapse:collapse;width:100%;
font-variant-numeric:tabular-nums}th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td{overflow-wrap:anywhere}td.num,th.num{text-align:right}
code{font:13px ui-monospace,monospace}
.verdict{font-weight:600}.yes{color:var(--good)}.no{color:var(--fault)}.key{display:inline-block;width:11px;height:11px;border-radius:3px;
margin:0 6px 0 14px;vertical-align:-1px}
"""


class Pages(Struct, frozen=True, kw_only=True):
    """All that the report shows. `checkpoints` are (generation, step) of every commit, `condemned` those that were given up."""

    seed: int
    total_steps: int
    reference: Sequence[Curve]
    attempts: Sequence[Curve]
    strikes: Sequence[Struck]
    recoveries: Sequence[Recovery]
    checkpoints: Sequence[tuple[int, int]]
    condemned: Sequence[tuple[int, int]]
    certificate: Certificate


def render(pages: Pages) -> str:
    """The page as HTML text."""
    certificate = pages.certificate
    verdict = "the interrupted run ended in the same bits" if certificate.certified else "the proof failed"
    sizes = " → ".join(str(curve.world_size) for curve in pages.attempts)
    body = [
        f"<h1>{escape(verdict.capitalize())}</h1>",
        f"<p>{pages.total_steps} steps, seed {pages.seed}; {sum(r.kills for r in pages.recoveries)} processes killed, "
        f"{certificate.steps_lost_total} steps lost and done again, number of ranks {sizes}.</p>",
        _section("Loss", "One run drawn upon the other. Whether all bits are equal, the certificate says.", _legend_loss(), _losses(pages)),
        _section("Generations", "Each start of the run, the steps that survive, and those that had to be done again.", "", _lanes(pages)),
        _section(
            "Recoveries",
            "From the strike until the lost step was applied anew.",
            _legend_phases(),
            _bars(pages.recoveries),
            _table(pages.recoveries),
        ),
        _section("Certificate", "Recomputed from the stored bytes.", _certificate(certificate)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>unbroken: demo, seed {pages.seed}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(parts)}</section>"


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _key(colour: str, text: str) -> str:
    return f'<span class="key" style="background:var(--{colour})"></span>{escape(text)}'


def _legend_loss() -> str:
    keys = (
        _key("reference", "uninterrupted reference") + _key("run", "under faults") + _key("again", "done again") + _key("fault", "strike")
    )
    return f"<p>{keys}</p>"


def _legend_phases() -> str:
    return "<p>" + "".join(_key(f"p{i}", name.replace("_", " ")) for i, name in enumerate(PHASES)) + "</p>"


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _across(y: float) -> str:
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="var(--line)"/>'


def _upright(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="var(--fault)" stroke-dasharray="3 4"/>'


def _spacing(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and their fractions) that cuts `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * most)


class _Axis:
    """Steps 0..last on the plot's width."""

    def __init__(self, last: int) -> None:
        self.last = max(1, last)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def ticks(self) -> list[int]:
        return list(range(0, self.last + 1, max(1, round(_spacing(self.last, 12)))))


def _losses(pages: Pages) -> str:
    axis = _Axis(pages.total_steps)
    values = [loss for curve in (*pages.reference, *pages.attempts) for loss in curve.losses] or [0.0]
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low) + 1e-9
    bottom = PLOT_TOP + PLOT_HEIGHT

    def y(loss: float) -> float:
        return bottom - PLOT_HEIGHT * (loss - low) / (high - low)

    def path(points: Mapping[int, float], colour: str, width: float) -> str:
        drawn = " ".join(f"{axis.x(step):.1f},{y(loss):.1f}" for step, loss in sorted(points.items()))
        shape = 'fill="none" stroke-linejoin="round" stroke-linecap="round"'
        return f'<polyline points="{drawn}" stroke="var(--{colour})" stroke-width="{width}" {shape}/>' if len(points) > 1 else ""

    parts = []
    spacing = _spacing(high - low, 5)
    for i in range(math.ceil(low / spacing), math.floor(high / spacing) + 1):
        parts += [_across(y(i * spacing)), _text(LEFT - 8, y(i * spacing) + 4, f"{i * spacing:g}", "end")]
    parts += [_text(axis.x(step), bottom + 18, str(step), "middle") for step in axis.ticks()]
    parts += [_text(LEFT, 14, "loss (nats per byte)"), _text(WIDTH - RIGHT, bottom + 34, "step", "end")]
    surviving: dict[int, float] = {}
    for curve in pages.reference:
        parts.append(path(_points(curve, 0, curve.survives_to), "reference", 7))
    for curve in pages.attempts:
        surviving |= _points(curve, 0, curve.survives_to)
        parts.append(path(_points(curve, curve.survives_to, pages.total_steps), "again", 5))
    parts.append(path(surviving, "run", 1.6))
    for i, struck in enumerate(_shown(pages.strikes)):
        x = axis.x(struck.step)
        parts.append(_upright(x, PLOT_TOP, bottom))
        parts.append(_text(x + 4, PLOT_TOP + 12 + 15 * (i % 3), _strike_words(struck), style="fault"))
    return _svg(bottom + 40, "loss of both runs over the steps", parts)


def _points(curve: Curve, first: int, last: int) -> dict[int, float]:
    """Step -> loss of those of the curve's steps that lie in first..last."""
    return {step: loss for step, loss in enumerate(curve.losses, curve.first_step) if first <= step <= last}


def _shown(strikes: Sequence[Struck]) -> list[Struck]:
    return [struck for struck in strikes if struck.action == "kill"]


def _strike_words(struck: Struck) -> str:
    if struck.at == "power":
        return f"power lost, step {struck.step}"
    return f"{moment(struck.at)}, rank {struck.rank}"


def _lanes(pages: Pages) -> str:
    axis = _Axis(pages.total_steps)
    parts = []
    by_generation = {struck.generation: struck for struck in _shown(pages.strikes)}
    for row, curve in enumerate(pages.attempts):
        top = 8 + row * LANE_HEIGHT * 2
        last = curve.first_step + len(curve.losses) - 1
        start, kept = axis.x(curve.first_step - 1), axis.x(max(curve.first_step - 1, min(curve.survives_to, last)))
        words = f"generation {curve.generation}: {curve.world_size} ranks, {'fresh' if curve.source == 'fresh' else f'from {curve.source}'}"
        parts.append(_text(min(start, axis.x(axis.last * 0.6)), top + 12, words, style="strong"))
        for x1, x2, colour in ((start, kept, "run"), (kept, axis.x(last), "again")):
            if x2 > x1:
                parts.append(f'<rect x="{x1:.1f}" y="{top + 19}" width="{x2 - x1:.1f}" height="12" rx="2" fill="var(--{colour})"/>')
        for generation, step in pages.checkpoints:
            if generation == curve.generation:
                bad = (generation, step) in pages.condemned
                colour, what = ("fault", "condemned") if bad else ("good", "checkpoint")
                dot = f'<circle cx="{axis.x(step):.1f}" cy="{top + 37}" r="3" fill="var(--{colour})">'
                parts.append(f"{dot}<title>{what}, step {step}</title></circle>")
        struck = by_generation.get(curve.generation)
        if struck is not None:
            x = axis.x(struck.step)
            parts.append(f'<path d="M{x - 5:.1f} {top + 20}l10 10m0 -10l-10 10" stroke="var(--fault)" stroke-width="2.5"/>')
            parts.append(_text(x + 9, top + 30, _strike_words(struck), style="fault") if x < WIDTH - 180 else "")
    bottom = 8 + len(pages.attempts) * LANE_HEIGHT * 2
    parts += [_text(axis.x(step), bottom + 12, str(step), "middle") for step in axis.ticks()]
    return _svg(bottom + 18, "generations over the steps", parts)


def _bars(recoveries: Sequence[Recovery]) -> str:
    longest = max((recovery.total_s for recovery in recoveries), default=1.0) or 1.0
    parts = []
    for row, recovery in enumerate(recoveries):
        top = 4 + row * (LANE_HEIGHT + 18)
        what = "power lost" if recovery.at == "power" else f"kill in {moment(recovery.at)}"
        words = f"{what}, step {recovery.step}: {recovery.total_s:.2f} s, from {recovery.source}"
        parts.append(_text(LEFT, top + 12, words, style="strong"))
        x = float(LEFT)
        for i, (name, seconds) in enumerate(recovery.phases()):
            width = (WIDTH - LEFT - RIGHT) * max(0.0, seconds) / longest
            box = f'<rect x="{x:.1f}" y="{top + 18}" width="{width:.1f}" height="14" fill="var(--p{i})">'
            parts.append(f"{box}<title>{name}: {seconds * 1000:.0f} ms</title></rect>")
            x += width
    return _svg(8 + len(recoveries) * (LANE_HEIGHT + 18), "phases of each recovery", parts)


def _table(recoveries: Sequence[Recovery]) -> str:
    head = "".join(f'<th class="num">{escape(name.replace("_", " "))}</th>' for name in (*PHASES, "total"))
    rows = []
    for r in recoveries:
        cells = "".join(f'<td class="num">{seconds:.3f}</td>' for seconds in (*(s for _, s in r.phases()), r.total_s))
        rows.append(f"<tr><td>{escape(moment(r.at))}, step {r.step}</td>{cells}</tr>")
    return f"<table><tr><th>strike (seconds)</th>{head}</tr>{''.join(rows)}</table>"


def _certificate(certificate: Certificate) -> str:
    def word(value: Any) -> str:
        if isinstance(value, bool):
            return f'<span class="verdict {"yes" if value else "no"}">{"yes" if value else "no"}</span>'
        if isinstance(value, list):
            return ", ".join(map(str, value)) if value else "none"
        return "not checked" if value is None else str(value)

    rows = (
        ("certified", certificate.certified),
        ("grade", certificate.grade),
        ("every loss has the reference's bits", certificate.losses_equal),
        ("every state root is the reference's", certificate.state_root_equal),
        ("every sample exactly once", certificate.samples_exactly_once),
        ("every superseded attempt equals its replay", certificate.superseded_equal),
        ("came back from an older checkpoint", certificate.fell_back),
        ("condemned", [f"step {c.step}: {escape(c.reason)}" for c in certificate.condemned]),
        ("generations", certificate.generations),
        ("ranks in each", certificate.world_sizes),
        ("steps lost and done again", certificate.steps_lost_total),
        ("checkpoints kept", certificate.num_checkpoints),
        ("limits of the claim", [escape(text) for text in certificate.differences]),
        ("problems", [escape(text) for text in certificate.problems]),
    )
    body = "".join(f"<tr><th>{escape(name)}</th><td>{word(value)}</td></tr>" for name, value in rows)
    root = f"<tr><th>state root at step {certificate.final_step}</th><td><code>{escape(certificate.final_root)}</code></td></tr>"
    return f"<table>{body}{root}</table>"
