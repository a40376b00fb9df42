"""The report is whole by itself: well-formed, nothing fetched, every number of the story in it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

from unbroken.chaos.inject import Struck
from unbroken.core.records import EventRecord
from unbroken.demo.report import Pages, render
from unbroken.demo.story import PHASES, Curve, recoveries, spread
from unbroken.recover.certify import Certificate, Condemned

VOID = {"meta", "br", "img", "input", "link", "hr"}


def losses(first: int, last: int) -> list[float]:
    return [1.5 + 4 * math.exp(-step / 25) + 0.1 * math.sin(step * 7) for step in range(first, last + 1)]


def curve(generation: int, world_size: int, source: str, first: int, last: int, survives_to: int) -> Curve:
    return Curve(
        generation=generation, world_size=world_size, source=source, first_step=first, losses=losses(first, last), survives_to=survives_to
    )


def strike(at: str, step: int, generation: int, time_s: float, action: str = "kill") -> Struck:
    return Struck(at=at, step=step, rank=1, generation=generation, action=action, time_s=time_s, pid=100)


def moments(begin: float) -> list[EventRecord]:
    return [
        EventRecord(name="recovery", step=1, at={"detect": begin + 0.01, "respawn": begin + 0.06}),
        EventRecord(
            name="start", step=1, at={"process": begin + 2.0, "rendezvous": begin + 2.3, "rollback": begin + 2.5, "align": begin + 2.51}
        ),
        EventRecord(name="caught_up", step=1, at={"compensate": begin + 3.1, "first_step": begin + 3.3}, facts={"lost_step": 12}),
        EventRecord(name="captured", step=1, facts={"capture_s": 0.01 * begin, "stall_s": 0.02}),
    ]


def story() -> Pages:
    strikes = [
        strike("step.backward", 14, 0, 10.0),
        strike("capture.copied", 30, 1, 20.0),
        strike("drain", 46, 2, 30.0),
        strike("step.forward", 61, 3, 39.0, "stop"),
        strike("power", 61, 3, 40.0),
    ]
    events = {generation: moments(10.0 * generation) for generation in (1, 2, 3, 4)}
    attempts = [
        curve(0, 3, "fresh", 1, 13, 10),
        curve(1, 3, "memory", 11, 30, 25),
        curve(2, 3, "memory", 26, 45, 45),
        curve(3, 3, "memory", 46, 60, 55),
        curve(4, 4, "disk", 56, 80, 80),
    ]
    certificate = Certificate(
        certified=True,
        grade="exact",
        steps=80,
        generations=5,
        world_sizes=[3, 3, 3, 3, 4],
        steps_lost_total=13,
        losses_equal=True,
        state_root_equal=True,
        samples_exactly_once=True,
        superseded_equal=True,
        fell_back=True,
        condemned=[Condemned(step=60, generation=3, objects=["packs/ab/x.pack"], reason="packs/ab/x.pack: <bad> digest")],
        differences=["generation 4: threads & kernels"],
        problems=[],
        num_checkpoints=3,
        final_step=80,
        final_root="ab" * 32,
    )
    return Pages(
        seed=7,
        total_steps=80,
        reference=[curve(0, 3, "fresh", 1, 80, 80)],
        attempts=attempts,
        strikes=strikes,
        recoveries=recoveries(strikes, events, {c.generation: c for c in attempts}, {40.0: 5}),
        checkpoints=[(0, 5), (0, 10), (1, 15), (1, 20), (1, 25), (2, 30), (2, 35), (2, 40), (2, 45), (3, 50), (3, 55), (3, 60), (4, 80)],
        condemned=[(3, 60)],
        certificate=certificate,
    )


class Reader(HTMLParser):
    """Follows the tags; complains about any that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    page = render(story())
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.references == []
    assert "http" not in page and "url(" not in page and "<script" not in page and "@import" not in page
    assert "&lt;bad&gt; digest" in page and "<bad>" not in page


def test_every_strike_phase_and_claim_is_on_the_page() -> None:
    pages = story()
    page = render(pages)
    reader = Reader()
    reader.feed(page)
    words = " ".join(reader.words)
    for text in ("backward, rank 1", "capture, rank 1", "drain, rank 1", "power lost, step 61", "4 ranks, from disk", "exact", "ab" * 32):
        assert text in words, text
    for name in PHASES:
        assert name.replace("_", " ") in words
    assert page.count("<polyline") == 1 + 1 + 3
    assert "nan" not in re.sub("[a-z]*nanc[a-z]*", "", page) and "inf" not in page.replace("info", "")


def test_phases_are_contiguous_and_sum_to_the_total() -> None:
    found = story().recoveries
    assert [r.at for r in found] == ["step.backward", "capture.copied", "drain", "power"]
    assert [r.kills for r in found] == [1, 1, 1, 5]
    for r in found:
        assert abs(sum(seconds for _, seconds in r.phases()) - r.total_s) < 1e-9
        assert abs(r.total_s - 3.3) < 1e-9 and abs(r.respawn_s - 1.99) < 1e-9
    assert found[-1].source == "disk" and found[-1].world_size == 4


def test_a_phase_without_work_takes_no_time_whichever_rank_noted_its_end() -> None:
    events = moments(10.0)
    events[2] = EventRecord(name="caught_up", step=1, at={"compensate": 12.505, "first_step": 13.3})
    (found,) = recoveries([strike("drain", 16, 0, 10.0)], {1: events}, {1: curve(1, 3, "memory", 16, 20, 20)}, {})
    assert found.compensate_s == 0
    assert abs(sum(seconds for _, seconds in found.phases()) - found.total_s) < 1e-9


def test_a_recovery_without_all_its_moments_is_not_invented() -> None:
    events = {1: moments(10.0)[:2]}
    assert recoveries([strike("step.forward", 14, 0, 10.0)], events, {1: curve(1, 3, "memory", 11, 20, 20)}, {}) == []


def test_spread_counts_only_the_events_that_hold_the_fact() -> None:
    events = {generation: moments(10.0 * generation) for generation in (1, 2, 3)}
    capture = spread(events, "captured", "capture_s")
    assert (capture.median, capture.max, capture.n) == (0.2, 0.3, 3)
    assert spread(events, "captured", "absent").n == 0
