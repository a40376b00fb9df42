"""What is fixed at a run's birth, what is refused at its start, and what the user is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.rigs.step_rank import CPU, raw, stack_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.capture.tree import rebuild
from unbroken.config import resolve
from unbroken.core.errors import LayoutMismatch, Refused
from unbroken.core.messages import Plan
from unbroken.core.ports import SystemClock
from unbroken.data.loader import Batches, as_source
from unbroken.doctor.room import Room
from unbroken.opening import (
    EnvironmentChanged,
    Opening,
    device_of,
    refuse_metric_schedulers,
    refuse_sync_batch_norm,
)
from unbroken.recover.start import Counters, Start, fact_items
from unbroken.step.exchange import Exchange
from unbroken.store.tiers.memory import MemoryTier


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    kept = torch.get_num_threads()
    yield
    torch.set_num_threads(kept)


def opening(exchange: Exchange | None = None, *, data_seed: int = 3, **options: Any) -> Opening:
    """A start that has not begun: data of 40 samples, 8 per step."""
    source = as_source(Batches(TensorDataset(torch.zeros(40, 2)), global_batch=8, seed=data_seed))
    made = Opening("runs/x", resolve("60s", "auto", options), stack_of(nn.Linear(2, 2), seed=9), source, CPU, SystemClock())  # type: ignore[arg-type]
    made.exchange = exchange or Exchange(CPU)
    made.start = Start(
        directory="runs/x",
        tier=MemoryTier(),
        exchange=made.exchange,
        stack=made.stack,
        clock=made.clock,
        resume="auto",
        options={},
    )
    return made


def born(**changed: Any) -> Plan:
    """The plan of a run that was born like `opening()`, but for the changes."""
    return Plan(generation=1, step=4, source="disk", stored_world_size=2, options=opening()._birth_facts() | changed)


# -- birth facts ---------------------------------------------------------------------------------------------------------------


def test_birth_facts_are_the_arguments_or_good_defaults() -> None:
    facts = opening()._birth_facts()
    assert (facts["units"], facts["seed"], facts["threads"], facts["reduce"], facts["grade"]) == (1, 9, 1, "ordered", "exact")
    assert facts["data"]["global_batch"] == 8
    assert msgspec.json.decode(msgspec.json.encode(facts)) == facts, "they travel, and are stored"
    given = opening(units=4, threads=3, keep=7, reduce="ring")._birth_facts()
    assert (given["units"], given["threads"], given["keep"], given["reduce"]) == (4, 3, 7, "ring")
    three = all_ranks(3, lambda exchange: opening(exchange)._birth_facts()["units"])
    assert three == [4] * 3


def test_a_resumed_run_keeps_what_it_was_born_with() -> None:
    made = opening()
    made._adopt(born(units=8, seed=77, threads=2))
    assert (made.num_units, made.stack.streams.seed, torch.get_num_threads()) == (8, 77, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"units": 2}, "units: born with 8, now 2"),
        ({"seed": 5}, "seed: born with 77, now 5"),
        ({"threads": 4}, "threads: born with 2, now 4"),
        ({"reduce": "ring"}, "reduce: born with 'ordered', now 'ring'"),
    ],
)
def test_an_argument_that_contradicts_the_birth_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    made = opening(**given)
    seed = made.stack.streams.seed
    with pytest.raises(LayoutMismatch, match=words) as caught:
        made._adopt(born(units=8, seed=77, threads=2))
    assert any(words in text for text in caught.value.mismatched)
    assert (made.num_units, made.stack.streams.seed) == (0, seed), "nothing may have been taken over"


def test_all_contradictions_are_listed_at_once() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        opening(units=2, seed=5, threads=4)._adopt(born(units=8, seed=77, threads=2))
    assert len(caught.value.mismatched) == 3
    opening(units=8, seed=77, threads=2)._adopt(born(units=8, seed=77, threads=2))


def test_other_data_than_at_birth_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="seed"):
        opening(data_seed=4)._adopt(born())


def test_a_folder_of_plain_checkpoints_is_no_run() -> None:
    with pytest.raises(Refused, match=r"checkpoints of a Store, not a run: use another folder"):
        opening()._adopt(Plan(generation=1, step=4, source="disk", options={"writer": "store"}))


def test_ring_keeps_its_world_size_and_equal_shares() -> None:
    ring = born(reduce="ring", units=4)
    all_ranks(2, lambda exchange: opening(exchange, reduce="ring")._adopt(ring))

    def other(exchange: Exchange) -> None:
        with pytest.raises(LayoutMismatch, match=r"world size: 2 at the checkpoint, now 4"):
            opening(exchange, reduce="ring")._adopt(ring)

    all_ranks(4, other)

    def uneven(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match=r"units=4 .* equally"):
            opening(exchange, reduce="ring")._adopt(Plan(generation=0, step=0, source="fresh", options=ring.options))

    all_ranks(3, uneven)


# -- what is collected ---------------------------------------------------------------------------------------------------------


def test_the_position_in_the_data_is_counted_in_samples() -> None:
    items = opening().pieces(Counters(step=5, samples=40, applied=4, skipped=1))
    pieces = {i.piece.pointer: (i.piece, raw(i)) for i in items}
    assert rebuild(pieces, "/data") == {"step": 5, "consumed_samples": 40, "seed": 9}
    assert rebuild(pieces, "/counters") == {"step": 5, "samples": 40, "applied": 4, "skipped": 1}


def test_the_fact_sheet_says_what_is_compared_and_what_only_recorded() -> None:
    items = fact_items(opening()._fact_sheet(born()))
    roles = {i.piece.pointer.split("/")[1]: (i.piece.role, i.piece.scope) for i in items}
    assert roles == {
        "model": ("compared", "logical"),
        "environment": ("compared", "rank"),
        "options": ("recorded", "logical"),
        "hardware": ("recorded", "rank"),
        "topology": ("recorded", "rank"),
        "layout": ("recorded", "logical"),
        "naming": ("recorded", "logical"),
        "anomalies": ("compared", "logical"),
    }
    assert all(i.piece.captured == "start" for i in items)
    assert not {i.piece.pointer for i in items} & {i.piece.pointer for i in opening().pieces(Counters())}


def test_each_moment_is_the_last_ranks() -> None:
    def rank(exchange: Exchange) -> dict[str, float]:
        made = opening(exchange)
        made.moments = {"process": float(exchange.rank), "align": 10.0 - exchange.rank}
        return made.latest_moments()

    assert all_ranks(3, rank) == [{"process": 2.0, "align": 10.0}] * 3


# -- what the user is told -----------------------------------------------------------------------------------------------------


def test_the_start_is_told_once_with_everything_that_limits_the_claim(capsys: pytest.CaptureFixture[str]) -> None:
    def rank(exchange: Exchange) -> None:
        made = opening(exchange)
        made.num_units = 4
        made.start.differences = ("threads: 1 -> 2",) if exchange.rank else ()
        made.start.notes = ("streams start anew",)
        made.announce(Plan(generation=1, step=4, source="memory", options={"threads": 1}, notes=("step 5 was damaged",)), 3 << 20, 1 << 19)

    all_ranks(3, rank)
    out, err = capsys.readouterr()
    assert out.startswith("unbroken: runs/x: step 4 from memory, generation 1; 4 units per step on 3 ranks, 1 threads each\n")
    assert "2 slots of 0.5 MiB and 3.0 MiB for gradients" in out
    assert err == "unbroken: step 5 was damaged\nunbroken: streams start anew\n"


def test_what_the_host_must_have_is_told_and_a_lack_of_it_before_the_failure(capsys: pytest.CaptureFixture[str]) -> None:
    made, plan = opening(), Plan(generation=0, step=0, source="fresh", options={"threads": 1})
    made.room = Room(available_bytes=2 << 20, held_bytes=1 << 20, free_bytes=9 << 20, stored_bytes=0)
    made.announce(plan, 1 << 20, 1 << 20)
    out, err = capsys.readouterr()
    assert "unbroken: needs 3.0 MiB of memory for 1 ranks, 3.0 MiB are available; up to 4.0 MiB on disk for 4 checkpoints" in out
    assert err == ""
    made.room = Room(available_bytes=1 << 20, held_bytes=0, free_bytes=3 << 20, stored_bytes=0)
    made.announce(plan, 1 << 20, 1 << 20)
    out, err = capsys.readouterr()
    assert "needs 3.0 MiB of memory for 1 ranks, 1.0 MiB are available; up to 4.0 MiB on disk" in out
    assert "unbroken: memory of the run: this does not fit: fewer ranks per host" in err
    assert "unbroken: disk of the run: this does not fit: free space" in err


def test_what_the_script_does_not_show_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    made = opening()
    made.config = replace(made.config, origins=("keep=5 from UNBROKEN_KEEP", "units=2 from /a/unbroken.toml:3"))
    made.announce(Plan(generation=0, step=0, source="fresh", options={"threads": 1}), 0, 0)
    assert "unbroken: keep=5 from UNBROKEN_KEEP, units=2 from /a/unbroken.toml:3\n" in capsys.readouterr().out


def test_I10_a_fresh_start_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    opening().announce(Plan(generation=0, step=0, source="fresh", options={"threads": 1}), 0, 0)
    assert "runs/x: a fresh start, generation 0" in capsys.readouterr().out


def test_I13_each_difference_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    made = opening()
    made.start.differences = ("a: 1 -> 2", "b: 3 -> 4")
    with pytest.warns(EnvironmentChanged) as caught:
        made.announce(Plan(generation=1, step=4, source="disk", options={"threads": 1}), 0, 0)
    assert [str(w.message).rpartition("limited: ")[2] for w in caught] == ["a: 1 -> 2", "b: 3 -> 4"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opening().announce(Plan(generation=1, step=4, source="disk", options={"threads": 1}), 0, 0)


def test_what_was_never_opened_can_be_closed() -> None:
    source = as_source(Batches(TensorDataset(torch.zeros(8)), global_batch=4))
    made = Opening("x", resolve("60s", "auto", {}), stack_of(nn.Linear(1, 1)), source, CPU, SystemClock())
    made.close()
    made.close()


# -- what is refused -----------------------------------------------------------------------------------------------------------


def test_the_device_is_that_of_the_parameters() -> None:
    assert device_of({"a": nn.ReLU(), "b": nn.Linear(1, 1, device="meta")}) == torch.device("meta")
    with pytest.raises(ValueError, match="no parameters"):
        device_of({"": nn.ReLU()})
    with pytest.raises(ValueError, match="no parameters"):
        device_of({})


@pytest.mark.parametrize("model", [lambda x: x, "gpt", nn.Linear, [nn.Linear(1, 1)]])
def test_what_is_no_module_is_refused_by_its_type(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model.*torch\.nn\.Module"):
        device_of({"": model})


def test_synchronised_statistics_are_refused_by_name_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.SyncBatchNorm(1)))
    with pytest.raises(Refused, match=r"^1\.0 is SyncBatchNorm.*use BatchNorm"):
        refuse_sync_batch_norm({"": model})
    with pytest.raises(Refused, match=r"^the model is SyncBatchNorm"):
        refuse_sync_batch_norm({"": nn.SyncBatchNorm(1)})
    refuse_sync_batch_norm({"": nn.BatchNorm1d(1)})


def test_a_scheduler_that_needs_a_metric_is_refused_with_the_remedy() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    refuse_metric_schedulers({"": torch.optim.lr_scheduler.StepLR(optimizer, 1)})
    with pytest.raises(TypeError, match=r"extras={'plateau': scheduler}"):
        refuse_metric_schedulers({"a": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)})


def test_grades_that_limit_the_claim_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    made = opening()
    loader = torch.utils.data.DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    made.source = as_source(loader, units=2)
    made.announce(Plan(generation=0, step=0, source="fresh", options={"threads": 1}), 0, 0)
    assert "the claim is limited by the data: this loader keeps its own order" in capsys.readouterr().err
