"""Steps whose numbers go bad: which are applied, what becomes a checkpoint, and that neither ranks nor failures change it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import unbroken
from tests.rigs.anomalous_run import Case, loss_of, open_run, train
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import commits, daemon_pid, end_daemon
from tests.rigs.torture_runs import journal
from unbroken.cli.app import app
from unbroken.core.errors import GaveUp

WITHOUT_13 = 210 - 13


pytestmark = pytest.mark.usefixtures("runtime")


class Life:
    """One run of a case in this process, and what it left."""

    def __init__(self, directory: Path, case: Case, **options: Any) -> None:
        self.directory = directory
        self.extras: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as self.warned:
            warnings.simplefilter("always")
            self.run = open_run(directory, case, self.extras, **options)
            self.seen = train(self.run, case, self.extras)

    @property
    def w(self) -> float:
        return float(self.run.model.w.item())

    @property
    def anomalies(self) -> list[str]:
        return [str(w.message) for w in self.warned if issubclass(w.category, unbroken.AnomalyWarning)]

    def counted(self) -> tuple[int, int]:
        """(applied, skipped)."""
        return self.run._counters.applied, self.run._counters.skipped


def skipped(directory: Path) -> dict[int, str]:
    """Steps that survive and were not applied, as the certificate names them; it must hold, and every checkpoint be finite."""
    archive = unbroken.open(str(directory))
    certificate = archive.certify()
    assert (certificate.certified, certificate.problems, certificate.samples_exactly_once) == (True, [], True)
    for commit in commits(directory):
        state = archive.load(commit.step)
        assert all(bool(value.isfinite().all()) for value in state["model"]["parameters"].values()), commit.step
    return {one.step: one.reason for one in certificate.skipped}


def ranks(directory: Path, case: Case, world_size: int = 3, **env: str) -> dict[str, Any]:
    """The same on several processes; all must say the same."""
    out = run_ranks(["-m", "tests.rigs.anomalous_run", str(directory), msgspec.json.encode(case).decode()], world_size, env)
    told = {text.splitlines()[-1] for text in out}
    assert len(told) == 1, told
    found: dict[str, Any] = json.loads(told.pop())
    return found


# -- B38 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 1e6])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_B38_a_bad_batch_is_skipped_and_every_other_is_applied_once(directory: Path, kind: str, clip: float | None) -> None:
    life = Life(directory, Case(bad={13: kind}, clip=clip))
    assert life.w == WITHOUT_13
    assert life.counted() == (19, 1)
    assert life.run.completed == 20
    found = skipped(directory)
    assert list(found) == [13]
    assert ("loss is nan" if kind == "loss" else "gradient") in found[13]
    went_back = [step for step, done in life.seen if not done]
    assert went_back == ([14] if kind == "gradient" and clip is None else [])  # a loss, a norm are looked at before they do harm
    assert len(life.anomalies) == 1 and "step 13 is not applied" in life.anomalies[0]
    assert commits(directory)[-1].step == 20


def test_B38_after_going_back_batches_are_there_once_each(directory: Path) -> None:
    """Poison is seen at 14, the newest checkpoint is of step 10: 11, 12 and 13 come again, 13 is skipped."""
    life = Life(directory, Case(bad={13: "gradient"}))
    assert [step for step, _ in life.seen] == [*range(1, 15), *range(11, 21)]
    generations = [record["base_step"] for record in journal(directory) if record["type"] == "begin"]
    assert generations == [0, 10]
    (back,) = [record for record in journal(directory) if record.get("name") == "rollback"]
    assert back["step"] == 14 and "/model/parameters/w holds NaN" in back["facts"]["reason"]


def test_B38_B23_everything_goes_back_together(directory: Path, tmp_path: Path) -> None:
    """Weights, optimizer, EMA, rate, random streams and data: the end has the bits of a run that saw the poison at once."""
    late = Life(directory, Case(bad={13: "gradient"}, adam=True))
    at_once = Life(tmp_path / "other", Case(bad={13: "gradient"}, adam=True, clip=1e6))
    end_daemon(tmp_path / "other")
    assert [done for _, done in at_once.seen] == [True] * 20
    assert not all(done for _, done in late.seen)
    assert commits(directory)[-1].state_root == commits(tmp_path / "other")[-1].state_root
    certificate = unbroken.open(str(directory)).certify(str(tmp_path / "other"))
    assert (certificate.grade, certificate.problems) == ("exact", [])


def test_B38_the_average_and_the_rate_are_those_of_the_steps_that_count(directory: Path) -> None:
    life = Life(directory, Case(bad={13: "gradient"}))
    assert int(life.extras["ema"].n_averaged) == 20  # run.step() is True for a skipped step, too: the loop's body has run once for each
    assert life.run._stack.parts.schedulers[""].last_epoch == 19
    assert all(p.grad is None for p in life.run.model.parameters())


OWN = [
    {"bad": {13: "loss"}, "passes": 1},
    {"bad": {13: "gradient"}, "passes": 2},
    {"bad": {13: "huge"}, "passes": 1, "adam": True},
    {"bad": {13: "gradient"}, "passes": 1, "tells_loss": False},
    {"bad": {20: "gradient"}, "passes": 2},
]


@pytest.mark.parametrize("fields", OWN)
def test_B38_poison_of_an_update_of_the_loops_own_is_passed_over(directory: Path, fields: dict[str, Any]) -> None:
    """Nothing can be skipped beforehand; so all go back, and the replay passes the step over."""
    case = Case(**fields)
    (bad,) = case.bad
    life = Life(directory, case)
    assert life.run.completed == 20 and life.counted() == (19, 1)
    if not case.adam:
        assert life.w == case.passes * (210 - bad)
    found = skipped(directory)
    assert list(found) == [bad] and "makes the state non-finite" in found[bad]
    assert commits(directory)[-1].step == 20
    assert life.seen.count((bad, True)) == 2, "once as it came, once in the careful replay, and then it is passed over"
    if "loss" in case.bad.values() or case.passes > 1:  # a loss of this very step has told
        after = [step for step, _ in life.seen][life.seen.index((bad, True)) + 1]
        assert after <= bad, "it is gone back from at once"


def test_B38_a_bad_loss_that_an_own_update_holds_back_leaves_nothing_to_go_back_for(directory: Path) -> None:
    """The loss is NaN, its gradient is not: the loop has applied it, and the state is whole."""
    life = Life(directory, Case(bad={13: "odd"}, passes=1))
    assert life.w == 210 and life.counted() == (20, 0)
    assert [step for step, _ in life.seen] == [*range(1, 21)]
    assert [r["loss"] for r in journal(directory) if r["type"] == "step" and r["step"] == 13] == ["7ff8000000000001"]


def test_B38_a_run_that_is_to_stop_at_nan_stops_before_an_own_update_applies_it(directory: Path) -> None:
    case = Case(bad={13: "loss"}, passes=1, rules={"nan": "stop"})
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    with pytest.raises(GaveUp, match="step 13: the loss is nan"):
        train(run, case, extras)
    assert run.model.w.item() == sum(range(1, 13))
    run.close()
    assert commits(directory)[-1].step <= 12


def test_B38_losses_that_are_not_told_are_no_bad_ones(directory: Path) -> None:
    life = Life(directory, Case(tells_loss=False, passes=1))
    assert life.w == 210 and life.counted() == (20, 0) and not life.anomalies


def test_B38_I13_three_ranks_go_back_from_an_own_update_like_one(directory: Path, tmp_path: Path) -> None:
    case = Case(bad={13: "gradient"}, passes=2, units=3, unit=1, adam=True)
    found = ranks(directory, case)
    assert found["completed"] == 20 and list(skipped(directory)) == [13]
    Life(tmp_path / "other", case)
    end_daemon(tmp_path / "other")
    certificate = unbroken.open(str(directory)).certify(str(tmp_path / "other"))
    assert (certificate.grade, certificate.problems) == ("exact", [])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_B38_accumulating_two_one_bad_half_takes_the_whole_update(directory: Path, kind: str) -> None:
    life = Life(directory, Case(bad={13: kind}, units=2, unit=1))
    assert (life.w, life.counted()) == (WITHOUT_13, (19, 1))
    assert list(skipped(directory)) == [13]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_B38_two_bad_batches(directory: Path, kind: str) -> None:
    life = Life(directory, Case(bad={13: kind, 14: kind}))
    assert (life.w, life.counted()) == (210 - 13 - 14, (18, 2))
    assert list(skipped(directory)) == [13, 14]


@pytest.mark.parametrize(("kind", "rules"), [("loss", {}), ("gradient", {}), ("gradient", {"max_skipped": 100})])
def test_B38_when_all_are_bad_the_run_gives_up_and_the_newest_checkpoint_is_a_good_one(
    directory: Path, kind: str, rules: dict[str, Any]
) -> None:
    case = Case(bad=dict.fromkeys(range(13, 21), kind), rules=rules)
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    words = "steps in a row could not be applied, the last is step 18" if not rules else "going back 3 times brought no new checkpoint"
    with pytest.raises(GaveUp, match=words) as gave_up, pytest.warns(unbroken.AnomalyWarning, match="step 13 is not applied"):
        train(run, case, extras)
    assert gave_up.value.exit_code == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unbroken.SaveWarning)  # where the last snapshot was poisoned, and nobody has heard of it yet
        run.close()  # as a `finally` does: nothing of the end is saved
    assert commits(directory)[-1].step == 10
    state = unbroken.open(str(directory)).load()
    assert state["model"]["parameters"]["w"].item() == 55


def test_B38_one_ranks_nan_is_every_ranks_decision(tmp_path: Path) -> None:
    """Unit 1 of three is bad, which rank 1 of three computes: once by its loss, once by its gradient alone."""
    case = Case(bad={7: "loss", 13: "gradient"}, units=3, unit=1)
    assert ranks(tmp_path / "run", case) == {"w": 210.0 - 7 - 13, "completed": 20}
    found = skipped(tmp_path / "run")
    assert found == {7: "the loss is nan (that of unit 1 on rank 1 is nan)", 13: "the gradient of w holds NaN"}
    life = Life(tmp_path / "alone", case)
    end_daemon(tmp_path / "alone")
    assert life.w == 210 - 7 - 13
    assert commits(tmp_path / "alone")[-1].state_root == commits(tmp_path / "run")[-1].state_root


def test_B38_I13_steps_in_a_row_are_counted_over_interruptions(directory: Path) -> None:
    """Three are skipped, the run ends with them in its state and goes on elsewhere: the sixth is one too many, as without a stop."""
    case = Case(bad=dict.fromkeys(range(13, 21), "loss"))
    assert Life(directory, case, total_steps=15).counted() == (12, 3)
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    with pytest.raises(GaveUp, match="6 steps in a row could not be applied, the last is step 18"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run, case, extras)
    run.close()
    assert commits(directory)[-1].step == 15


def test_B38_the_certificate_says_to_people_what_was_skipped(directory: Path) -> None:
    Life(directory, Case(bad={13: "gradient"}))
    result = CliRunner().invoke(app, ["certify", str(directory)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "skipped: step 13: the gradient of w holds NaN" in result.output
    assert re.search(r"num skipped +1\b.*num rollbacks +1\b", result.output, re.S)


# -- what poison is -----------------------------------------------------------------------------------------------------------


def test_poison_in_the_optimizers_state_only_is_noticed_by_the_daemon(directory: Path) -> None:
    """The square of a huge gradient overflows in Adam's second moment: weights and losses stay finite for ever."""
    life = Life(directory, Case(bad={12: "huge"}, adam=True, pause_s=0.05))
    assert list(skipped(directory)) == [12]
    (poisoned,) = [record for record in journal(directory) if record.get("name") == "poisoned"]
    assert poisoned["step"] == 15 and "/optimizer/state/w/exp_avg_sq holds inf" in poisoned["facts"]["reason"]
    assert life.run.completed == 20
    first, second = [record for record in journal(directory) if record.get("name") == "rollback"]
    assert first["step"] < 20 and "exp_avg_sq" in first["facts"]["reason"]
    assert second["facts"]["reason"].startswith("after step 12 ")


