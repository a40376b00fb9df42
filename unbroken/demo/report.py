"""report.html: the whole story on one page that needs nothing else, for a reader who has never heard of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from msgspec import Struct

from unbroken.demo.charts import Scene, bars, key, losses, numbered, starts, strike_words
from unbroken.demo.story import PHASES, Recovery, Spread
from unbroken.proof.certify import Certificate

STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1d1f23;--soft:#646b75;--line:#dfe2e6;--reference:#c3cddd;--run:#1f5fbf;
--again:#f0b53f;--fault:#c2352b;--good:#1e7d4f;--on:#fff;--p0:#8a3ffc;--p1:#8794a8;--p2:#1192a8;--p3:#1f5fbf;--p4:#b5487f;--p5:#f0b53f;
--p6:#198038}
@media(prefers-color-scheme:dark){:root{--page:#14161a;--card:#1b1e24;--ink:#e8eaee;--soft:#9aa3af;--line:#31363f;--reference:#46536a;
--run:#8dbaff;--again:#a87412;--fault:#ff7b6e;--good:#5fcf95;--on:#14161a;--p0:#a98bff;--p1:#6b7687;--p2:#4fc3d6;--p3:#6ea8ff;--p4:#e580b4;
--p5:#e0a040;--p6:#55c078}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:36px 20px 64px}h1{font-size:28px;line-height:1.25;margin:0 0 10px;text-wrap:balance}
h2{font-size:18px;margin:0 0 2px}p{margin:0 0 12px;color:var(--soft);max-width:96ch}h1+p{color:var(--ink);font-size:16px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin-top:18px;overflow-x:auto}
ol{margin:0 0 12px;padding-left:22px;color:var(--soft)}li::marker{color:var(--fault);font-weight:700}
svg{display:block;width:100%;min-width:720px;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
svg .strong{fill:var(--ink)}svg .inside,svg .badge{fill:var(--on)}svg .badge{font-weight:700}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin-bottom:10px;
color:var(--soft)}
.key{display:inline-block;width:18px;height:8px;border-radius:3px;margin-right:7px;vertical-align:1px;background:var(--c)}
.key.dot{width:9px;height:9px;border-radius:5px;vertical-align:0}.key.thin{height:3px;vertical-align:3px}
.key.open{background:none;border:1px dashed var(--c)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{text-align:left;padding:6px 14px 6px 0;
border-bottom:1px solid var(--line);vertical-align:top}tr:last-child>*{border-bottom:0}th{color:var(--soft);font-weight:500}
td{overflow-wrap:anywhere}td.num,th.num{text-align:right;white-space:nowrap}.seconds th:first-child{min-width:15em}.claims th{width:50%}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:14px 0 0;color:var(--soft)}dt{color:var(--ink)}dd{margin:0}
code{font:13px ui-monospace,monospace}.verdict{font-weight:600}.yes{color:var(--good)}.no{color:var(--fault)}
"""

PHASE_WORDS = {
    "detect": "until the death is seen (after the power loss: until the job is started again; nobody was left to see it)",
    "respawn": "new processes start Python, import torch and build the model",
    "rendezvous": "the ranks meet again and find the daemon",
    "rollback": "the state is chosen, loaded, verified, and compared between the ranks",
    "align": "the data and the memory for snapshots are brought into place",
    "compensate": "steps between the loaded state and the one that was struck are done again",
    "first_step": "the step that was struck, now applied by all ranks",
}


class Pages(Struct, frozen=True, kw_only=True):
    """All that the report shows."""

    seed: int
    scene: Scene
    recoveries: Sequence[Recovery]
    capture_s: Spread
    stall_s: Spread
    certificate: Certificate


