"""The report is whole by itself: well-formed, nothing fetched, every number of the story in it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

from msgspec import structs

from unbroken.chaos.inject import Struck
from unbroken.core.records import EventRecord
from unbroken.demo.charts import Scene
from unbroken.demo.report import Pages, render
from unbroken.demo.story import PHASES, Account, Curve, PowerLoss, recoveries, spread
from unbroken.proof.certify import Certificate, Condemned

VOID = {"meta", "br", "img", "input", "link", "hr"}


def losses(first: int, last: int) -> list[float]:
    return [1.5 + 4 * math.exp(-step / 25) + 0.1 * math.sin(step * 7) for step in range(first, last + 1)]


def curve(generation: int, world_size: int, source: str, first: int, last: int, survives_to: int) -> Curve:
    return Curve(
        generation=generation, world_size=world_size, source=source, first_step=first, losses=losses(first, last), survives_to=survives_to
    )


def strike(at: str, step: int, generation: int, time_s: float, action: str = "kill") -> Struck:
    return Struck(at=at, step=step, rank=1, generation=generation, action=action, time_s=time_s, pid=100)


def account(begin: float, source: str, base_step: int, step: int, world_size: int = 3) -> Account:
    """What the journal says of a recovery that began at `begin`: everything up to `step` was applied again within 3.3 s."""
    made = Account(world_size=world_size, base_step=base_step, source=source)
    made.events = [
        EventRecord(name="recovery", step=1, at={"detect": begin + 0.01, "respawn": begin + 0.06}),
        EventRecord(
            name="start", step=1, at={"process": begin + 2.0, "rendezvous": begin + 2.3, "rollback": begin + 2.5, "align": begin + 2.51}
        ),
        EventRecord(name="captured", step=1, facts={"capture_s": 0.01 * begin, "stall_s": 0.02}),
    ]
    made.applied = {step - 1: begin + 3.1, step: begin + 3.3}
    return made


STRIKES = [
    strike("step.backward", 14, 0, 10.0),
    strike("capture.copied", 30, 1, 20.0),
    strike("drain", 46, 2, 30.0),
    strike("step.forward", 56, 3, 39.0, "stop"),
    strike("power", 56, 3, 40.0),
    strike("step.forward", 69, 4, 50.0, "preempt"),
]
ACCOUNTS = {
    1: account(10.0, "memory", 10, 14),
    2: account(20.0, "memory", 25, 30),
    3: account(30.0, "memory", 45, 46),
    4: account(40.0, "disk", 50, 56),
    5: account(50.0, "memory", 69, 70, world_size=4),
}
POWER_LOSS = PowerLoss(num_killed=5, noticed_s=40.02)


def story() -> Pages:
    attempts = [
        curve(0, 3, "fresh", 1, 13, 10),
        curve(1, 3, "memory", 11, 30, 25),
        curve(2, 3, "memory", 26, 45, 45),
        curve(3, 3, "memory", 46, 54, 50),
        curve(4, 3, "disk", 51, 69, 69),
        curve(5, 4, "memory", 70, 80, 80),
    ]
    certificate = Certificate(
        certified=True,
        grade="exact",
        steps=80,
        generations=6,
        world_sizes=[3, 3, 3, 3, 3, 4],
        steps_lost_total=13,
        losses_equal=True,
        state_root_equal=True,
        samples_exactly_once=True,
        superseded_equal=True,
        fell_back=True,
        condemned=[Condemned(step=54, generation=3, objects=["packs/ab/x.pack"], reason="packs/ab/x.pack: <bad> digest")],
        differences=["generation 4: threads & kernels"],
        problems=[],
        num_checkpoints=3,
        final_step=80,
        final_root="ab" * 32,
    )
    scene = Scene(
        total_steps=80,
        reference=[curve(0, 3, "fresh", 1, 80, 80)],
        attempts=attempts,
        strikes=STRIKES,
        checkpoints=[(0, 5), (0, 10), (1, 15), (1, 20), (1, 25), (2, 30), (2, 40), (2, 45), (3, 50), (3, 54), (4, 60), (4, 69), (5, 80)],
        condemned=[(3, 54)],
    )
    return Pages(
        seed=7,
        scene=scene,
        recoveries=recoveries(STRIKES, ACCOUNTS, POWER_LOSS),
        capture_s=spread(ACCOUNTS, "captured", "capture_s"),
        stall_s=spread(ACCOUNTS, "captured", "stall_s"),
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
    page = render(story())
    reader = Reader()
    reader.feed(page)
    words = " ".join(reader.words)
    for text in (
        "rank 1 killed in backward",
        "rank 1 killed in capture",
        "rank 1 killed in drain",
        "power lost",
        "asked to end (SIGTERM)",
        "started again on 4 ranks",
        "8 processes were killed",
        "3 → 3 → 3 → 3 → 3 → 4",
        "generation 5, 4 ranks: from step 69 in memory",
        "5 snapshots, each copied to memory in 300 ms (median; at most 500)",
        "exact",
        "ab" * 32,
    ):
        assert text in words, text
    for name in PHASES:
        assert words.count(name.replace("_", " ")) >= 3
    assert page.count("<polyline") == 1 + 1 + 3, "the reference, the run, and three stretches done again"
    assert page.count("stroke-dasharray") == 5 + 1, "one line per strike, and the steps that left no record"
    assert "nan" not in re.sub("[a-z]*nanc[a-z]*", "", page) and "inf" not in page.replace("info", "")


def test_a_failed_proof_is_the_first_thing_said() -> None:
    pages = story()
    broken = structs.replace(pages.certificate, certified=False, grade="sequence", losses_equal=False, problems=["step 3: <other> bits"])
    page = render(structs.replace(pages, certificate=broken))
    assert page.index("The proof failed") < page.index("<section>")
    assert '<span class="verdict no">no</span>' in page and "step 3: &lt;other&gt; bits" in page


def test_phases_are_contiguous_and_sum_to_the_total() -> None:
    found = story().recoveries
    assert [r.at for r in found] == ["step.backward", "capture.copied", "drain", "power"]
    assert [r.kills for r in found] == [1, 1, 1, 5]
    for r in found:
        assert abs(sum(seconds for _, seconds in r.phases()) - r.total_s) < 1e-9
        assert abs(r.total_s - 3.3) < 1e-9 and abs(r.respawn_s - 1.99) < 1e-9
    assert (found[-1].source, found[-1].base_step, found[-1].world_size) == ("disk", 50, 3)


def test_the_total_ends_with_the_step_that_was_struck_whatever_the_old_journal_knew_of_it() -> None:
    late = account(40.0, "disk", 50, 56)
    late.applied = {51: 42.6, 52: 42.7, 55: 43.5, 56: 43.6}
    (found,) = recoveries([strike("power", 56, 3, 40.0)], {4: late}, POWER_LOSS)
    assert abs(found.total_s - 3.6) < 1e-9 and abs(found.compensate_s - 0.99) < 1e-9


def test_nobody_is_left_to_see_a_power_loss_so_the_restart_is_when_it_was_noticed() -> None:
    alone = account(40.0, "disk", 50, 56)
    alone.events = [event for event in alone.events if event.name != "recovery"]
    (found,) = recoveries([strike("power", 56, 3, 40.0)], {4: alone}, PowerLoss(num_killed=5, noticed_s=40.5))
    assert abs(found.detect_s - 0.5) < 1e-9 and abs(found.total_s - 3.3) < 1e-9


def test_a_phase_without_work_takes_no_time_whichever_rank_noted_its_end() -> None:
    quick = account(10.0, "memory", 15, 16)
    quick.applied = {16: 13.3}
    (found,) = recoveries([strike("drain", 16, 0, 10.0)], {1: quick})
    assert found.compensate_s == 0
    assert abs(sum(seconds for _, seconds in found.phases()) - found.total_s) < 1e-9


def test_a_recovery_without_all_its_moments_is_not_invented() -> None:
    cut_short = account(10.0, "memory", 10, 14)
    cut_short.applied = {}
    assert recoveries([strike("step.forward", 14, 0, 10.0)], {1: cut_short}) == []
    assert recoveries([strike("step.forward", 14, 0, 10.0)], {}) == []


def test_spread_counts_only_the_events_that_hold_the_fact() -> None:
    some = {number: ACCOUNTS[number] for number in (1, 2, 3)}
    capture = spread(some, "captured", "capture_s")
    assert (capture.median, capture.max, capture.n) == (0.2, 0.3, 3)
    assert spread(some, "captured", "absent").n == 0
