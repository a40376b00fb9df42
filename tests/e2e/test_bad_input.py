"""What a user can get wrong: one error that says what is wrong and what to do, the right exit code, and nothing touched."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from tests.rigs import tiny_run
from tests.rigs.ranks import start_ranks
from tests.rigs.tiny_run import DATA_SEED, Tiny, bits_of, commits, end_daemon, files_of, loss_of, open_run, samples, train
from tests.rigs.torture_runs import ROOT
from unbroken.core.errors import SaveWarning
from unbroken.core.os import hostname
from unbroken.store.repository import Repository
from unbroken.store.sealed import FORMAT, seal
from unbroken.store.tiers.disk import DiskTier

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def script(folder: Path, body: str) -> str:
    """A training script whose folder is its first argument."""
    path = folder / "script.py"
    path.write_text("import os, sys\nfrom pathlib import Path\nfrom tests.rigs.tiny_run import *\ndirectory = Path(sys.argv[1])\n" + body)
    return str(path)


def launch(path: str, directory: Path, ranks: int = 1) -> tuple[dict[str, Any], str]:
    """The outcome of `unbroken run --json`, whose exit code it must also state, and what was said."""
    command = [sys.executable, "-m", "unbroken", "run", "--json", "--nproc-per-node", str(ranks), path, str(directory)]
    env = os.environ | ENVIRONMENT | {"TMPDIR": str(Path(path).parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert outcome["exit_code"] == done.returncode, done.stderr
    return outcome, done.stdout + done.stderr


def work(path: str, directory: Path) -> tuple[int, str]:
    """Exit code of a worker as the launcher would start it, and what it said."""
    command = [sys.executable, "-m", "unbroken.cluster.worker", path, str(directory)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has ended. Refused starts leave it as it is."""
    directory = tmp_path_factory.mktemp("bad_input") / "run"
    train(directory, 2, extras={"ema": {"w": torch.ones(3)}, "note": {"k": 1}})
    end_daemon(directory)
    return directory


def refused(directory: Path, model: nn.Module, **options: Any) -> unbroken.LayoutMismatch:
    """The error of a start with live objects that do not fit; it must leave them, and the folder, as they were."""
    for parameter in model.parameters():
        parameter.data.add_(0.25)
    given: dict[str, Any] = {"extras": {"ema": {"w": torch.zeros(3)}, "note": {"k": 2}}} | options
    live, stored, chance = bits_of(model), files_of(directory), random.getstate()
    extras = repr(given["extras"])
    with pytest.raises(unbroken.LayoutMismatch) as caught:
        open_run(directory, model=model, **given)
    end_daemon(directory)
    assert bits_of(model) == live, "the model was touched"
    assert repr(given["extras"]) == extras, "the extras were touched"
    assert random.getstate() == chance, "the random streams were touched"
    assert files_of(directory) | {"writer.json": b""} == stored | {"writer.json": b""}, "the folder was touched"
    assert caught.value.exit_code == 4
    return caught.value


# -- state that does not fit -----------------------------------------------------------------------------------------------------


def test_wrong_shapes_are_listed_in_one_error(committed: Path) -> None:
    error = refused(committed, Tiny(width=5))
    assert len(error.mismatched) == 7 and not error.missing and not error.unexpected
    assert "/model/parameters/body.0.weight: stored float32[3, 4], live float32[5, 4]" in str(error)
    assert "/model/buffers/body.1.running_mean: stored float32[3], live float32[5]" in str(error)


def test_wrong_dtypes_are_listed_in_one_error(committed: Path) -> None:
    error = refused(committed, Tiny(dtype=torch.float64))
    assert len(error.mismatched) == 9, "num_batches_tracked is an integer in both"
    assert "/model/parameters/frozen: stored float32[150, 150], live float64[150, 150]" in str(error)


