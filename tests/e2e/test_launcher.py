"""`unbroken run` with toy scripts: restarts, budgets, orphans, signals, exit codes. No training library is needed for any of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.rigs.launched import gone, is_running, launched, wait_until

THREE = ("--nproc-per-node", "3")


def test_a_killed_worker_is_seen_at_once_and_all_start_again(tmp_path: Path) -> None:
    script = """
if ATTEMPT == 0:
    wait_for(lambda: len(marks("start")) == 3)
    if RANK == 1:
        mark("killed"); os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
    with launched(tmp_path, script, *THREE) as job:
        assert job.wait() == 0, job.stderr
        first, second = job.marks()[:3], job.marks()[3:]
        assert sorted(mark["rank"] for mark in second) == [0, 1, 2]
        assert not any(is_running(mark["pid"]) for mark in first)
        outcome = job.outcome()
        assert (outcome["exit_code"], outcome["restarts"]) == (0, 1)
        failure = outcome["failures"][0]
        assert (failure["codes"], failure["rank"], failure["error"]) == ([[1, -9]], 1, "SIGKILL")
        (killed,) = job.marks("killed")
        assert failure["at_s"] - killed["at"] < 0.5, "death is announced by the kernel, nobody sleeps"
        assert min(mark["at"] for mark in second) - killed["at"] < 3.0


def test_workers_that_start_again_have_stood_by_and_none_is_left_at_the_end(tmp_path: Path) -> None:
    script = """
if ATTEMPT == 0:
    time.sleep(600)
"""
    with launched(tmp_path, script, "--nproc-per-node", "2", "--preload", "json") as job:
        first = [mark["pid"] for mark in job.wait_for_marks("start", 2)]

        def standing() -> list[int]:
            return [child.pid for child in psutil.Process(job.process.pid).children() if "standby worker" in " ".join(child.cmdline())]

        wait_until(lambda: len(standing()) == 2, "two standby processes")
        standby = standing()
        os.kill(first[0], signal.SIGKILL)
        assert sorted(mark["pid"] for mark in job.wait_for_marks("start", 4)[2:]) == sorted(standby)
        assert job.wait() == 0, job.stderr
        gone([*first, *standby])


@pytest.mark.parametrize("redirects", ["0", "3"])
def test_B36_a_always_failing_uses_the_budget_and_names_code_and_logs(tmp_path: Path, redirects: str) -> None:
    with launched(tmp_path, "sys.exit(7)", "--max-restarts", "3", "--redirects", redirects) as job:
        assert job.wait() == 5
        assert len(job.marks()) == 4
        outcome = job.outcome()
        assert (outcome["exit_code"], outcome["restarts"], outcome["worker_exit_codes"]) == (5, 3, {"0": 7})
        last = job.stderr.splitlines()[-1]
        assert "3 restarts in" in last and "exit code 7" in last
        assert f"(logs: {outcome['log_dir']})" in last
        (found,) = Path(outcome["log_dir"]).rglob("failures.json")
        failures = json.loads(found.read_bytes())
        assert [failure["codes"] for failure in failures] == [[[0, 7]]] * 4
        assert bool(list(Path(outcome["log_dir"]).rglob("stdout.log"))) is (redirects == "3")


def test_B36_b_the_budget_belongs_to_the_job_not_to_a_rank(tmp_path: Path) -> None:
    script = "time.sleep(600) if RANK == ATTEMPT % 2 else sys.exit(1)"
    with launched(tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "3") as job:
        assert job.wait() == 5
        assert job.outcome()["restarts"] == 3
        assert len(job.marks()) <= 8
        assert {mark["attempt"] for mark in job.marks()} == {0, 1, 2, 3}


