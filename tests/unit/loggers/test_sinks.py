"""The sinks of other tools, with their real libraries: torn ends, half-written steps, lost steps, and whose library is missing."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from unbroken.core.errors import MissingExtra, Refused
from unbroken.loggers import choose
from unbroken.loggers.choose import Target, targets
from unbroken.loggers.recordio import leveldb_records
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo

ALL = 10**9
HEADER = b":W&B\xe1\xbe\x00"


def rows(first: int, last: int) -> list[Row]:
    return [Row(step=k, values={"loss": 1 / k, "a/b": k, "word": "x", "even": k % 2 == 0, "samples": 8}) for k in range(first, last + 1)]


# -- TensorBoard -------------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def board(folder: Path, step: int, *batches: list[Row]) -> int:
    """Open, write, close; the step held at the opening."""
    from unbroken.loggers.to_tensorboard import TensorBoard

    sink = TensorBoard(str(folder))
    try:
        held = sink.open(RunInfo("id", "/run", step))
        for batch in batches:
            sink.write(batch)
        return held
    finally:
        sink.close()


def test_tensorboard_reads_what_was_written_texts_left_out(tmp_path: Path) -> None:
    assert board(tmp_path, 0, rows(1, 2), rows(3, 3)) == 0
    assert board(tmp_path, 3, rows(4, 5)) == 3
    found = scalars(tmp_path)
    assert set(found) == {"loss", "a/b", "even", "samples"}
    assert found["a/b"] == [(k, k) for k in range(1, 6)]
    assert found["even"] == [(k, float(k % 2 == 0)) for k in range(1, 6)]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 40, 80])
def test_tensorboard_a_torn_event_is_cut_off_and_comes_again(tmp_path: Path, cut: int) -> None:
    board(tmp_path, 0, rows(1, 3))
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - cut)
    assert board(tmp_path, ALL, rows(3, 4)) == 2
    assert scalars(tmp_path)["a/b"] == [(k, k) for k in range(1, 5)]


def test_tensorboard_a_damaged_last_event_is_none(tmp_path: Path) -> None:
    board(tmp_path, 0, rows(1, 3))
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    assert board(tmp_path, ALL) == 2


def test_tensorboard_takes_lost_steps_back_and_leaves_files_of_others_alone(tmp_path: Path) -> None:
    other = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    other.write_bytes(b"not ours")
    (tmp_path / "events.out.tfevents.000000000009.unbroken").symlink_to(other)
    board(tmp_path, 0, rows(1, 3))
    board(tmp_path, ALL, rows(4, 6))
    assert board(tmp_path, 2, rows(3, 3)) == 2
    assert sorted(path.name[-21:] for path in tmp_path.iterdir() if not path.is_symlink() and path != other) == [
        "000000000001.unbroken",
        "000000000003.unbroken",
    ]
    (tmp_path / "events.out.tfevents.000000000009.unbroken").unlink()
    assert other.read_bytes() == b"not ours"
    other.unlink()
    assert scalars(tmp_path)["a/b"] == [(1, 1), (2, 2), (3, 3)]


def test_tensorboard_two_writers_do_not_mix(tmp_path: Path) -> None:
    from unbroken.loggers.to_tensorboard import TensorBoard

    first = TensorBoard(str(tmp_path))
    first.open(RunInfo("id", "/run", 0))
    with pytest.raises(Refused, match="another process writes event files here"):
        board(tmp_path, 0)
    first.close()
    assert board(tmp_path, 0) == 0


def test_I9_tensorboard_steps_of_another_run_or_branch_are_not_taken_back(tmp_path: Path) -> None:
    from unbroken.loggers.to_tensorboard import TensorBoard

    board(tmp_path, 0, rows(1, 3))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    sink = TensorBoard(str(tmp_path))
    for stranger in (RunInfo("other", "/other", 0), RunInfo("id", "/run", 2, "hot")):
        with pytest.raises(Refused, match="holds steps of another run or branch: choose another folder"):
            sink.open(stranger)
        sink.close()
    assert path.read_bytes() == before
    path.rename(tmp_path / "events.out.tfevents.000000000001.unbroken")  # as an older version named it
    assert board(tmp_path, 3, rows(4, 4)) == 3
    assert scalars(tmp_path)["a/b"] == [(k, k) for k in range(1, 5)]


# -- MLflow ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())


def test_mlflow_has_one_run_whatever_happens_and_half_a_step_is_completed(tmp_path: Path, mlflow: Any) -> None:
    from mlflow.entities import Metric

    from unbroken.loggers.to_mlflow import MLflow

    uri, run = (tmp_path / "ml").as_uri(), RunInfo("ab" * 16, "/runs/gpt", 0)
    sink = MLflow(uri)
    assert sink.open(run) == 0
    sink.write(rows(1, 2))
    (there,) = mlflow.search_runs(["0"])
    mlflow.log_batch(there.info.run_id, metrics=[Metric("loss", 1 / 3, 0, 3), Metric("a.b", 3, 0, 3)])  # killed within step 3
    again = MLflow(uri)
    assert again.open(run) == 2
    again.write(rows(3, 4))
    again.close()
    other = MLflow(uri)
    assert other.open(RunInfo("cd" * 16, "/runs/other", 0)) == 0
    other.close()
    (there,) = [one for one in mlflow.search_runs(["0"]) if one.data.tags["unbroken.run_id"] == "ab" * 16]
    assert (there.info.run_name, there.info.status) == ("gpt", "FINISHED")
    assert set(there.data.metrics) == {"loss", "a.b", "even", "samples"}
    for name in there.data.metrics:
        assert [metric.step for metric in mlflow.get_metric_history(there.info.run_id, name)] == [1, 2, 3, 4], name


def test_mlflow_takes_more_than_one_batch_holds(tmp_path: Path, mlflow: Any) -> None:
    from unbroken.loggers.to_mlflow import MLflow

    sink = MLflow((tmp_path / "ml").as_uri())
    sink.open(RunInfo("ab" * 16, "/runs/gpt", 0))
    sink.write(rows(1, 600))
    sink.close()
    (there,) = mlflow.search_runs(["0"])
    assert len(mlflow.get_metric_history(there.info.run_id, "samples")) == 600


# -- logs of wandb and SwanLab -----------------------------------------------------------------------------------------------


def leveldb(*records: bytes) -> bytes:
    """A file as both write it."""
    out = bytearray(HEADER)
    for record in records:
        first = True
        while True:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += bytes(left)
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
            if not record:
                break
    return bytes(out)


def test_records_over_several_blocks_are_read(tmp_path: Path) -> None:
    records = [os.urandom(n) for n in (0, 1, 32754, 32755, 5, 100_000, 32761 - 7, 3)]
    (tmp_path / "f").write_bytes(leveldb(*records))
    assert list(leveldb_records(str(tmp_path / "f"))) == records


@pytest.mark.parametrize("cut", [1, 5, 6, 7, 8, 40_000])
def test_reading_ends_at_a_torn_record(tmp_path: Path, cut: int) -> None:
    whole = leveldb(b"one", b"two" * 20_000)
    (tmp_path / "f").write_bytes(whole[:-cut])
    assert list(leveldb_records(str(tmp_path / "f"))) == [b"one"]


@pytest.mark.parametrize("damage", [b"", b":W&B", HEADER, HEADER + b"\0" * 7, HEADER + os.urandom(100)])
def test_what_is_no_record_is_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "f").write_bytes(damage)
    assert list(leveldb_records(str(tmp_path / "f"))) == []


def test_a_flipped_bit_ends_the_reading(tmp_path: Path) -> None:
    raw = bytearray(leveldb(b"one", b"two", b"three"))
    raw[7 + 7 + 3 + 7 + 1] ^= 1
    (tmp_path / "f").write_bytes(raw)
    assert list(leveldb_records(str(tmp_path / "f"))) == [b"one"]


# -- what log_to= means ------------------------------------------------------------------------------------------------------


class Own:
    """A sink of the user's."""

    def open(self, run: RunInfo) -> int:
        return 0

    def write(self, rows: Any) -> None: ...

    def close(self) -> None: ...


