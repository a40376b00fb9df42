"""Saving in the background: a save holds what the call saw, and its failure is heard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from tests.rigs.states import BEFORE_FSYNC, no_space, run_script, s, struck, whole
from unbroken.checkpoints import Store
from unbroken.core.errors import CheckpointWarning, SaveFailed
from unbroken.core.ports import arm

DEADLINE_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """While this is cleared the background writer stands still at its next file."""
    event = threading.Event()
    event.set()

    def strike() -> None:
        assert event.wait(DEADLINE_S)

    with struck(strike):
        yield event
        event.set()


# --- B05: what the call saw -----------------------------------------------------------------------------------------------------


def two_views(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:600], x[400:]]


def big() -> torch.Tensor:
    return torch.zeros(1_000_000)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], list[float]]]] = {
    "tensor": (big, lambda t, k: t.fill_(k), lambda t: [t.min().item(), t.max().item()]),
    "numpy array": (lambda: np.zeros(1_000_000), lambda a, k: a.fill(k), lambda a: [a.min(), a.max()]),
    "shared memory": (lambda: big().share_memory_(), lambda t, k: t.fill_(k), lambda t: [t.min().item(), t.max().item()]),
    "0-dim tensor": (lambda: torch.zeros(()), lambda t, k: t.fill_(k), lambda t: [t.item()]),
    "nested": (
        lambda: {"a": [{"b": 0, "t": torch.zeros(3)}]},
        lambda d, k: (d["a"][0].update(b=k), d["a"][0]["t"].fill_(k)),
        lambda d: [d["a"][0]["b"], *d["a"][0]["t"].tolist()],
    ),
    "two views": (
        lambda: two_views(torch.zeros(1000)),
        lambda v, k: [t.fill_(k) for t in v],
        lambda v: [*v[0].tolist(), *v[1].tolist()],
    ),
    "optimizer": (
        lambda: optimizer_at(0),
        lambda o, k: [state["step"].fill_(k) for state in o.state.values()],
        lambda o: [state["step"].item() for state in o["state"].values()],
    ),
}


def optimizer_at(step: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.zeros(2)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_B05_a_save_holds_the_values_of_the_call(kind: str, folder: Path, gate: threading.Event) -> None:
    make, fill, values = KINDS[kind]
    value, hist = make(), []
    state: dict[str, Any] = {"v": value, "n": 0, "hist": hist}
    num = 2 if kind in ("tensor", "numpy array", "shared memory") else 10
    with Store(folder, keep=10) as store:
        store.save(0, {}, wait=True)
        gate.clear()
        for k in range(1, num + 1):
            fill(value, k)
            state["n"] = k
            hist.append(k)
            if k > 2:
                gate.set()  # two are in flight; a third would wait for the writer
            store.save(k, state)
            fill(value, -1)
            state["n"] = -1
            hist.append(-1)
        gate.set()
        store.wait()
        for k in range(1, num + 1):
            back = store.load(k)
            assert set(values(back["v"])) == {k}
            assert back["n"] == k
            assert back["hist"] == [x for j in range(1, k) for x in (j, -1)] + [k]


def test_B05_two_saves_in_flight_a_third_waits(folder: Path, gate: threading.Event) -> None:
    with Store(folder) as store:
        store.save(0, {}, wait=True)
        gate.clear()
        store.save(1, s(1))
        store.save(2, s(2))
        third = threading.Thread(target=store.save, args=(3, s(3)))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        gate.set()
        third.join(DEADLINE_S)
        assert not third.is_alive()
    assert [whole(Store(folder).load(k)) for k in (1, 2, 3)] == [1, 2, 3]


def test_B05_buffers_are_reused_and_grow(folder: Path) -> None:
    with Store(folder, keep=8) as store:
        for k in range(1, 8):
            store.save(k, {"x": torch.full((k * 10_000,), float(k))})
    for k in range(1, 8):
        x = Store(folder).load(k)["x"]
        assert x.shape == (k * 10_000,) and x.min() == x.max() == k


# --- B07: failures are heard ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard_at", ["save", "wait", "close"])
def test_B07_a_I9_a_failed_save_is_raised_at_the_next_call_and_harms_nothing(heard_at: str, folder: Path) -> None:
    store = Store(folder, keep=1)
    store.save(10, s(10), wait=True)
    with struck(no_space):
        store.save(20, s(20))
        store._background.join(DEADLINE_S)
    assert store.latest() == 10
    with pytest.raises(SaveFailed, match=r"step 20 was not saved: Permanent: .*No space left on device") as caught:
        {"save": lambda: store.save(30, s(30)), "wait": store.wait, "close": store.close}[heard_at]()
    assert isinstance(caught.value, OSError) and caught.value.errno == 28
    assert caught.value.__cause__ is not None and "errno 28" in str(caught.value.__cause__)
    assert store.latest() == 10 and whole(store.load()) == 10
    assert [info.step for info in unbroken.open(folder).steps()] == [10]
    store.close()


def test_B07_a_a_failure_that_is_no_disk_error_keeps_type_and_text(folder: Path) -> None:
    def broken() -> None:
        raise RuntimeError("cable pulled")

    store = Store(folder)
    store.save(0, {}, wait=True)
    with struck(broken), pytest.raises(SaveFailed, match="RuntimeError: cable pulled") as caught:
        store.save(1, s(1), wait=True)
    assert not isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    store.close()


@pytest.mark.parametrize(
    "place", ["store.create.part", BEFORE_FSYNC, "store.create.before_link", "store.append.before_fsync", "saving.before_commit"]
)
def test_B07_a_wherever_it_fails_the_next_save_goes_on(place: str, folder: Path) -> None:
    with Store(folder, keep=1) as store:
        store.save(10, s(10), wait=True)
        for _ in range(2):
            with struck(no_space, place), pytest.raises(SaveFailed):
                store.save(20, s(20), wait=True)
            assert store.latest() == 10
        store.save(20, s(20), wait=True)
        assert store.latest() == 20 and whole(store.load()) == 20
    report = unbroken.open(folder).verify()
    assert report.ok and report.num_checkpoints == 1
    assert unbroken.open(folder).steps()[0].generation > 0  # what a journal says of the failed attempts must not stand beside this


def test_B07_b_killed_between_dispatch_and_finish(folder: Path) -> None:
    with Store(folder, keep=1) as store:
        store.save(10, s(10))
    child = os.fork()
    if child == 0:
        arm(BEFORE_FSYNC, lambda: os.kill(os.getpid(), 9))
        store = Store(folder, keep=1)
        store.save(20, s(20))
        store.wait()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    store = Store(folder, keep=1)
    assert store.latest() == 10
    assert whole(store.load(10)) == 10


def test_B07_c_a_normal_exit_right_after_save_finishes_it(folder: Path) -> None:
    done = run_script(
        """
        import sys, time, torch, unbroken
        from unbroken.core.ports import arm
        arm("store.create.before_fsync", lambda: time.sleep(0.05))
        store = unbroken.Store(sys.argv[1])
        store.save(20, {"w": torch.full((1000,), 20.0), "b": torch.full((7,), 20.0), "step": 20})
        """,
        str(folder),
    )
    assert done.stderr == ""
    assert whole(Store(folder).load()) == 20


def test_B07_c_I9_a_failure_that_nobody_asked_for_is_told_at_exit(folder: Path) -> None:
    done = run_script(
        """
        import sys, unbroken
        from unbroken.core.ports import arm
        store = unbroken.Store(sys.argv[1])
        store.save(10, {"step": 10}, wait=True)
        def no_space(): raise OSError(28, "No space left on device")
        arm("store.create.before_fsync", no_space)
        store.save(20, {"step": 20})
        """,
        str(folder),
    )
    assert "step 20 was not saved" in done.stderr and "No space left on device" in done.stderr


@pytest.mark.parametrize("place", [BEFORE_FSYNC, "store.create.part"])
def test_I9_a_folder_that_cannot_be_begun_is_told_at_once(place: str, folder: Path) -> None:
    store = Store(folder)
    with struck(no_space, place), pytest.raises(SaveFailed, match="step 1 was not saved") as caught:
        store.save(1, s(1))
    assert isinstance(caught.value, OSError) and caught.value.errno == 28
    store.save(1, s(1))
    store.close()
    assert whole(store.load()) == 1


def test_B07_d_the_training_error_surfaces_and_the_save_error_is_noted(folder: Path) -> None:
    with Store(folder) as store:
        store.save(10, s(10))
    with pytest.raises(ZeroDivisionError) as caught, struck(no_space), Store(folder) as store:
        store.save(20, s(20))
        raise ZeroDivisionError("training")
    assert any("step 20 was not saved" in note for note in caught.value.__notes__)
    assert isinstance(caught.value.__context__, SaveFailed)
    assert Store(folder).latest() == 10


def test_B07_d_without_a_save_error_nothing_is_added(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Store(folder) as store:
        store.save(20, s(20))
        raise ZeroDivisionError("training")
    assert not hasattr(caught.value, "__notes__") and caught.value.__context__ is None
    assert Store(folder).latest() == 20


def test_B07_e_after_a_failure_the_next_save_works_and_then_the_old_one_may_go(folder: Path) -> None:
    with Store(folder, keep=1) as store:
        store.save(10, s(10), wait=True)
        with struck(no_space), pytest.raises(SaveFailed):
            store.save(20, s(20), wait=True)
        store.save(30, s(30), wait=True)
        assert store.latest() == 30
    assert [info.step for info in unbroken.open(folder).steps()] == [30]


def test_a_failing_clean_up_is_a_warning_and_no_failed_save(folder: Path) -> None:
    store = Store(folder, keep=1)
    store.save(1, s(1), wait=True)
    with struck(no_space, "store.delete"):
        store.save(2, s(2))
        store._background.join(DEADLINE_S, awaited=False)
    with pytest.warns(CheckpointWarning, match="could not be removed"):
        store.wait()
    store.save(3, s(3), wait=True)
    assert [info.step for info in unbroken.open(folder).steps()] == [3]
    store.close()
