"""What all commands share: how results, JSON and errors leave the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from unbroken.core.errors import MissingExtra, UnbrokenError

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
DirArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="The run folder, or its copy: s3://bucket/run; DIR@NAME is a branch of it.", show_default=False)
]
LineageOption = Annotated[str, typer.Option("--lineage", metavar="NAME", help="Which history of the folder: a branch's name.")]

PIPE_COLUMNS = 4096
"""A pipe or file has no width: nothing may be cut there."""


def console() -> Console:
    """Standard output for people."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def say(line: str) -> None:
    """One line about what is going on, to standard error."""
    print(f"unbroken: {line}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One line of JSON; records are written with their field names."""
    print(msgspec.json.encode(value).decode(), flush=True)


def size(num_bytes: int) -> str:
    """A size for people."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


@contextmanager
def errors_as_exit_codes(as_json: bool) -> Iterator[None]:
    """Turn an expected error into its message and exit code: the world's fault as core/errors says, a user's mistake 2."""
    try:
        yield
    except UnbrokenError as error:
        raise _fail(error, error.exit_code, as_json) from error
    except (ValueError, MissingExtra) as error:
        raise _fail(error, 2, as_json) from error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as error:
        raise _fail(error, 1, as_json) from error


def fail(kind: str, text: str, code: int, *, as_json: bool) -> int:
    """Say what went wrong, for machines if they ask, and for people; the exit code."""
    if as_json:
        print_json({"error": {"kind": kind, "text": text, "exit_code": code}})
    print(f"unbroken: {kind}: {text}", file=sys.stderr)
    return code


def _fail(error: Exception, code: int, as_json: bool) -> typer.Exit:
    return typer.Exit(fail(type(error).__name__, str(error), code, as_json=as_json))
