"""A program run by the worker module behaves as under plain python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, sys, __main__
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "main_file": __main__.__file__, "spec": __spec__ is None,
    "own": sorted(name for name in globals() if not name.startswith("__")), "same": globals() is vars(__main__),
    "package": __package__, "annotations": "__annotations__" in globals(),
}))
"""


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def worker(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "unbroken.cluster.worker", *command, **env)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "probe.py").write_text(PROBE)
    (tmp_path / "sub" / "__init__.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "probe.py")
    return tmp_path


@pytest.mark.parametrize("script", ["sub/probe.py", "link.py"])
def test_a_script_sees_the_same_world(folder: Path, script: str) -> None:
    plain, ours = run(folder, script, "-m", "x"), worker(folder, script, "-m", "x")
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_a_module_sees_the_same_world(folder: Path) -> None:
    plain, ours = run(folder, "-m", "sub.probe", "x"), worker(folder, "-m", "sub.probe", "x")
    assert plain.returncode == ours.returncode == 0, ours.stderr
    expected, found = json.loads(plain.stdout), json.loads(ours.stdout)
    assert {key: found[key] for key in ("argv", "path0", "name", "file", "package", "same")} == {
        key: expected[key] for key in ("argv", "path0", "name", "file", "package", "same")
    }


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    raise ValueError('boom')\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('second') from e\n",
        "def f(:\n",
        "import sys\nsys.exit('bye')\n",
        "import sys\nsys.exit(7)\n",
        "import sys\nsys.exit(None)\n",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, file=sys.stderr)\n1 / 0\n",
        "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value), sys.last_traceback.tb_lineno))\n1 / 0\n",
        "import atexit\natexit.register(print, 'at exit')\nprint('end')\n",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n",
        "import multiprocessing as m\ndef f():\n    print('child', __name__, flush=True)\n"
        "if __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=f); p.start(); p.join(); print(p.exitcode)\n",
    ],
)
def test_output_tracebacks_and_exit_codes_are_those_of_python(tmp_path: Path, body: str) -> None:
    (tmp_path / "p.py").write_text(body)
    plain, ours = run(tmp_path, "p.py"), worker(tmp_path, "p.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_uncaught_exception_is_left_for_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("raise ValueError('boom\\nsecond line')\n")
    worker(tmp_path, "p.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: boom\nsecond line"
    assert "p.py" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0
    assert os.listdir(tmp_path).count("error.json.part") == 0


def test_notes_stand_below_the_message_and_a_syntax_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("e = ValueError('boom')\ne.add_note('while loading sample 3')\nraise e\n")
    (tmp_path / "q.py").write_text("def f(:\n")
    texts = []
    for name in ("p.py", "q.py"):
        worker(tmp_path, name, TORCHELASTIC_ERROR_FILE=str(tmp_path / f"{name}.json"))
        texts.append(json.loads((tmp_path / f"{name}.json").read_text())["message"]["message"])
    assert texts == ["ValueError: boom\nwhile loading sample 3", "SyntaxError: invalid syntax"]


@pytest.mark.parametrize(
    ("error", "code"),
    [("ValueError('boom')", 1), ("__import__('unbroken').NoCheckpoint('boom')", 3), ("__import__('unbroken').Refused('boom')", 4)],
)
def test_an_error_that_a_framework_turns_into_an_exit_is_left_for_the_launcher(tmp_path: Path, error: str, code: int) -> None:
    """Hydra prints what its main function raises, and ends with 1."""
    (tmp_path / "p.py").write_text(f"import sys\ntry:\n    raise {error}\nexcept Exception:\n    sys.exit(1)\n")
    done = worker(tmp_path, "p.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == code
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].endswith("boom")


@pytest.mark.parametrize("end", ["sys.exit(7)", "sys.exit('bye')", "sys.exit(0)", "sys.exit(1) if False else sys.exit()"])
def test_an_exit_that_means_something_else_keeps_its_code(tmp_path: Path, end: str) -> None:
    (tmp_path / "p.py").write_text(f"import sys\ntry:\n    raise ValueError\nexcept ValueError:\n    {end}\n")
    plain, ours = run(tmp_path, "p.py"), worker(tmp_path, "p.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert not (tmp_path / "error.json").exists()


def test_an_error_that_cannot_be_written_down_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("raise ValueError('boom')\n")
    done = worker(tmp_path, "p.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "missing" / "error.json"))
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert "could not write" in done.stderr


def test_B36_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("print('ran')\n")
    done = worker(tmp_path, "p.py", UNBROKEN_LAUNCHER_PID="1")
    assert done.returncode == 1
    assert "launcher 1 is gone" in done.stderr
    assert "ran" not in done.stdout


def test_a_program_that_is_not_python(tmp_path: Path) -> None:
    done = worker(tmp_path, "--exec", "sh", "-c", "echo $0 $1; exit 9", "a", "b")
    assert (done.returncode, done.stdout) == (9, "a b\n")


def test_without_a_program_it_says_how_it_is_used(tmp_path: Path) -> None:
    assert "usage" in worker(tmp_path).stderr


def test_no_torch_is_loaded_for_the_program(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import sys\nprint([m for m in ('torch', 'numpy') if m in sys.modules])\n")
    assert worker(tmp_path, "p.py").stdout == "[]\n"
