"""`run.update()`: an update of several passes and optimizers is one transaction, exact at any number of ranks and whoever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import Tiny, loss_of, open_run, samples, train
from tests.rigs.torture_runs import ROOT, finish, journal
from unbroken.step.exchange import Exchange, ExchangeFailed
from unbroken.step.update import NO_LOSS

SCRIPT = str(ROOT / "tests/rigs/adversaries.py")
GAN = str(ROOT / "examples/train_gan.py")
STEPS = 7
SLOW = ((0, "scatter"), (1, "gather"), (1, "gather late"), (1, "scatter late"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted process."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run_ranks([SCRIPT, str(folder), str(STEPS)], 1, ENVIRONMENT)
    return folder


def launched(folder: Path, *, ranks: int, faults: Sequence[Mapping[str, Any]] = (), **env: str) -> int:
    """The same under the launcher; how often it started the workers again."""
    own = os.environ | ENVIRONMENT | env
    if faults:
        own |= {"UNBROKEN_FAULTS": json.dumps(list(faults)), "UNBROKEN_FAULT_LOG": f"{folder}.faults"}
    command = [sys.executable, "-m", "unbroken", "run", "--json", "--nproc-per-node", str(ranks), SCRIPT, str(folder), str(STEPS)]
    process = subprocess.Popen(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    code, out, err = finish(process)
    assert code == 0, err
    return int(json.loads(out.splitlines()[-1])["restarts"])


def require_exact(folder: Path, reference: Path) -> None:
    certificate = unbroken.open(folder).certify(reference)
    assert (certificate.grade, certificate.samples_exactly_once) == ("exact", True), certificate.problems


@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 7))])
def test_I13_I14_passes_weights_and_own_steps_have_one_root_at_every_world_size(tmp_path: Path, reference: Path, ranks: int) -> None:
    run_ranks([SCRIPT, str(tmp_path / "run"), str(STEPS)], ranks, ENVIRONMENT)
    require_exact(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("ranks", "first", "second"),
    [(3, "step.optimizer", "step.forward"), (4, "step.reduce", "step.optimizer"), (1, "step.optimizer", "step.applied")],
)
def test_I8_a_kill_between_two_passes_leaves_no_trace(tmp_path: Path, reference: Path, ranks: int, first: str, second: str) -> None:
    faults = [
        {"at": first, "step": 3, "rank": ranks - 1, "generation": 0, "action": "kill"},
        {"at": second, "step": 5, "rank": 0, "generation": 1, "action": "kill"},
    ]
    assert launched(tmp_path / "run", ranks=ranks, faults=faults) == 2
    require_exact(tmp_path / "run", reference)
    assert unbroken.open(tmp_path / "run").certify().world_sizes == [ranks] * 3


@pytest.mark.parametrize(
    ("turn", "place"),
    [(0, "gather"), (1, "scatter"), (0, "gather late"), *(pytest.param(turn, f"{place}", marks=pytest.mark.slow) for turn, place in SLOW)],
)
def test_I8_a_collective_that_fails_in_any_pass_sends_all_back_to_a_snapshot(
    tmp_path: Path, reference: Path, turn: int, place: str
) -> None:
    """Late: rank 1 fails after the last collective of the pass, which the others have seen succeed: their optimizers may have run."""
    assert launched(tmp_path / "run", ranks=3, FAIL=f"5 {turn} 1 {place}") == 1
    require_exact(tmp_path / "run", reference)
    records = journal(tmp_path / "run")
    assert not [r for r in records if r.get("name") == "refused"], "nothing is tried again in place"
    assert {r["attempt"] for r in records if r["type"] == "step"} == {0}


@pytest.mark.timeout(300)
def test_the_gan_example_ends_in_one_root_wherever_it_is_killed(tmp_path: Path) -> None:
    assert len(Path(GAN).read_text().splitlines()) <= 60
    run_ranks([GAN, str(tmp_path / "whole")], 1, ENVIRONMENT)
    faults = json.dumps([{"at": "step.optimizer", "step": 18, "rank": 2, "generation": 0, "action": "kill"}])
    command = [sys.executable, "-m", "unbroken", "run", "--json", "--nproc-per-node", "3", GAN, str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT | {"UNBROKEN_FAULTS": faults}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["restarts"] == 1
    require_exact(tmp_path / "run", tmp_path / "whole")


# -- in this process -------------------------------------------------------------------------------------------------------------


def own_loop(directory: Path, steps: int, *, inside: bool, **options: Any) -> list[float]:
    """What run.step(clip_grad_norm=1.0) does, by hand."""
    run = open_run(directory, total_steps=steps, **options)
    optimizer = next(iter(run._stack.parts.optimizers.values()))
    losses = []
    for batch in run:
        if not inside:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
        with run.update() as update:
            if inside:
                for micro in batch:
                    micro.backward(loss_of(run.model, micro))
                update.reduce()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(run.loss)
        run.save(wait=True)
    return losses


@pytest.mark.parametrize(("inside", "options"), [(False, {}), (True, {}), (True, {"reduce": "ring", "units": 1})])
def test_I13_one_pass_by_hand_is_what_run_step_does(tmp_path: Path, inside: bool, options: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", 5, **options)
    assert own_loop(tmp_path / "run", 2, inside=inside, **options) + own_loop(tmp_path / "run", 5, inside=inside, **options) == whole
    require_exact(tmp_path / "run", tmp_path / "whole")


def lbfgs(directory: Path, steps: int) -> list[float]:
    """Full batches, a strong Wolfe line search; every evaluation is a pass over the batch."""
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    run = open_run(
        directory, model=model, optimizer=optimizer, total_steps=steps, units=3, data=unbroken.Batches(samples(), global_batch=64, seed=1)
    )
    losses = []
    for batch in run:
        with run.update() as update:

            def closure(batch: Any = batch, update: Any = update) -> float:
                for micro in batch:
                    micro.backward(loss_of(model, micro))
                return float(update.reduce())

            optimizer.step(closure)
        losses.append(run.loss)
    return losses


def test_I13_lbfgs_goes_on_exactly(tmp_path: Path) -> None:
    whole = lbfgs(tmp_path / "whole", 4)
    assert lbfgs(tmp_path / "run", 2) + lbfgs(tmp_path / "run", 4) == whole
    assert whole[-1] < whole[0]
    require_exact(tmp_path / "run", tmp_path / "whole")


def test_a_step_without_a_loss_is_certified_and_told_apart_from_nan(tmp_path: Path) -> None:
    def life(steps: int) -> None:
        run = open_run(tmp_path / "run", total_steps=steps)
        for batch in run:
            for micro in batch:
                loss_of(run.model, micro).backward()  # type: ignore[no-untyped-call]
                micro.backward(None)
            run.step()
            assert run.loss != run.loss

    life(2)
    life(4)
    assert [r["loss"] for r in journal(tmp_path / "run") if r["type"] == "step"] == [NO_LOSS] * 4
    certificate = unbroken.open(tmp_path / "run").certify()
    assert (certificate.grade, certificate.steps) == ("sequence", 4), certificate.problems
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "run").losses_equal is None


@pytest.mark.parametrize("inside", [False, True])
def test_I8_a_failed_collective_in_one_process_loses_the_step_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    whole = own_loop(tmp_path / "whole", 4, inside=inside)
    genuine, fails = Exchange.scatter, iter([False, False, True])

    def scatter(self: Exchange, *given: Any) -> torch.Tensor:
        if next(fails):
            raise ExchangeFailed("a peer has hung up")
        return genuine(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "scatter", scatter)
        with pytest.raises(unbroken.StepLost, match=r"step 3: a collective failed inside run\.update\(\).*hung up"):
            own_loop(tmp_path / "run", 4, inside=inside)
    assert own_loop(tmp_path / "run", 4, inside=inside) == whole[2:]
    require_exact(tmp_path / "run", tmp_path / "whole")


def test_a_scheduler_that_was_stepped_in_a_block_that_failed_does_not_hide_the_error(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = open_run(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler, total_steps=3)
    with pytest.raises(ZeroDivisionError):
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(model, micro))
            with run.update():
                optimizer.step()
                scheduler.step()
                if batch.step == 2:
                    raise ZeroDivisionError
    with pytest.warns(unbroken.SaveWarning, match="step 2 was left half-way"):
        run.close()


def test_an_error_after_a_reduction_is_a_step_left_half_way(tmp_path: Path) -> None:
    train(tmp_path / "whole", 4)
    own_loop(tmp_path / "run", 2, inside=True)
    run = open_run(tmp_path / "run", total_steps=4)
    with pytest.raises(ZeroDivisionError):
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
            with run.update():
                next(iter(run._stack.parts.optimizers.values())).step()
                raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="left half-way"):
        run.save()
    with pytest.warns(unbroken.SaveWarning, match="step 3 was left half-way"):
        run.close()
    assert unbroken.open(tmp_path / "run").steps()[-1].step == 2
    own_loop(tmp_path / "run", 4, inside=True)
    require_exact(tmp_path / "run", tmp_path / "whole")


def test_an_error_before_any_reduction_leaves_the_last_boundary_whole(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", total_steps=4, lose_at_most="100 steps")
    with pytest.raises(ZeroDivisionError):
        for batch in run:
            with run.update() as update:
                for micro in batch:
                    micro.backward(loss_of(run.model, micro))
                if batch.step == 3:
                    raise ZeroDivisionError
                update.reduce()
    run.close()
    assert unbroken.open(tmp_path / "run").steps()[-1].step == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("with run.update(): pass", "without update.reduce"),
        ("work(); opt.step()", "inside `with run.update"),
        ("with run.update() as u: work(); opt.step()", "before update.reduce"),
        ("with run.update() as u: work(); u.reduce(); work()", "after the last pass"),
        ("with run.update() as u: work(); u.reduce(); work(); opt.step()", "before update.reduce"),
        ("with run.update() as u: u.reduce()", "0 of 2 units"),
        ("with run.update() as u: work(); u.reduce(); u.reduce()", "0 of 2 units"),
        ("with run.update() as u: work(); work()", "iterated before"),
        ("work(); run.step(); run.update().__enter__()", "in place of run.step"),
        ("with run.update() as u: work(); u.reduce(); run.step()", "step.. inside run.update"),
        ("with run.update() as u: work(); u.reduce(); run.update().__enter__()", "left half-way|once per batch"),
        ("with run.update() as u: work(); u.reduce()\nu.reduce()", "belongs into its block"),
        ("next(iter(batch)).backward(torch.ones((), requires_grad=True)); run.update().__enter__()", "1 of 2 units"),
    ],
)  # fmt: skip
def test_wrong_uses_say_what_to_do(tmp_path: Path, body: str, words: str) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = open_run(tmp_path / "run", model=model, optimizer=optimizer, total_steps=2)

    def work() -> None:
        for micro in batch:
            micro.backward(loss_of(model, micro))

    names = {"run": run, "opt": optimizer, "work": work, "torch": torch}
    with pytest.raises(RuntimeError, match=words):
        for batch in run:
            exec(body, names | {"batch": batch})
    assert run.completed <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unbroken.SaveWarning)
        run.close()


def test_update_outside_the_loop_is_refused(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", total_steps=1)
    with pytest.raises(RuntimeError, match="into the loop"), run.update():
        pass
    run.close()


def test_the_units_come_again_with_other_numbers_and_the_same_data(tmp_path: Path) -> None:
    """The first time they are loaded again, later they are held."""
    run = open_run(tmp_path / "run", total_steps=3)
    seen: list[list[Any]] = []
    for batch in run:
        with run.update() as update:
            for _ in range(3):
                seen.append([])
                for micro in batch:
                    seen[-1].append((micro.ids.tolist(), micro.x.tolist(), float(torch.rand(()))))
                    micro.backward(loss_of(run.model, micro))
                update.reduce()
    for step in range(3):
        passes = seen[3 * step : 3 * step + 3]
        assert passes[0] and all([unit[:2] for unit in one] == [unit[:2] for unit in passes[0]] for one in passes)
        assert len({unit[2] for one in passes for unit in one}) == 6
    assert unbroken.open(tmp_path / "run").certify().samples_exactly_once


def test_a_scaler_is_the_loops_own_too_and_an_overflow_is_a_skipped_step(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run = open_run(tmp_path / "run", model=model, optimizer=optimizer, scaler=scaler, total_steps=3)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(model, micro) * (float("inf") if batch.step == 2 else 1.0))
        with run.update():
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert [r["status"] for r in journal(tmp_path / "run") if r["type"] == "step"] == ["applied", "skipped", "applied"]
    assert scaler.get_scale() == 4.0
