"""What happens without a death: a failing collective, a request to stop, a full disk. And that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken
from tests.rigs.torture_runs import ROOT, SCRIPT, finish, journal, launch, processes_of, reference, wait_until


@pytest.mark.parametrize("place", ["exchange.scatter", "exchange.gather"])
def test_I8_a_collective_that_fails_on_one_of_three_ranks_is_repeated_in_place(tmp_path: Path, place: str) -> None:
    """The same units come again in the same processes; EMA, scheduler and BatchNorm see the step once."""
    expected = reference(tmp_path / "reference", 6)
    process = launch(tmp_path / "hit", 6, ranks=3, faults=[{"at": place, "step": 4, "rank": 1, "action": "raise"}])
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["root"] == expected["root"]
    records = journal(tmp_path / "hit")
    refused = [r for r in records if r.get("name") == "refused"]
    assert [r["facts"]["retry"] for r in refused] == [True]
    assert len([r for r in records if r["type"] == "begin"]) == 1, "nobody may have been restarted"
    assert [r["attempt"] for r in records if r["type"] == "step"] == [0, 0, 0, 1, 0, 0]


def test_I8_a_loop_left_while_gradients_are_on_their_way_goes_on_in_the_same_processes(tmp_path: Path) -> None:
    """After backward and before run.step() the first buckets have left; all three ranks break and start the loop again."""
    expected = reference(tmp_path / "reference", 6)
    process = launch(tmp_path / "left", 6, ranks=3, TORTURE_LEAVE="3")
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["root"] == expected["root"]
    records = journal(tmp_path / "left")
    assert len([r for r in records if r["type"] == "begin"]) == 1, "nobody may have been restarted"
    assert [r["step"] for r in records if r["type"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("whom", ["group", "one rank", "launcher"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_ends_the_step_commits_and_exits_0(tmp_path: Path, whom: str, number: signal.Signals) -> None:
    directory = tmp_path / "run"
    process = launch(directory, 100000, ranks=3, TORTURE_INTERVAL="1000 steps")
    try:
        wait_until(lambda: _steps(directory) >= 1, 60, "first step")
        workers = [int(line.split()[0]) for line in processes_of(directory) if SCRIPT in line and "unbroken run" not in line]
        assert len(workers) == 3
        if whom == "launcher":
            process.send_signal(number)
        elif whom == "one rank":
            os.kill(workers[1], number)
        else:
            for pid in workers:
                os.kill(pid, number)
        code, _, err = finish(process, 60)
    finally:
        process.kill()  # a run without end must not outlive a test that has failed
    assert code == 0, err
    steps = [r["step"] for r in journal(directory) if r["type"] == "step"]
    archive = unbroken.open(str(directory))
    assert archive.steps()[-1].step == steps[-1], "the last finished step is committed"
    assert archive.certify().certified
    wait_until(lambda: not processes_of(directory), 5, "no process of the run is left")


def _steps(directory: Path) -> int:
    """Steps committed or journalled durably so far, or that the daemon knows of."""
    from unbroken.core.messages import Hello, Status, StatusReply, Welcome
    from unbroken.shm.channel import connect

    try:
        channel = connect(str(directory), start=False)
    except OSError:
        return 0
    try:
        channel.send(Hello(role="observer", pid=os.getpid()))
        assert isinstance(channel.receive(5.0)[0], Welcome)
        channel.send(Status())
        reply = channel.receive(5.0)[0]
        return (reply.facts.get("last_applied") or 0) if isinstance(reply, StatusReply) else 0
    finally:
        channel.close()


def test_I9_a_disk_that_fills_up_does_not_end_the_run(tmp_path: Path) -> None:
    """8 MB of tmpfs under the run folder: saves fail, are listed, and the run ends well."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        filler = mount / "filler"
        filler.write_bytes(b"\0" * ((8 << 20) - (400 << 10)))
        process = launch(mount / "run", 12, ranks=3, TORTURE_INTERVAL="1 steps")
        code, _, err = finish(process)
        assert code == 0, err
        assert "were not saved" in err or "not saved" in err, err
        assert "No space left" in err, err
        filler.unlink()
        archive = unbroken.open(str(mount / "run"))
        good = [c.step for c in archive.steps()]
        assert good, "what was committed before stays"
        assert archive.verify().ok
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_I11_no_process_and_no_memory_of_the_run_outlives_a_killed_launcher(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = launch(directory, 100000, ranks=3)
    wait_until(lambda: _steps(directory) >= 2, 60, "second step")
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(directory), 5, "no process of the run is left")
    # memory files live in their processes only: no process, no memory


def test_under_plain_python_a_killed_trainer_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = [sys.executable, str(ROOT / SCRIPT), str(directory), "100000"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: _steps(directory) >= 2, 60, "second step")
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(directory), 5, "no process of the run is left")


@pytest.mark.parametrize("when", [2, 4])
def test_I9_a_killed_daemon_is_replaced_and_nothing_is_lost(tmp_path: Path, when: int) -> None:
    """Memory slots die with it; the run goes on, opens a generation with another daemon and ends exact."""
    expected = reference(tmp_path / "reference", 12)
    directory = tmp_path / "run"
    process = launch(directory, 12, ranks=3, TORTURE_SLEEP="0.2")
    wait_until(lambda: _steps(directory) >= when, 60, "some steps")
    daemon = next(int(line.split()[0]) for line in processes_of(directory) if "unbroken.agent" in line)
    os.kill(daemon, signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["root"] == expected["root"]
    records = journal(directory)
    assert [r["step"] for r in records if r["type"] == "step" and r["clock"][0][0] == 1][-1] == 12
    assert any(r.get("name") == "continued" for r in records)
    certificate = unbroken.open(str(directory)).certify(against=str(tmp_path / "reference"))
    assert certificate.grade == "exact", certificate
    assert certificate.steps_lost_total == 0, "nothing was computed twice"
