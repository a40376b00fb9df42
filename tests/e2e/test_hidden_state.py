"""State that hides: what a model, an optimizer or the script keeps besides tensors must come back, and a half-done step must not (I13)."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from tests.rigs.tiny_run import Tiny, bits_of, end_daemon, loss_of, open_run
from unbroken.step.exchange import Exchange, ExchangeFailed

STEPS = 6

Parts = dict[str, Any]
Body = Callable[[Parts, unbroken.Run], None]


@pytest.fixture(autouse=True)
def no_daemon_stays(tmp_path: Path) -> Iterator[None]:
    yield
    for directory in tmp_path.iterdir():
        end_daemon(directory)


def life(directory: Path, steps: int, make: Callable[[], Parts], before: Body | None = None, after: Body | None = None) -> list[float]:
    """Train up to `steps` steps; `before` runs at the top of each step, `after` behind run.step."""
    torch.manual_seed(3)
    parts = make()
    run = open_run(directory, total_steps=steps, lose_at_most="100 steps", **parts)
    losses = []
    for batch in run:
        if before is not None:
            before(parts, run)
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        if run.step():
            losses.append(run.loss)
            if after is not None:
                after(parts, run)
    return losses


def resumes(tmp_path: Path, make: Callable[[], Parts], before: Body | None = None, after: Body | None = None) -> None:
    """Two lives of three steps are one of six, in losses and in the whole state."""
    whole = life(tmp_path / "whole", STEPS, make, before, after)
    first = life(tmp_path / "run", STEPS // 2, make, before, after)
    end_daemon(tmp_path / "run")
    assert first + life(tmp_path / "run", STEPS, make, before, after) == whole
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"


# -- models --------------------------------------------------------------------------------------------------------------------


class Scaled(Tiny):
    """A plain attribute that decides what comes out, handed over as extra state (as fp8 layers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]


class Rebinding(Tiny):
    """Counts its forwards in a buffer that is bound anew each time, and lets the count in."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return super().forward(x) * (1 + 0.1 * self.count)


class Caching(Tiny):
    """Makes a table when it is first needed, and lets it grow."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = getattr(self, "table", None)
        if table is None or len(table) < self.wanted:
            self.register_buffer("table", torch.arange(1.0, self.wanted + 1), persistent=False)
        return super().forward(x) * self.table[1]


def test_I13_a_modules_extra_state_comes_back(tmp_path: Path) -> None:
    def grow(parts: Parts, run: unbroken.Run) -> None:
        parts["model"].factor *= 0.5

    resumes(tmp_path, lambda: {"model": Scaled()}, after=grow)


def test_I13_a_buffer_that_is_bound_anew_in_each_forward_is_a_part_of_the_step(tmp_path: Path) -> None:
    resumes(tmp_path, lambda: {"model": Rebinding()})


def test_I14_a_buffer_bound_anew_starts_each_unit_from_the_steps_beginning(tmp_path: Path) -> None:
    """Else the count would depend on how many units a rank computes."""
    model = Rebinding()
    life(tmp_path / "run", STEPS, lambda: {"model": model})
    assert model.count.item() == STEPS


def test_I13_a_cache_made_while_training_is_no_obstacle_to_a_resume(tmp_path: Path) -> None:
    def evaluate(parts: Parts, run: unbroken.Run) -> None:
        model = parts["model"]
        model.wanted = 2 + run.completed
        model.eval()(torch.zeros(2, 4))
        model.train()

    resumes(tmp_path, lambda: {"model": Caching()}, after=evaluate)


def test_a_buffer_that_changes_its_shape_within_a_step_is_named(tmp_path: Path) -> None:
    class Growing(Rebinding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = torch.zeros(3)
            return Tiny.forward(self, x)

    with pytest.raises(RuntimeError, match=r"buffer 'count' of Growing, torch.float32\[\], was replaced by one of torch.float32\[3\]"):
        life(tmp_path / "run", 1, lambda: {"model": Growing()})


# -- optimizers ----------------------------------------------------------------------------------------------------------------


class Warming(torch.optim.SGD):
    """Keeps how far it is beside the parameters' state."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.01 * shared["steps"]
        return super().step(closure)


class Owning(torch.optim.SGD):
    """Keeps how far it is in its own part of state_dict."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.steps
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "steps"})
        self.steps = state_dict["steps"]


@pytest.mark.parametrize("kind", [Warming, Owning])
def test_I13_what_an_optimizer_keeps_besides_parameters_state_comes_back(tmp_path: Path, kind: type[torch.optim.SGD]) -> None:
    def make() -> Parts:
        model = Tiny()
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}

    resumes(tmp_path, make)


def test_options_that_the_checkpoint_overrides_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def make(lr: float) -> Parts:
        model = Tiny()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=lr)}

    life(tmp_path / "run", 1, lambda: make(0.1))
    assert "is not used" not in capfd.readouterr().err
    life(tmp_path / "run", 2, lambda: make(0.5))
    assert "optimizer: lr=0.5 in the script is not used, the checkpoint has 0.1" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["optimizer", "scheduler"])