def render(pages: Pages) -> str:
    """The page as HTML text."""
    certified = pages.certificate.certified
    verdict = "The run under faults ended in the same bits" if certified else "The proof failed: the two runs are not shown to be equal"
    body = [
        f"<h1>{escape(verdict)}</h1>",
        _introduction(pages),
        _section(
            "Loss",
            "Both runs' loss at every step. Where the thin line lies within the thick one they agree as far as a picture can show; that "
            "every bit agrees, the certificate below says.",
            _legend(
                key("reference", "undisturbed reference"), key("run", "under faults", "thin"), key("again", "computed twice, first attempt")
            ),
            losses(pages.scene),
        ),
        _section(
            "Starts",
            "Each start of the run under faults goes on from the newest state that can be had whole: in the memory of a daemon that "
            "outlives the ranks, or on disk. Steps beyond that state are lost and done again by the next start.",
            _legend(
                key("run", "steps that count"),
                key("again", "lost, done again"),
                key("again", "lost without a record (memory was gone)", "open"),
                key("good", "checkpoint on disk", "dot"),
                key("fault", "checkpoint found damaged", "dot"),
            ),
            starts(pages.scene),
        ),
        _recoveries(pages),
        _section(
            "Certificate",
            "Recomputed from the stored bytes of both runs, not from what the runs remember. In the folder of this page, "
            "“unbroken certify interrupted --against reference” does it again.",
            _certificate(pages.certificate),
        ),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>unbroken: demo, seed {pages.seed}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _introduction(pages: Pages) -> str:
    """What was done, and every strike by its number."""
    scene = pages.scene
    first = scene.attempts[0].world_size if scene.attempts else 0
    intro = (
        f"A small language model was trained twice for {scene.total_steps} steps from the same seed ({pages.seed}), on {first} processes "
        "(ranks). The reference ran undisturbed. The other run was struck as follows; its training script knows nothing of it:"
    )
    items = "".join(f"<li>step {struck.step}: {escape(_told(struck, pages))}</li>" for _, struck in numbered(scene.strikes))
    sizes = " → ".join(str(curve.world_size) for curve in scene.attempts)
    rest = (
        f"In all, {sum(r.kills for r in pages.recoveries)} processes were killed; {pages.certificate.steps_lost_total} steps of which a "
        f"record was left were done again; the number of ranks was {sizes}."
    )
    return f"<p>{escape(intro)}</p><ol>{items}</ol><p>{escape(rest)}</p>"


def _told(struck: Any, pages: Pages) -> str:
    words = strike_words(struck)
    if struck.action == "preempt":
        after = next((c.world_size for c in pages.scene.attempts if c.generation == struck.generation + 1), 0)
        return f"{words}; the step was finished and saved, then the job was started again on {after} ranks"
    if struck.at == "power":
        return f"{words}: launcher, ranks and daemon killed at once, right after a byte of the newest checkpoint had been changed on disk"
    return words


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(parts)}</section>"


def _legend(*keys: str) -> str:
    return f'<div class="legend">{"".join(keys)}</div>'


def _recoveries(pages: Pages) -> str:
    words = "".join(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(text)}</dd>" for name, text in PHASE_WORDS.items())
    capture, stall = pages.capture_s, pages.stall_s
    cost = (
        f"Saving in between: {capture.n} snapshots, each copied to memory in {capture.median * 1000:.0f} ms (median; at most "
        f"{capture.max * 1000:.0f}); training waited {stall.median * 1000:.0f} ms for each (at most {stall.max * 1000:.0f}). Writing them "
        "to disk goes on beside training."
    )
    return _section(
        "Recoveries",
        "From the strike until the step that was struck is applied by all ranks, in seconds.",
        _legend(*(key(f"p{i}", name.replace("_", " ")) for i, name in enumerate(PHASES))),
        bars(pages.recoveries, pages.scene.strikes),
        _table(pages.recoveries),
        f'<dl>{words}</dl><p style="margin-top:14px">{escape(cost)}</p>',
    )


def _table(recoveries: Sequence[Recovery]) -> str:
    head = "".join(f'<th class="num">{escape(name.replace("_", " "))}</th>' for name in (*PHASES, "total"))
    rows = []
    for r in recoveries:
        cells = "".join(f'<td class="num">{seconds:.3f}</td>' for seconds in (*(s for _, s in r.phases()), r.total_s))
        rows.append(f"<tr><td>step {r.step}, from step {r.base_step} in {escape(r.source)}</td>{cells}</tr>")
    return f'<table class="seconds"><tr><th>struck</th>{head}</tr>{"".join(rows)}</table>'


def _certificate(certificate: Certificate) -> str:
    def word(value: Any) -> str:
        if isinstance(value, bool):
            return f'<span class="verdict {"yes" if value else "no"}">{"yes" if value else "no"}</span>'
        if isinstance(value, list):
            return "<br>".join(escape(str(one)) for one in value) if value else "none"
        return "not checked" if value is None else escape(str(value))

    rows = (
        ("certified", certificate.certified),
        ("grade", "exact: equal to the reference, bit for bit" if certificate.grade == "exact" else certificate.grade),
        (f"the loss of each of {certificate.steps} steps has the reference's bits", certificate.losses_equal),
        ("wherever both runs made a checkpoint, the whole state has one hash", certificate.state_root_equal),
        ("every sample was used exactly once", certificate.samples_exactly_once),
        ("every step done again gave the same bits both times", certificate.superseded_equal),
        ("a damaged checkpoint was noticed and an older one used", certificate.fell_back),
        ("damage found", [f"step {c.step}: {c.reason}" for c in certificate.condemned]),
        ("limits of the claim", certificate.differences),
        ("problems", certificate.problems),
        ("checkpoints kept", certificate.num_checkpoints),
    )
    body = "".join(f"<tr><th>{escape(name)}</th><td>{word(value)}</td></tr>" for name, value in rows)
    root = (
        f"<tr><th>hash of the whole state at step {certificate.final_step}</th><td><code>{escape(certificate.final_root)}</code></td></tr>"
    )
    return f'<table class="claims">{body}{root}</table>'