def test_every_kind_of_sink_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Own()
    here = str(tmp_path)
    assert targets(None) == targets([]) == ()
    assert targets("jsonl") == (Target("jsonl"),)
    assert targets(["jsonl:a/b.jsonl", own]) == (Target("jsonl", f"{here}/a/b.jsonl"), Target("own", own=own))
    assert targets(["tensorboard:tb", "wandb:p", "mlflow:http://x:5000", "swanlab:p"]) == (
        Target("tensorboard", f"{here}/tb"),
        Target("wandb", "p"),
        Target("mlflow", "http://x:5000"),
        Target("swanlab", "p"),
    )
    assert targets(["mlflow:mlruns", "mlflow:databricks"]) == (Target("mlflow", f"{here}/mlruns"), Target("mlflow", "databricks"))
    assert [str(one) for one in targets(["jsonl", "wandb:p", own])] == ["jsonl", "wandb:p", "Own"]
    assert choose.make(targets(own)[0]) is own


@pytest.mark.parametrize(
    ("log_to", "error", "words"),
    [
        ("csv", ValueError, "log_to='csv': give \"jsonl\", .*or an object with the methods open, write and close"),
        ("", ValueError, "log_to=''"),
        ("jsonl:", ValueError, "log_to='jsonl:'"),
        ("wandb", ValueError, "log_to='wandb'"),
        ("wandb:", ValueError, "log_to='wandb:'"),
        (["jsonl", 3], TypeError, "log_to= got 3: give"),
        (Own, TypeError, "log_to= got <class"),
        (object(), TypeError, "log_to= got <object"),
        (["wandb:p", "wandb:p"], ValueError, "wandb:p is named twice"),
    ],
)
def test_a_wrong_sink_is_an_error_that_says_what_is_accepted(log_to: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        targets(log_to)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow", "swanlab"])
def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"this needs {kind}: pip install 'unbroken\[{kind}\]'"):
        targets(f"{kind}:x")


def test_choosing_sinks_imports_none_of_their_libraries() -> None:
    import subprocess

    script = (
        "import sys; from unbroken.config import resolve\n"
        "resolve('30s', 'auto', {'log_to': ['jsonl', 'tensorboard:x', 'wandb:x', 'mlflow:x', 'swanlab:x']})\n"
        "assert not set(sys.modules) & {'tensorboard', 'wandb', 'mlflow', 'swanlab', 'torch'}, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
