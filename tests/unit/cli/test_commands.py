"""The reading commands as processes: their JSON, their exit codes, their errors, and that they start fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.synthetic_run import interrupted, uninterrupted
from unbroken.core.os import boot_id, hostname
from unbroken.core.records import Writer
from unbroken.store.lease import WriterLease
from unbroken.store.tiers.disk import DiskTier

READING = ("ls", "show", "logs", "verify", "certify")


def unbroken(*args: str | Path, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unbroken", *map(str, args)]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def json_of(*args: str | Path, code: int = 0) -> Any:
    done = unbroken(*args, "--json", code=code)
    assert done.stdout.count("\n") == 1, "one document on one line"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    uninterrupted(DiskTier(str(folder)))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    interrupted(DiskTier(str(folder)))
    return folder


def damage(run: Path) -> Path:
    """Change one byte in the middle of a pack."""
    pack = max(run.glob("packs/*/*.pack"))
    raw = bytearray(pack.read_bytes())
    raw[4096] ^= 1
    pack.write_bytes(raw)
    return pack


def test_ls_json_has_the_fixed_fields(run: Path) -> None:
    found = json_of("ls", run)
    assert [one["step"] for one in found] == sorted(one["step"] for one in found)
    assert len(found) >= 3
    for one in found:
        assert {"step": int, "generation": int, "size_bytes": int, "created": str, "kind": str, "root": str}.items() <= {
            key: type(value) for key, value in one.items()
        }.items()
        assert len(one["root"]) == 64


def test_ls_for_people_names_every_step(run: Path) -> None:
    steps = [str(one["step"]) for one in json_of("ls", run)]
    lines = unbroken("ls", run).stdout.splitlines()
    assert lines[0].split() == ["step", "generation", "size", "created", "kind", "root"]
    assert [line.split()[0] for line in lines[1:-1]] == steps
    assert lines[-1].endswith("on disk in all")


def test_verify_json_has_the_fixed_fields(run: Path) -> None:
    report = json_of("verify", run)
    assert set(report) == {"ok", "num_checkpoints", "num_chunks", "bad", "condemned"}
    assert report["ok"] is True
    assert report["num_checkpoints"] == len(json_of("ls", run))
    assert report["num_chunks"] > 0
    assert "all good" in unbroken("verify", run).stdout


def test_B01_verify_of_a_changed_byte_is_exit_1_and_names_the_file(run: Path) -> None:
    pack = damage(run)
    report = json_of("verify", run, code=1)
    assert report["ok"] is False
    assert str(pack.relative_to(run)) in [path for path, _ in report["bad"]]
    done = unbroken("verify", run, code=1)
    assert pack.name in done.stdout
    assert "damaged" in done.stdout


def test_show_lists_every_variable(run: Path) -> None:
    found = json_of("show", run, "--variables")
    assert found["num_variables"] == len(found["variables"]) > 0
    for one in found["variables"]:
        assert {"name", "layer", "kind", "role", "scope", "size_bytes", "hash", "captured"} <= set(one)
        assert one["layer"] in {"hardware", "framework", "scheduling"}
        assert one["role"] in {"restored", "compared", "recorded"}
    for_people = unbroken("show", run, "--variables").stdout
    assert all(one["name"] in for_people for one in found["variables"])


def test_show_of_an_older_step_shows_that_step(run: Path) -> None:
    first, *_, last = (one["step"] for one in json_of("ls", run))
    hashes = [
        {one["name"]: one["hash"] for one in json_of("show", run, "--variables", "--step", str(step))["variables"]}
        for step in (first, last)
    ]
    assert hashes[0] != hashes[1]
    assert {one["name"]: one["hash"] for one in json_of("show", run, "--variables")["variables"]} == hashes[1]


def test_show_gives_an_overview(run: Path) -> None:
    overview = json_of("show", run)
    assert overview["facts"]["run_id"] == "run"
    assert overview["newest"] == json_of("ls", run)[-1]
    text = unbroken("show", run).stdout
    assert overview["newest"]["root"] in text


def test_logs_makes_a_sink_anew_and_then_has_nothing_to_do(run: Path, tmp_path: Path) -> None:
    first = json_of("logs", run)
    assert first == {"sink": "jsonl", "held": 0, "written": 12, "holds": 12}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert set(rows[0]) == {"step", "loss", "samples"}
    assert json_of("logs", run)["written"] == 0
    unbroken("logs", run, "--to", f"jsonl:{tmp_path / 'other.jsonl'}")
    assert (tmp_path / "other.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert unbroken("logs", run, "--to", "jsonl").stdout == "jsonl: held steps up to 12, 0 written, holds steps up to 12\n"


def test_logs_refuses_what_it_cannot_do(run: Path) -> None:
    assert 'give "jsonl"' in json_of("logs", run, "--to", "csv", code=2)["error"]["text"]
    lease = WriterLease.acquire(str(run), Writer(host=hostname(), pid=os.getpid(), boot_id=boot_id(), since="now"))
    try:
        refused = json_of("logs", run, "--to", "wandb:project", code=4)["error"]["text"]
        assert f"process {os.getpid()} keeps this run alive, which feeds its sinks itself" in refused
        assert json_of("logs", run)["holds"] == 12, "a file has a lock of its own"
    finally:
        lease.release()


def test_certify_without_a_reference_is_grade_sequence(run: Path) -> None:
    certificate = json_of("certify", run)
    assert (certificate["certified"], certificate["grade"]) == (True, "sequence")
    assert {"condemned", "problems", "world_sizes", "samples_exactly_once"} <= set(certificate)
    assert "grade sequence" in unbroken("certify", run).stdout


def test_certify_against_a_reference_is_grade_exact(run: Path, reference: Path) -> None:
    certificate = json_of("certify", run, "--against", reference)
    assert (certificate["certified"], certificate["grade"]) == (True, "exact")
    assert certificate["losses_equal"] is certificate["state_root_equal"] is True
    assert "grade exact" in unbroken("certify", run, "--against", reference).stdout


def test_certify_of_a_changed_byte_is_exit_1(run: Path, reference: Path) -> None:
    pack = damage(run)
    certificate = json_of("certify", run, "--against", reference, code=1)
    assert certificate["certified"] is False
    assert any(pack.name in problem for problem in certificate["problems"])
    done = unbroken("certify", run, code=1)
    assert "not certified" in done.stdout
    assert pack.name in done.stdout


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("make", ["missing", "empty"])
def test_nothing_there_is_exit_3(tmp_path: Path, command: str, make: str) -> None:
    folder = tmp_path / make
    if make == "empty":
        folder.mkdir()
    error = json_of(command, folder, code=3)["error"]
    assert (error["kind"], error["exit_code"]) == ("NoCheckpoint", 3)
    done = unbroken(command, folder, code=3)
    assert done.stderr.startswith("unbroken: NoCheckpoint: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert folder.exists() is (make == "empty"), "reading makes nothing"


@pytest.mark.parametrize("command", READING)
def test_a_foreign_folder_is_exit_4(tmp_path: Path, command: str) -> None:
    (tmp_path / "thesis.txt").write_text("not yours")
    assert json_of(command, tmp_path, code=4)["error"]["kind"] == "ForeignFolder"


@pytest.mark.parametrize("command", READING)
def test_B39_a_newer_format_is_exit_4(run: Path, command: str) -> None:
    path = run / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":9').replace(b'"min_reader":1', b'"min_reader":9'))
    error = json_of(command, run, code=4)["error"]
    assert error["kind"] == "NewerFormat"
    assert "upgrade" in error["text"]


def test_a_step_that_is_not_there_is_exit_3(run: Path) -> None:
    assert json_of("show", run, "--variables", "--step", "999999", code=3)["error"]["kind"] == "NoCheckpoint"


def test_a_checkpoint_may_be_named_in_one_word(run: Path) -> None:
    steps = [one["step"] for one in json_of("ls", run)]
    assert json_of("show", f"{run}@{steps[0]}")["checkpoint"]["step"] == steps[0]
    assert json_of("show", f"{run}@main:{steps[0]}") == json_of("show", run, "--step", str(steps[0]))
    assert [one["step"] for one in json_of("ls", f"{run}@main")] == steps
    assert json_of("verify", f"{run}@main")["ok"]
    assert json_of("show", f"{run}@999999", code=3)["error"]["kind"] == "NoCheckpoint"
    assert json_of("show", f"{run}@nosuch", code=3)["error"]["kind"] == "NoCheckpoint"


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["ls"],
        ["ls", "a", "b"],
        ["show", "a", "--step", "x"],
        ["show", "a", "--step", "-1"],
        ["demo", "--ranks", "9"],
        ["--nonsense"],
    ],
)
def test_usage_errors_are_exit_2(args: list[str]) -> None:
    done = unbroken(*args, code=2)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ls"], "Missing argument 'DIR'"),
        (["show", "a", "--step", "x"], "Invalid value for '--step'"),
        (["show", "a@1", "--step", "2"], "name two: give one of them"),
        (["verify", "a@1"], "this looks at all checkpoints of a lineage"),
        (["nonsense"], "No such command 'nonsense'"),
        (["verify", "a", "--nonsense"], "No such option: --nonsense"),
    ],
)
def test_usage_errors_are_json_where_that_is_asked_for(args: list[str], words: str) -> None:
    error = json_of(*args, code=2)["error"]
    assert words in error["text"]
    assert error["exit_code"] == 2


def test_a_demo_folder_with_files_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("not yours")
    done = unbroken("demo", "--dir", tmp_path, code=2)
    assert "not empty" in done.stderr
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_version_and_help() -> None:
    assert unbroken("--version").stdout == "unbroken 0.1.0\n"
    text = unbroken("--help").stdout
    assert {"run", "demo", *READING} <= set(text.split())
    assert "completion" not in text
    for command in READING:
        assert "--json" in unbroken(command, "--help").stdout


def test_a_reader_that_goes_away_is_no_error_of_ours(run: Path) -> None:
    shell = f"'{sys.executable}' -m unbroken ls '{run}' | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("command", READING)
def test_reading_commands_load_no_torch(run: Path, command: str) -> None:
    script = (
        "import sys; sys.argv = ['unbroken', *sys.argv[1:]]\n"
        "from unbroken.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, command, str(run)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "False\n"


def test_diff_of_equal_runs_is_exit_0_and_of_different_ones_exit_1(run: Path, reference: Path) -> None:
    equal = json_of("diff", run, reference)
    assert set(equal) == {"equal", "state_equal", "steps", "roots", "differences", "journal"}
    assert (equal["equal"], equal["steps"], equal["journal"]["steps"]) == (True, [12, 12], 12)
    different = json_of("diff", f"{run}@9", f"{reference}@12", code=1)
    assert [(one["name"], one["what"]) for one in different["differences"] if one["counts"]] == [("/model/w", "value"), ("/step", "value")]
    assert [(one["name"], one["rank"], one["counts"]) for one in equal["differences"]] == [("/random/torch", 2, False)]  # 2 and 3 ranks
    lines = unbroken("diff", f"{run}@9", f"{reference}@main:12", code=1).stdout.splitlines()
    assert lines[0] == "step 9 and step 12: state roots differ"
    assert "losses: equal in all 9 steps that both hold" in lines
    assert lines[-1] == "different: 2 variables"
    assert unbroken("diff", run, reference).stdout.splitlines()[-1] == "equal"


def test_diff_without_a_checkpoint_is_exit_3_and_without_a_place_exit_2(run: Path) -> None:
    assert json_of("diff", f"{run}@10", run, code=3)["error"]["kind"] == "NoCheckpoint"
    assert json_of("diff", f"{run}@a/b", run, code=2)["error"]["kind"] == "ValueError"


def test_export_says_what_is_where(run: Path, tmp_path: Path) -> None:
    made = json_of("export", run, "--to", tmp_path / "out")
    assert (made["step"], made["path"], made["files"]) == (12, str(tmp_path / "out"), ["model.safetensors", "state.json"])
    assert json_of("export", run, "--to", tmp_path / "out", code=4)["error"]["kind"] == "Refused"
    assert json_of("export", run, "--to", tmp_path / "o2", "--format", "npz", code=2)["error"]["kind"] == "ValueError"
    assert "step 9 is in" in unbroken("export", run, "--step", "9", "--to", tmp_path / "x.pt", "--format", "torch").stdout