def test_missing_and_extra_keys_are_listed_in_one_error_with_all_else(committed: Path) -> None:
    """Model, optimizer and extras differ at once."""
    model = Tiny()
    del model.frozen
    model.more = nn.Parameter(torch.zeros(2))
    model.body.append(nn.Linear(2, 2))
    error = refused(committed, model, extras={"ema": {"w": torch.zeros(4), "v": torch.zeros(1)}})
    assert error.missing == ("/model/parameters/body.4.bias", "/model/parameters/body.4.weight", "/model/parameters/more", "extras.ema.v")
    assert error.unexpected == ("/model/parameters/frozen", "extras.note")
    assert "extras.ema.w: float32[3] in the checkpoint, float32[4] in the target" in error.mismatched
    assert any("/optimizer/groups/0" in text and "'more'" in text for text in error.mismatched)


def test_other_extras_leave_the_model_untouched(committed: Path) -> None:
    assert refused(committed, Tiny(), extras={"ema": {"w": torch.zeros(4)}, "note": {"k": 2}}).mismatched
    assert refused(committed, Tiny(), extras={"note": {"k": 2}}).unexpected == ("extras.ema",)
    assert refused(committed, Tiny(), extras={}).unexpected == ("extras.ema", "extras.note")


@pytest.mark.parametrize("other", ["SGD", "two", "fewer groups"])
def test_another_optimizer_is_refused(committed: Path, other: str) -> None:
    model = Tiny()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if other == "two":
        optimizer = [torch.optim.AdamW(model.body[0].parameters()), torch.optim.AdamW(model.body[3].parameters())]
    elif other == "fewer groups":
        optimizer = torch.optim.AdamW([{"params": model.body[0].parameters()}, {"params": model.body[3].parameters()}])
    assert "/optimizer/groups" in str(refused(committed, model, optimizer=optimizer))


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    rates = torch.optim.lr_scheduler

    def made(model: nn.Module, make: Callable[[Any], Any]) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        return {"optimizer": optimizer, "scheduler": make(optimizer), "extras": {}}

    torch.manual_seed(3)
    model = Tiny()
    train(tmp_path / "run", 2, model=model, **made(model, lambda o: [rates.StepLR(o, 1, 0.5), rates.ConstantLR(o)]))
    end_daemon(tmp_path / "run")
    for make, words in (
        (lambda o: rates.StepLR(o, 1, 0.5), "/scheduler/1"),
        (lambda o: [rates.StepLR(o, 1, 0.5), rates.CosineAnnealingLR(o, 10)], "missing in the checkpoint: /scheduler/1/T_max"),
        (lambda o: [rates.ExponentialLR(o, 0.5), rates.ConstantLR(o)], "not in the live state: /scheduler/0/step_size"),
        (lambda o: None, "/scheduler"),
    ):
        model = Tiny()
        assert words in str(refused(tmp_path / "run", model, **made(model, make)))


def test_under_the_launcher_a_misfit_ends_with_4_and_is_not_tried_again(committed: Path, tmp_path: Path) -> None:
    body = """
model = Tiny(width=5)
before = bits_of(model)
try:
    open_run(directory, model=model)
finally:
    print("untouched", bits_of(model) == before)
"""
    outcome, said = launch(script(tmp_path, body), committed)
    assert (outcome["exit_code"], outcome["restarts"], outcome["worker_exit_codes"]) == (4, 0, {"0": 4}), said
    assert "untouched True" in said
    assert said.count("stored float32[3, 4], live float32[5, 4]") >= 2, "in the traceback, and whole at the end"
    assert "LayoutMismatch" in outcome["reason"]


# -- nothing usable where something must be --------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["missing", "empty"])
def test_I10_nothing_there_is_exit_3_and_nothing_is_made(tmp_path: Path, there: str) -> None:
    directory = tmp_path / "run"
    if there == "empty":
        directory.mkdir()
    with pytest.raises(unbroken.NoCheckpoint, match="must") as caught:
        open_run(directory, resume="must")
    assert caught.value.exit_code == 3
    assert directory.exists() is (there == "empty")
    assert not list(tmp_path.rglob("*.json"))


