"""`unbroken demo`: train, kill, continue, prove."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken.cli.output import JsonOption, errors_as_exit_codes, print_json, say


def command(
    directory: Annotated[str, typer.Option("--dir", metavar="DIR", help="Where to write; must be empty or missing.")] = "demo-run",
    seed: Annotated[int, typer.Option(min=0, help="Of the data, the model and the moments of the faults.")] = 0,
    ranks: Annotated[int, typer.Option(min=2, max=4, help="Training processes.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Train a small GPT, kill it again and again, and prove that the result has the same bits as without faults."""
    with errors_as_exit_codes(as_json):
        from unbroken.demo.main import run_demo

        result = run_demo(directory, seed, ranks, echo=say if as_json else print)
        if as_json:
            print_json(result)
    raise typer.Exit(0 if result.certified else 1)
