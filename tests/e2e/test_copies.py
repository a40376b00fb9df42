"""Runs with a copy in a real S3 server: the folder is lost, the server dies, answers get lost; the commands on a copy; secrets."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unbroken
from tests.rigs.fake_trainer import prepared_daemon
from tests.rigs.launched import is_running
from tests.rigs.lossy_proxy import lossy_proxy
from tests.rigs.tiny_run import commits, daemon_pid, damage_newest, end_daemon, files_of, flip, loss_of, open_run, own_pack, train
from tests.rigs.torture_runs import finish, journal, launch, processes_of, reference, wait_until
from unbroken.cli.app import app
from unbroken.store.tiers.choose import tier_at

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unbroken[object]'")

from tests.rigs.s3_server import S3Server, s3_server, weed

STEPS = 12


@pytest.fixture
def keys(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.environment()


@pytest.fixture
def url(s3: S3Server, keys: dict[str, str]) -> str:
    return s3.place()


@pytest.fixture
def end(tmp_path: Path) -> Iterator[None]:
    yield
    end_daemon(tmp_path / "run")


def command(*words: object) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def newest_in(url: str) -> int:
    try:
        return max((one.step for one in unbroken.open(url).steps()), default=-1)
    except unbroken.UnbrokenError:
        return -1


def test_B01_I13_the_folder_is_gone_after_a_kill_and_the_run_ends_in_the_same_bits_from_s3(tmp_path: Path, url: str) -> None:
    """Everything of the job is killed on two ranks, the folder removed; the next job brings the newest checkpoint back and is hit again."""
    expected = reference(tmp_path / "reference", STEPS)
    directory, slow = tmp_path / "hot", {"UNBROKEN_COPY_TO": url, "TORTURE_INTERVAL": "1 steps", "TORTURE_SLEEP": "0.2"}
    process = launch(directory, STEPS, ranks=2, **slow)
    wait_until(lambda: newest_in(url) >= 2, 60, "step 2 is in the copy")
    victims = [int(line.split()[0]) for line in processes_of(directory)]
    os.killpg(process.pid, signal.SIGKILL)
    for pid in victims:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until(lambda: not processes_of(directory), 20, "all of the job is gone")
    shutil.rmtree(directory)
    kept = newest_in(url)
    fault = {"at": "step.backward", "step": STEPS - 1, "rank": 1, "generation": 1, "action": "kill"}
    code, out, err = finish(launch(directory, STEPS, ranks=2, faults=[fault], UNBROKEN_COPY_TO=url, UNBROKEN_RESUME="must"))
    assert code == 0, err
    assert f"step {kept} from {url}: brought back into the folder" in err
    result = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert result["root"] == expected["root"]
    certificate = unbroken.open(directory).certify(against=tmp_path / "reference")
    assert (certificate.certified, certificate.grade) == (True, "exact"), certificate
    wait_until(lambda: newest_in(url) == STEPS, 60, "the last checkpoint is in the copy")
    archive = unbroken.open(url)
    assert archive.verify().ok
    assert archive.certify(against=tmp_path / "reference").grade == "exact"
    told = [*out.splitlines(), *err.splitlines()]
    assert any(line.startswith(f"unbroken: copies in {url}: every checkpoint") and "per checkpoint" in line for line in told)


def test_I9_a_server_that_is_killed_stops_neither_training_nor_checkpoints_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: None, runtime: None
) -> None:
    program, directory = weed(), tmp_path / "run"
    assert program is not None
    with s3_server(program) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        url = server.place()
        train(directory, 2, copy_to=url)
        wait_until(lambda: newest_in(url) == 2, 30, "step 2 is in the copy")
        os.kill(server.pid, signal.SIGKILL)
        train(directory, 6, copy_to=url)
    assert [commit.step for commit in commits(directory)] == [4, 5, 6]
    wait_until(lambda: _names(directory) & {"copy_failed"}, 60, "the journal says it")
    text = "".join(path.read_text() for path in (directory / "runs/main/journal").iterdir())
    assert server.key not in text and server.secret not in text


SLOWLY = """
import unbroken.agent, unbroken.daemon.errands
unbroken.agent.LINGER_S, unbroken.daemon.errands.ERRAND_NEWS_S = 60, 0.2
arm("copying.before_commit", lambda: arm("copying.before_commit", None) or time.sleep(1.5))
"""
"""A daemon whose first way back takes longer than it is silent."""


def test_I11_a_start_hears_that_a_checkpoint_is_being_brought_back(
    tmp_path: Path, runtime: None, end: None, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, copy = tmp_path / "run", f"file://{tmp_path}/copy"
    train(directory, 2, copy_to=copy)
    end_daemon(directory)
    shutil.rmtree(directory)
    with prepared_daemon(str(directory), SLOWLY):
        assert len(train(directory, 3, copy_to=copy, resume="must")) == 1
        end_daemon(directory)
    err = capfd.readouterr().err
    assert err.count("unbroken: a checkpoint is being brought back from the copy") == 1
    assert f"step 2 from {copy}: brought back" in err


@pytest.mark.slow
def test_I11_all_ranks_wait_in_turns_while_a_checkpoint_is_brought_back(tmp_path: Path, runtime: None, end: None) -> None:
    directory, copy = tmp_path / "run", f"file://{tmp_path}/copy"
    reference(directory, 3, ranks=2, UNBROKEN_COPY_TO=copy)
    end_daemon(directory)
    shutil.rmtree(directory)
    with prepared_daemon(str(directory), SLOWLY):
        code, out, err = finish(launch(directory, 5, ranks=2, UNBROKEN_COPY_TO=copy, UNBROKEN_RESUME="must"))
    assert code == 0, err
    assert err.count("unbroken: a checkpoint is being brought back from the copy") == 1
    assert f"step 3 from {copy}: brought back" in err
    assert json.loads(next(line for line in out.splitlines() if line.startswith("{")))["completed"] == 5


def _names(directory: Path) -> set[str]:
    return {record.get("name", "") for record in journal(directory)}


def test_answers_that_are_lost_leave_a_whole_copy(
    s3: S3Server, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, end: None
) -> None:
    with lossy_proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.lose = 6
        train(tmp_path / "run", 3, copy_to=url)
        wait_until(lambda: newest_in(url) == 3, 60, "the copy is there")
        wait_until(lambda: daemon_pid(tmp_path / "run") is None, 30, "the daemon has ended")
        assert len(proxy.lost) == 6
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert unbroken.open(url).verify().ok


def train_copied(directory: Path, url: str, steps: int, **options: Any) -> None:
    """Train, each checkpoint copied before the next is made, until the daemon has ended."""
    run = open_run(directory, total_steps=steps, copy_to=url, **options)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step()
        wait_until(lambda: newest_in(url) == run.completed - 1, 30, "the step before is copied")
    wait_until(lambda: newest_in(url) == steps, 30, "the last one is copied")
    end_daemon(directory)


def test_commands_work_on_the_copy_and_repair_brings_the_folder_back_to_verify(tmp_path: Path, url: str, end: None) -> None:
    directory = tmp_path / "run"
    train_copied(directory, url, 4, width=5000)
    assert [one["step"] for one in command("ls", url)[1]] == [2, 3, 4]
    assert command("show", url)[1]["newest"]["step"] == 4
    assert command("show", url, "--variables")[1]["num_variables"] > 10
    assert command("verify", url)[0] == 0
    assert command("export", url, "--to", tmp_path / "weights")[0] == 0
    assert command("diff", directory, url)[1]["equal"]
    before = files_of(directory)
    damage_newest(directory)
    (directory / own_pack(directory, commits(directory)[0])).unlink()
    manifest = commits(directory)[1].manifests[0].path
    flip(directory / manifest, 300)
    assert command("verify", directory)[0] == 1
    code, report = command("repair", directory, "--from", url, "--dry-run")
    assert (code, report["dry_run"], len(report["faults"]), report["written_bytes"]) == (0, True, 3, 0)
    assert command("verify", directory)[0] == 1
    code, report = command("repair", directory, "--from", url)
    assert (code, report["ok"]) == (0, True)
    assert {fault["path"] for fault in report["faults"]} >= {manifest}
    after = files_of(directory)
    assert {path: raw for path, raw in after.items() if path != "writer.json"} == {
        p: raw for p, raw in before.items() if p != "writer.json"
    }
    assert command("verify", directory)[0] == 0
    assert train(directory, 5, width=5000)


def test_what_the_copy_lacks_too_is_listed_and_left_as_it_was(tmp_path: Path, url: str, end: None) -> None:
    directory = tmp_path / "run"
    train_copied(directory, url, 2, copy_keep=1)
    pack = own_pack(directory, commits(directory)[1])
    flip(directory / pack, 4096)
    before = (directory / pack).read_bytes()
    code, report = command("repair", directory, "--from", url)
    assert (code, report["ok"]) == (1, False)
    (fault,) = report["faults"]
    assert fault["path"] == pack and "missing" in fault["why"]
    assert (directory / pack).read_bytes() == before
    assert [path for path, _ in report["bad"]] == [pack]


@pytest.mark.parametrize(
    "given", ["s3://AKIAKEY:sEcReT@bucket/run", "s3://bucket/run?X-Amz-Signature=sEcReT", "file://AKIAKEY:sEcReT@x/run"]
)
def test_secrets_in_the_url_are_refused_and_not_repeated(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for act in (
        lambda: open_run(tmp_path / "run", copy_to=given),
        lambda: unbroken.open(given),
        lambda: unbroken.Store(given),
        lambda: monkeypatch.setenv("UNBROKEN_COPY_TO", given) or open_run(tmp_path / "run"),
    ):
        with pytest.raises(ValueError) as told:
            act()
        assert "sEcReT" not in str(told.value) and "AKIAKEY" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_keys_stand_nowhere(s3: S3Server, tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str], end: None) -> None:
    directory = tmp_path / "run"
    with_cmdline: list[bytes] = []
    run = open_run(directory, total_steps=2, copy_to=url)
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        assert run.step()
        with_cmdline.append(Path(f"/proc/{daemon_pid(directory)}/cmdline").read_bytes())
    wait_until(lambda: newest_in(url) == 2, 30, "copied")
    end_daemon(directory)
    assert b"unbroken.agent" in with_cmdline[0]
    seen = b"".join([*files_of(directory).values(), *with_cmdline])
    seen += b"".join(tier_at(url).read(path) for path in tier_at(url).list(""))
    said = capfd.readouterr()
    for secret in (s3.key, s3.secret):
        assert secret.encode() not in seen
        assert secret not in said.out + said.err


def test_doctor_says_which_level_a_bucket_gives(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = command("doctor", url)
    assert code == 0, report
    assert report["findings"][-1]["seen"].startswith("full: ")
    assert tier_at(url).list("") == [], "nothing is left behind"
    for name, value in s3.environment(reader=True).items():
        monkeypatch.setenv(name, value)
    code, report = command("doctor", url)
    assert code == 1
    assert report["findings"][-1]["seen"].startswith("unfit: ")
    assert "may not do this" in json.dumps(report)


def test_a_branch_is_trained_and_said_not_to_be_copied(tmp_path: Path, end: None, capfd: pytest.CaptureFixture[str]) -> None:
    directory, copy = tmp_path / "run", f"file://{tmp_path}/copy"
    train(directory, 2, copy_to=copy)
    unbroken.open(directory).branch(2, "hot")
    held = files_of(tmp_path / "copy")
    assert len(train(directory, 3, copy_to=copy, lineage="hot")) == 1
    assert f"lineage hot is not copied to {copy}: branches are not yet" in capfd.readouterr().out
    assert files_of(tmp_path / "copy") == held