def damage_all(directory: Path) -> list[str]:
    """One byte of every checkpoint's manifest is changed; their paths."""
    paths = [commit.manifests[0].path for commit in commits(directory)]
    for path in paths:
        tiny_run.flip(directory / path, 700)
    return paths


@pytest.mark.parametrize("resume", ["must", "auto"])
def test_I10_all_damaged_is_exit_3_with_each_and_its_reason(tmp_path: Path, resume: str) -> None:
    directory = tmp_path / "run"
    train(directory, 2)
    end_daemon(directory)
    paths = damage_all(directory)
    with pytest.raises(unbroken.NoCheckpoint) as caught:
        open_run(directory, resume=resume)
    assert caught.value.exit_code == 3
    for step, path in enumerate(paths):
        (line,) = [line for line in str(caught.value).splitlines() if path in line]
        assert f"step {step} of generation 0" in line and "is not the file that the commit" in line
    again = files_of(directory)
    with pytest.raises(unbroken.NoCheckpoint, match="none is usable"):
        open_run(directory, resume=resume)
    assert files_of(directory).keys() == again.keys(), "nothing was removed, nothing begun"


def test_I10_under_the_launcher_it_ends_with_3_and_is_not_tried_again(tmp_path: Path) -> None:
    outcome, said = launch(script(tmp_path, 'open_run(directory, resume="must")\n'), tmp_path / "run", ranks=2)
    assert (outcome["exit_code"], outcome["restarts"]) == (3, 0), said
    assert 3 in outcome["worker_exit_codes"].values()
    assert not (tmp_path / "run").exists()


# -- folders that are not ours to write ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thesis.tex", "packs/photo.raw", "runs/Jul01_host/events.out.tfevents.1", "manifests/readme"])
def test_a_foreign_folder_is_exit_4_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "folder"
    (directory / name).parent.mkdir(parents=True)
    (directory / name).write_bytes(b"not ours")
    with pytest.raises(unbroken.ForeignFolder, match="choose an empty or new folder") as caught:
        open_run(directory)
    assert caught.value.exit_code == 4
    assert files_of(directory) == {name: b"not ours"}


def test_a_live_writer_in_another_process_is_named(tmp_path: Path) -> None:
    """The other one ends with 4; the one who was first goes on."""
    directory = tmp_path / "run"
    run = open_run(directory, total_steps=3)
    code, said = work(script(tmp_path, "open_run(directory)\n"), directory)
    assert code == 4, said
    assert f"Fenced: {directory} is in use: process {os.getpid()} on {hostname()} lives" in said
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
    assert unbroken.open(directory).certify().certified
    assert unbroken.open(directory).certify().generations == 1
    assert commits(directory)[-1].step == 3


def test_a_store_that_holds_the_folder_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with unbroken.Store(directory) as store:
        store.save(1, {"a": 1})
        code, said = work(script(tmp_path, "open_run(directory)\n"), directory)
        assert code == 4, said
        assert f"process {os.getpid()} on {hostname()}" in said.splitlines()[-1], said


def test_a_notebook_takes_over_its_own_run(tmp_path: Path) -> None:
    """The cell is run again: the first Run was left in mid-step by an error and still lives."""
    first = open_run(tmp_path / "run", total_steps=4)
    batches = iter(first)
    for _ in range(2):
        for micro in next(batches):
            micro.backward(loss_of(first.model, micro))
        first.step()
    for micro in next(batches):
        micro.backward(loss_of(first.model, micro))
        break
    losses = train(tmp_path / "run", 4)
    assert losses == train(tmp_path / "whole", 4)[2:], "it went on after step 2, in the same bits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        first.close()
    certificate = unbroken.open(tmp_path / "run").certify(tmp_path / "whole")
    assert certificate.grade == "exact", certificate.problems
    assert commits(tmp_path / "run")[-1].generation == 1


