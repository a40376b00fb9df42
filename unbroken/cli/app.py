"""The command line: which commands there are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import unbroken
from unbroken.cli import (
    branch,
    certify,
    compact,
    demo,
    diff,
    doctor,
    export,
    import_source,
    logs,
    ls,
    materialize,
    prune,
    repair,
    run,
    show,
    verify,
)
from unbroken.cli.output import fail

app = typer.Typer(
    name="unbroken",
    help="Training that cannot be broken: kill it, and the run ends in the same bits, with proof.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("run", context_settings=run.PASS_EVERYTHING_ON, add_help_option=False)(run.command)
for _module in (demo, ls, show, logs, verify, repair, certify, diff, export, branch, materialize, prune, compact, doctor):
    app.command(_module.__name__.rpartition(".")[2])(_module.command)
app.command("import")(import_source.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"unbroken {unbroken.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Training that cannot be broken: kill it, and the run ends in the same bits, with proof.

    Exit codes: 0 ok, 1 the check found a problem, 2 usage, 3 no usable checkpoint, 4 refused, 5 gave up.
    """


def main() -> None:
    """Entry point of the `unbroken` command. With --json a usage error, too, is one JSON document."""
    if "--json" not in sys.argv[1:]:
        app()
        return
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:  # raised again, unless it is a usage error
        text = getattr(error, "format_message", None)  # click's class of a usage error, whose place depends on typer's version
        if text is None:
            raise
        raise SystemExit(fail("UsageError", text(), 2, as_json=True)) from None
    sys.exit(code if isinstance(code, int) else 0)
