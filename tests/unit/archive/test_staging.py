"""A save is written while its state is still copied: in order, whole, and never what was not copied."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.archive.staging import CopyFailed, Staging
from unbroken.capture import tree
from unbroken.capture.tree import flatten

STATE = {f"w{n:03d}": torch.full((1000,), float(n)) for n in range(20)}


def test_parts_are_ready_one_by_one_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, gate, passed = Staging(), threading.Semaphore(0), []
    plain = tree.write_item
    monkeypatch.setattr(tree, "write_item", lambda item, place: gate.acquire() and plain(item, place))
    parts = staging.place(flatten(dict(reversed(STATE.items()))))
    assert [part.piece.pointer for part in parts] == sorted(part.piece.pointer for part in parts)

    def use() -> None:
        for part in parts:
            assert part.ready is not None
            part.ready()
            passed.append((part.piece.pointer, bytes(part.data)))

    user, copier = threading.Thread(target=use), threading.Thread(target=staging.copy)
    user.start(), copier.start()
    for _ in parts:
        gate.release()
    user.join(30), copier.join(30)
    whole = {item.piece.pointer: item for item in flatten(STATE)}
    assert [name for name, _ in passed] == sorted(whole)
    found = {name[1:]: torch.frombuffer(bytearray(data), dtype=torch.float32) for name, data in passed if name}
    assert all(torch.equal(found[name], value) for name, value in STATE.items())


def test_who_waits_for_what_will_not_be_copied_is_told() -> None:
    staging = Staging()
    parts = staging.place(flatten(STATE))
    threading.Timer(0.05, staging.give_up).start()
    with pytest.raises(CopyFailed):
        parts[0].ready()  # type: ignore[misc]


class Stop(BaseException):
    """As a keyboard interrupt."""


def test_B05_a_save_that_is_interrupted_while_it_copies_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tree.write_item

    def interrupted(item: Any, place: memoryview) -> None:
        if item.piece.pointer == "/w010":
            raise Stop
        plain(item, place)

    store = unbroken.Store(tmp_path / "run", keep=5)
    store.save(1, STATE, wait=True)
    monkeypatch.setattr(tree, "write_item", interrupted)
    for _ in range(3):  # staging memory is not used up
        with pytest.raises(Stop):
            store.save(2, STATE)
    monkeypatch.setattr(tree, "write_item", plain)
    assert store.latest() == 1
    store.save(2, STATE, wait=True)
    store.close()
    archive = unbroken.open(str(tmp_path / "run"))
    assert [found.step for found in archive.steps()] == [1, 2]
    assert archive.verify().ok
    assert all(torch.equal(value, STATE[name]) for name, value in archive.load(2).items())


def test_B05_a_change_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    state = {f"w{n}": torch.zeros(300_000) for n in range(8)}
    with unbroken.Store(tmp_path / "run", keep=20) as store:
        for step in range(6):
            for value in state.values():
                value.fill_(step)
            store.save(step, state)
            for value in state.values():
                value.fill_(-1)
    archive = unbroken.open(str(tmp_path / "run"))
    for step in range(6):
        assert all(bool((value == step).all()) for value in archive.load(step).values())
