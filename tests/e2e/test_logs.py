"""Metrics after kills, read back by each tool's own reader: every committed step once, in order, with the values of an undisturbed run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.launched import Launched, launched, wait_until
from tests.rigs.tiny_run import end_daemon

STEPS = 60
KILLS = 3
WARM = ("--preload", "torch,torch._dynamo,unbroken.session")

TRAIN = f"""
import torch, unbroken
from tests.rigs.tiny_run import Tiny, loss_of, samples
torch.manual_seed(3)
model = Tiny()
run = unbroken.Run(
    os.path.join(FOLDER, "run"), model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), units=2,
    data=unbroken.Batches(samples(), global_batch=8, seed=1), total_steps={STEPS}, lose_at_most="2 steps",
    log_to=json.loads(os.environ["LOG_TO"]),
)
for batch in run:
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
    if run.step():
        run.log(**{{f"many/{{i}}": run.completed * i for i in range(40)}})  # so that wandb and SwanLab flush now and then
        run.log(weight=model.body[0].weight.detach()[0, 0], rank=RANK, even=run.completed % 2 == 0)
        run.log(**{{"odd/one": float("nan") if run.completed % 7 else float("-inf")}}, word=f"step {{run.completed}}")
        mark("step", step=run.completed)
        time.sleep(0.08 if RANK == 0 else 0)
        if run.completed == 12 and ATTEMPT == 0 and RANK == 0:
            wait_for(lambda: os.path.exists(os.path.join(FOLDER, "go")), 100)
"""


def environment(folder: Path, log_to: list[str]) -> dict[str, str]:
    """No network, nothing outside the folder, for all tools."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {
        "LOG_TO": json.dumps(log_to),
        "HOME": str(home),
        "PYTHONPATH": os.getcwd(),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "SWANLAB_MODE": "offline",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }


def sinks(folder: Path) -> list[str]:
    return ["jsonl", f"tensorboard:{folder / 'tb'}", "wandb:demo", f"mlflow:{(folder / 'ml').as_uri()}", "swanlab:demo"]


def kill_some(one: Launched, chance: random.Random) -> None:
    """Kill one worker, or both, at a random moment of each of the first attempts; once at least when all sinks hold something."""
    for attempt in range(KILLS):
        pids = wait_until(lambda attempt=attempt: _pids(one, attempt), f"attempt {attempt}; {one.stderr}")
        wait_until(lambda attempt=attempt: any(m["attempt"] == attempt for m in one.marks("step")), f"a step of attempt {attempt}")
        if attempt == 0:
            wait_until(lambda: any(path.stat().st_size > 7 for path in wandb_files(one.folder)), "flush of wandb", 90)
            (one.folder / "go").touch()
        time.sleep(chance.uniform(0.0, 1.0))
        for pid in chance.choice([pids, pids[:1], pids[1:]]):
            os.kill(pid, signal.SIGKILL)


def _pids(one: Launched, attempt: int) -> list[int]:
    found = [m["pid"] for m in sorted(one.marks("start"), key=lambda m: m["rank"]) if m["attempt"] == attempt]
    return found if len(found) == 2 else []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def from_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def from_wandb(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """wandb's Python reader is gone from the package; SwanLab has one of its own for wandb's files."""
    from swanlab.converter.wb.wbdatastore import DataStoreTruncatedError, WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[tuple[int, Any]]] = {}
    files = wandb_files(folder)
    assert len({path.name for path in files}) == 1, "one run"
    num_used = 0
    for path in files:
        before = len(found.get("loss", []))
        with WBDataStoreReader() as reader, suppress(DataStoreTruncatedError):  # a killed attempt's file is torn
            reader.open(str(path))
            for data in iter(reader.scan, None):
                record = Record.FromString(data)
                if record.WhichOneof("record_type") == "history":
                    for item in record.history.item:
                        name = item.key or "/".join(item.nested_key)
                        if not name.startswith("_"):
                            found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
        num_used += len(found.get("loss", [])) > before
    assert num_used > 1, "a killed attempt must have left something"
    return found


def wandb_files(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def from_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "ml").as_uri())
    (run,) = client.search_runs(["0"])
    return {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}


def from_swanlab(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[str, list[tuple[int, float]]] = {}
    files = sorted((folder / "run" / "swanlog").glob("run-*/*.swanlab"))
    assert len({path.name for path in files}) == 1, "one run"
    for path in files:
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record.FromString(data)
            if record.HasField("scalar") and not record.scalar.key.startswith("__swanlab__"):  # its own watch on the hardware
                found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        reader.close()
    return found


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, Any]]]:
    return {name: [(row["step"], row[name]) for row in rows] for name in rows[0] if name != "step"}


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= tolerance * abs(a)


def check(found: dict[str, list[tuple[int, Any]]], expected: dict[str, list[tuple[int, Any]]], tolerance: float = 0.0) -> None:
    """The same names; under each all steps once, in order, with the values expected."""
    assert set(found) == set(expected)
    for name, column in expected.items():
        assert [step for step, _ in found[name]] == list(range(1, STEPS + 1)), name
        wrong = [(a, b) for a, b in zip(column, found[name], strict=True) if not same(a[1], b[1], tolerance)]
        assert not wrong, (name, wrong[:3])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, Any]]]:
    """What a run shows that nobody has killed; at another world size, which must not matter."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    with launched(folder, TRAIN, "--nproc-per-node", "1", env=environment(folder, ["jsonl"])) as one:
        assert one.wait(120) == 0, one.stderr
    end_daemon(folder / "run")
    return as_columns(lines_of(folder / "run" / "metrics.jsonl"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_I8_after_three_kills_every_sink_holds_every_step_once(
    seed: int, tmp_path: Path, undisturbed: dict[str, list[tuple[int, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with launched(tmp_path, TRAIN, "--nproc-per-node", "2", *WARM, env=environment(tmp_path, sinks(tmp_path))) as one:
        kill_some(one, random.Random(seed))
        assert one.wait(120) == 0, one.stderr
    end_daemon(tmp_path / "run")
    assert "metrics" not in one.stderr, one.stderr
    check(as_columns(lines_of(tmp_path / "run" / "metrics.jsonl")), undisturbed)
    numbers = {name: column for name, column in undisturbed.items() if name != "word"}
    check(from_tensorboard(tmp_path), numbers, tolerance=1e-7)
    check(from_mlflow(tmp_path), {name.replace("/", "."): column for name, column in numbers.items()})
    check(from_swanlab(tmp_path), numbers)
    check({k: [(s, _number(v)) for s, v in column] for k, column in from_wandb(tmp_path).items()}, undisturbed)


def _number(value: Any) -> Any:
    """wandb writes what JSON lacks as texts."""
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value) if isinstance(value, str) else value