def test_poison_of_the_last_step_is_noticed_before_the_run_ends(directory: Path) -> None:
    life = Life(directory, Case(bad={20: "gradient"}))
    assert (life.w, life.counted()) == (190, (19, 1))
    assert commits(directory)[-1].step == 20


def test_a_mask_of_minus_infinity_and_an_infinite_best_are_no_poison(directory: Path) -> None:
    life = Life(directory, Case())
    assert (life.w, life.counted(), life.anomalies) == (210, (20, 0), [])
    assert skipped(directory) == {}


def test_what_is_born_poisoned_is_refused_by_name(directory: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[0, 1] = math.inf
    options: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": unbroken.Batches(torch.utils.data.TensorDataset(torch.ones(4, 2)), global_batch=2),
    }
    with pytest.raises(ValueError, match="/model/parameters/weight holds inf before the first step"):
        unbroken.Run(directory, **options)
    model.weight.requires_grad_(False)  # a mask that no step may change
    unbroken.Run(directory, **options).close()


def test_ignore_is_as_if_nobody_looked(directory: Path) -> None:
    life = Life(directory, Case(bad={13: "gradient"}, rules={"nan": "ignore"}))
    assert math.isnan(life.w) and life.counted() == (20, 0)
    assert commits(directory)[-1].step == 20 and life.anomalies == []


