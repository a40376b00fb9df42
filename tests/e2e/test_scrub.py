"""`scrub_every` in a run: damage to an older checkpoint is told while training goes on, and stands in the journal."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

import unbroken
from tests.rigs.tiny_run import commits, flip, loss_of, open_run, own_pack
from unbroken.config import resolve
from unbroken.core.records import EventRecord
from unbroken.store.journal import read_journal
from unbroken.store.tiers.disk import DiskTier


def events(directory: Path, name: str) -> list[EventRecord]:
    tier, found = DiskTier(str(directory)), []
    for generation in unbroken.open(directory)._repository.log.state.generations:
        for line in read_journal(tier, "main", generation.number, generation.nonce):
            if isinstance(line.record, EventRecord) and line.record.name == name:
                found.append(line.record)
    return found


def test_I3_damage_to_a_stored_checkpoint_is_a_warning_and_an_event_and_training_goes_on(tmp_path: Path) -> None:
    run = open_run(tmp_path, keep=9, total_steps=500, width=5000, lose_at_most="1000 steps", scrub_every="1s")
    damaged, deadline_s = "", time.monotonic() + 60
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in run:
            for micro in batch:
                micro.backward(loss_of(run.model, micro))
            run.step()
            if run.completed <= 3:
                run.save(wait=True)
            elif not damaged:
                damaged = own_pack(tmp_path, next(one for one in commits(tmp_path) if one.step == 2))
                flip(tmp_path / damaged, 5000)
            told = [str(one.message) for one in caught if issubclass(one.category, unbroken.CheckpointWarning)]
            if told or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
    at = run.completed
    run.close()
    assert told and all(
        f"a stored checkpoint is damaged, training goes on, and the next start passes it over: {damaged}" in t for t in told
    )
    assert at > 3
    (event,) = events(tmp_path, "damaged")
    assert event.facts["path"] == damaged and 2 in event.facts["steps"]
    assert 2 in [one.step for one in unbroken.open(tmp_path).steps()], "only a start gives it up"


@pytest.mark.parametrize("text", ["100 steps", "often", "0s", "0.5s", 24])
def test_how_often_is_a_time(text: object) -> None:
    with pytest.raises(ValueError, match=r'scrub_every=.*such as "24h"'):
        resolve("60s", "auto", {"scrub_every": text})  # type: ignore[typeddict-item]
    assert resolve("60s", "auto", {"scrub_every": "24h"}).scrub_every == 86400.0
    assert resolve("60s", "auto", {}).scrub_every is None