@pytest.mark.parametrize("preload", ["", "json"], ids=["cold", "warm"])
def test_B36_d_a_grandchild_that_ignores_sigterm_is_gone_before_the_next_attempt(tmp_path: Path, preload: str) -> None:
    """One in the worker's session, one in a session of its own, one that is another program in a session of its own."""
    script = """
import subprocess
if ATTEMPT == 0 and RANK == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for own in (False, True):
        child = os.fork()
        if child == 0:
            if own:
                os.setsid()
            mark("grandchild", child=os.getpid())
            time.sleep(600)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    other.stdout.readline()
    mark("grandchild", child=other.pid)
    wait_for(lambda: len(marks("grandchild")) == 3)
    os.kill(os.getpid(), signal.SIGKILL)
elif ATTEMPT == 0:
    time.sleep(600)
for found in marks("grandchild"):
    try:
        state = open(f"/proc/{found['child']}/stat").read().rsplit(")", 1)[1].split()[0]
    except OSError:
        state = "gone"
    mark("seen", state=state)
"""
    with launched(tmp_path, script, *THREE, "--preload", preload, env={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait() == 0, job.stderr
        assert len(job.marks("seen")) == 9
        assert {mark["state"] for mark in job.marks("seen")} <= {"gone", "Z", "X"}
        assert "is gone" not in job.stderr, "the fork server is none of them"


@pytest.mark.parametrize("preload", ["", "json"], ids=["cold", "warm"])
def test_B36_e_twenty_quick_restarts_while_workers_hold_the_port(tmp_path: Path, preload: str) -> None:
    script = """
import socket
held = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10)
if ATTEMPT < 20:
    if RANK == ATTEMPT % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    with launched(tmp_path, script, "--nproc-per-node", "2", "--preload", preload) as job:
        assert job.wait(120) == 0, job.stderr
        assert job.outcome()["restarts"] == 20
        assert {failure["error"] for failure in job.outcome()["failures"]} == {"SIGKILL"}


def test_B36_f_a_rank_that_ends_early_is_no_failure(tmp_path: Path) -> None:
    script = """
if RANK != 2:
    sys.exit(0)
wait_for(lambda: not any(os.path.exists(f"/proc/{m['pid']}/exe") for m in marks("start") if m["rank"] != 2))
mark("last")
"""
    with launched(tmp_path, script, *THREE) as job:
        assert job.wait() == 0, job.stderr
        assert job.outcome()["restarts"] == 0
        assert job.marks("last")


@pytest.mark.parametrize("code", [3, 4])
def test_a_final_exit_code_is_kept_and_not_tried_again(tmp_path: Path, code: int) -> None:
    with launched(tmp_path, f"sys.exit({code})", "--nproc-per-node", "2") as job:
        assert job.wait() == code
        assert job.outcome()["restarts"] == 0
        assert len(job.marks()) <= 2


def test_the_whole_error_with_its_remedy_is_shown_at_the_end(tmp_path: Path) -> None:
    script = "import unbroken; raise unbroken.LayoutMismatch('other facts:\\n  units: born with 4, now 8\\nGive them as they were')"
    with launched(tmp_path, script, "--redirects", "3") as job:
        assert job.wait() == 4
        *_, remedy, last = job.stderr.splitlines()
        assert remedy == "Give them as they were"
        assert "LayoutMismatch: other facts:; starting again cannot change that (logs: " in last
        assert job.outcome()["failures"][0]["message"].endswith("now 8\nGive them as they were")


def test_a_program_that_cannot_start_is_not_tried_a_hundred_times(tmp_path: Path) -> None:
    with launched(tmp_path, "raise RuntimeError(f'no file {os.getpid()}')") as job:
        assert job.wait() == 5
        assert len(job.marks()) == 3
        assert "RuntimeError: no file" in job.outcome()["reason"]


MISTAKE = """
class Wrong(ValueError): pass
time.sleep(0.3 * RANK)
raise Wrong("units=3")
"""


@pytest.mark.parametrize("script", [MISTAKE, "import no_such_module", "def f(:", "open('no such file')"])
def test_a_mistake_that_every_rank_makes_is_not_tried_again(tmp_path: Path, script: str) -> None:
    with launched(tmp_path, script, "--nproc-per-node", "2") as job:
        assert job.wait() == 1
        assert job.outcome()["restarts"] == 0
        assert "no run was opened, and starting again cannot change that" in job.outcome()["reason"]
        assert job.outcome()["worker_exit_codes"] == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("if RANK == 0 and ATTEMPT == 0: raise ValueError('x')", "one rank alone: the next attempt may come out otherwise"),
        ("if ATTEMPT == 0: raise (ValueError if RANK else OSError)('x')", "the world's fault on one rank"),
        (
            "open(os.environ['UNBROKEN_LAUNCH_FILE'], 'w').write('{\"directory\": \"/none\"}\\n') if ATTEMPT == 0 else sys.exit(0)\n"
            "raise ValueError('x')",
            "a run was opened",
        ),
    ],
)
def test_what_may_come_out_otherwise_is_tried_again(tmp_path: Path, script: str, why: str) -> None:
    with launched(tmp_path, script, "--nproc-per-node", "2") as job:
        assert job.wait() == 0, why
        assert job.outcome()["restarts"] == 1, why


def test_a_torn_error_file_does_not_harm_the_launcher(tmp_path: Path) -> None:
    script = """
if ATTEMPT == 0:
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": {"mess')
    sys.exit(9)
"""
    with launched(tmp_path, script) as job:
        assert job.wait() == 0, job.stderr
        assert job.outcome()["failures"][0]["error"] == "exit code 9"


@pytest.mark.parametrize(("sent", "got"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM")])
def test_B34_a_wish_to_end_reaches_every_worker_and_is_a_success_if_they_finish(tmp_path: Path, sent: str, got: str) -> None:
    script = """
def finish(number, frame):
    mark("got", signal=signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, finish); signal.signal(signal.SIGUSR1, finish)
mark("armed")
time.sleep(600)
"""
    with launched(tmp_path, script, *THREE) as job:
        job.wait_for_marks("armed", 3)
        job.signal(signal.Signals[sent])
        assert job.wait() == 0, job.stderr
        assert [mark["signal"] for mark in job.marks("got")] == [got] * 3
        assert job.outcome()["restarts"] == 0


def test_B34_workers_that_do_not_end_are_killed_after_the_grace(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('armed'); time.sleep(600)"
    with launched(tmp_path, script, "--nproc-per-node", "2", env={"UNBROKEN_GRACE_S": "0.5"}) as job:
        pids = [mark["pid"] for mark in job.wait_for_marks("armed", 2)]
        job.signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        gone(pids)
        assert job.outcome()["worker_exit_codes"] == {"0": -9, "1": -9}


def test_B34_a_second_interrupt_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *a: mark('got')); mark('armed'); [time.sleep(1) for _ in range(600)]"
    with launched(tmp_path, script) as job:
        job.wait_for_marks("armed", 1)
        job.signal(signal.SIGINT)
        job.wait_for_marks("got", 1)
        job.signal(signal.SIGINT)
        assert job.wait(15) == 128 + signal.SIGINT


def test_B36_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('armed'); time.sleep(600)"
    with launched(tmp_path, script, *THREE) as job:
        pids = [mark["pid"] for mark in job.wait_for_marks("armed", 3)]
        job.signal(signal.SIGKILL)
        gone(pids)


def test_what_a_worker_left_running_ends_with_the_job(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    time.sleep(600)
mark("child", child=child)
"""
    with launched(tmp_path, script) as job:
        assert job.wait() == 0, job.stderr
        gone([mark["child"] for mark in job.marks("child")])


def test_workers_are_told_who_their_launcher_is(tmp_path: Path) -> None:
    script = """
mark("env", parent=os.getppid(), **{name: os.environ.get(name) for name in (
    "UNBROKEN_LAUNCHER_PID", "UNBROKEN_KEEPER_PID", "UNBROKEN_LAUNCH_FILE", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")})
"""
    with launched(tmp_path, script, "--nproc-per-node", "2") as job:
        assert job.wait() == 0, job.stderr
        for mark in job.marks("env"):
            assert mark["UNBROKEN_LAUNCHER_PID"] == mark["UNBROKEN_KEEPER_PID"] == str(mark["parent"]) == str(job.process.pid)
            assert mark["UNBROKEN_LAUNCH_FILE"]
            assert (mark["WORLD_SIZE"], mark["LOCAL_RANK"], mark["OMP_NUM_THREADS"]) == ("2", str(mark["rank"]), "1")
        assert not list(tmp_path.glob("unbroken-run-*")), "nothing is left behind after a success"


def test_torchruns_flags_for_output_work(tmp_path: Path) -> None:
    script = "print('hello from', RANK)"
    with launched(tmp_path, script, "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), "--tee", "3", "--role", "toy") as job:
        assert job.wait() == 0, job.stderr
        assert "[toy1]:hello from 1" in (tmp_path / "out").read_text()
        assert {path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")} == {"hello from 0\n", "hello from 1\n"}


def test_a_program_that_is_not_python(tmp_path: Path) -> None:
    done = _run(tmp_path, "--no-python", "--nproc-per-node", "2", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "rank 0 of 2", "rank 1 of 2"]), done.stderr


def test_restarts_of_a_real_process_group(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((3,), float(RANK + 1))
dist.all_reduce(total)
mark("sum", value=total.tolist())
if ATTEMPT < 3 and RANK == ATTEMPT:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
    with launched(tmp_path, script, *THREE) as job:
        assert job.wait(120) == 0, job.stderr
        assert job.outcome()["restarts"] == 3
        assert [mark["value"] for mark in job.marks("sum") if mark["attempt"] == 3] == [[6.0] * 3] * 3


def test_two_nodes_meet_and_meet_again_after_a_death(tmp_path: Path) -> None:
    script = """
store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
import socket; socket.create_connection(store, timeout=10)
mark("met", world=os.environ["WORLD_SIZE"], store=store)
wait_for(lambda: len([m for m in marks("met") if m["world"] == "4" and m["store"] == list(store)]) == 4)
if len({tuple(m["store"]) for m in marks("met")}) == 1:
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "b").mkdir()
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"127.0.0.1:{port}")
    with launched(tmp_path, script, *flags, "--local-addr", "127.0.0.1") as a:
        toy = [sys.executable, "-m", "unbroken", "run", *flags, "--local-addr", "127.0.0.1", str(a.script)]
        b = subprocess.Popen(toy, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert a.wait(120) == 0, a.stderr
            _, err = b.communicate(timeout=60)
            assert b.returncode == 0, err
        finally:
            b.kill()
        assert len({tuple(mark["store"]) for mark in a.marks("met")}) == 2


def test_B34_a_launcher_that_waits_for_its_fork_server_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import time\nopen({str(tmp_path / 'warming')!r}, 'w').close()\ntime.sleep(600)\n")
    env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with launched(tmp_path, "", "--preload", "slow", env=env) as job:
        wait_until((tmp_path / "warming").exists, "the server's import")
        job.signal(signal.SIGTERM)
        assert job.wait(20) == 128 + signal.SIGTERM
        assert "SIGTERM came while no worker ran yet" in job.stderr
        assert not job.marks()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_B34_a_launcher_that_waits_for_other_nodes_ends_when_it_is_told_to(tmp_path: Path, sent: signal.Signals) -> None:
    (tmp_path / "toy.py").touch()
    command = [sys.executable, "-m", "unbroken", "run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    waiting = subprocess.Popen([*command, str(tmp_path / "toy.py")], stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stderr is not None
        assert any("waiting for other nodes" in line for line in iter(waiting.stderr.readline, ""))
        waiting.send_signal(sent)
        _, err = waiting.communicate(timeout=30)
        assert waiting.returncode == 128 + sent
        assert f"{sent.name} came while waiting for other nodes" in err
    finally:
        waiting.kill()
        waiting.wait()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc-per-node", "0", "toy.py"], "at least 1 process"),
        (["no-such-script.py"], "no such script: no-such-script.py"),
        (["--nproc-per-node", "many", "toy.py"], "Unsupported nproc_per_node value: many"),
        (["--max-restarts", "-1", "toy.py"], "max_restarts must be >= 0"),
        (["--signals-to-handle", "SIGNONE", "toy.py"], "no signal is called 'SIGNONE'"),
        (["--nonsense", "toy.py"], "--nonsense"),
        ([], "training_script"),
    ],
)
def test_usage_errors_end_with_2_and_say_what_is_wrong(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "toy.py").touch()
    done = _run(tmp_path, *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_grace_that_is_no_number_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_GRACE_S", "nan")
    (tmp_path / "toy.py").touch()
    done = _run(tmp_path, "toy.py")
    assert done.returncode == 2
    assert "UNBROKEN_GRACE_S is 'nan'" in done.stderr


def test_help_lists_torchruns_flags(tmp_path: Path) -> None:
    done = _run(tmp_path, "--help")
    assert done.returncode == 0
    assert "usage: unbroken run" in done.stdout
    assert {"--nproc-per-node", "--max-restarts", "--rdzv-endpoint", "--json"} <= set(done.stdout.replace(",", " ").split())


def _run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unbroken", "run", *args]
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_rig_notices_what_does_not_happen() -> None:
    with pytest.raises(AssertionError, match="nothing did not happen"):
        wait_until(lambda: False, "nothing", 0.05)


def test_workers_come_out_of_a_warm_server_which_a_restart_uses_again(tmp_path: Path) -> None:
    """A module that must not be there is named once; a server that is killed is done without."""
    (tmp_path / "spoiler.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n")
    script = """
mark("born", torch="torch" in sys.modules, parent=os.getppid())
wait_for(lambda: len([m for m in marks("born") if m["attempt"] == ATTEMPT]) == 2)
if ATTEMPT == 1 and RANK == 0:
    def is_server(pid):
        with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/stat") as stat:
            return line.read().startswith(b"unbroken: warm fork server") and int(stat.read().rpartition(")")[2].split()[1]) == os.getppid()
    (server,) = [int(p) for p in os.listdir("/proc") if p.isdigit() and is_server(p)]
    os.kill(server, signal.SIGKILL)
    mark("struck")
if ATTEMPT == 1:
    wait_for(lambda: marks("struck"))
if ATTEMPT < 2:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    env = {"PYTHONPATH": str(tmp_path)}
    with launched(tmp_path, script, "--nproc-per-node", "2", "--preload", "torch,spoiler", env=env) as job:
        assert job.wait(120) == 0, job.stderr
        born = job.marks("born")
        assert {mark["attempt"]: mark["torch"] for mark in born} == {0: True, 1: True, 2: False}
        assert len({mark["parent"] for mark in born}) == 1
        assert job.stderr.count("--preload: spoiler is left out: started 1 threads") == 1
        assert job.stderr.count("the warm fork server is gone") == 1
