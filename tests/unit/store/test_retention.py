"""Which checkpoints stay, and why: every rule alone, all together, and under clocks and values that nobody should trust."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from unbroken.core.records import Best, CommitEntry, CondemnEntry, Generation, Keep, LogState
from unbroken.store.log import Key
from unbroken.store.retention import CHECKS, judge, rules, told


def commit(step: int, time: str = "", *, generation: int = 0, milestone: bool = False) -> CommitEntry:
    return CommitEntry(
        step=step, generation=generation, milestone=milestone, manifests=(), state_root="0" * 64, size_bytes=0, journal_head="",
        journal_lines=0, time=time,
    )  # fmt: skip


def log(*commits: CommitEntry, condemned: tuple[CondemnEntry, ...] = ()) -> LogState:
    return LogState(
        generations=(Generation(number=0, parent=None, base_step=0, nonce="0", world_size=1),), commits=commits, condemned=condemned
    )


def stays(state: LogState, keep: Keep, values: dict[Key, float | None] | None = None) -> list[int]:
    return [verdict.commit.step for verdict in judge(state, keep, values or {}, {}) if verdict.stays]


def logged(**values: float | None) -> dict[Key, float | None]:
    return {(int(name[1:]), 0): value for name, value in values.items()}


def test_every_so_many_steps_the_first_one_stays_and_what_is_kept_once_stays_kept() -> None:
    kept: list[int] = []
    there: list[int] = []
    for step in (0, 90, 110, 190, 199, 230, 310, 555, 590, 600):  # as a run does it: after each checkpoint what is not kept goes
        there = stays(log(*map(commit, [*there, step])), Keep(newest=1, every_steps=100))
        assert set(kept) <= set(there)
        kept = [one for one in there if one != step or step in (110, 230, 310, 555, 600)]
    assert there == [110, 230, 310, 555, 600]


def test_one_per_hour_is_the_newest_of_each_hour_for_the_newest_hours_that_have_one() -> None:
    times = ["08:05", "08:50", "09:10", "09:59", "13:00", "13:30", "14:01"]
    state = log(*[commit(10 * n, f"2026-01-31T{time}:00.000Z") for n, time in enumerate(times)])
    assert stays(state, Keep(newest=1, hours=1)) == [60]
    assert stays(state, Keep(newest=1, hours=3)) == [30, 50, 60], "hours without a checkpoint do not count"
    assert stays(state, Keep(newest=1, hours=99)) == [10, 30, 50, 60]


def test_a_run_that_goes_on_for_hours_ends_with_one_per_hour() -> None:
    there: list[CommitEntry] = []
    for minute in range(0, 8 * 60, 7):
        there.append(commit(minute, f"2026-01-31T{10 + minute // 60}:{minute % 60:02d}:00.000Z"))
        there = [verdict.commit for verdict in judge(log(*there), Keep(newest=1, hours=5), {}, {}) if verdict.stays]
        assert len(there) <= 6
    assert [one.time[11:13] for one in there] == ["13", "14", "15", "16", "17"]


def test_clocks_that_jump_are_not_times_and_unreadable_times_are_no_hours() -> None:
    back = log(commit(1, "2026-01-31T10:10:00Z"), commit(2, "2026-01-31T11:50:00Z"), commit(3, "2026-01-31T10:05:00Z"))
    assert stays(back, Keep(newest=1, hours=9)) == [2, 3], "within an hour the newer step counts, whatever its minute"
    future = log(commit(1, "2199-01-01T00:00:00Z"), commit(2, "2026-01-31T10:00:00Z"), commit(3, "2026-01-31T11:00:00Z"))
    assert stays(future, Keep(newest=1, hours=2)) == [2, 3], "one from the future keeps no place of those that came after it"
    odd = log(*[commit(n, time) for n, time in enumerate(["", "never", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:00"])])
    assert stays(odd, Keep(newest=1, hours=9)) == [3]
    assert stays(log(commit(1, ""), commit(2, "")), Keep(newest=1, hours=9)) == [2]
    assert stays(log(commit(1, ""), commit(2, "2026-01-31T10:00:00Z")), Keep(newest=1, hours=9)) == [2]
    zones = log(commit(1, "2026-01-31T12:30:00+02:00"), commit(2, "2026-01-31T10:40:00.000Z"))
    assert stays(zones, Keep(newest=1, hours=9)) == [2], "the same hour in UTC"


def test_B10_b_the_best_stay_beside_the_newest() -> None:
    state = log(*map(commit, [1, 2, 3, 4]))
    values = logged(s1=0.1, s2=0.5, s3=0.3)
    assert stays(state, Keep(newest=1, best=Best(metric="m")), values) == [1, 4]
    assert stays(state, Keep(newest=1, best=Best(metric="m", num=2)), values) == [1, 3, 4]
    assert stays(state, Keep(newest=1, best=Best(metric="m", largest=True)), values) == [2, 4]
    assert stays(state, Keep(newest=1, best=Best(metric="m", num=9)), values) == [1, 2, 3, 4]
    assert stays(state, Keep(newest=1, best=Best(metric="m")), {}) == [4], "one that has not logged it does not count"


@pytest.mark.parametrize("largest", [False, True])
def test_nan_and_infinities_are_never_best_and_of_equal_ones_the_older_is(largest: bool) -> None:
    state, keep = log(*map(commit, [1, 2, 3, 4, 5, 6])), Keep(newest=1, best=Best(metric="m", largest=largest))
    assert stays(state, keep, logged(s1=math.nan, s2=math.inf, s3=-math.inf, s4=7.0, s5=7.0)) == [4, 6]
    assert stays(state, keep, logged(s1=math.nan)) == [6]


def test_I2_a_checkpoint_whose_value_cannot_be_known_stays() -> None:
    state, keep = log(*map(commit, [1, 2, 3])), Keep(newest=1, best=Best(metric="m"))
    verdicts = {verdict.commit.step: verdict for verdict in judge(state, keep, logged(s1=None, s2=0.5), {})}
    assert verdicts[1].stays and "cannot be read" in verdicts[1].reasons[0]
    assert verdicts[2].reasons == ("the best by m: 0.5",)


def test_rules_add_up_and_each_reason_is_given() -> None:
    state = log(*[commit(step, f"2026-01-31T{step // 60:02d}:{step % 60:02d}:00Z", milestone=step == 30) for step in range(0, 200, 10)])
    keep = Keep(newest=2, every_steps=100, hours=2, best=Best(metric="m"), reach_back=70)
    found = {v.commit.step: v.reasons for v in judge(state, keep, logged(s50=0.25), {}) if v.stays}
    assert found == {
        30: ("milestone",),
        50: ("the best by m: 0.25",),
        100: ("the first from step 100 on",),
        120: ("going back 70 steps may need it",),
        170: ("the newest of the hour 2026-01-31T02Z",),
        180: ("among the newest 2",),
        190: ("among the newest 2", "the newest of the hour 2026-01-31T03Z"),
    }
    alone = [Keep(newest=2), Keep(newest=1, every_steps=100), Keep(newest=1, hours=2), Keep(newest=1, best=Best(metric="m"))]
    assert set(found) == {step for one in (*alone, Keep(newest=1, reach_back=70)) for step in stays(state, one, logged(s50=0.25))}


def test_what_goes_is_told_why() -> None:
    generations = (
        Generation(number=0, parent=None, base_step=0, nonce="0", world_size=1),
        Generation(number=1, parent=None, base_step=0, nonce="1", world_size=1),
        Generation(number=2, parent=1, base_step=20, nonce="2", world_size=1),
    )
    commits = (commit(5), *[commit(step, generation=1) for step in (10, 20, 30)], commit(25, generation=2), commit(40, generation=2))
    condemned = (CondemnEntry(step=25, generation=2, objects=(), reason="x"),)
    state = LogState(generations=generations, commits=commits, condemned=condemned)
    found = {v.commit.step: (v.stays, v.reasons) for v in judge(state, Keep(newest=1), {}, {(20, 1): "a save under way needs it"})}
    assert found == {
        5: (True, ("a history from before a fresh start",)),
        10: (False, ("no rule keeps it",)),
        20: (True, ("a save under way needs it",)),
        25: (False, ("damaged",)),
        30: (False, ("the run went on from an earlier step",)),
        40: (True, ("the newest",)),
    }


@pytest.mark.parametrize("seed", range(20))
def test_I2_whatever_the_rules_the_newest_and_the_milestones_stay(seed: int) -> None:
    dice = random.Random(seed)
    commits = [
        commit(
            step,
            dice.choice(["", "x", f"20{dice.randint(0, 99):02d}-01-31T{dice.randint(0, 23):02d}:00:00Z"]),
            milestone=dice.random() < 0.2,
        )
        for step in sorted(dice.sample(range(10_000), dice.randint(1, 40)))
    ]
    values = {(c.step, 0): dice.choice([math.nan, None, dice.gauss(0, 1)]) for c in commits if dice.random() < 0.7}
    best = Best(metric="m", largest=dice.random() < 0.5, num=dice.randint(1, 5)) if dice.random() < 0.5 else None
    keep = Keep(newest=dice.randint(1, 5), every_steps=dice.choice([None, 1, 1000]), hours=dice.choice([0, 3]), best=best)
    state = log(*commits)
    there = stays(state, keep, values)
    assert {commits[-1].step, *(c.step for c in commits if c.milestone)} <= set(there)
    assert there == stays(log(*(c for c in commits if c.step in there)), keep, values), "asked again, nothing more goes"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *[("keep", value, "give a whole number of at least 1") for value in (0, -1, 1.5, True, "3")],
        *[("keep_every", value, "such as") for value in ("0 steps", "-3 steps", "1h", "often", 5, "", "1000")],
        *[("keep_hours", value, "whole number") for value in (0, -1, "24h", 1.5, True)],
        ("keep_hours", 10**9, "at most"),
        *[("keep_best", value, "name of a logged metric") for value in ("", " ", 3, "max", "max 3", "val_loss max 0", "val_loss 0")],
        ("keep_best", "step", "every row has the number"),
        ("keep_best", "/x max", "a name begins with"),
    ],
)  # fmt: skip
def test_B10_c_nonsense_is_refused_with_the_options_name_and_the_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: .*{remedy}".replace("(", r"\(")):
        rules({name: value})


def test_what_people_write_is_what_is_kept() -> None:
    assert rules(dict.fromkeys(CHECKS)) == Keep()
    assert rules({"keep": 5, "keep_every": " 1000 steps", "keep_hours": 24, "keep_best": "val loss"}) == Keep(
        newest=5, every_steps=1000, hours=24, best=Best(metric="val loss")
    )
    for text, wanted in {
        "val_loss": Best(metric="val_loss"),
        "val_loss 3": Best(metric="val_loss", num=3),
        "eval/acc max": Best(metric="eval/acc", largest=True),
        " eval/acc  max  3 ": Best(metric="eval/acc", largest=True, num=3),
        "top 5 min": Best(metric="top 5"),
    }.items():
        assert rules({"keep_best": text}).best == wanted
    assert told(rules({"keep": 2, "keep_every": "10 steps", "keep_hours": 3, "keep_best": "acc max 4"})) == (
        "the newest 2, milestones, one every 10 steps, one per hour for 3 hours, the best 4 by acc (largest)"
    )