def test_a_loop_that_steps_what_run_steps_is_told(tmp_path: Path, what: str) -> None:
    def make() -> Parts:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    with pytest.raises(RuntimeError, match=r"was (called|stepped) by the loop"):
        life(tmp_path / "run", 3, make, after=lambda parts, run: parts[what].step())


def test_optimizers_are_left_as_they_were_found(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life(tmp_path / "run", 1, lambda: {"model": model, "optimizer": optimizer})
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


# -- gradients and weights -----------------------------------------------------------------------------------------------------


def test_I14_gradients_of_the_users_own_do_not_enter_a_step(tmp_path: Path) -> None:
    def probe(parts: Parts, run: unbroken.Run) -> None:
        run.model(torch.ones(2, 4)).sum().backward()

    plain = life(tmp_path / "plain", STEPS, lambda: {"model": Tiny()}, before=lambda parts, run: torch.rand(2, 4))
    probed = life(tmp_path / "probed", STEPS, lambda: {"model": Tiny().eval()}, before=probe)
    assert probed == life(tmp_path / "unprobed", STEPS, lambda: {"model": Tiny().eval()})
    assert plain != probed, "dropout was off"


def test_weights_loaded_between_run_and_loop_are_refused(tmp_path: Path) -> None:
    pretrained = {name: torch.zeros_like(value) for name, value in Tiny().state_dict().items()}
    for state, is_refused in ((pretrained, True), (None, False)):
        run = open_run(tmp_path / "run", total_steps=2)
        run.model.load_state_dict(state or run.model.state_dict())
        if is_refused:
            with pytest.raises(RuntimeError, match=r"parameters changed between Run\(\.\.\.\) and the loop, first 'body"):
                next(iter(run))
        else:
            assert next(iter(run)) is not None, "the same values written again are no change"
        run.close()


# -- extras --------------------------------------------------------------------------------------------------------------------


def test_plain_values_at_the_top_of_extras_are_saved_and_put_back(tmp_path: Path) -> None:
    def count(parts: Parts, run: unbroken.Run) -> None:
        parts["extras"]["seen"] += 1
        parts["extras"]["best"] = min(parts["extras"]["best"], run.loss)

    def make() -> Parts:
        made.append({"seen": 0, "best": 100.0})
        return {"model": Tiny(), "extras": made[-1]}

    made: list[dict[str, Any]] = []
    resumes(tmp_path, make, after=count)
    assert made[0] == made[2] and made[0]["seen"] == STEPS


@pytest.mark.parametrize("kind", ["generator", "value", "history"])
def test_I8_a_step_repeated_in_place_has_its_extras_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    makers: dict[str, Callable[[], Any]] = {"generator": lambda: torch.Generator().manual_seed(1), "value": lambda: 0, "history": list}

    def make() -> Parts:
        return {"model": Tiny(), "extras": {kind: makers[kind]()}}

    def draw(parts: Parts, run: unbroken.Run) -> None:
        extras = parts["extras"]
        if kind == "generator":
            run.model.body[0].bias.requires_grad_(bool(torch.rand((), generator=extras[kind]) < 0.5))
        elif kind == "value":
            extras[kind] += 1
        else:
            extras[kind].append(run.completed)

    whole = life(tmp_path / "whole", STEPS, make, before=draw)
    genuine, failing = Exchange.scatter, iter([False, False, True] + [False] * STEPS)

    def fail_once(self: Exchange, *frames: Any) -> torch.Tensor:
        if next(failing):
            raise ExchangeFailed("a peer has hung up")
        return genuine(self, *frames)

    monkeypatch.setattr(Exchange, "scatter", fail_once)
    assert life(tmp_path / "run", STEPS, make, before=draw) == whole
    assert unbroken.open(tmp_path / "run").certify(tmp_path / "whole").grade == "exact"


def test_I8_a_module_in_extras_that_changed_within_a_refused_step_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def average(parts: Parts, run: unbroken.Run) -> None:
        with torch.no_grad():
            parts["extras"]["ema"].weight.mul_(0.9)

    def fail(self: Exchange, *frames: Any) -> torch.Tensor:
        raise ExchangeFailed("a peer has hung up")

    monkeypatch.setattr(Exchange, "scatter", fail)
    with pytest.raises(unbroken.StepLost, match=r"extras \['ema'\] have changed within it"):
        life(tmp_path / "run", STEPS, lambda: {"model": Tiny(), "extras": {"ema": nn.Linear(2, 2)}}, before=average)


# -- evaluation ----------------------------------------------------------------------------------------------------------------


def test_I13_an_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    """Whatever it draws, whichever modes the modules were in, wherever in the step it happens, and if it fails."""

    def make() -> Parts:
        model = Tiny()
        model.body[2].eval()  # a part that the script itself has put to rest
        return {"model": model}

    def evaluate(parts: Parts, run: unbroken.Run) -> None:
        model = parts["model"]
        with contextlib.suppress(ZeroDivisionError), run.eval():
            assert not any(module.training for module in model.modules())
            assert not model(torch.rand(4, 4)).requires_grad
            assert random.random() != np.random.rand()
            if run.completed == 2:
                raise ZeroDivisionError
        assert [module.training for module in model.modules()] == [True, True, True, True, False, True]

    plain = life(tmp_path / "plain", STEPS, make)
    assert life(tmp_path / "before", STEPS, make, before=evaluate) == plain
    assert life(tmp_path / "after", STEPS, make, after=evaluate) == plain
    assert unbroken.open(tmp_path / "after").certify(tmp_path / "plain").grade == "exact"


# -- half-done -----------------------------------------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Fails in step 3."""

    num = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num += 1
        if self.num == 3:
            raise ValueError("no more")
        return super().step(closure)


def two_optimizers() -> Parts:
    model = Tiny()
    body, rest = list(model.body.parameters()), [model.frozen]
    return {"model": model, "optimizer": [torch.optim.SGD(body, lr=0.1), Failing(rest, lr=0.1)]}


@pytest.mark.parametrize("how", ["close in finally", "caught, then closed", "caught, then trained on"])
def test_a_half_applied_step_is_not_saved(tmp_path: Path, how: str) -> None:
    torch.manual_seed(3)
    run = open_run(tmp_path / "run", total_steps=STEPS, lose_at_most="100 steps", **two_optimizers())

    def loop() -> None:
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
            run.step()

    with pytest.raises(ValueError, match="no more"):
        if how == "close in finally":
            try:
                loop()
            finally:
                with pytest.warns(unbroken.SaveWarning, match="step 3 was left half-way"):
                    run.close()
        else:
            loop()
    if how == "caught, then trained on":
        with pytest.raises(RuntimeError, match="a step was left half-way by an error"):
            loop()
        with pytest.raises(RuntimeError, match="a step was left half-way by an error"):
            run.save()
    if how != "close in finally":
        with pytest.warns(unbroken.SaveWarning, match="step 3 was left half-way"):
            run.close()
    assert [info.step for info in unbroken.open(tmp_path / "run").steps()] == [0]


def test_a_boundary_that_an_error_did_not_let_come_is_not_saved(tmp_path: Path) -> None:
    """The average has not been updated yet: this is no state of step 2."""

    def fail(parts: Parts, run: unbroken.Run) -> None:
        if run.completed == 2:
            try:
                raise ZeroDivisionError
            finally:
                with pytest.warns(unbroken.SaveWarning, match="step 2 was left half-way"):
                    run.close()

    with pytest.raises(ZeroDivisionError):
        life(tmp_path / "run", STEPS, lambda: {"model": Tiny()}, after=fail)
    assert [info.step for info in unbroken.open(tmp_path / "run").steps()] == [0]


def test_I6_a_forked_child_cannot_write_its_memory_as_the_runs(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", total_steps=STEPS, lose_at_most="100 steps")
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()
        if run.completed == 2:
            child = os.fork()
            if child == 0:
                with torch.no_grad():
                    run.model.frozen.zero_()
                run.close()
                os._exit(0)
            os.waitpid(child, 0)
    assert [info.step for info in unbroken.open(tmp_path / "run").steps()] == [0, STEPS]
    assert torch.count_nonzero(run.model.frozen)


def test_a_second_run_in_the_folder_says_to_the_first_who_has_taken_over(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    first = open_run(tmp_path / "run", total_steps=STEPS)
    second = open_run(tmp_path / "real", total_steps=STEPS)
    with pytest.raises(RuntimeError, match="another Run in this process has opened"):
        first.save()
    second.close()


def test_a_run_that_is_done_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    life(tmp_path / "run", 2, lambda: {"model": Tiny()})
    capsys.readouterr()
    model = Tiny()
    assert life(tmp_path / "run", 2, lambda: {"model": model}) == []
    assert "nothing to do, all 2 steps are done" in capsys.readouterr().out
    assert bits_of(model)


def test_I13_an_option_changed_in_mid_run_is_a_difference_at_the_next_start(tmp_path: Path) -> None:
    def more(parts: Parts, run: unbroken.Run) -> None:
        parts["model"].body[2].p = 0.4

    life(tmp_path / "run", 2, lambda: {"model": Tiny()}, after=more)
    with pytest.warns(unbroken.EnvironmentChanged, match=r"Dropout\(p=0.4.*Dropout\(p=0.1"):
        life(tmp_path / "run", 3, lambda: {"model": Tiny()})


def test_I13_another_class_of_optimizer_is_a_difference(tmp_path: Path) -> None:
    """Adam and AdamW have the same state and the same options: only their names tell them apart."""

    def make(kind: type[torch.optim.Optimizer]) -> Parts:
        model = Tiny()
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}  # type: ignore[call-arg]

    life(tmp_path / "run", 1, lambda: make(torch.optim.RMSprop))
    with pytest.warns(unbroken.EnvironmentChanged, match=r"\(optimizer\): RMSprop -> Other"):
        life(tmp_path / "run", 2, lambda: make(type("Other", (torch.optim.RMSprop,), {})))