def test_a_checkpoint_that_ignore_has_poisoned_is_passed_over_once_somebody_looks(directory: Path) -> None:
    Life(directory, Case(bad={13: "gradient"}, rules={"nan": "ignore"}, steps=20), total_steps=16)
    life = Life(directory, Case(bad={13: "gradient"}), keep=9)
    assert life.w == WITHOUT_13
    assert [step for step, _ in life.seen][:2] == [17, 11]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_stop_ends_the_run_at_the_first(directory: Path, kind: str) -> None:
    case = Case(bad={13: kind}, rules={"nan": "stop"})
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    with pytest.raises(GaveUp, match="step 13: the loss is nan" if kind == "loss" else "step 14: the loss is nan|holds NaN"):
        train(run, case, extras)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unbroken.SaveWarning)
        run.close()
    assert commits(directory)[-1].step == 10


# -- scalers, plain loops -----------------------------------------------------------------------------------------------------


def test_overflows_stay_the_scalers_own_business(directory: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    life = Life(directory, Case(bad=dict.fromkeys(range(3, 12), "scaled"), rules={"max_skipped": 0}), scaler=scaler)
    assert (life.w, life.counted(), life.anomalies) == (210 - sum(range(3, 12)), (11, 9), [])
    assert scaler.get_scale() == 8.0 / 2**9
    certificate = unbroken.open(str(directory)).certify()
    assert (certificate.num_skipped, certificate.skipped, certificate.num_rollbacks) == (9, [], 0)


@pytest.mark.parametrize(("kind", "scale"), [("loss", 4.0), ("odd", 8.0)])
def test_a_bad_loss_is_shown_to_the_scaler_as_ever_and_never_applied(directory: Path, kind: str, scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    life = Life(directory, Case(bad={13: kind}), scaler=scaler)
    assert (life.w, life.counted(), scaler.get_scale(), life.anomalies) == (WITHOUT_13, (19, 1), scale, [])
    assert skipped(directory) == {13: "the loss is nan (that of unit 0 on rank 0 is nan)"}


def test_a_bad_loss_with_a_finite_gradient_is_not_applied_either(directory: Path) -> None:
    life = Life(directory, Case(bad={13: "odd"}))
    assert (life.w, life.counted()) == (WITHOUT_13, (19, 1))


@pytest.mark.parametrize("tells_loss", [True, False])
def test_a_loss_that_a_plain_loop_does_not_tell_is_not_taken_for_a_bad_one(directory: Path, tells_loss: bool) -> None:
    life = Life(directory, Case(reduce="ring", tells_loss=tells_loss))
    assert (life.w, life.counted(), life.anomalies) == (210, (20, 0), [])


@pytest.mark.parametrize(("tells_loss", "kind"), [(True, "loss"), (True, "gradient"), (False, "gradient"), (False, "loss")])
def test_a_plain_loop_is_guarded_as_far_as_it_tells(directory: Path, tells_loss: bool, kind: str) -> None:
    life = Life(directory, Case(bad={13: kind}, reduce="ring", tells_loss=tells_loss))
    assert (life.w, life.counted()) == (WITHOUT_13, (19, 1))
    assert list(skipped(directory)) == [13]


# -- beside other things ------------------------------------------------------------------------------------------------------


def test_a_loop_that_waits_for_its_checkpoints_goes_back_instead_of_failing(directory: Path) -> None:
    case = Case(bad={13: "gradient"}, pause_s=0.0)
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    with pytest.warns(unbroken.AnomalyWarning, match="step 13 is not applied: the gradient of w holds NaN"):
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro, case))
            run.step()
            run.save(wait=True)
    assert run.model.w.item() == WITHOUT_13
    assert list(skipped(directory)) == [13]


