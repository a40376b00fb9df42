"""Running a program as `python program args` would, tied to the launcher that started this process.

The program sees the same `sys.argv`, `sys.path[0]` and `__main__`, and its tracebacks show its own frames only. An uncaught exception is
also written to TORCHELASTIC_ERROR_FILE, so that the launcher can name it.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import traceback
from datetime import datetime, timezone
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from unbroken.core.errors import UnbrokenError
from unbroken.core.os import die_with_parent
from unbroken.core.ports import environment

USAGE = "usage: python -m unbroken.cluster.worker [-m | --exec] program [args]"


def main(argv: list[str]) -> NoReturn:
    """Run the program of `argv`; never returns."""
    _tie_to_launcher()
    if argv[:1] in (["-m"], ["--exec"]):
        how, argv = argv[0], argv[1:]
    else:
        how = "script"
    if not argv:
        sys.exit(USAGE)
    if how == "--exec":
        os.execvp(argv[0], argv)
    sys.argv = argv
    try:
        _run_module(argv[0]) if how == "-m" else _run_script(argv[0])
    except SystemExit as end:
        sys.exit(_hidden_code(end))
    except BaseException as error:  # noqa: BLE001  (reported exactly as the interpreter would, then the process ends)
        _report(error)
        sys.exit(_exit_code(error))
    sys.exit(0)


def _exit_code(error: BaseException) -> int:
    """As the interpreter would, but a refusal of ours ends with its own code: the launcher must not start again what it cannot change."""
    if isinstance(error, UnbrokenError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _hidden_code(end: SystemExit) -> Any:
    """A framework (Hydra) that prints an error and ends with 1 must not hide it from the launcher, nor a code of ours."""
    hidden = end.__context__
    if end.code != 1 or not isinstance(hidden, Exception):
        return end.code
    _write_error_file(hidden, _programs_frames(hidden.__traceback__))
    return _exit_code(hidden)


def _tie_to_launcher() -> None:
    """Die when the launcher dies; if it died before we could say so, we have another parent by now."""
    launcher = int(environment("UNBROKEN_LAUNCHER_PID", "0"))
    if launcher:
        die_with_parent()
        if os.getppid() != launcher:
            sys.exit(f"launcher {launcher} is gone")


def _run_script(path: str) -> None:
    """Run a file as `__main__`, which stays in place until the process ends (threads and exit handlers may look at it)."""
    if os.path.isdir(path) or not os.path.exists(path):
        runpy.run_path(path, run_name="__main__")
        return
    path = os.path.abspath(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(name: str) -> None:
    """Run a module as `python -m` does."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _report(error: BaseException) -> None:
    """Print the traceback without our own frames, and leave the error where exit handlers and the launcher look for it."""
    frames = _programs_frames(error.__traceback__)
    _write_error_file(error, frames)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(frames), frames
    sys.excepthook(type(error), error, frames)


def warm_file() -> str:
    """File of the fork server, whose frames stand below a forked worker's."""
    module = sys.modules.get("unbroken.cluster.warm")
    return getattr(module, "__file__", None) or ""


def _programs_frames(frames: TracebackType | None) -> TracebackType | None:
    ours = (__file__, "<frozen runpy>", warm_file())
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames


def _in_words(error: BaseException) -> str:
    """The whole message and the notes, without the place in the source that a SyntaxError shows first."""
    lines = traceback.format_exception_only(error)
    return "".join(lines[-1:] if isinstance(error, SyntaxError) else lines).strip()


def _write_error_file(error: BaseException, frames: TracebackType | None) -> None:
    """In TorchElastic's own format, whole or not at all. A full disk must not hide the error itself."""
    path = environment("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, frames)),
        "timestamp": str(int(datetime.now(timezone.utc).timestamp())),
        "kinds": " ".join(kind.__name__ for kind in type(error).__mro__),  # ours: the launcher asks whether it can come out otherwise
    }
    try:
        text = json.dumps({"message": {"message": _in_words(error), "extraInfo": extra}})
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError as why:
        print(f"unbroken: could not write {path}: {why}", file=sys.stderr)