def test_a_newer_format_is_exit_4_with_both_versions(committed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    facts = Repository.open(DiskTier(str(committed))).facts
    newer = seal("run", facts).replace(b'"format":1,"min_reader":1', b'"format":7,"min_reader":7')
    (directory / "run.json").write_bytes(newer)
    text = rf"run\.json: written by a newer version \(format 7, this reads <= {FORMAT}\)"
    with pytest.raises(unbroken.NewerFormat, match=text) as caught:
        open_run(directory)
    assert caught.value.exit_code == 4
    assert files_of(directory).keys() - {"writer.json"} == {"run.json"}
    assert (directory / "run.json").read_bytes() == newer


def test_a_run_is_not_begun_where_one_must_never_be(committed: Path) -> None:
    with pytest.raises(unbroken.Refused, match="a run exists here"):
        open_run(committed, resume="never")


# -- facts that are fixed at birth -----------------------------------------------------------------------------------------------


def other_facts(directory: Path, **options: Any) -> str:
    """The refusal of a start with other facts."""
    with pytest.raises(unbroken.LayoutMismatch) as caught:
        open_run(directory, extras={"ema": {"w": torch.ones(3)}, "note": {"k": 1}}, **options)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_every_changed_fact_of_the_data_is_named(committed: Path) -> None:
    text = other_facts(committed, data=unbroken.Batches(samples(48), global_batch=16, seed=9, shuffle=False, epochs=3))
    changes = {"seed": (1, 9), "global_batch": (8, 16), "num_samples": (64, 48), "shuffle": (True, False), "epochs": (None, 3)}
    for name, (before, now) in changes.items():
        assert f"{name}: the run was born with {before}, now it is {now}" in text


def test_a_changed_number_of_units_or_seed_is_named(committed: Path) -> None:
    text = other_facts(committed, units=4, seed=DATA_SEED + 1)
    assert "units: born with 2, now 4" in text
    assert f"seed: born with {DATA_SEED}, now {DATA_SEED + 1}" in text
    assert "reduce: born with 'ordered', now 'ring'" in other_facts(committed, reduce="ring")


# -- what cannot be stored or trained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extras", "words"),
    [({"a": {"f": [1, lambda x: x]}}, r"extras\.a\.f\[1\]: cannot store a value of type function"), ({"lock": object()}, "extras.lock")],
)
def test_what_cannot_be_stored_is_named_before_a_run_begins(tmp_path: Path, extras: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        open_run(tmp_path / "run", extras=extras)
    assert files_of(tmp_path / "run").keys() <= {"writer.json"}, "no run was begun"
    train(tmp_path / "run", 1)


def test_a_plateau_scheduler_belongs_into_the_extras(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"extras=\{'plateau': scheduler\}"):
        open_run(tmp_path / "run", model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not (tmp_path / "run").exists()


def test_synchronised_batch_norm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(unbroken.Refused, match=r"body\.1 is SyncBatchNorm.*GroupNorm") as caught:
        open_run(tmp_path / "run", model=nn.SyncBatchNorm.convert_sync_batchnorm(Tiny()))  # type: ignore[no-untyped-call]
    assert caught.value.exit_code == 4
    assert not (tmp_path / "run").exists()


def test_a_parameter_of_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the optimizer, group 1, holds a parameter of no model given to Run: pass that model too"):
        open_run(tmp_path / "run", model=(model := Tiny()), optimizer=torch.optim.SGD(groups(model), lr=0.1))
    assert not (tmp_path / "run").exists()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, the second with a stranger."""
    return [{"params": model.parameters()}, {"params": [nn.Parameter(torch.zeros(1))]}]


SEEDS = """
import torch
torch.manual_seed(int(os.environ["RANK"]))
model = Tiny()
unbroken.Run(directory, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), units=2,
             data=unbroken.Batches(samples(), global_batch=8))
"""


def test_ranks_that_start_from_different_seeds_are_told_what_differs(tmp_path: Path) -> None:
    ranks = start_ranks([script(tmp_path, SEEDS), str(tmp_path / "run")], 2, ENVIRONMENT)
    said = [process.communicate(timeout=120)[1] for process in ranks]
    for rank in range(2):
        assert ranks[rank].returncode == 1
        assert "ValueError: the ranks do not start from one state; 5 pieces differ" in said[rank], said[rank]
        assert "/model/parameters/body.0.weight" in said[rank] and "torch.manual_seed" in said[rank]
    assert not (tmp_path / "run" / "run.json").exists()


# -- options ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lose_at_most": "30 parsecs"}, '"30s", "5 min", "1h", or "100 steps"'),
        ({"lose_at_most": "1.5 steps"}, '"100 steps"'),
        ({"lose_at_most": "0s"}, '"30s"'),
        ({"lose_at_most": 30}, 'lose_at_most=30: give a time such as "30s"'),
        ({"resume": "always"}, 'give "auto", "must" or "never"'),
        ({"reduce": "tree"}, 'give "ordered" .* or "ring"'),
        ({"units": 0}, "units=0: give a whole number of at least 1"),
        ({"units": True}, "units=True"),
        ({"total_steps": 2.5}, "total_steps=2.5"),
        ({"threads": -1}, "threads=-1"),
        ({"keep": 0}, "keep=0"),
        ({"seed": "7"}, "seed must be an integer from 0 to .* not '7'"),
        ({"seed": -1}, "seed must be an integer"),
        ({"unit": 4}, r"unknown options \['unit'\]; known are .*'units'"),
    ],
)
def test_an_option_that_makes_no_sense_is_said_so(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        open_run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# -- the loop --------------------------------------------------------------------------------------------------------------------


def forgets_the_step(run: unbroken.Run, batch: Any) -> None:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))


def steps_twice(run: unbroken.Run, batch: Any) -> None:
    forgets_the_step(run, batch)
    run.step()
    run.step()


def goes_backward_twice(run: unbroken.Run, batch: Any) -> None:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
        micro.backward(loss_of(run.model, micro))


def forgets_backward(run: unbroken.Run, batch: Any) -> None:
    for micro in batch:
        loss_of(run.model, micro).backward()  # type: ignore[no-untyped-call]
    run.step()


def leaves_units_out(run: unbroken.Run, batch: Any) -> None:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
        break
    run.step()


def saves_inside(run: unbroken.Run, batch: Any) -> None:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
        run.save()


def iterates_twice(run: unbroken.Run, batch: Any) -> None:
    forgets_the_step(run, batch)
    forgets_the_step(run, batch)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (forgets_the_step, r"asked for the next batch without run\.step\(\)"),
        (steps_twice, r"run\.step\(\) was called twice for one batch"),
        (goes_backward_twice, "unit 0 of step 3 has had its backward; add several losses up"),
        (forgets_backward, r"unit 0 of step 3 ended without micro\.backward\(loss\)"),
        (leaves_units_out, r"run\.step\(\) after 1 of 2 units: iterate over the whole batch"),
        (saves_inside, r"run\.save\(\) belongs after run\.step\(\) or outside the loop"),
        (iterates_twice, "the batch of step 3 was iterated before"),
    ],
)
def test_a_mistake_in_the_loop_is_named_and_costs_no_finished_step(tmp_path: Path, mistake: Callable[..., None], words: str) -> None:
    """In step 3; the two before are saved by close(), and the run goes on to the same bits once the loop is right."""
    run = open_run(tmp_path / "run", total_steps=4, lose_at_most="100 steps")
    with pytest.raises(RuntimeError, match=words):
        for batch in run:
            if batch.step == 3:
                mistake(run, batch)
            else:
                forgets_the_step(run, batch)
                run.step(clip_grad_norm=1.0)
    run.close()
    done = 3 if mistake is steps_twice else 2
    assert commits(tmp_path / "run")[-1].step == done
    losses = train(tmp_path / "run", 4)
    assert len(losses) == 4 - done
    if done == 2:
        assert losses == train(tmp_path / "whole", 4)[2:]
    assert unbroken.open(tmp_path / "run").certify().certified