def test_the_daemon_dies_before_the_run_goes_back(directory: Path) -> None:
    """Another daemon is started, and the disk has what is needed."""
    case = Case(bad={13: "gradient"})
    extras: dict[str, Any] = {}
    run = open_run(directory, case, extras)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro, case))
            if batch.step == 14 and run.model.w.isnan():
                os.kill(daemon_pid(directory) or 0, signal.SIGKILL)
            run.step()
            if batch.step == 10:
                run.save(wait=True)
    assert run.model.w.item() == WITHOUT_13
    assert list(skipped(directory)) == [13]


class Counting:
    """A loader of the user's own, which knows its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 20:
            self.place += 1
            yield torch.tensor([float(self.place)])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("kind", ["workers", "plain", "own"])
def test_every_kind_of_data_goes_back_with_the_weights(directory: Path, kind: str) -> None:
    numbers = torch.utils.data.TensorDataset(torch.arange(1, 21, dtype=torch.float32))
    if kind == "workers":
        data: Any = unbroken.Batches(numbers, global_batch=1, shuffle=False, epochs=1, num_workers=2)
    else:
        data = torch.utils.data.DataLoader(numbers, batch_size=1) if kind == "plain" else Counting()
    life = Life(directory, Case(bad={13: "gradient"}), data=data, total_steps=20)
    assert (life.w, life.counted()) == (WITHOUT_13, (19, 1))
    assert unbroken.open(str(directory)).certify().certified


def test_the_user_is_told_that_the_rules_have_changed(directory: Path) -> None:
    Life(directory, Case(), total_steps=5)
    with pytest.warns(unbroken.EnvironmentChanged, match="anomalies/nan: None -> stop"):
        open_run(directory, Case(rules={"nan": "stop"})).close()


def test_rules_of_another_type_are_refused(directory: Path) -> None:
    for wrong in ("nan", 3):
        with pytest.raises(ValueError, match=rf"anomalies={wrong!r}: give unbroken\.Anomalies"):
            open_run(directory, Case(), anomalies=wrong)


# -- spikes -------------------------------------------------------------------------------------------------------------------

RULE: dict[str, Any] = {"threshold": 100.0, "window": 6, "warmup": 4, "back": 3, "ahead": 2}


def spiky(action: str, bad: tuple[int, ...] = (13,), **changes: Any) -> Case:
    return Case(bad=dict.fromkeys(bad, "spike"), spike=RULE | {"action": action}, **changes)


def test_a_spike_is_told_and_applied(directory: Path) -> None:
    life = Life(directory, spiky("warn"))
    assert (life.w, life.counted()) == (210, (20, 0))
    assert len(life.anomalies) == 1 and "step 13: the loss" in life.anomalies[0] and "it is applied" in life.anomalies[0]
    assert [record["step"] for record in journal(directory) if record.get("name") == "spike"] == [13]


def test_a_spike_is_skipped(directory: Path) -> None:
    life = Life(directory, spiky("skip"))
    assert (life.w, life.counted()) == (WITHOUT_13, (19, 1))
    assert "is a spike" in skipped(directory)[13] and life.run.completed == 20


def test_a_spike_takes_a_window_of_data_with_it(directory: Path) -> None:
    """Seen at 13: 11 and 12 are undone, 13 to 15 are not computed; the loop never sees 11 to 15 again."""
    life = Life(directory, spiky("rollback"))
    assert (life.w, life.counted()) == (210 - sum(range(11, 16)), (15, 5))
    assert [step for step, _ in life.seen] == [*range(1, 14), *range(16, 21)]
    assert list(skipped(directory)) == [11, 12, 13, 14, 15]
    assert int(life.extras["ema"].n_averaged) == 15


def test_two_spikes_make_two_windows_that_do_not_meet(directory: Path) -> None:
    """The second spike is the first step after the window of the first: its own begins there."""
    life = Life(directory, spiky("rollback", (10, 13)))
    assert list(skipped(directory)) == [8, 9, 10, 11, 12, 13, 14, 15]
    assert life.w == 210 - sum(range(8, 16))


def test_a_window_that_reaches_back_to_the_birth(directory: Path) -> None:
    """The checkpoint that the window needs is kept although there are newer ones."""
    case = Case(bad={13: "spike"}, spike=RULE | {"action": "rollback", "back": 13}, every=2)
    life = Life(directory, case, keep=1)
    assert life.w == sum(range(16, 21))
    assert list(skipped(directory)) == list(range(1, 16))


def test_I13_the_window_is_the_same_wherever_the_run_was_interrupted(directory: Path, tmp_path: Path) -> None:
    """Stopped before, inside and after the window, with a checkpoint there each time."""
    case = spiky("rollback", (10, 13), adam=True)
    whole = Life(tmp_path / "whole", case)
    end_daemon(tmp_path / "whole")
    for stop in (7, 9, 12, 14, 17):
        Life(directory, case, total_steps=stop)
    parts = Life(directory, case)
    assert parts.w == whole.w
    certificate = unbroken.open(str(directory)).certify(str(tmp_path / "whole"))
    assert (certificate.grade, certificate.problems) == ("exact", [])
