"""Workers out of the warm fork server: children of the launcher like any other, with an environment, streams and luck of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.launched import wait_until
from unbroken.cluster.forked import ForkedProcess, ForkedWorker, ForkServer, ServerLost, can_fork
from unbroken.cluster.warm import GROUP_SIGNALS, Order

SLOW_S = 60.0


class Ahead(ForkServer):
    """Every worker has stood by before it gets its order."""

    def fork(self, order: Order) -> int:
        self.warm_up()
        self.has_forked = True
        self.stand_by(1)
        standby = self.standby
        pid = super().fork(order)
        assert (pid,) == standby and self.standby == ()
        return pid


@pytest.fixture(params=[ForkServer, Ahead], ids=["forked", "stood by"])
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Callable[..., ForkServer]]:
    made: list[ForkServer] = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def new(*modules: str) -> ForkServer:
        made.append(request.param(modules))
        made[-1].open()
        return made[-1]

    yield new
    for server in made:
        server.close()


def run(server: ForkServer, folder: Path, code: str, *args: str, **env: str) -> tuple[ForkedProcess, str, str]:
    """Run a script in a forked worker to its end: the process, what it printed, what it complained."""
    script, out, err = folder / "script.py", folder / "out", folder / "err"
    script.write_text(code)
    environment = {"PATH": os.environ["PATH"], "UNBROKEN_LAUNCHER_PID": str(os.getpid())} | env
    order = Order(argv=(str(script), *args), env=environment, stdout=str(out), stderr=str(err))
    process = ForkedProcess(server.fork(order))
    process.wait(SLOW_S)
    return process, out.read_text(), err.read_text()


def test_a_worker_is_our_child_with_its_own_arguments_environment_and_session(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    code = """
import json, os, sys
title = open("/proc/self/cmdline").read().rstrip("\\0")
print(json.dumps([sys.argv, dict(os.environ), os.getppid(), os.getsid(0) == os.getpid(), sys.path[0], title]))
"""
    process, out, err = run(serve(), tmp_path, code, "a", "b c", COLOUR="red")
    argv, env, parent, leads, path, title = json.loads(out)
    assert title == f"{sys.executable} {tmp_path / 'script.py'} a b c", "what ps and pgrep show"
    assert argv == [str(tmp_path / "script.py"), "a", "b c"]
    assert (env["COLOUR"], "PYTHONPATH" in env, parent, leads, path) == ("red", False, os.getpid(), True, str(tmp_path))
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("code", "ends"),
    [("import sys; sys.exit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9), ("import os; os._exit(3)", 3)],
)
def test_the_way_it_ended_is_seen_as_of_any_child(serve: Callable[..., ForkServer], tmp_path: Path, code: str, ends: int) -> None:
    process, _, _ = run(serve(), tmp_path, code)
    assert process.poll() == ends
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_an_error_shows_the_programs_frames_only(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    process, _, err = run(serve(), tmp_path, "def f():\n    raise ValueError('mine')\nf()\n")
    assert process.returncode == 1
    assert err.count("File ") == 2 and "unbroken" not in err and "ValueError: mine" in err


def test_modules_are_there_already_and_luck_is_not_shared(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import random\nluck = random.random()\n")
    server = serve("heavy")
    code = "import sys, random; print('heavy' in sys.modules, sys.modules['heavy'].luck, random.random())"
    first, second = (run(server, tmp_path, code)[1].split() for _ in range(2))
    assert first[:2] == second[:2] and first[0] == "True"
    assert first[2] != second[2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n", "started 1 threads"),
        ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
        ("raise SystemExit(3)\n", ""),
    ],
    ids=["threads", "fails", "exits"],
)
def test_a_module_that_must_not_be_there_is_left_out_by_name(
    serve: Callable[..., ForkServer], tmp_path: Path, body: str, words: str
) -> None:
    """The others stay, and workers can still be started."""
    (tmp_path / "bad.py").write_text(body)
    (tmp_path / "good.py").write_text("")
    server = serve("good", "bad")
    code = "import sys; print('good' in sys.modules, 'bad' in sys.modules)"
    if not words:
        with pytest.raises(ServerLost):
            run(server, tmp_path, code)
        return
    assert run(server, tmp_path, code)[1] == "True False\n"
    assert list(server.dropped) == ["bad"] and words in server.dropped["bad"]


def test_a_server_that_is_gone_is_said(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    server = serve()
    run(server, tmp_path, "")
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    with pytest.raises(ServerLost):
        run(server, tmp_path, "")


@pytest.mark.parametrize("sig", GROUP_SIGNALS)
def test_B34_a_signal_to_the_whole_job_spares_the_server_and_ends_a_worker(
    serve: Callable[..., ForkServer], tmp_path: Path, sig: signal.Signals
) -> None:
    server = serve()
    run(server, tmp_path, "")
    assert server.pid is not None
    os.kill(server.pid, sig)
    process, _, _ = run(server, tmp_path, "import os, sys; os.kill(os.getpid(), int(sys.argv[1])); print('lives')", str(int(sig)))
    assert process.returncode == -sig


def test_B34_a_signal_that_comes_while_a_worker_is_being_made_is_not_lost(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    server = serve()
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    env = {"PATH": os.environ["PATH"], "UNBROKEN_LAUNCHER_PID": str(os.getpid())}
    for _ in range(10):
        process = ForkedProcess(server.fork(Order(argv=(str(tmp_path / "sleep.py"),), env=env)))
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(SLOW_S) == -signal.SIGTERM


def test_standby_processes_are_used_in_turn_and_one_that_was_killed_is_passed_over(tmp_path: Path) -> None:
    server = ForkServer(())
    server.open()
    server.stand_by(2)
    assert server.standby == (), "nothing has shown yet that workers can be forked"
    run(server, tmp_path, "")
    server.stand_by(3)
    first, second, third = server.standby
    wait_until(lambda: all(os.getpgid(pid) == pid for pid in server.standby), "each to be a group of its own")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z", "its death")
    assert run(server, tmp_path, "print('here')")[:2][1] == "here\n"
    assert server.standby == (first, third), "the dead one is reaped at the end"
    server.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (first, second, third))


def test_standby_processes_end_with_the_server(tmp_path: Path) -> None:
    server = ForkServer(())
    server.open()
    run(server, tmp_path, "")
    server.stand_by(2)
    pids = server.standby
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    for pid in pids:
        assert ForkedProcess(pid).wait(10) == 0
    server.stand_by(2)
    with pytest.raises(ServerLost):
        run(server, tmp_path, "")
    server.close()


def test_nothing_of_the_server_outlives_its_launcher(tmp_path: Path) -> None:
    code = (
        "import time; from unbroken.cluster.forked import ForkServer; from unbroken.cluster.warm import Order; import os\n"
        "s = ForkServer(()); s.open()\n"
        "env = dict(os.environ, UNBROKEN_LAUNCHER_PID=str(os.getpid()))\n"
        f"print(s._process.pid, s.fork(Order(argv=({str(tmp_path / 'sleep.py')!r},), env=env)), flush=True); time.sleep(600)"
    )
    (tmp_path / "sleep.py").write_text("import time; time.sleep(600)")
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = SLOW_S
    while any(_lives(pid) for pid in pids) and deadline > 0:
        deadline -= 0.05
        signal.sigtimedwait([], 0.05)
    assert deadline > 0, "server or worker lives on"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_handler_ends_the_workers_whole_session(serve: Callable[..., ForkServer], tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("import os, time\nos.fork()\ntime.sleep(600)\n")
    env = {"PATH": os.environ["PATH"], "UNBROKEN_LAUNCHER_PID": str(os.getpid())}
    process = ForkedProcess(serve().fork(Order(argv=(str(tmp_path / "two.py"),), env=env)))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    ForkedWorker(process).close(signal.SIGKILL)
    assert process.wait(SLOW_S) == -signal.SIGKILL
    ForkedWorker(process).close(signal.SIGKILL)  # nobody is left: no error


WORKER = ("-u", "-m", "unbroken.cluster.worker")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"entrypoint": "/bin/other"}, False),
        ({"args": {0: ("script.py",)}}, False),
        ({"args": {0: (*WORKER, "--exec", "ls")}}, False),
        ({"args": {0: (*WORKER, "-m", "package")}}, True),
        ({"envs": {0: {}}}, False),
        ({"numa_options": object()}, False),
    ],
)
def test_only_our_own_python_workers_with_a_fixed_number_of_threads_are_forked(change: dict[str, Any], expected: bool) -> None:
    arguments = {"entrypoint": sys.executable, "args": {0: (*WORKER, "script.py")}, "envs": {0: {"OMP_NUM_THREADS": "1"}}}
    assert can_fork(arguments | {"numa_options": None} | change) is expected
